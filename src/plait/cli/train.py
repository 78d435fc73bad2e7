"""plait train: train a model, on this machine or as a rank that a launcher started."""

import os
import sys

from plait.cli.arguments import job_parser, load_job, parse, superfluous
from plait.spec.findings import UserError

_WORDS = """\
Train a model on text. With nothing said: the model `tiny` on the source of Python's own
library, 4 ranks on this machine, tp 2 x dp 2 with ZeRO-1, about a minute on two cores.
Under torchrun or SLURM it joins as the rank that was started. Flags are stronger than the file."""


def run(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = job_parser("train", "[JOB.toml] [--model NAME] [--ranks N] [--tp N] ...", _WORDS)
    given, words, findings = parse(argv, parser)
    file, *more = words or [None]

    from plait.train import launch
    from plait.train.preflight import problems as further

    place = launch.joined(os.environ)
    try:
        world = place.world_size if place else None
        problems = [*findings, *superfluous(more)]
        job, found = load_job("train", given, problems, file, world=world, further=further)
        if errors := [f for f in found if f.level == "error"]:
            raise UserError(errors)
    except UserError:
        # Every rank reads the same job: one rank a node says what is wrong with it.
        if place and place.local_rank:
            return 2
        raise
    if not place or place.rank == 0:
        for finding in found:
            print(f"{finding.level}: {finding.line()}", file=sys.stderr)
    return launch.run(job, given["json"])
