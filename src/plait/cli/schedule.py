"""plait schedule: a pipeline schedule built, simulated and drawn."""

import json
import os
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf, isfinite
from pathlib import Path
from typing import Any

from plait.cli.arguments import parse, parser, superfluous
from plait.schedules.bound import lower_bound, routes
from plait.schedules.build import build, problems
from plait.schedules.check import check
from plait.schedules.csvfile import read_table, write_table
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
_SIZES, _KINDS, _FILES = ("pp", "microbatches", "vpp", "group"), ("f", "b", "w"), tuple(_FLAGS)[-3:]
#: Longer than anything takes; and how many lines an error may have.
_LONGEST, _MOST_LINES = 1e12, 20


def run(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    given, question = read(argv)
    table, times = question.table()
    timeline = simulate(table, times)
    answer = _answer(question, timeline)
    _write(given, timeline)
    print(json.dumps(answer) if given["json"] else _page(given, answer, timeline))
    return 0 if answer["within_cap"] else 1


def _parser() -> ArgumentParser:
    result = parser("schedule", "NAME [--pp N] [--microbatches N] ...", _WORDS)
    for name, (metavar, text) in _FLAGS.items():
        result.add_argument(f"--{name}", dest=name, metavar=metavar, help=text)
    return result


# ------------------------------------------------------------------------------------------
# The question


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
            SCHEDULES.items(), (self.vpp,) if self.vpp else (1, 2)
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
    findings = [*findings, *superfluous(words[1:]), *_outputs(given)]
    name, group, table = _name(words[:1], findings)
    sizes = {key: _whole(key, given.get(key), findings) for key in _SIZES}
    if group is not None:
        if sizes["group"] not in (None, group):
            message = f"two groups: {words[0]} and --group {sizes['group']}"
            findings.append(error("group", sizes["group"], message, group))
        sizes["group"] = group
    times = {kind: _times(kind, given.get(kind, "1"), findings) for kind in _KINDS}
    comm = _number("comm", given.get("comm", "0"), findings)
    cap = _number("cap", given["cap"], findings) if "cap" in given else None
    if not {f.where for f in findings} & set(_KINDS) and not any(map(any, times.values())):
        findings.append(error("f", given.get("f"), "nothing takes any time", 1))
    if table is not None:
        findings += _against(table, sizes)
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


def _settled(question: Question, findings: list[Finding]) -> Question:
    """The question with its number of chunks, if it has one; what is illegal about it."""
    name, pp, many, vpp = question.name, question.pp, question.micro_batches, question.vpp
    lengths = {kind: len(times) for kind, times in question.times.items() if len(times) > 1}
    if question.given is None:
        if vpp is None and name != "auto":
            vpp = SCHEDULES[name].vpp[0]
        elif vpp is None and lengths:
            vpp = max(1, round(next(iter(lengths.values())) / pp))
        findings += problems(name, pp, many, vpp=vpp, group=question.group)
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
        match = closest(word, (*SCHEDULES, *aliases)) or "1f1b"
        message = f"schedule {word!r} is none of {known}, nor a file *.csv"
        findings.append(error("schedule", said, message, canonical(match)))
        return "", None, None
    if colon and (name != "interleaved-1f1b" or not group.isdecimal() or int(group) < 1):
        message = "only interleaved-1f1b takes a group of micro batches, as interleaved-1f1b:8"
        findings.append(error("schedule", said, message, name))
        return "", None, None
    return name, int(group) if colon else None, None


def _whole(key: str, text: str | None, findings: list[Finding]) -> int | None:
    """A number of things, at least one."""
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        findings.append(error(key, text, f"{text!r} is not a whole number"))
        return None
    if value < 1:
        findings.append(error(key, value, f"{value} is below 1", 1))
        return None
    return value


def _number(key: str, text: str, findings: list[Finding]) -> float:
    """A length of time, or an amount of activations."""
    try:
        value = float(text)
    except ValueError:
        findings.append(error(key, text, f"{text!r} is not a number"))
        return 0.0
    if not isfinite(value):
        findings.append(error(key, text, f"{text} is not a finite number"))
    elif value < 0:
        findings.append(error(key, text, f"{text} is below 0", 0))
    elif value > _LONGEST:
        findings.append(error(key, text, f"{text} is above {_LONGEST:g}", _LONGEST))
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
    for key, own in has.items():
        if sizes[key] not in (None, own):
            yield error(key, sizes[key], f"the file has {own}", own)
    if sizes["group"] is not None:
        yield error("group", sizes["group"], "a table in a file has no groups")


# ------------------------------------------------------------------------------------------
# Files


def _outputs(given: Mapping[str, Any]) -> Iterator[Finding]:
    """Files that cannot be written, before anything is done."""
    seen: dict[Path, str] = {}
    for key in _FILES:
        if key not in given:
            continue
        path = Path(given[key]).resolve()
        if not given[key]:
            yield error(key, given[key], "a file must be named")
        elif path.exists() and not path.is_file():
            yield error(key, given[key], "is there, and no file")
        elif not path.parent.is_dir():
            yield error(key, given[key], f"there is no folder {path.parent}")
        elif not os.access(path.parent, os.W_OK):
            yield error(key, given[key], f"the folder {path.parent} cannot be written to")
        elif path in seen:
            yield error(key, given[key], f"is the file of --{seen[path]} too")
        seen.setdefault(path, key)


def _write(given: Mapping[str, Any], timeline: Timeline) -> None:
    """The files that were asked for: all of them, or none."""
    from plait.schedules.perfetto import trace
    from plait.schedules.svg import svg

    table = timeline.table
    writers = {
        "svg": lambda path: path.write_text(svg(table, timeline), "utf-8"),
        "trace": lambda path: path.write_text(trace(table, timeline), "utf-8"),
        "csv": partial(write_table, table),
    }
    ready: list[tuple[Path, Path]] = []
    key = ""
    try:
        for key in (key for key in _FILES if key in given):
            path = Path(given[key]).resolve()
            part = path.with_name(f".{path.name}.{os.getpid()}.part")
            ready.append((part, path))
            writers[key](part)
        for part, path in ready:
            part.replace(path)
    except OSError as problem:
        raise UserError([error(key, given[key], problem.strerror or str(problem))]) from None
    finally:
        for part, _ in ready:
            part.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------
# The answer


def _answer(question: Question, timeline: Timeline) -> dict[str, Any]:
    table = timeline.table
    over = check(table, cap=question.cap) if question.cap is not None else []
    # A table that passes the cap cannot be held against what the cap allows.
    room = inf if over or question.cap is None else question.cap
    chunks, pp = table.chunks, len(table.ranks)
    return {
        "schedule": question.name,
        "pp": pp,
        "vpp": chunks // pp if chunks % pp == 0 else None,
        "microbatches": table.micro_batches,
        "makespan": timeline.makespan,
        "lower_bound": lower_bound(routes(table), timeline.times, room),
        "bubble": timeline.bubble,
        "busy": list(timeline.busy),
        "peak_activations": list(timeline.peak_activations),
        "cap": question.cap,
        "within_cap": not over,
        **(_held_against(question.best_named(), table) if question.name == "auto" else {}),
        "actions": [[str(action) for action in actions] for actions in table.ranks],
    }


def _held_against(named: Timeline | None, table: Table) -> dict[str, Any]:
    """What "auto" is better than, and whether it is just that."""
    if named is None:
        return {"best_named": None, "chosen": "search"}
    best = {
        "schedule": named.table.name,
        "vpp": named.table.chunks // len(named.table.ranks),
        "makespan": named.makespan,
    }
    same = named.table.ranks == table.ranks
    return {"best_named": best, "chosen": named.table.name if same else "search"}


def _page(given: Mapping[str, Any], answer: dict[str, Any], timeline: Timeline) -> str:
    """The answer for people."""
    from rich.console import Console
    from rich.markup import escape

    from plait.schedules.draw import drawing

    table, bubble, makespan = timeline.table, answer["bubble"], timeline.makespan
    peak = max(timeline.peak_activations)
    console = Console(highlight=False)
    colour = console.color_system is not None and not console.no_color
    vpp = answer["vpp"] or 1
    parts = [
        f"[bold]{escape(answer['schedule'])}[/]",
        _many(answer["pp"], "rank") + (f" x {vpp} chunks" if vpp > 1 else ""),
        _many(answer["microbatches"], "micro batch", "es"),
        f"makespan [bold]{makespan:.6g}[/]" + _above(makespan, answer["lower_bound"]),
        f"bubble [bold]{bubble['step_total']:.1%}[/] of the step "
        f"({bubble['step_ideal']:.1%} of ideal), {bubble['span_total']:.1%} of a rank's own span",
        f"peak [bold]{peak:.4g}[/] micro batch" + "es" * (peak != 1),
    ]
    if best := answer.get("best_named"):
        name = best["schedule"] + (f" x {best['vpp']} chunks" if best["vpp"] > 1 else "")
        parts.append(f"best named {name}, {best['makespan']:.6g}")
    with console.capture() as capture:
        console.print()
        console.print(" · ".join(part.replace(" ", "\u00a0") for part in parts))
        console.print()
        console.print(_ranks(timeline))
        console.print()
        console.print(drawing(table, timeline, console.width, colour), soft_wrap=True)
        for key in _FILES:
            if key in given:
                console.print(f"[dim]{key}[/] written to {escape(given[key])}")
        if not answer["within_cap"]:
            console.print(f"\n[bold red]Holds more than {answer['cap']:g}:[/]")
            for finding in check(table, cap=answer["cap"]):
                console.print(f"  {escape(finding.line())}")
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _above(makespan: float, bound: float) -> str:
    """How far the makespan is from what is possible at all."""
    if makespan <= bound * (1 + 1e-9):
        return " (no order is shorter)"
    return f" ({makespan / bound - 1:.1%} above the bound {bound:.6g})"


def _many(n: int, noun: str, plural: str = "s") -> str:
    return f"{n} {noun}" + (plural if n > 1 else "")


def _ranks(timeline: Timeline):
    """A row a rank: what it has, how long it idles, how much it holds."""
    from rich.table import Table as Grid

    grid = Grid.grid(padding=(0, 2))
    heads = ("  rank", "chunks", "busy", "idle", "idle of its span", "peak activations")
    for head in heads:
        grid.add_column(justify="left" if head == "  rank" else "right", no_wrap=True)
    grid.add_row(*(f"[dim]{head}[/]" for head in heads))
    most = max(timeline.peak_activations)
    for rank, spans in enumerate(timeline.spans):
        busy, held = timeline.busy[rank], timeline.table.held[rank]
        own = spans[-1].end - spans[0].start
        peak = timeline.peak_activations[rank]
        grid.add_row(
            f"  {rank}",
            ",".join(map(str, held)) if len(held) < 6 else f"{held[0]},{held[1]}..{held[-1]}",
            f"{busy:.6g}",
            f"{1 - busy / timeline.makespan:.1%}",
            f"{max(1 - busy / own, 0.0) if own else 0:.1%}",
            f"[bold]{peak:.4g}[/]" if peak == most else f"{peak:.4g}",
        )
    return grid
