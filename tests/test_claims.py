"""docs/claims.md: every command's answer is as the page says."""

import io
import json
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

import pytest

from plait.cli.main import main

PAGE = (Path(__file__).parent.parent / "docs/claims.md").read_text("utf-8")
ROWS = re.findall(
    r"^\| `((?:explain|schedule|tables) [^`]+)` \| `([^`]+)` \| ([^|`]+) \|$", PAGE, re.MULTILINE
)
SUMS = re.findall(r"^\| [^|`]*\| `([^`]+)` \| ([^|`]+) \|$", PAGE, re.MULTILINE)


@cache
def answer(command: str):
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()):
        main([*shlex.split(command), "--json"])
    return json.loads(out.getvalue())


def read(command: str, field: str):
    """A field of a command's answer: a dotted path, an entry of the traffic, a finding."""
    said, words = answer(command), field.split()
    if words[0] == "traffic":
        rows = [row for row in said["traffic"] if row["stage"] == 0]
        for key, word in zip(("axis", "collective", "phase"), words[1:4], strict=True):
            rows = [row for row in rows if word in ("*", row[key])]
        assert rows, f"{command} sends nothing of {field}"
        return sum(row[words[4]] for row in rows)
    if words[0] == "finding":
        (finding,) = (f for f in said["findings"] if f["rule"] == words[1])
        return finding[words[2]]
    while field:
        # What is suggested goes by dotted paths itself.
        part, _, rest = field.partition(".")
        if isinstance(said, dict) and field in said:
            part, rest = field, ""
        said, field = said[int(part)] if isinstance(said, list) else said[part], rest
    return said


def as_said(value, text: str) -> bool:
    """A number to the digits that are printed, or a word."""
    if isinstance(value, str):
        return value == text
    mantissa, power, _ = text.partition("e")
    digits = len(mantissa.partition(".")[2])
    return (float(f"{value:.{digits}e}") if power else round(value, digits)) == float(text)


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_a_claim(row):
    command, field, text = ROWS[row]
    value = read(command, field)
    factor, times, _ = text.partition(" x above")
    if times:
        above = read(*ROWS[row - 1][:2])
        assert value == pytest.approx(float(factor) * above, rel=1e-3)
    else:
        assert as_said(value, text), f"{command}: {field} is {value}, not {text}"


@pytest.mark.parametrize(("formula", "text"), SUMS)
def test_arithmetic(formula, text):
    assert re.fullmatch(r"[\d\s.e+*/()-]+", formula)
    assert as_said(eval(formula), text)  # digits and signs alone


def test_every_row_is_read():
    lines = [line for line in PAGE.splitlines() if re.match(r"\| .*`.*\|$", line)]
    assert len(lines) == len(ROWS) + len(SUMS)
    assert len(ROWS) > 50
    assert not as_said(0.46, "0.467")
    assert not as_said(1.9e10, "1.8e10")
    assert PAGE.count("**Said:**") == PAGE.count("**So:**") > 20
