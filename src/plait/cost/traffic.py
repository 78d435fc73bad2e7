"""What one rank sends in an optimizer step: every strategy's formulas together."""

from plait.cost.data import data_traffic
from plait.cost.dtypes import size_of
from plait.cost.ledger import TrafficLedger
from plait.cost.tensor import tensor_traffic
from plait.spec.job import Job


def traffic(job: Job) -> TrafficLedger:
    """The ledger of a step in the steady state (weights have been initialised and published).

    It is the same on every rank. `parallel/` issues exactly this, padding and scalars included.
    """
    ledger = TrafficLedger()
    tensor_traffic(job, ledger)
    data_traffic(job, ledger)
    # Valid tokens of the global batch; then the loss and the squared gradient norm together.
    world = job.layout.world
    ledger.add(0, "world", "all-reduce", "loss", "int64", size_of("int64"), world)
    ledger.add(0, "world", "all-reduce", "norm", "float64", size_of("float64", 2), world)
    return ledger
