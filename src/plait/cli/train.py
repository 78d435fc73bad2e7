"""plait train: train a model, on this machine or as a rank that a launcher started."""

import os
import sys
from collections.abc import Mapping

from plait.cli.arguments import job_parser, load_job, parse, superfluous
from plait.spec.findings import UserError, error

_WORDS = """\
Train a model on text. With nothing said: the model `tiny` on the source of Python's own
library, 4 ranks on this machine, tp 2 x dp 2 with ZeRO-1, about a minute on two cores.
Under torchrun or SLURM it joins as the rank that was started. Flags are stronger than the file."""


def run(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = job_parser("train", "[JOB.toml] [--model NAME] [--ranks N] [--tp N] ...", _WORDS)
    given, words, findings = parse(argv, parser)
    file, *more = words or [None]
    try:
        world = launched_world(os.environ)
        problems = [*findings, *superfluous(more)]
        job, found = load_job("train", given, problems, file=file, world=world)
        errors = [f for f in found if f.level == "error"]
        if errors:
            raise UserError(errors)
    except UserError:
        # Every rank reads the same job: one rank a node says what is wrong with it.
        if _speaks(os.environ):
            raise
        return 2
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        for finding in found:
            print(f"plait: {finding.level}: {finding.line()}", file=sys.stderr)

    from plait.train.launch import run as launch

    return launch(job, given["json"])


def launched_world(environment: Mapping[str, str]) -> int | None:
    """Ranks that torchrun or SLURM has started, None when this is an ordinary process.

    Raises:
        UserError: the number is none.
    """
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in environment and size in environment:
            text = environment[size]
            if not text.isdecimal() or int(text) < 1:
                raise UserError([error(size, text, f"{text!r} is not a number of ranks")])
            return int(text)
    return None


def _speaks(environment: Mapping[str, str]) -> bool:
    """Whether this process is the first of the launcher's on its node, or the only one."""
    return environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0")) == "0"
