"""plait explain: what a layout holds, sends and takes, from formulas alone."""

import json

from plait.cli.arguments import job_parser, load_job, model_or_file, parse

_WORDS = """\
Say what a layout holds, sends and takes, from formulas, in no time and without a device. By
default: the model's own sequence length, micro batch 1, bfloat16 with float32 gradients and Adam
states, ZeRO-1. Exit code 1: it does not fit, or is illegal. Flags are stronger than the file."""


def run(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    usage = "MODEL --gpus GPU:COUNT [--tp N] ...  |  plait explain JOB.toml ..."
    given, words, findings = parse(argv, job_parser("explain", usage, _WORDS))
    file, model, more = model_or_file(words)
    job, found = load_job("plan", given, [*findings, *more], file=file, model=model)

    from plait.report.build import report

    answer = report(job, found)
    show(answer, given["json"])
    illegal = any(f.level == "error" for f in found)
    return int(illegal or answer["fits"] is False)


def show(answer: dict, as_json: bool) -> None:
    """A REPORT on stdout, for people or as one JSON object."""
    if as_json:
        print(json.dumps(answer, default=str))
        return

    from plait.report.text import render

    print(render(answer))
