"""Numbers in what the rules say: estimates that show how much is at stake."""

from plait.spec.cluster import Cluster
from plait.spec.job import DTYPE_BYTES, Job


def in_bytes(n: float) -> str:
    """Bytes with a binary unit, three digits, no zeros behind: "61.2 GiB", "4 GiB"."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            value = n / size
            return f"{value:.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"
    return f"{n:.0f} bytes"


def in_time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def element_bytes(job: Job) -> int:
    """Bytes of one activation: "auto" is bfloat16 on the GPUs of a cluster."""
    auto = "float32" if job.cluster is None else "bfloat16"
    return DTYPE_BYTES.get(auto if job.train.dtype == "auto" else job.train.dtype, 4)


def stream_bytes(job: Job) -> int:
    """Bytes of the residual stream of one micro batch: [tokens, hidden]."""
    layout = job.layout
    tokens = layout.micro_batch * job.train.seq_len // layout.cp
    return tokens * job.model.hidden * element_bytes(job)


def beyond(cluster: Cluster, extent: int) -> str:
    """How groups over `extent` ranks in a row leave the fast domain."""
    domain = f"the fast domain of {cluster.fast_domain} devices"
    return f"leaves {domain}" if extent > cluster.fast_domain else f"does not divide {domain}"


def slow_links(cluster: Cluster) -> str:
    """The slow link in words, with its speed where it is known."""
    if cluster.nic is None:
        return "the slow links"
    return f"links of {cluster.nic / 1e9:.0f} GB/s instead of {cluster.link / 1e9:.0f} GB/s"
