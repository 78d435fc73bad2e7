"""The names of pipeline schedules: what each means for a layout, and what else it is called.

How the actions of a schedule are ordered is for `plait.schedules`.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A family of pipeline schedules.

    Attributes:
        vpp: chunks that a rank may hold, (fewest, most); the default is the fewest, but 2 where
            one is legal and pointless.
        placement: which chunks a rank holds. "loop": r, r + p, r + 2p, ...; "v": r and 2p - 1 - r;
            "both": r and p - 1 - r, two copies of the model, one pipeline in each direction.
        split: whether input gradients (I) and weight gradients (W) are actions of their own.
        aliases: names of the same in Primus, in torch.distributed.pipelining, in papers.
    """

    vpp: tuple[int, int]
    placement: str
    split: bool
    aliases: tuple[str, ...] = ()


#: More chunks a rank than any model has layers.
_MANY = 10_000

SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule((1, 1), "loop", False, ("afab", "all-forward-all-backward")),
    "1f1b": Schedule((1, 1), "loop", False, ("pipedream-flush", "one-forward-one-backward")),
    "interleaved-1f1b": Schedule(
        (2, _MANY), "loop", False, ("1f1b-interleaved", "interleaved", "vpp")
    ),
    "looped-bfs": Schedule((2, _MANY), "loop", False, ("bfs", "breadth-first")),
    "zb-h1": Schedule(
        (1, _MANY),
        "loop",
        True,
        ("zero-bubble", "zb", "zb1p", "zb-1p", "h1", "interleaved-zero-bubble"),
    ),
    "zb-h2": Schedule((1, 1), "loop", True, ("zb2p", "zb-2p", "h2")),
    "zb-auto": Schedule(
        (1, 1), "loop", True, ("zero-bubble-heuristic", "zb-heuristic", "zb-greedy")
    ),
    "zbv": Schedule(
        (2, 2), "v", True, ("zbv-formatted", "zbv-zero-bubble", "zb-v", "v-schedule", "v-zb")
    ),
    "v-half": Schedule((2, 2), "v", True, ("zbv-half",)),
    "v-min": Schedule((2, 2), "v", True, ("zbv-min",)),
    "dualpipe": Schedule((1, 1), "both", True, ("bidirectional",)),
    "dualpipev": Schedule((2, 2), "v", True, ("dualpipe-v", "cut-in-half")),
    "auto": Schedule((1, _MANY), "loop", True),
}


def _fold(name: str) -> str:
    """`ScheduleZBVZeroBubble`, `ZBV zero-bubble` and `zbv_zero_bubble` are one word."""
    word = re.sub(r"[^a-z0-9]", "", name.lower())
    return word.removeprefix("schedule") or word


_CANONICAL = {_fold(alias): name for name, s in SCHEDULES.items() for alias in (name, *s.aliases)}


def canonical(name: str) -> str | None:
    """The schedule that a name of any of the field's systems means; None if it means none."""
    return _CANONICAL.get(_fold(name))


def is_file(schedule: str) -> bool:
    """Whether a schedule is a table in a file (torch's CSV form) and no name."""
    return schedule.lower().endswith(".csv")
