"""What is wrong with a question, or worth knowing about an answer.

A finding is one line for a person: what, where, and the nearest thing that would be right.
Whoever reads input gathers all findings before stopping, so that a person mends everything at once.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

Level = Literal["error", "warning", "note"]
#: The worst first.
LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing to know about a layout, a job or an input.

    Attributes:
        level: "error" (illegal), "warning" (legal, and costs something) or "note".
        rule: kebab-case name of the rule that found it.
        message: one line, numbers included.
        where: the field or file that it is about, as a person would write it ("layout.tp").
        value: the offending value.
        suggest: field -> value that would put it right (the nearest legal one).
    """

    level: Level
    rule: str
    message: str
    where: str = ""
    value: Any = None
    suggest: dict[str, Any] = field(default_factory=dict)

    @property
    def nearest(self) -> Any:
        """The nearest legal value of the field itself, or of the first field suggested."""
        if self.where in self.suggest:
            return self.suggest[self.where]
        return next(iter(self.suggest.values()), None)

    def line(self) -> str:
        """The finding as one line: where, what, nearest legal value."""
        head = f"{self.where}: " if self.where else ""
        hint = ", ".join(
            str(value) if key == self.where else f"{key} {value}"
            for key, value in self.suggest.items()
        )
        return f"{head}{self.message}" + (f" (nearest: {hint})" if hint else "")

    def as_json(self) -> dict[str, Any]:
        """The finding as `--json` shows an error: where, value, message, nearest."""
        keys = ("where", "value", "message", "nearest")
        return {key: plain(getattr(self, key)) for key in keys}


def plain(value: Any) -> Any:
    """What JSON can hold; it has no NaN, no infinity and no dates."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    finite = not isinstance(value, float) or isfinite(value)
    return value if finite and isinstance(value, str | int | float | None) else str(value)


def error(
    where: str, value: Any, message: str, nearest: Any = None, rule: str = "input"
) -> Finding:
    """An error about one field, with the nearest legal value of that field where there is one."""
    suggest = {} if nearest is None else {where: nearest}
    return Finding("error", rule, message, where, value, suggest)


class UserError(Exception):
    """The question is wrong: every problem with it, found before anything was started."""

    def __init__(self, findings: Iterable[Finding]):
        self.findings = tuple(findings)
        super().__init__("; ".join(f.line() for f in self.findings))


def closest(word: str, known: Iterable[str], cutoff: float = 0.55) -> str | None:
    """The known word most like `word`, or None when nothing is near (0: anything, 1: the same)."""
    known = sorted(known)
    folded = {k.lower().replace("_", "-"): k for k in known}
    match = difflib.get_close_matches(word.lower().replace("_", "-"), folded, n=1, cutoff=cutoff)
    return folded[match[0]] if match else None
