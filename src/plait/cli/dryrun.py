"""plait dryrun: ranks of a layout under fake tensors, held against the formulas."""

import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping

from plait.cli.explain import ask, show
from plait.spec.findings import Finding, UserError, error

_WORDS = """\
Run the training program with fake tensors and no other ranks, at any size, and compare what it
sends and holds with what `plait explain` says. One rank of each kind is run, and of what repeats
(micro batches, layers) as much as is needed to tell the rest. Exit code 1: they differ, ranks of a
group do not issue the same collectives, or it does not fit."""

#: Seconds without a word.
_QUIET = 2.0


def run(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    given, question = ask("dryrun", _WORDS, argv, _flags, _no_number)
    job, found = question.job, question.findings
    rank = int(given["rank"]) if "rank" in given else None
    wrong = _no_such_rank(rank, job.layout.world)
    if question.serving is not None:
        message = "what is run is the training program; plait explain says what serving holds"
        wrong.append(error("from", given["from"], message, rule="not-built"))
    errors = [f for f in (*found, *question.own) if f.level == "error"] + wrong
    if errors:  # an illegal layout can be explained, but not run
        raise UserError(errors)

    from plait.trace.dryrun import dryrun

    answer = dryrun(job, found, full=given["full"], rank=rank, tell=_progress())
    show(question.completed(answer), job, given)
    return int(not answer["agree"] or answer["fits"] is False)


def _flags(parser: ArgumentParser) -> Mapping[str, str]:
    words = "run every action of every stage: nothing is repeated"
    parser.add_argument("--full", action="store_true", default=False, help=words)
    parser.add_argument("--rank", metavar="R", help="run this rank alone")
    return {"--rank": "rank"}


def _no_number(given: Mapping[str, str]) -> list[Finding]:
    """What is wrong with the rank that was asked for, whatever ranks there are."""
    text = given.get("rank", "0")
    try:
        int(text)
    except ValueError:
        return [error("rank", text, f"{text!r} is not a whole number", 0)]
    return []


def _no_such_rank(rank: int | None, world: int) -> list[Finding]:
    if rank is None or 0 <= rank < world:
        return []
    nearest = min(max(rank, 0), world - 1)
    return [error("rank", rank, f"there are ranks 0 to {world - 1}", nearest)]


def _progress() -> Callable[[str], None]:
    """Prints what is being done, of many things now and then one."""
    last = time.monotonic()

    def tell(doing: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _QUIET:
            last = time.monotonic()
            print(f"dry run: {doing}", file=sys.stderr, flush=True)

    return tell
