"""What is legal and costs more than it need: warnings and notes, with numbers.

Each rule is one function that yields findings; `suggest` holds what would avoid the cost. The
numbers are estimates that say how much is at stake; the exact ones are the ledger's.
"""

from collections.abc import Iterator
from typing import Any

from plait.rules.numbers import in_bytes, stream_bytes
from plait.spec.findings import Finding, Level
from plait.spec.job import Job
from plait.spec.layout import Layout


def _finding(
    level: Level, rule: str, where: str, value: Any, message: str, suggest: dict[str, Any]
) -> Finding:
    return Finding(level, rule, message, where, value, suggest)


def tensor_without_sequence(job: Job) -> Iterator[Finding]:
    """Without sequence parallelism every tp rank keeps the inputs of norms and maps whole."""
    layout = job.layout
    if layout.tp == 1 or layout.sequence_parallel:
        return
    # Kept for backward: the inputs of the two norms and of the two fans of linear maps.
    kept = 4 * stream_bytes(job)
    where = "layout.sequence_parallel"
    message = (
        f"without it each of the {layout.tp} tp ranks keeps about {in_bytes(kept)} per layer and "
        f"micro batch that could be cut to {in_bytes(kept / layout.tp)}"
    )
    divides = layout.micro_batch * job.train.seq_len // layout.cp % layout.tp == 0
    suggest = {where: True} if divides else {}
    yield _finding("warning", "tp-without-sequence-parallel", where, False, message, suggest)


def option_without_axis(job: Job) -> Iterator[Finding]:
    """An option whose axis has one rank does nothing; it is not switched off, only named."""
    layout, default = job.layout, Layout()
    needs = {
        "sequence_parallel": ("tp", layout.tp),
        "ulysses": ("cp", layout.cp),
        "cp_method": ("cp / ulysses", layout.cp // layout.ulysses),
        "vpp": ("pp", layout.pp),
        "schedule": ("pp", layout.pp),
        "stages": ("pp", layout.pp),
        "zero": ("dp_shard x cp", layout.fsdp),
    }
    for name, (axis, degree) in needs.items():
        value = getattr(layout, name)
        # zero 1 is what everybody gets without asking.
        idle = value == getattr(default, name) or (name == "zero" and value == 0)
        if degree == 1 and not idle:
            shown = str(value).lower() if isinstance(value, bool) else value
            message = f"{name} {shown} does nothing: {axis} is 1"
            where = f"layout.{name}"
            suggest = {} if name == "stages" else {where: getattr(default, name)}
            yield _finding("warning", "option-without-axis", where, value, message, suggest)


RULES = (tensor_without_sequence, option_without_axis)
