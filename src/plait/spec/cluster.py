"""The machines: how many devices, how much each holds, and where the links are fast."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """A number of equal devices.

    Attributes:
        name: as people write it, "h100:64".
        device: the device's full name.
        devices: how many.
        node: devices in one node.
        fast_domain: devices that reach each other over the fast links; ranks fill domains in
            order. Usually the node; more in an NVL72 rack (72 in trays of 4) or a slice of TPUs,
            less where a box has two PCIe switches or a mesh is handed out in parts. Every rule goes
            by it, none by the node.
        memory: bytes of device memory (decimal GB of the data sheet x 10^9).
        memory_bandwidth: bytes a second.
        peak_flops: dtype -> dense floating-point operations a second.
        link, nic: one-direction bytes a second of one device inside and outside the domain.
        peer: of these, what one pair of devices has where all are joined pairwise (an xGMI mesh);
            None where a switch gives any two of them the whole `link`.
    """

    name: str
    device: str
    devices: int
    node: int
    fast_domain: int
    memory: int
    memory_bandwidth: float
    peak_flops: dict[str, float]
    link: float
    nic: float | None
    peer: float | None = None

    def bandwidth(self, size: int) -> float:
        """Bytes a second of one device in a group of `size` that stays in the fast domain: on a
        mesh the links to the others of the group."""
        return self.link if self.peer is None else min(self.link, max(1, size - 1) * self.peer)

    def crosses(self, ranks: tuple[int, ...]) -> bool:
        """Whether a group of ranks leaves one fast domain (ranks fill domains in order)."""
        return len({rank // self.fast_domain for rank in ranks}) > 1
