"""plait explain: what a layout holds, sends and takes, from formulas alone."""

import json
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plait.cli.arguments import FLAGS, add_launch, job_parser, model_or_file, parse
from plait.cli.files import outputs, write
from plait.cli.question import Question, asked, launched
from plait.spec.findings import Finding, plain
from plait.spec.job import Job

_WORDS = """\
Say what a layout holds, sends and takes, from formulas, in no time and without a device. By
default: the model's own sequence length, micro batch 1, bfloat16 with float32 gradients and Adam
states, ZeRO-1. Exit code 1: it does not fit, or is illegal. Flags are stronger than the file.

--from DIALECT reads what another system launches with, a file or the command itself in quotes:
plait explain --from megatron launch.sh --gpus h100:128. `plait presets` lists the dialects."""


def run(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    given, question = ask("explain", _WORDS, argv)
    answer = question.report()
    show(answer, question.job, given)
    return int(question.illegal or answer["fits"] is False)


def ask(
    command: str,
    words: str,
    argv: Sequence[str],
    own: Callable[[ArgumentParser], Mapping[str, str]] = lambda _: {},
    wrong: Callable[[Mapping[str, Any]], list[Finding]] = lambda _: [],
) -> tuple[Mapping[str, Any], Question]:
    """The question of a command that answers with a REPORT: its flags, and what they ask.

    own: adds flags of the command's own to the parser, and returns those with a value. wrong: what
    is wrong with their values.

    Raises:
        UserError: every problem of arguments, file and fields, the page's file among them.
    """
    parser, flags = asking(command, words)
    given, subjects, findings = parse(argv, parser, flags | own(parser))
    findings = [*findings, *outputs(given, ["html"]), *wrong(given)]
    if "from" in given:
        return given, launched(given["from"], subjects, given, findings)
    file, model, more = model_or_file(subjects)
    return given, asked(given, [*findings, *more], file, model)


def asking(command: str, words: str) -> tuple[ArgumentParser, Mapping[str, str]]:
    """The parser and the flags of a command that answers with a REPORT."""
    usage = f"MODEL --gpus GPU:COUNT [--tp N] ...  |  plait {command} JOB.toml ..."
    usage += f"  |  plait {command} --from DIALECT FILE-OR-COMMAND ..."
    parser = job_parser(command, usage, words)
    launch = add_launch(parser)
    parser.add_argument("--html", metavar="FILE", help="write the answer as a page there, too")
    return parser, FLAGS | launch | {"--html": "html"}


def show(answer: dict[str, Any], job: Job, given: Mapping[str, Any]) -> None:
    """A REPORT on stdout, for people or as one JSON object, and as a page where one was asked for.

    Raises:
        UserError: the page cannot be written.
    """
    if "html" in given:
        write(given, {"html": lambda path: path.write_text(_page(answer, job), "utf-8")})
    print(json.dumps(plain(answer)) if given["json"] else text(answer, job))


def _page(answer: dict[str, Any], job: Job) -> str:
    from plait.report.html import page
    from plait.report.timeline import drawn

    return page(answer, drawn(job) if _pipelined(answer, job) else None)


def text(answer: dict[str, Any], job: Job) -> str:
    """A REPORT for people."""
    from plait.report.text import render

    if not _pipelined(answer, job):
        return render(answer)
    from plait.report.timeline import for_text

    return render(answer, timeline=for_text(job))


def _pipelined(answer: dict[str, Any], job: Job) -> bool:
    """Whether there is a pipeline, and its step is known: it is not of an illegal layout."""
    return job.layout.pp > 1 and answer["traffic"] is not None
