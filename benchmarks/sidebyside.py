"""Two contenders in the same processes, step by step in turn: ratios that a noisy machine leaves.

A contender is a function (rank, ...) -> step, and a step a function without arguments. Ranks are
forked as the tests fork theirs.
"""

import argparse
import json
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from ranks import run_ranks

Step = Callable[[], None]
Contender = Callable[[int], Step]

WARM_UP = 3  # steps before anything is measured: allocations, caches, Adam's states


@dataclass(frozen=True)
class Comparison:
    """What is held against what.

    Attributes:
        name: for `--only`. what: the two contenders in words.
        ranks: processes. tokens: of one step of all ranks together.
        ours, theirs: each builds one rank's step.
        goal: the least tokens/s of ours over theirs (None: for information).
    """

    name: str
    what: str
    ranks: int
    tokens: int
    ours: Contender
    theirs: Contender
    goal: float | None


@dataclass(frozen=True)
class Result:
    """A comparison's numbers.

    Attributes:
        ratio: median over pairs of (seconds of theirs / seconds of ours) = tokens/s of ours over
            theirs; low, high: least and largest.
        ours_tokens_s, theirs_tokens_s: from the median steps.
        ours_mib, theirs_mib: largest growth of a rank's peak resident memory over what the
            process had before it built the contender, each alone in fresh processes.
    """

    name: str
    what: str
    ranks: int
    pairs: int
    ratio: float
    low: float
    high: float
    goal: float | None
    ours_tokens_s: float
    theirs_tokens_s: float
    ours_mib: float
    theirs_mib: float

    @property
    def reached(self) -> bool | None:
        return None if self.goal is None else self.ratio >= self.goal

    def json(self) -> dict:
        return asdict(self) | {"reached": self.reached}


def measure(comparison: Comparison, pairs: int) -> Result:
    """Times the two in turn, then the memory of each alone."""
    c = comparison
    times = run_ranks(c.ranks, partial(_alternate, c.ours, c.theirs, pairs), timeout=900)[0]
    memory = [
        max(run_ranks(c.ranks, partial(_peak, contender), timeout=900)) / 2**20
        for contender in (c.ours, c.theirs)
    ]
    ratios = [theirs / ours for ours, theirs in times]
    ours, theirs = (c.tokens / median(side) for side in zip(*times, strict=True))
    return Result(
        c.name,
        c.what,
        c.ranks,
        pairs,
        median(ratios),
        min(ratios),
        max(ratios),
        c.goal,
        ours,
        theirs,
        *memory,
    )


def _alternate(
    ours: Contender, theirs: Contender, pairs: int, rank: int
) -> list[tuple[float, float]]:
    """Seconds of (ours, theirs), pair by pair; who begins takes turns."""
    steps = (ours(rank), theirs(rank))
    for _ in range(WARM_UP):
        for step in steps:
            step()
    times = []
    for i in range(pairs):
        pair = [0.0, 0.0]
        for who in (0, 1) if i % 2 == 0 else (1, 0):
            dist.barrier()
            start = perf_counter()
            steps[who]()
            pair[who] = perf_counter() - start
        times.append(tuple(pair))
    return times


def _peak(contender: Contender, rank: int) -> int:
    """Bytes by which this process's peak resident memory grows over three steps."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = contender(rank)
    for _ in range(3):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def table(results: list[Result]) -> Table:
    """The results for people."""
    out = Table(title="tokens/s of plait over its peer, median of interleaved pairs", box=None)
    for name, where in {
        "comparison": "left",
        "ranks": "right",
        "ratio": "right",
        "min..max": "right",
        "goal": "right",
        "met": "left",
        "tokens/s": "right",
        "peer": "right",
        "peak MiB": "right",
        "peer's": "right",
    }.items():
        out.add_column(name, justify=where, no_wrap=name != "comparison")
    for r in results:
        out.add_row(
            f"{r.name}: {r.what}",
            str(r.ranks),
            f"{r.ratio:.2f}",
            f"{r.low:.2f}..{r.high:.2f}",
            "" if r.goal is None else f"{r.goal:.2f}",
            {None: "", True: "yes", False: "no"}[r.reached],
            f"{r.ours_tokens_s:,.0f}",
            f"{r.theirs_tokens_s:,.0f}",
            f"{r.ours_mib:,.0f}",
            f"{r.theirs_mib:,.0f}",
        )
    return out


def command(
    doc: str,
    known: Callable[[bool], list[Any]],
    measure: Callable[[Any, int], Any],
    arguments: list[str] | None,
    repeats: tuple[str, int] = ("pairs", 15),
    printed: Callable[[list[Any]], Table] = table,
) -> int:
    """The command of a benchmark: measures what it knows, or a part; returns the exit code.

    Args:
        doc: of the script. known: what there is to measure, of no size where it is to be quick;
            each has a name.
        measure: takes one of them and how often; its answer has a `ratio` and a `json`.
        repeats: what "how often" is called, and its default. printed: the answers for people.
    """
    often, default = repeats
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--only", help="those whose name begins so")
    more = f"{often} of each ({default})"
    parser.add_argument(f"--{often}", type=int, default=default, help=more)
    parser.add_argument("--quick", action="store_true", help="of no size: does it run?")
    parser.add_argument("--json", action="store_true", help="the numbers on stdout")
    args = parser.parse_args(arguments)
    all_ = known(args.quick)
    chosen = [c for c in all_ if args.only is None or c.name.startswith(args.only)]
    if not chosen:
        print(f"--only {args.only}: one of {', '.join(c.name for c in all_)}", file=sys.stderr)
        return 2
    log, results = Console(stderr=True), []
    for case in chosen:
        with log.status(case.name):
            results.append(measure(case, getattr(args, often)))
        if not log.is_terminal:
            log.print(f"{case.name}: {results[-1].ratio:.3f}")
    if args.json:
        print(json.dumps({"results": [r.json() for r in results]}))
    else:
        out = Console()
        # Into a file or a pipe: no line is cut to a terminal's width.
        (out if out.is_terminal else Console(width=150)).print(printed(results))
    return 0
