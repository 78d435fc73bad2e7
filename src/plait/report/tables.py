"""The tables of `plait tables`, assembled: what is assumed, the rows, and notes for the reader."""

from collections.abc import Mapping
from typing import Any

from plait.spec.job import Job
from plait.spec.parameters import parameter_count


def table(
    name: str, given: Mapping[str, Any], base: Job | None, option: Any = None
) -> dict[str, Any]:
    """One table as plain dicts and lists, ready for JSON.

    Args:
        name: "comparison", "cost", "zero", "batch", "examples" or "vllm".
        given: dotted path -> text of what was said about the job, defaults of the table included.
        base: the job that these make; None for "examples".
        option: of "zero" a name of `cost.recipes`; of "comparison" and "cost" the degree of the
            strategies (None: `tables_cost.degree_of`).
    """
    assumed, rows, notes = _TABLES[name](given, base, option)
    return {"table": name, "assumptions": assumed, "rows": rows, "notes": notes}


_Parts = tuple[dict[str, Any], list[dict[str, Any]], list[str]]


def _assumed(job: Job) -> dict[str, Any]:
    """What the numbers of a job rest on."""
    return {
        "model": job.model.name,
        "parameters": parameter_count(job.model),
        "gpus": job.cluster.name if job.cluster else None,
        "world": job.layout.world,
        "seq_len": job.train.seq_len,
        "global_batch": job.train.global_batch,
        "dtype": job.train.dtype,
        "recompute": job.layout.recompute,
    }


def _comparison(given: Mapping[str, Any], base: Job, option: Any) -> _Parts:
    from plait.report.tables_cost import comparison, degree_of

    degree = option or degree_of(base)
    notes = [
        "each strategy by itself, on as many ranks as its degree says, the rest data parallel; "
        "what is sent when is read off its ledger, without scalars and counts",
        "frameworks by their sources in 2026; plait has all of them",
    ]
    return _assumed(base) | {"degree": degree}, comparison(given, base, degree), notes


def _cost(given: Mapping[str, Any], base: Job, option: Any) -> _Parts:
    from plait.report.tables_cost import cost, degree_of

    degree = option or degree_of(base)
    notes = [
        "each strategy by itself, on as many ranks as its degree says, ZeRO-1 over the rest; one "
        "global batch; bytes of a rank and step, of the stage that holds or sends most",
        "critical: the program waits for it; hidden: issued so that something is computed "
        "meanwhile, long enough or not; partly: some of its messages are",
        "bubble: idle over all time of a step, messages free; even: of the schedule, were all "
        "chunks alike and forward, input and weight gradients as long",
    ]
    return _assumed(base) | {"degree": degree}, cost(given, base, degree), notes


def _zero(given: Mapping[str, Any], base: Job, option: Any) -> _Parts:
    from plait.cost.recipes import RECIPES
    from plait.report.tables_zero import DEGREES, STAGES, sizes_of, zero

    recipe = RECIPES[option]
    named = any(key == "model" or key.startswith("model.") for key in given)
    counted = given.keys() & {"gpus", "ranks"}
    degrees = (base.layout.world,) if counted else DEGREES
    assumed = {
        "recipe": option,
        "source": recipe.source,
        "bytes_per_parameter": {
            "weights": recipe.weights,
            "gradients": recipe.gradients,
            "optimizer": recipe.optimizer,
        },
        "formulas": {str(stage): recipe.formula(stage) for stage in STAGES},
    }
    model = base if named else None
    notes = ["model states only; activations, buffers and gathered weights come on top"]
    if named:
        notes.append(
            "this program: bfloat16 weights, float32 gradients and states (18 bytes a parameter), "
            "padding included; under ZeRO-3 its weights exist as float32 masters only (16)"
        )
    return assumed, zero(sizes_of(model), degrees, recipe, model), notes


def _batch(given: Mapping[str, Any], base: Job, option: Any) -> _Parts:
    from plait.report.tables_batch import batch, equations

    return _assumed(base), batch(given, base), equations(base)


def _examples(given: Mapping[str, Any], base: None, option: Any) -> _Parts:
    from plait.report.tables_examples import examples

    notes = [
        "bytes of a rank; of the stage and moment that hold most, of the stage that sends most"
    ]
    return {}, examples(), notes


def _vllm(given: Mapping[str, Any], base: Job, option: Any) -> _Parts:
    from plait.report.tables_vllm import BYTES, vllm

    world = base.layout.world
    assumed = {
        "model": base.model.name,
        "parameters": parameter_count(base.model),
        "world": world,
        "bytes_per_element": BYTES,
        "vllm": "0.33.0",
    }
    notes = [
        "weights and cache of a rank in bfloat16; the cache is that of one token of a request that "
        "the rank serves, and how many ranks hold the same of it",
    ]
    return assumed, vllm(base.model, world), notes


_TABLES = {
    "comparison": _comparison,
    "cost": _cost,
    "zero": _zero,
    "batch": _batch,
    "examples": _examples,
    "vllm": _vllm,
}
