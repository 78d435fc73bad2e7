"""plait tables: the tables that surveys of the field caption, computed for a model."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.cli.arguments import FLAGS, load_job, parse, parser, superfluous
from plait.cost.recipes import RECIPES
from plait.report.tables_zero import RECIPE
from plait.spec.findings import Finding, UserError, closest, error
from plait.spec.job import Job
from plait.spec.jobfile import draft_job
from plait.spec.layout import divisors, nearest

_WORDS = """\
Tables of the field, every cell computed for a model and devices. They take the flags of a job, as
`plait explain` does; what a table varies itself is no flag of it."""

_MODEL = {"model", "gpus", "ranks", *(path for path in FLAGS.values() if path.startswith("model."))}
_BATCH = {
    "layout.micro_batch",
    "layout.recompute",
    "train.seq_len",
    "train.global_batch",
    "train.accumulation",
    "train.dtype",
    "train.grad_dtype",
    "train.bucket_mib",
}


@dataclass(frozen=True)
class _Table:
    """words: for --help. takes: paths that may be given. defaults: of these."""

    words: str
    takes: frozenset[str]
    defaults: dict[str, str]


_STRATEGIES = {"model": "llama3.1-8b", "gpus": "h100:8", "train.seq_len": "4096"}
_TABLES = {
    "comparison": _Table(
        "strategies: what is split, what stays whole, what is sent when, limits, frameworks",
        frozenset({*_MODEL, *_BATCH, "degree"}),
        _STRATEGIES,
    ),
    "cost": _Table(
        "strategies: model states, activations, bytes sent, critical or hidden, bubble",
        frozenset({*_MODEL, *_BATCH, "degree"}),
        _STRATEGIES,
    ),
    "zero": _Table(
        "model states by size, data-parallel degree and ZeRO stage, as ZeRO's Table 1",
        frozenset({*_MODEL, "recipe"}),
        {},
    ),
    "batch": _Table(
        "global = micro x dp x accumulation, and what each micro batch costs",
        frozenset(FLAGS.values()),
        {"model": "llama2-70b", "gpus": "h100:64", "layout.tp": "8", "layout.pp": "2"},
    ),
    "examples": _Table("layouts in print, each held against rules and ledger", frozenset(), {}),
    "vllm": _Table(
        "strategies of serving: whether vLLM has them, flags, what is sharded and copied",
        frozenset(_MODEL),
        {"model": "deepseek-v3", "gpus": "h200:8"},
    ),
}
#: Flags that no job has.
_OWN = {"--recipe": "recipe", "--degree": "degree"}
#: Samples of a global batch for each device, where nothing is said.
_SAMPLES = 8


@dataclass(frozen=True)
class Question:
    """Which table, of what: dotted path -> text, defaults included, the job that these make, and
    the option of its own that the table takes."""

    name: str
    given: dict[str, Any]
    base: Job | None
    option: Any
    as_json: bool


def run(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    question = read(argv)

    from plait.report.tables import table

    answer = table(question.name, question.given, question.base, question.option)
    if question.as_json:
        print(json.dumps(answer))
    else:
        from plait.report.tables_text import render

        print(render(answer))
    return 0


def read(argv: Sequence[str]) -> Question:
    """The question that the arguments ask.

    Raises:
        UserError: everything that is wrong with it.
    """
    flags = FLAGS | _OWN
    given, words, findings = parse(argv, _parser(), flags)
    as_json = given.pop("json")
    findings = [*findings, *superfluous(words[1:])]
    name = words[0] if words else None
    if name not in _TABLES:
        raise UserError([*findings, _unknown(name)])
    table = _TABLES[name]
    findings += _not_taken(name, given, table.takes)
    recipe, degree = given.pop("recipe", RECIPE), given.pop("degree", None)
    if recipe not in RECIPES:
        message = f"no such recipe; recipes are {', '.join(RECIPES)}"
        findings.append(error("--recipe", recipe, message, closest(recipe, RECIPES) or RECIPE))
    if name == "examples":
        if findings:
            raise UserError(findings)
        return Question(name, {}, None, None, as_json)
    given = {path: text for path, text in given.items() if path in table.takes}
    said = given.keys()
    given = _defaults(table, given)
    # The sizes of ZeRO's table are no model; some job says how many ranks there are.
    stated = any(path.startswith("model") for path in given)
    some = {} if stated else {"model": "tiny"}
    some |= {} if given.keys() & {"gpus", "ranks"} else {"ranks": "1"}
    if "train.seq_len" in table.defaults and "train.seq_len" not in said:
        # No more than the model has positions for.
        job, _ = draft_job("plan", None, {k: v for k, v in (given | some).items() if k in said})
        if job is not None and job.train.seq_len < int(given["train.seq_len"]):
            given["train.seq_len"] = str(job.train.seq_len)
    told = {"train.global_batch", "train.accumulation"} & given.keys()
    if name not in ("zero", "vllm") and not told:
        # Enough samples that a pipeline and accumulation have something to do.
        job, problems = draft_job("plan", None, given | some)
        if job is not None and not problems:
            samples = job.layout.world * job.layout.micro_batch * _SAMPLES
            given["train.global_batch"] = str(samples)
    base, found = load_job("plan", given | some, findings)
    if errors := [f for f in found if f.level == "error"]:
        raise UserError(errors)
    option = recipe if name == "zero" else _degree(degree, base.layout.world)
    return Question(name, given, base, option, as_json)


def _degree(text: str | None, world: int) -> int | None:
    """A degree that divides the ranks.

    Raises:
        UserError: it does not.
    """
    if text is None:
        return None
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    if number and world % number == 0:
        return number
    legal = nearest(number, divisors(world))
    message = f"{text!r} does not divide the {world} ranks"
    raise UserError([error("--degree", text, message, legal)])


def _defaults(table: _Table, given: dict[str, Any]) -> dict[str, Any]:
    """What was given, on top of the table's own defaults."""
    defaults = dict(table.defaults)
    if "ranks" in given:
        defaults.pop("gpus", None)
    if any(path.startswith("model.") for path in given) and "model" not in given:
        sizes = {"model.layers", "model.hidden", "model.heads", "model.vocab"}
        if sizes <= given.keys():
            defaults.pop("model", None)
    used = {path for path in given if path.startswith("layout.") and path != "layout.micro_batch"}
    if used or given.keys() & {"model", "gpus", "ranks"}:
        # How the ranks are used goes with the model and the ranks; whoever says it says all of it.
        defaults = {k: v for k, v in defaults.items() if not k.startswith("layout.")}
    return defaults | given


