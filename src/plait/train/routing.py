"""What routers chose in a step, summed over all ranks: part of the message that ends the step."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.models.moe import mixtures
from plait.models.transformer import Transformer
from plait.spec.model import Model


@dataclass(frozen=True)
class Routing:
    """The mixtures of a model in a step, in the order of their layers.

    Attributes:
        layers: their numbers.
        sent: choices of every expert by all tokens of the global batch.
        received: those that it took, which is less where it has a capacity.
        aux_loss, z_loss: what they add to the mean loss, coefficients included.
    """

    layers: tuple[int, ...]
    sent: tuple[tuple[int, ...], ...]
    received: tuple[tuple[int, ...], ...]
    aux_loss: float
    z_loss: float

    @property
    def imbalance(self) -> float:
        """Tokens of the busiest expert over those of an expert in the mean; of the mixture where
        it is worst. 1 where all are equal."""
        return max(max(row) * len(row) / max(sum(row), 1) for row in self.received)

    @property
    def dropped(self) -> float:
        """The share of choices that no expert took."""
        return 1 - sum(map(sum, self.received)) / max(sum(map(sum, self.sent)), 1)

    def rows(self) -> list[dict[str, Any]]:
        """Tokens per expert, a dict for each mixture."""
        names, columns = ("layer", "sent", "received"), (self.layers, self.sent, self.received)
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def taken(model: Model, modules: Iterable[Transformer], device: str) -> Tensor:
    """float64 [mixtures * (2 E + 2)]: what passed backward on this rank since the last time.

    Every choice is in it on one rank only, so ranks add up. Empty for a model without mixtures.
    """
    layers = moe_layers(model)
    if not layers:  # or all its layers are dense, as the first of a deeper model may be
        return torch.zeros(0, dtype=torch.float64, device=device)
    row = {layer: i for i, layer in enumerate(layers)}
    table = torch.zeros(len(layers), 2 * model.moe.experts + 2, dtype=torch.float64, device=device)
    for module in modules:
        for number, layer in module.layers.items():
            for moe in mixtures(layer):
                found = moe.take()
                if found is not None:
                    table[row[int(number)]] += torch.cat([part.double() for part in found])
    return table.flatten()


def routing_of(model: Model, total: Tensor, tokens: int) -> Routing | None:
    """What the sum of `taken` over all ranks says; tokens: valid ones of the global batch."""
    layers = moe_layers(model)
    if not layers:
        return None
    experts = model.moe.experts
    rows = total.view(len(layers), -1).tolist()
    return Routing(
        layers,
        tuple(tuple(map(round, row[:experts])) for row in rows),
        tuple(tuple(map(round, row[experts:-2])) for row in rows),
        sum(row[-2] for row in rows) / tokens,
        sum(row[-1] for row in rows) / tokens,
    )


def moe_layers(model: Model) -> tuple[int, ...]:
    """Numbers of the layers whose MLP is a mixture."""
    return tuple(i for i in range(model.layers) if model.is_moe(i))
