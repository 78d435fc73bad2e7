"""What a launch would be if it were legal, or if it said on how many devices it runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from plait.rules import check
from plait.spec.findings import Finding, UserError
from plait.spec.job import Job
from plait.spec.jobfile import draft, job_paths
from plait.spec.layout import Layout

#: Suggestions that are followed one after the other, at most.
_ROUNDS = 12
#: Worlds that are tried, in multiples of the smallest that holds the dense grid.
_MULTIPLES = 4096


def of_training(job: Job) -> list[Finding]:
    """What plait's rules say of a job that trains."""
    return check(job, "plan")


def nearest_legal(
    fields: Mapping[str, Any],
    refusals: Sequence[Finding],
    judge: Callable[[Job], Iterable[Finding]] = of_training,
    settle: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
) -> Job | None:
    """The job that comes out where every error is put right as it suggests; None where that leads
    nowhere.

    Args:
        fields: dotted path -> value, of the launch and the flags. refusals: errors of the
            target's own: what these suggest is done first.
        judge: what is wrong with a job. settle: derives anew what the target derives of the rest.
    """
    known, fields = job_paths(), dict(fields)
    for finding in refusals:
        fields |= {path: value for path, value in finding.suggest.items() if path in known}
    for _ in range(_ROUNDS):
        fields = dict(settle(fields))
        made = draft("plan", None, fields)
        wrong = list(made.findings)
        if made.job is not None:
            wrong += [f for f in judge(made.job) if f.level == "error"]
        if not wrong:
            return made.job
        cure = next((f.suggest for f in wrong if f.suggest), None)
        if cure is None:
            return None
        fields |= {path: value for path, value in cure.items() if path in known}
    return None


def smallest_world(fields: Mapping[str, Any]) -> tuple[int, Finding]:
    """The fewest ranks on which the degrees of a launch go together, and the note that says so."""
    layout = {
        path.removeprefix("layout."): value
        for path, value in fields.items()
        if path.startswith("layout.") and path != "layout.stages"
    }
    dense = 1
    for axis in ("tp", "cp", "pp", "dp_replicate", "dp_shard"):
        value = layout.get(axis, 1)
        text = str(value)
        dense *= int(text) if text.isdecimal() and 0 < int(text) < 10**6 else 1
    world = next((n for n in range(dense, dense * _MULTIPLES, dense) if _goes(n, layout)), dense)
    message = f"the file does not say on how many devices; {world} are the fewest that its degrees"
    return world, Finding(
        "note", "world-assumed", f"{message} need (--gpus GPU:COUNT says more)", "ranks", world
    )


def _goes(world: int, layout: Mapping[str, Any]) -> bool:
    try:
        Layout.fill(world, **layout)
    except UserError:
        return False
    return True
