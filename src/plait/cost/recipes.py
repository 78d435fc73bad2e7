"""Bytes of model states a parameter, as the programs of the field hold them.

Published numbers say 14, 16, 18 or 20 bytes a parameter. None is wrong: each is of another recipe
of dtypes. So a recipe is an input here, and is printed with what follows from it. With w, g, o
bytes of weights, gradients and optimizer states (Adam's two moments, and master weights where
weights are coarser), sharded over N ranks:

    ZeRO 0   w + g + o        ZeRO 2   w + (g + o) / N
    ZeRO 1   w + g + o / N    ZeRO 3   (w + g + o) / N
"""

from collections import Counter
from dataclasses import dataclass
from math import prod

from plait.cost.dtypes import dtypes_of
from plait.planner.partition import placement
from plait.spec.buckets import shards_of, zero_stage
from plait.spec.chunks import chunk_parameters
from plait.spec.job import DTYPE_BYTES, Job
from plait.spec.layout import Layout
from plait.spec.model import Model
from plait.spec.parameters import Parameter, local_shape


@dataclass(frozen=True)
class Recipe:
    """Bytes a parameter.

    Attributes:
        weights, gradients: of the copies that stay.
        optimizer: master weights, moments, and whatever else lives where they do.
        zero: the ZeRO stage for which its source states it.
        source: who says so.
        in_use: bytes for each parameter of the largest unit (a layer, the embedding, the head):
            weights that are gathered while units are computed.
    """

    weights: float
    gradients: float
    optimizer: float
    zero: int = 1
    source: str = ""
    in_use: float = 0

    @property
    def total(self) -> float:
        """Bytes a parameter with nothing sharded."""
        return self.weights + self.gradients + self.optimizer

    def shares(self, zero: int) -> tuple[float, float]:
        """Bytes a parameter under a ZeRO stage: (on every rank, shared by the N ranks)."""
        parts = (self.optimizer, self.gradients, self.weights)
        return sum(parts[zero:]), sum(parts[:zero])

    def formula(self, zero: int | None = None, shards: str = "N") -> str:
        """Bytes a parameter in writing: "6 + 12/N"; `zero` None: the stage of the source."""
        whole, shared = self.shares(self.zero if zero is None else zero)
        terms = [f"{whole:g}"] if whole else []
        return " + ".join(terms + ([f"{shared:g}/{shards}"] if shared else []))


#: Known ones. Where a source gives a sum only, the parts are those of its code.
RECIPES = {
    "zero-fp16-adam": Recipe(2, 2, 12, 1, "ZeRO, 1910.02054 section 3.1: K = 12"),
    "megatron-bf16": Recipe(
        2, 4, 12, 1, "Megatron-LM theoretical_memory_usage.py: 18, or 6 + 12 / dp"
    ),
    "megatron-precision-aware": Recipe(
        2, 4, 8, 1, "Megatron-LM --use-precision-aware-optimizer: bf16 moments, fp32 master"
    ),
    "megatron-precision-aware-bf16-gradients": Recipe(
        2, 2, 8, 1, "the same with gradients in bf16"
    ),
    "megatron-fp8-weights": Recipe(
        2, 4, 12, 1, "Megatron-LM --fp8-param-gather: fp8 weights and their transposed copy"
    ),
    "deepspeed-bf16": Recipe(
        2, 6, 12, 1, "DeepSpeed bf16_optimizer.py: gradients in bf16, their sums in fp32, whole"
    ),
    "deepspeed-zero2-estimator": Recipe(
        2, 6, 12, 2, "DeepSpeed estimate_zero2_model_states_mem_needs: 2 + 18 / N"
    ),
    "deepspeed-zero3-estimator": Recipe(
        2, 4, 12, 3, "DeepSpeed estimate_zero3_model_states_mem_needs: 18 / N + 4 x layer", 4
    ),
    "primus": Recipe(2, 2, 10, 1, "Primus projection, memory mode: 4 + 10 / N"),
    "fsdp2": Recipe(
        4, 4, 8, 3, "torch fully_shard, fp32 parameters, bf16 compute, two units in flight", 4
    ),
    "deepseek-v3": Recipe(
        1, 4, 8, 1, "DeepSeek-V3, 2412.19437 section 3.3: fp8 weights, bf16 moments"
    ),
}


def recipe_of(job: Job, expert: bool = False) -> Recipe:
    """What a job's own program holds of a parameter (`cost.memory.states`); padding aside, it is
    exact. Those of experts are sharded over other ranks, and where there is one, over none.

    Under ZeRO-3 with master weights of their own the weights exist as masters only; what is
    gathered of a unit and of its neighbour is in the compute dtype.
    """
    dtypes = dtypes_of(job)
    c, m, g = (DTYPE_BYTES[d] for d in (dtypes.compute, dtypes.master, dtypes.grad))
    zero = zero_stage(job.layout, expert)
    master = m if c != m else 0
    weights = 0 if zero == 3 and master else c
    return Recipe(weights, g, 2 * m + master, zero, "this program", 2 * c if zero == 3 else 0)


def states(model: Model, layout: Layout, recipe: Recipe) -> list[dict[str, float]]:
    """Bytes of model states on a rank of each stage, by class, under the layout's ZeRO stage.

    Parameters of experts lie on the expert grid: they shard over what ep and etp leave of the
    ranks. A table that is tied over stages is held at both. No padding beyond that of a vocabulary
    that tp does not divide.
    """
    return [
        stage_states(
            [p for chunk in chunks for p in chunk_parameters(model, layout, chunk)],
            model,
            layout,
            recipe,
        )
        for chunks in placement(layout)
    ]


def stage_states(
    held: list[Parameter], model: Model, layout: Layout, recipe: Recipe
) -> dict[str, float]:
    """`states` of one stage, from the parameters that it holds."""
    numbers, units = Counter(), Counter()
    for p in held:
        n = prod(local_shape(p, model, layout))
        numbers[p.expert] += n
        units[p.unit] += n
    total = dict.fromkeys(("parameters", "gradients", "optimizer", "gathered"), 0.0)
    for expert, n in numbers.items():
        zero, shards = zero_stage(layout, expert), shards_of(layout, expert)
        own = n / shards
        total["parameters"] += recipe.weights * (own if zero == 3 else n)
        total["gradients"] += recipe.gradients * (own if zero >= 2 else n)
        total["optimizer"] += recipe.optimizer * (own if zero >= 1 else n)
    if zero_stage(layout) == 3:
        total["gathered"] = recipe.in_use * max(units.values())
    return total
