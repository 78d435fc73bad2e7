"""What `plait schedule` is asked: a table out of a file, or one to be built."""

from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any

from plait.cli.arguments import parse, parser, superfluous
from plait.cli.files import outputs
from plait.cli.schedule_files import FILES
from plait.schedules.auto import NAMED, SEARCHED
from plait.schedules.build import build, problems
from plait.schedules.check import check
from plait.schedules.csvfile import read_table
from plait.schedules.simulate import Timeline, Times, simulate
from plait.schedules.table import Table
from plait.spec.findings import Finding, UserError, closest, error
from plait.spec.schedule import SCHEDULES, canonical, is_file

_WORDS = """\
Build a pipeline schedule, simulate it and draw it. NAME is a schedule (`plait presets` lists
them), interleaved-1f1b:GROUP, or a table in a file of torch's CSV form. Times are those of one
rank's whole share of one micro batch, in any unit; activations are counted in the same shares and
held from F to W. Exit code 1: a rank holds more than the cap."""

_FLAGS = {
    "pp": ("N", "pipeline ranks (4; of a file: its own)"),
    "microbatches": ("N", "micro batches (2 pp; of a file: its own)"),
    "vpp": ("N", "chunks of a rank (the fewest that the schedule takes)"),
    "group": ("N", "interleaved-1f1b: micro batches of a chunk before the next chunk (pp)"),
    "f": ("T", "time of a forward pass (1), or T,T,...: of each chunk"),
    "b": ("T", "time of an input gradient (1), or T,T,...; without the weight gradient"),
    "w": ("T", "time of a weight gradient (1), or T,T,..."),
    "comm": ("T", "time of a message between two ranks (0)"),
    "cap": ("X", "the most activations that a rank may hold; auto and zb-auto keep to it"),
    "svg": ("FILE", "draw it there"),
    "trace": ("FILE", "write the timeline there, for Perfetto"),
    "csv": ("FILE", "write the table there, as torch.distributed.pipelining reads it"),
}
_SIZES, _KINDS = ("pp", "microbatches", "vpp", "group"), ("f", "b", "w")
#: Longer than anything takes, and shorter; how many lines an error may have; how many digits a
#: number of things, and how many characters of a text are repeated.
_LONGEST, _SHORTEST, _MOST_LINES, _DIGITS, _SHOWN = 1e12, 1e-12, 20, 18, 40


def _parser() -> ArgumentParser:
    result = parser("schedule", "NAME [--pp N] [--microbatches N] ...", _WORDS)
    for name, (metavar, text) in _FLAGS.items():
        result.add_argument(f"--{name}", dest=name, metavar=metavar, help=text)
    return result


@dataclass(frozen=True)
class Question:
    """What is asked: a table out of a file, or one to be built.

    Attributes:
        given: the table of a file.
        times: of "f", "b" and "w": one number, of a rank's whole share of a micro batch, or one
            a chunk.
    """

    name: str
    given: Table | None
    pp: int
    micro_batches: int
    vpp: int | None
    group: int | None
    times: Mapping[str, tuple[float, ...]]
    comm: float
    cap: float | None

    def table(self) -> tuple[Table, Times]:
        """The table, and how long the actions of its chunks take.

        Raises:
            UserError: there is no such table.
        """
        if self.given is not None:
            return self.given, self._lasting(self.given.chunks)
        # Where the number of chunks is open, "auto" asks for the times of several.
        times = self._lasting if self.vpp is None else self._lasting(self.pp * self.vpp)
        more = {"vpp": self.vpp, "group": self.group, "times": times, "cap": self.cap}
        table = build(self.name, self.pp, self.micro_batches, **more)
        return table, self._lasting(table.chunks)

    def best_named(self) -> Timeline | None:
        """The shortest of the named schedules that keep the cap, which "auto" is held against."""
        found = []
        for (name, schedule), vpp in product(
            SCHEDULES.items(), (self.vpp,) if self.vpp else SEARCHED + NAMED
        ):
            # Two copies of the model are not the chunks that were asked for.
            other = name == "auto" or (schedule.placement == "both" and self.vpp is not None)
            if other or problems(name, self.pp, self.micro_batches, vpp=vpp):
                continue
            times = self._lasting(self.pp * vpp)
            more = {"vpp": vpp, "times": times, "cap": self.cap}
            table = build(name, self.pp, self.micro_batches, **more)
            if self.cap is None or not check(table, cap=self.cap):
                found.append(simulate(table, times))
        return min(found, key=lambda timeline: timeline.makespan, default=None)

    def _lasting(self, chunks: int) -> Times:
        parts = (self.times[kind] for kind in _KINDS)
        parts = ((t[0] * self.pp / chunks,) * chunks if len(t) == 1 else t for t in parts)
        return Times(*parts, self.comm)


