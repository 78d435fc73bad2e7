"""The machines: how many devices, how much each holds, and where the links are fast."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """A number of equal devices.

    Attributes:
        name: as people write it, "h100:64".
        device: the device's full name.
        devices: how many.
        node: devices in one node. fast_domain: devices that reach each other over the fast
            links; usually the node, 72 in an NVL72 rack.
        memory: bytes of device memory (decimal GB of the data sheet x 10^9).
        memory_bandwidth: bytes a second.
        peak_flops: dtype -> dense floating-point operations a second.
        link, nic: one-direction bytes a second of one device inside and outside the domain.
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

    def crosses(self, ranks: tuple[int, ...]) -> bool:
        """Whether a group of ranks leaves one fast domain (ranks fill domains in order)."""
        return len({rank // self.fast_domain for rank in ranks}) > 1
