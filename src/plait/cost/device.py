"""Device memory that no tensor is: what the allocator holds beyond them, and the context.

Estimates, each with how to measure it on a device; the report shows them apart from the ledger.
"""

from collections.abc import Iterable

from plait.cost.ledger import StageMemory
from plait.spec.layout import Layout

#: What the caching allocator holds beyond what is allocated: blocks are rounded, and freed ones do
#: not always suit the next request. States are allocated once and leave no holes, so it is a
#: share of what comes and goes. An estimate; on a device it is
#: max_memory_reserved - max_memory_allocated.
ALLOCATOR_SHARE = 0.1
#: CUDA's context and loaded kernels, bytes. An estimate (0.5 to 1.5 GB are reported); on a device
#: it is what nvidia-smi shows beyond memory_reserved before the first collective.
CONTEXT_BYTES = 768 * 2**20
#: NCCL's channel buffers of one communicator, bytes. An estimate (1 to 4 GB are reported for
#: programs with many groups).
COMMUNICATOR_BYTES = 256 * 2**20


def fullest(rows: Iterable[StageMemory]) -> StageMemory:
    """The moment at which some stage holds most."""
    return max(rows, key=lambda row: row.total)


def reserved_bytes(peak: StageMemory) -> int:
    """What the allocator holds beyond the tensors of the fullest moment."""
    passing = peak.total - peak.parameters - peak.gradients - peak.optimizer
    return round(passing * ALLOCATOR_SHARE)


def context_bytes(layout: Layout) -> int:
    """The context and the communicators: one for each axis, for the whole world, and for what
    several axes are made of."""
    sizes = (layout.tp, layout.cp, layout.fsdp, layout.dp_replicate, layout.pp, layout.world)
    return CONTEXT_BYTES + sum(size > 1 for size in sizes) * COMMUNICATOR_BYTES