def read(argv: Sequence[str]) -> tuple[dict[str, Any], Question]:
    """The texts of the flags, and the question that they ask.

    Raises:
        UserError: everything that is wrong with the arguments.
    """
    # Like a field that is no true-or-false, a flag here must not stand without its value.
    flags = dict.fromkeys((f"--{name}" for name in _FLAGS), "model")
    given, words, findings = parse(argv, _parser(), flags)
    findings = [*findings, *superfluous(words[1:]), *outputs(given, FILES)]
    name, group, table = _name(words[:1], findings)
    sizes = {key: _whole(key, given.get(key), findings) for key in _SIZES}
    findings += _sizes(words, name, group, table, sizes, {f.where for f in findings})
    if group is not None:
        sizes["group"] = group
    times = {kind: _times(kind, given.get(kind, "1"), findings) for kind in _KINDS}
    if not any(map(any, times.values())):
        # In place of what is below 0, a 0 would leave nothing that takes any time.
        none = {f.where for f in findings if f.where in _KINDS and f.nearest == 0}
        findings = [replace(f, suggest={f.where: 1}) if f.where in none else f for f in findings]
        if not {f.where for f in findings} & set(_KINDS):
            findings.append(error("f", given.get("f"), "nothing takes any time", 1))
    comm = _number("comm", given.get("comm", "0"), findings)
    least = 1 if name in ("auto", "zb-auto") else 0  # what they keep to, something must be able to
    cap = _number("cap", given["cap"], findings, least) if "cap" in given else None
    if table is not None:
        sizes |= {"pp": len(table.ranks), "microbatches": table.micro_batches}
    pp = sizes["pp"] or 4
    question = Question(
        name, table, pp, sizes["microbatches"] or 2 * pp, sizes["vpp"], sizes["group"],
        times, comm, cap,
    )  # fmt: skip
    # Sizes and lengths only make sense together.
    if name and {f.where for f in findings}.isdisjoint((*_SIZES, *_KINDS)):
        question = _settled(question, findings)
    if findings:
        raise UserError(findings)
    return given, question


def _sizes(
    words: list[str],
    name: str,
    group: int | None,
    table: Table | None,
    sizes: Mapping[str, int | None],
    wrong: set[str],
) -> list[Finding]:
    """What is illegal about numbers of things.

    Args:
        group: the one in the schedule's name. sizes: those of flags. wrong: fields of which
            something is wrong already.
    """
    if table is not None:
        return list(_against(table, sizes))
    if not name:
        small = ((key, size) for key, size in sizes.items() if size is not None and size < 1)
        return [error(key, size, f"{size} is below 1", 1) for key, size in small]
    pp, many, vpp, beside = (sizes[key] for key in _SIZES)
    pp = 4 if pp is None else pp
    if many is None:
        many = 2 * _legal("pp", pp, problems(name, pp, 1, vpp))
    found = problems(name, pp, many, vpp, beside if group is None else group)
    if not wrong.isdisjoint(_SIZES):
        # Of what is held against a number that could not be read, only so much is certain.
        found = [f for f in found if f.value < 1]
    if group is not None:
        legal = _legal("group", group, found)
        named = {"where": "schedule", "value": words[0], "suggest": {"schedule": f"{name}:{legal}"}}
        found = [replace(f, **named) if f.where == "group" else f for f in found]
        if beside not in (None, group):
            message = f"two groups: {words[0]} and --group {beside}"
            found.append(error("group", beside, message, legal))
    return found


def _legal(where: str, value: int, found: list[Finding]) -> int:
    """The value, or the nearest that is legal."""
    return next((f.nearest for f in found if f.where == where), value)


