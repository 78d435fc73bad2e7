"""Records what routers choose: how many rows each mixture of a rank moves, as it moves them."""

from plait.cost.expert import Rows
from plait.models.moe import mixtures
from plait.train.program import Program


class RoutedRecorder:
    """Within it, the rows of every mixture and micro batch are entered into `rows`.

    Attributes:
        rows: layer -> one for each micro batch, as `cost.traffic.traffic` takes them.
    """

    def __init__(self, program: Program):
        self.rows: dict[int, list[Rows]] = {}
        self.dispatches = [
            (int(number), moe.dispatch)
            for module in program.modules.values()
            for number, layer in module.layers.items()
            for moe in mixtures(layer)
        ]

    def __enter__(self) -> "RoutedRecorder":
        for _, dispatch in self.dispatches:
            dispatch.moved = []
        return self

    def __exit__(self, *_: object) -> None:
        for layer, dispatch in self.dispatches:
            self.rows[layer] = [Rows(*rows) for rows in dispatch.moved]
            dispatch.moved = None
