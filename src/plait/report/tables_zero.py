"""Model states under ZeRO by the accounting of a recipe: ZeRO (1910.02054) section 5, Table 1."""

from collections.abc import Iterable, Mapping
from typing import Any

from plait.cost.memory import memory
from plait.cost.recipes import Recipe
from plait.spec.job import Job
from plait.spec.jobfile import draft_job
from plait.spec.parameters import parameter_count

#: The paper's own: half-precision weights and gradients, K = 12 bytes of optimizer states.
RECIPE = "zero-fp16-adam"
#: Sizes and degrees of ZeRO's Table 1.
SIZES = {"7.5B": 7_500_000_000, "128B": 128_000_000_000, "1T": 1_000_000_000_000}
DEGREES = (1, 4, 16, 64, 256, 1024)
STAGES = (0, 1, 2, 3)


def state_bytes(parameters: int, stage: int, degree: int, recipe: Recipe) -> float:
    """Bytes of model states on one of `degree` ranks."""
    whole, shared = recipe.shares(stage)
    return parameters * (whole + shared / degree)


def zero(
    sizes: Mapping[str, int], degrees: Iterable[int], recipe: Recipe, base: Job | None
) -> list[dict[str, Any]]:
    """A row for each size, degree and stage; bytes of one rank.

    Args:
        sizes: name -> parameters.
        base: the job of the one model that was named: `program_bytes` is what this program holds
            of it, padding included, by its own recipe (None without a model, and of degrees that
            its samples do not reach).
    """
    return [
        {
            "model": name,
            "parameters": parameters,
            "dp": degree,
            "stage": stage,
            "bytes": round(state_bytes(parameters, stage, degree, recipe)),
            "program_bytes": _held(base, degree, stage) if base else None,
        }
        for name, parameters in sizes.items()
        for degree in degrees
        for stage in STAGES
    ]


def sizes_of(base: Job | None) -> dict[str, int]:
    """The paper's sizes, or that of a model."""
    return {base.model.name: parameter_count(base.model)} if base else SIZES


def _held(base: Job, degree: int, stage: int) -> int:
    """Model states that a rank of this program holds."""
    # One rank has nothing to shard, and takes stage 0 only.
    stage = stage if degree > 1 else 0
    given = {"model": "tiny", "ranks": degree, "zero": stage, "seq_len": 128}
    job, findings = draft_job("plan", None, given)
    assert job is not None, findings
    rows = memory(Job(base.model, job.layout, job.train))
    return max(row.parameters + row.gradients + row.optimizer for row in rows)
