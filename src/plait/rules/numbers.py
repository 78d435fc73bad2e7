"""Numbers in what the rules say: estimates that show how much is at stake."""

from plait.spec.job import DTYPE_BYTES, Job


def in_bytes(n: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f} bytes"


def element_bytes(job: Job) -> int:
    """Bytes of one activation: "auto" is bfloat16 on the GPUs of a cluster."""
    auto = "float32" if job.cluster is None else "bfloat16"
    return DTYPE_BYTES.get(auto if job.train.dtype == "auto" else job.train.dtype, 4)


def stream_bytes(job: Job) -> int:
    """Bytes of the residual stream of one micro batch: [tokens, hidden]."""
    layout = job.layout
    tokens = layout.micro_batch * job.train.seq_len // layout.cp
    return tokens * job.model.hidden * element_bytes(job)
