"""plait dryrun: one rank of a layout under fake tensors, held against the formulas."""

from plait.cli.explain import ask, show
from plait.spec.findings import UserError

_WORDS = """\
Run the training program of one rank with fake tensors and no other ranks, at any size, and
compare what it sends and holds with what `plait explain` says. Exit code 1: they differ."""


def run(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    given, job, found = ask("dryrun", _WORDS, argv)
    errors = [f for f in found if f.level == "error"]
    if errors:  # an illegal layout can be explained, but not run
        raise UserError(errors)

    from plait.trace.dryrun import dryrun

    answer = dryrun(job, found)
    show(answer, job, given)
    return 0 if answer["agree"] else 1
