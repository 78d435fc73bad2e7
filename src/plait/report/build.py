"""The answer about one layout: what a rank holds and sends, whether it fits, what to know.

One dict that goes out as JSON as it is and that `report/text.py` draws for people. Nothing here
imports torch.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from plait.cost.context import imbalance
from plait.cost.device import context_bytes, fullest, reserved_bytes
from plait.cost.dtypes import dtypes_of
from plait.cost.links import far_axes
from plait.cost.memory import memory
from plait.cost.recipes import recipe_of
from plait.cost.serving import Serving, limits, longest, stage_layers
from plait.cost.traffic import traffic
from plait.report.serving import grids as serving_grids
from plait.report.serving import memory as serving_memory
from plait.report.serving import section
from plait.schedules.job import timeline
from plait.spec.buckets import shards_of
from plait.spec.chunks import chunk_layers
from plait.spec.findings import Finding
from plait.spec.grid import Grid, dense_grid, expert_grid
from plait.spec.job import Job
from plait.spec.layout import Layout
from plait.spec.parameters import active_count, parameter_count

_TIMES = (
    "step_seconds",
    "low",
    "high",
    "compute_seconds",
    "exposed_communication_seconds",
    "tokens_per_second_per_gpu",
    "model_tflops_per_gpu",
    "mfu",
)
_BUBBLES = ("step_total", "step_ideal", "span_total", "span_ideal")


def report(
    job: Job,
    findings: Sequence[Finding],
    world: int | None = None,
    serving: Serving | None = None,
) -> dict[str, Any]:
    """The REPORT of a job: plain dicts, lists, numbers, ready for JSON.

    Args:
        world: ranks, where the degrees of an illegal layout do not multiply to them (or its
            experts' do not): then there are no grids.
        serving: how a serving engine uses the ranks: what it holds and sends takes the place of
            a training step.

    With an error among the findings the layout is only described; what would be computed is None
    and it does not fit. Without a cluster nothing says how much a device holds: `fits` is None.

    Memory is bytes of one rank, an entry of `by_stage` for each moment of a step: what is alive
    when that moment is at its fullest. A layout fits where peak + reserved + context <= device.
    Traffic is bytes of one rank in one optimizer step.
    """
    layout, model = job.layout, job.model
    legal = all(f.level != "error" for f in findings)
    if serving is None:
        held = _memory(job) if legal else _unknown_memory(job)
        own = _training(job, legal, held)
    else:
        own = _serving(job, legal, serving, findings)
    margin = own["memory"]["margin_bytes"]
    fits = margin is None or margin >= 0
    return {
        "model": asdict(model)
        | {"parameters": parameter_count(model), "active_parameters": active_count(model)},
        "cluster": None if job.cluster is None else asdict(job.cluster),
        "world": layout.world if world is None else world,
        "layout": _layout(job, legal, world, serving),
        "grids": _grids(layout, serving) if world is None else {"dense": None, "expert": None},
        "findings": [asdict(f) for f in findings],
        "fits": (None if job.cluster is None else fits) if legal else False,
        "time": dict.fromkeys(_TIMES),
    } | own


def _training(job: Job, legal: bool, held: dict[str, Any]) -> dict[str, Any]:
    """What a step of training holds and sends."""
    batch = job.batch
    return {
        "context": _context(job) if legal else None,
        "batch": {
            "micro": batch.micro,
            "global": batch.global_,
            "accumulation": batch.accumulation,
            "seq_len": job.train.seq_len,
            "tokens_per_step": batch.global_ * job.train.seq_len,
            "dtype": job.train.dtype,
            "grad_dtype": dtypes_of(job).grad if legal else job.train.grad_dtype,
        },
        "memory": held,
        "traffic": _traffic(job) if legal else None,
        "bubble": _bubble(job) if legal else dict.fromkeys(_BUBBLES),
        "serving": None,
    }


def _serving(
    job: Job, legal: bool, serving: Serving, findings: Sequence[Finding]
) -> dict[str, Any]:
    """What serving holds; there is no step of training, and its batch is what runs at once."""
    asked = {x.option: x for x in limits(serving)}
    requests, tokens = (asked[c.option] for c in serving.kind.limits[:2])
    return {
        "context": None,
        "batch": {
            "micro": None,
            "global": requests.in_all,
            "accumulation": None,
            "seq_len": longest(serving, job.model),
            "tokens_per_step": tokens.of_rank,
            "dtype": serving.dtype,
            "grad_dtype": None,
        },
        "memory": serving_memory(job, serving) if legal else _unknown_memory(job),
        "traffic": None,
        "bubble": dict.fromkeys(_BUBBLES),
        "serving": section(job, serving, findings, legal),
    }


def _layout(job: Job, legal: bool, world: int | None, serving: Serving | None) -> dict[str, Any]:
    """Every field; what cannot be derived of an illegal layout is None."""
    derived: dict[str, Any] = {"stages": _stages(job)} if legal else {}
    if legal and serving is not None and job.layout.pp > 1:
        derived = {"stages": list(stage_layers(serving, job.model))}
    if world not in (None, job.layout.world):
        derived |= {"dp_replicate": None, "dp_shard": None}
    return asdict(job.layout) | derived


def _grids(layout: Layout, serving: Serving | None) -> dict[str, dict[str, int] | None]:
    if serving is not None:
        return serving_grids(layout, serving)
    return {"dense": _sizes(dense_grid(layout)), "expert": _sizes(expert_grid(layout))}


def _stages(job: Job) -> list[int] | None:
    """Layers of each chunk of a pipeline."""
    if job.layout.pp == 1:
        return job.layout.stages
    return [len(layers) for layers in chunk_layers(job.model, job.layout)]


def _context(job: Job) -> dict[str, Any] | None:
    """How even attention is over the cp ranks, for samples of one text."""
    if job.layout.cp == 1:
        return None
    ring = job.layout.cp // job.layout.ulysses
    even = imbalance(job, [[(job.train.seq_len,)]])
    return {"pieces": "head-tail" if ring > 1 else "contiguous", "imbalance": even}


def _sizes(grid: Grid) -> dict[str, int]:
    return dict(zip(grid.axes, grid.sizes, strict=True))


def _bubble(job: Job) -> dict[str, float]:
    """Idle time of the ranks, simulated: actions take as long as their operations, messages no
    time."""
    return dict.fromkeys(_BUBBLES, 0.0) if job.layout.pp == 1 else timeline(job).bubble


def _memory(job: Job) -> dict[str, Any]:
    rows = memory(job)
    peak = fullest(rows)
    reserved, context = reserved_bytes(peak), context_bytes(job.layout)
    device = job.cluster.memory if job.cluster else None
    return {
        "device_bytes": device,
        "peak_bytes": peak.total,
        "reserved_bytes": reserved,
        "context_bytes": context,
        "margin_bytes": None if device is None else device - peak.total - reserved - context,
        "recipe": _recipe(job),
        "by_stage": [asdict(row) for row in rows],
    }


def _recipe(job: Job) -> dict[str, Any]:
    """Bytes of model states a parameter, of those of experts apart: they lie on other ranks."""

    def row(expert: bool) -> dict[str, Any]:
        recipe = recipe_of(job, expert)
        parts = {name: getattr(recipe, name) for name in ("weights", "gradients", "optimizer")}
        shards = shards_of(job.layout, expert) if recipe.zero else 1
        return parts | {"total": recipe.total, "formula": recipe.formula(), "shards": shards}

    return {"dense": row(False), "experts": row(True) if job.model.moe else None}


def _unknown_memory(job: Job) -> dict[str, Any]:
    unknown = (
        "peak_bytes",
        "reserved_bytes",
        "context_bytes",
        "margin_bytes",
        "recipe",
        "by_stage",
    )
    device = job.cluster.memory if job.cluster else None
    return {"device_bytes": device} | dict.fromkeys(unknown)


def _traffic(job: Job) -> list[dict[str, Any]]:
    ledger = traffic(job)
    far = far_axes(job.layout, job.cluster, {entry.axis for entry in ledger.entries})
    return [asdict(row) for row in ledger.rows(inter_node=far)]
