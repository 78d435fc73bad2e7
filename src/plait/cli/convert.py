"""plait convert: one system's launch in the words of another."""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISDIR
from typing import Any

from plait.cli.arguments import FLAGS, add_launch, job_parser, model_or_file, parse
from plait.cli.explain import text
from plait.cli.question import Question, as_said, asked, launched
from plait.dialects import dialect
from plait.dialects.launch import Launch, Written
from plait.spec.findings import Finding, UserError, error, plain

_WORDS = """\
Write a launch of one system in the words of another: plait convert --from megatron --to torchtitan
launch.sh > recipe.py. Without --from, of a model and flags or of a job file, as `plait explain`
takes them. The text goes to stdout, notes on what the target cannot say to stderr; of several
files the first, and all of them into a folder with --out. Exit code 1: the layout is illegal, or
the target refuses it; then the REPORT is printed instead, and nothing is written."""


def run(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    given, question = _ask(argv)
    target = dialect(given["to"], "to")
    answer: dict[str, Any] = {"from": given.get("from"), "to": given["to"]}
    if question.illegal:
        report = question.report()
        if given["json"]:
            print(json.dumps(plain(answer | {"files": None, "notes": [], "report": report})))
        else:
            print(text(report, question.job))
        return 1
    written: Written = question.written(given["to"])
    notes = _once([*written.notes, *(_refused(target, written, question) if written.files else [])])
    refused = [f for f in notes if f.level == "error"]
    if given["json"]:
        found = [{"level": f.level, "rule": f.rule, "message": f.message} for f in notes]
        files = None if refused else written.files
        more = {"files": files, "notes": found, "report": question.report()}
        print(json.dumps(plain(answer | more)))
    else:
        for finding in notes:
            print(f"{finding.level}: {finding.message}", file=sys.stderr)
    if refused:
        return 1
    if "out" in given:
        _write(Path(given["out"]), written.files)
    elif not given["json"]:
        print(next(iter(written.files.values())), end="")
        if len(written.files) > 1:
            names = ", ".join(list(written.files)[1:])
            print(f"note: {names} too, with --out FOLDER", file=sys.stderr)
    return 0


def asking() -> tuple[ArgumentParser, Mapping[str, str]]:
    """The parser and the flags of the command."""
    usage = "--from DIALECT --to DIALECT FILE-OR-COMMAND"
    usage += "  |  MODEL --gpus GPU:COUNT ... --to DIALECT"
    parser = job_parser("convert", usage, _WORDS)
    launch = add_launch(parser)
    parser.add_argument("--to", metavar="DIALECT", help="in whose words it shall be said")
    parser.add_argument("--out", metavar="FOLDER", help="write all files there")
    return parser, FLAGS | launch | {"--to": "to", "--out": "out"}


def _ask(argv: list[str]) -> tuple[Mapping[str, Any], Question]:
    parser, flags = asking()
    given, subjects, findings = parse(argv, parser, flags)
    findings = list(findings)
    try:
        if "to" in given:
            dialect(given["to"], "to")
        else:
            findings.append(error("to", None, "to which dialect? --to DIALECT", rule="no-value"))
    except UserError as problem:
        findings += problem.findings
    findings += _folder(given)
    if "from" in given:
        return given, launched(given["from"], subjects, given, findings)
    file, model, more = model_or_file(subjects)
    return given, asked(given, [*findings, *more], file, model)


def _folder(given: Mapping[str, Any]) -> list[Finding]:
    """What is wrong with the folder to write into, before anything is done."""
    if "out" not in given:
        return []
    try:
        mode = Path(given["out"]).stat().st_mode if given["out"] else None
        why = "a folder must be named" if mode is None else "is there, and no folder"
        return [] if mode and S_ISDIR(mode) else [error("out", given["out"], why)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as problem:  # a name that is too long, or none
        return [error("out", given["out"], getattr(problem, "strerror", None) or str(problem))]


def _refused(target: Any, written: Written, question: Question) -> list[Finding]:
    """What the target would refuse or change of what was written: it is read back."""
    from plait.dialects.launch import Told
    from plait.dialects.source import Source

    file, text = next(iter(written.files.items()))
    source = Source(text, file, Path(file), written.files)
    launch: Launch = target.read(source, Told({}, question.job.layout.world, question.job.model))
    found = [*launch.findings, *target.check(launch, as_said(launch, question.job))]
    return [f for f in found if f.level in ("error", "warning")]


def _once(findings: list[Finding]) -> list[Finding]:
    return list({(f.level, f.message): f for f in findings}.values())


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """All files, or none.

    Raises:
        UserError: one cannot be written.
    """
    parts: list[tuple[Path, Path]] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            part = folder / f".{name}.part"
            parts.append((part, folder / name))
            part.write_text(content, "utf-8")
        for part, path in parts:
            part.replace(path)
    except OSError as problem:
        raise UserError([error("out", str(folder), problem.strerror or str(problem))]) from None
    finally:
        for part, _ in parts:
            part.unlink(missing_ok=True)
