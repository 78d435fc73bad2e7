"""What the ranks send in an optimizer step: every strategy's formulas together."""

from plait.cost.context import context_traffic
from plait.cost.data import data_traffic
from plait.cost.dtypes import size_of
from plait.cost.expert import Routed, expert_traffic, told
from plait.cost.ledger import TrafficLedger
from plait.cost.parts import parts_of
from plait.cost.pipeline import pipeline_traffic
from plait.cost.tensor import tensor_traffic
from plait.spec.job import Job


def traffic(job: Job, routed: Routed | None = None) -> TrafficLedger:
    """The ledger of a step in the steady state (weights have been initialised and published).

    It has entries for one rank of each stage; all ranks of a stage send the same, but for rows of
    experts, which depend on data. `parallel/` issues exactly this, padding and scalars included.

    routed: what a rank really routed, of the layers that it has; elsewhere choices are even.
    """
    ledger, world = TrafficLedger(), job.layout.world
    for stage, parts in enumerate(parts_of(job)):
        for part in parts:
            tensor_traffic(job, ledger, stage, part)
            context_traffic(job, ledger, stage, part)
            expert_traffic(job, ledger, stage, part, routed)
            data_traffic(job, ledger, stage, part)
        # Valid tokens of the global batch; then the loss, the squared gradient norm and what
        # routers chose together.
        ledger.add(stage, "world", "all-reduce", "loss", "int64", size_of("int64"), world)
        last = size_of("float64", 2 + told(job))
        ledger.add(stage, "world", "all-reduce", "norm", "float64", last, world)
    pipeline_traffic(job, ledger)
    return ledger
