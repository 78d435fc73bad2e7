"""Runs the commands that the documents show and writes what they print into the documents.

    python docs/refresh.py

Two things are kept fresh. A `console` block whose command is `plait explain`, `plait dryrun`,
`plait schedule` or `plait tables`: what follows the command is what it prints, of a dry run the
part that `explain` does not have, of a launch that is read what is found in it. And a table under
a comment such as

    <!-- plait explain llama3.1-8b --gpus h100:64 | --zero 1 | --zero 3 -->
    <!-- plait schedule --pp 8 --microbatches 32 | 1f1b | zbv -->

which has a row for each alternative, taken from the command's JSON.
"""

import io
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

from plait.cli.main import main

ROOT = Path(__file__).parent.parent
STATES = ("parameters", "gradients", "optimizer")
_SHOWN = "explain|dryrun|schedule|tables"
_CONSOLE = re.compile(rf"```console\n\$ (plait (?:{_SHOWN}) .*)\n(?:.*\n)*?```\n")
_TABLE = re.compile(r"<!-- (plait (?:explain|schedule) .*?) -->\n+(?:\|.*\n)*\n*")


def documents() -> Iterator[Path]:
    """Every page that a person reads."""
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))


def output(command: str) -> str:
    """What a plait command prints on a page 100 columns wide that has no colours."""
    page = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    with patch.dict(os.environ, page), redirect_stdout(io.StringIO()) as out:
        main(shlex.split(command)[1:])
    text = "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n") + "\n"
    if "--from" in shlex.split(command):
        return _of_launch(text)
    measured = text.find("\nMeasured")
    return text if measured < 0 else f"...{text[measured:]}"


def _of_launch(text: str) -> str:
    """What is found in a launch, and of the nearest legal one no more than how it begins."""
    findings, legal = text.find("\nFindings"), text.find("\nNearest legal launch")
    if findings < 0 or legal < 0:
        return text
    head = "".join(text[legal:].splitlines(keepends=True)[:4])
    return f"...{text[findings:legal]}{head}...\n"


def fresh(text: str, run: Callable[[str], bool] = lambda command: True) -> str:
    """A page with its outputs renewed, those whose command `run` accepts."""

    def console(match: re.Match) -> str:
        command = match[1]
        return f"```console\n$ {command}\n{output(command)}```\n" if run(command) else match[0]

    def table(match: re.Match) -> str:
        return f"<!-- {match[1]} -->\n\n{_table(match[1])}\n"

    return _TABLE.sub(table, _CONSOLE.sub(console, text))


def _table(line: str) -> str:
    base, *alternatives = (part.strip() for part in line.split("|"))
    answers = [json.loads(output(f"{base} {flags} --json")) for flags in alternatives]
    rows = (_schedules if base.startswith("plait schedule") else _reports)(alternatives, answers)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _schedules(alternatives: list[str], answers: list[dict]) -> list[list[str]]:
    heads = ["", "makespan", "idle in the step", "idle in a rank's span", "bubble", "peak"]
    rows = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for flags, answer in zip(alternatives, answers, strict=True):
        bubble = answer["bubble"]
        idle = answer["makespan"] - sum(answer["busy"]) / len(answer["busy"])
        shares = [f"{bubble[key]:.1%}" for key in ("step_total", "span_total")]
        peak = f"{max(answer['peak_activations']):.4g}"
        rows.append([f"`{flags}`", f"{answer['makespan']:.5g}", *shares, f"{idle:.4g}", peak])
    return rows


def _reports(alternatives: list[str], reports: list[dict]) -> list[list[str]]:
    axes = [
        axis
        for axis in ("tp", "cp", "ulysses", "fsdp", "dp_replicate")
        if any(row["axis"] == axis for report in reports for row in report["traffic"])
    ]
    heads = ["", *STATES, "the rest", "peak", "fits", *(f"sent over {axis}" for axis in axes)]
    rows = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for flags, report in zip(alternatives, reports, strict=True):
        fullest = max(report["memory"]["by_stage"], key=lambda row: row["total"])
        states = [fullest[name] for name in STATES]
        held = [*states, fullest["total"] - sum(states), fullest["total"]]
        sent = [
            sum(row["wire_bytes"] for row in report["traffic"] if row["axis"] == axis)
            for axis in axes
        ]
        cells = [f"{n / 2**30:.2f} GiB" if n else "0" for n in held]
        cells.append("yes" if report["fits"] else "no")
        cells += [f"{n / 1e9:.2f} GB" if n else "0" for n in sent]
        rows.append([f"`{flags}`", *cells])
    return rows


if __name__ == "__main__":
    for path in documents():
        before = path.read_text("utf-8")
        if (after := fresh(before)) != before:
            path.write_text(after, "utf-8")
            print(f"{path.relative_to(ROOT)} renewed")
