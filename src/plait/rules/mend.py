"""What errors suggest, held against the whole question.

A rule knows the nearest value that it allows itself: heads say which tp divides them, the ranks
which tp divides those. What a person is told to write has to suit all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from plait.spec.findings import Finding
from plait.spec.job import Job, Train
from plait.spec.layout import LARGEST, Layout, divisors

Suggest = dict[str, Any]
Ask = Callable[[Suggest], list[Finding]]

_FIELDS = {
    f"{table}.{f.name}"
    for table, cls in (("layout", Layout), ("train", Train))
    for f in fields(cls)
}
#: What divides the ranks; the first of them do so by themselves.
_MODEL_DEGREES = ("tp", "cp", "ulysses", "pp", "ep", "etp")
_DEGREES = {f"layout.{axis}" for axis in (*_MODEL_DEGREES, "dp_replicate", "dp_shard")}
#: So often one value leads to another; rules may also send each other round.
_STEPS = 10


def mended(job: Job, found: Sequence[Finding], ask: Ask) -> list[Finding]:
    """The findings; what errors among them suggest of layout and batch leaves no error about the
    same field, nor moves it to another, or is taken back where nothing does.

    Args:
        job: what the question was read as, a stand-in where it could not be (see `draft_job`).
        ask: all errors of the question with some fields changed.
    """
    said = {(finding.rule, finding.where) for finding in found}

    def mend(finding: Finding) -> Finding:
        if finding.level != "error" or not finding.suggest or finding.suggest.keys() - _FIELDS:
            return finding
        where = finding.where
        rules = {rule for rule, field in said if field == where}

        def left(changes: Suggest) -> list[Finding]:
            moved = ((f.rule in rules and (f.rule, f.where) not in said, f) for f in ask(changes))
            return [f for is_moved, f in moved if is_moved or f.where == where]

        return replace(finding, suggest=_sound(job, finding, left))

    return [mend(finding) for finding in found]


def _sound(job: Job, finding: Finding, left: Ask) -> Suggest:
    """The nearest changes that leave nothing; none where there are none."""
    changes = finding.suggest
    if finding.where in _DEGREES:
        options = (changes, *_near(job, finding))
        return next((option for option in options if not left(option)), {})
    for _ in range(_STEPS):
        if not (still := left(changes)):
            return changes
        changes = changes | still[0].suggest
    return {}


def _near(job: Job, finding: Finding) -> Iterator[Suggest]:
    """Other values of a degree, the nearest first: alone, with what else is suggested, and without
    any other degree."""
    layout, value = job.layout, finding.value
    # The degrees of a stand-in need not go together: it has as many replicas as there are ranks.
    ranks = layout.world if layout.world <= LARGEST else layout.dp
    near = sorted(divisors(ranks), key=lambda d: (abs(d - value), d))
    alone = dict.fromkeys((f"layout.{axis}" for axis in _MODEL_DEGREES), 1)
    for also in ({}, finding.suggest, alone):
        yield from (also | {finding.where: degree} for degree in near)
