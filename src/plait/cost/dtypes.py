"""The dtypes of a job by name, as `train.program.dtypes_of` has them in torch."""

from typing import NamedTuple

from plait.spec.job import DTYPE_BYTES, Job


class Dtypes(NamedTuple):
    """compute: of weights and activations; master: of the optimizer; grad: of gradients; wide:
    of what is too coarse in the compute dtype (sums of squares, softmax)."""

    compute: str
    master: str
    grad: str
    wide: str


def dtypes_of(job: Job) -> Dtypes:
    """The dtypes of a job; "auto" must have been resolved for the compute dtype."""
    compute, grad = job.train.dtype, job.train.grad_dtype
    assert compute in DTYPE_BYTES, f"dtype {compute} has not been resolved"
    wide = "float64" if compute == "float64" else "float32"
    return Dtypes(compute, wide, wide if grad == "auto" else grad, wide)


def size_of(dtype: str, *shape: int) -> int:
    """Bytes of a tensor."""
    size = DTYPE_BYTES[dtype]
    for n in shape:
        size *= n
    return size