def _settled(question: Question, findings: list[Finding]) -> Question:
    """The question with its number of chunks, if it has one; what is illegal about it."""
    name, pp, many, vpp = question.name, question.pp, question.micro_batches, question.vpp
    lengths = {kind: len(times) for kind, times in question.times.items() if len(times) > 1}
    if question.given is None:
        if vpp is None and name != "auto":
            vpp = SCHEDULES[name].vpp[0]
        elif vpp is None and lengths:
            vpp = max(1, round(next(iter(lengths.values())) / pp))
            findings += problems(name, pp, many, vpp=vpp)
        chunks = pp * (vpp or 1)
    else:
        chunks = question.given.chunks
    for kind, length in lengths.items():
        if length != chunks:
            message = f"{length} times for {chunks} chunks: give one a chunk, or one for all"
            findings.append(error(kind, ",".join(f"{t:g}" for t in question.times[kind]), message))
    return replace(question, vpp=vpp)


def _name(words: list[str], findings: list[Finding]) -> tuple[str, int | None, Table | None]:
    """The schedule by its own name, its group and, of a file, its table."""
    known = ", ".join(SCHEDULES)
    if not words:
        findings.append(error("schedule", None, f"name a schedule: {known}, or a file *.csv"))
        return "", None, None
    (said,) = words
    if is_file(said):
        try:
            table = read_table(Path(said))
        except UserError as problem:
            findings += problem.findings
            return "", None, None
        wrong = check(table)
        if more := wrong[_MOST_LINES:]:
            wrong[_MOST_LINES:] = [error(said, len(more), f"and {len(more)} more such")]
        findings += (replace(f, where=f"{said}, {f.where}") for f in wrong)
        return ("", None, None) if wrong else (said, None, table)
    word, colon, group = said.partition(":")
    name = canonical(word)
    if name is None:
        aliases = [alias for s in SCHEDULES.values() for alias in s.aliases]
        match = closest(word[:_SHOWN], (*SCHEDULES, *aliases)) or "1f1b"
        message = f"schedule {word[:_SHOWN]!r} is none of {known}, nor a file *.csv"
        findings.append(error("schedule", said, message, canonical(match)))
        return "", None, None
    number = int(group) if group.isdecimal() and len(group) <= _DIGITS else 0
    if colon and (name != "interleaved-1f1b" or number < 1):
        message = "only interleaved-1f1b takes a group of micro batches, as interleaved-1f1b:8"
        findings.append(error("schedule", said, message, name))
        return "", None, None
    return name, number if colon else None, None


def _whole(key: str, text: str | None, findings: list[Finding]) -> int | None:
    """A number of things; which are legal is not known here."""
    if text is None:
        return None
    try:
        if len(text) <= _DIGITS:
            return int(text)
        message = f"{text[:_SHOWN]!r} is no whole number of at most {_DIGITS} digits"
    except ValueError:
        message = f"{text!r} is not a whole number"
    findings.append(error(key, text, message))
    return None


def _number(key: str, text: str, findings: list[Finding], least: float = 0) -> float:
    """A length of time, or an amount of activations."""
    shown = text[:_SHOWN]
    try:
        value = float(text)
    except ValueError:
        findings.append(error(key, text, f"{shown!r} is not a number"))
        return 0.0
    if not isfinite(value):
        findings.append(error(key, text, f"{shown} is not a finite number"))
    elif value < least:
        findings.append(error(key, text, f"{shown} is below {least}", least))
    elif 0 < value < _SHORTEST:
        message = f"{shown} is below {_SHORTEST:g}, and not 0"
        findings.append(error(key, text, message, _SHORTEST))
    elif value > _LONGEST:
        findings.append(error(key, text, f"{shown} is above {_LONGEST:g}", _LONGEST))
    else:
        return value
    return 0.0


def _times(kind: str, text: str, findings: list[Finding]) -> tuple[float, ...]:
    return tuple(_number(kind, part, findings) for part in text.split(","))


def _against(table: Table, sizes: Mapping[str, int | None]) -> Iterator[Finding]:
    """What was said about a table in a file that is not so."""
    has = {"pp": len(table.ranks), "microbatches": table.micro_batches}
    if table.chunks % len(table.ranks) == 0:
        has["vpp"] = table.chunks // len(table.ranks)
    elif sizes["vpp"] is not None:
        what = (
            f"the file has {table.chunks} chunks on {len(table.ranks)} ranks, not as many on each"
        )
        yield error("vpp", sizes["vpp"], what)
    for key, own in has.items():
        if sizes[key] not in (None, own):
            yield error(key, sizes[key], f"the file has {own}", own)
    if sizes["group"] is not None:
        yield error("group", sizes["group"], "a table in a file has no groups")