def _unknown(name: str | None) -> Finding:
    known = ", ".join(_TABLES)
    if name is None:
        return error("table", None, f"which table? They are {known}", rule="unknown-table")
    message = f"no such table; tables are {known}"
    return error("table", name, f"{name!r}: {message}", closest(name, _TABLES), "unknown-table")


def _not_taken(name: str, given: dict[str, Any], takes: frozenset[str]) -> list[Finding]:
    """Flags that a table has no use for."""
    flags = {path: flag for flag, path in (FLAGS | _OWN).items()}
    return [
        error(flags[path], text, f"the table {name!r} takes no {flags[path]}", rule="unknown-flag")
        for path, text in given.items()
        if path not in takes
    ]


def _parser() -> argparse.ArgumentParser:
    tables = "\n".join(f"  {name:<12}{table.words}" for name, table in _TABLES.items())
    result = parser("tables", "NAME [--model NAME] [--gpus GPU:COUNT] ...", f"{_WORDS}\n\n{tables}")
    shown = {
        "--model": ("NAME", "the model"),
        "--gpus": ("GPU:COUNT", "the devices"),
        "--ranks": ("N", "ranks, of no device in particular"),
        "--seq-len": ("N", "tokens of a sample"),
        "--global-batch": ("N", f"samples of a step ({_SAMPLES} for each device)"),
        "--micro-batch": ("N", "samples of a rank in one forward pass"),
        "--degree": ("N", "comparison, cost: ranks of each strategy (one fast domain)"),
        "--recipe": ("NAME", f"zero: bytes a parameter: {', '.join(RECIPES)}"),
    }
    for flag, (metavar, text) in shown.items():
        dest = (FLAGS | _OWN)[flag]
        result.add_argument(flag, dest=dest, metavar=metavar, help=text)
    for flag in FLAGS.keys() - shown:
        result.add_argument(flag, dest=FLAGS[flag], help=argparse.SUPPRESS)
    return result
