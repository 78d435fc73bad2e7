"""The flags that `train`, `explain` and `dryrun` share: every field of a job.

argparse prints the help and pairs flags with their texts; texts become values where the job is
read (`plait.spec.jobfile`), so that everything that is wrong is said at once.
"""

import argparse
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn

from plait.rules import check, errors
from plait.rules.mend import mended
from plait.spec.findings import Finding, UserError, closest, error
from plait.spec.job import Job
from plait.spec.jobfile import SHORT, TABLES, Purpose, draft_job, job_paths

_TOP = {
    "model": ("NAME", "a preset (see `plait presets`), a Hugging Face folder or config.json"),
    "ranks": ("N", "number of ranks"),
    "gpus": ("GPU:COUNT", "the cluster, as h100:64, or a file that describes it"),
    "metrics": ("FILE", "write one JSON line a step there"),
    "explain": ("BOOL", "train: the report at the start, the ledger of every step as it runs"),
}
_LAYOUT = {
    "tp": ("N", "tensor parallel degree"),
    "sequence_parallel": ("BOOL", "split norm regions over the tp ranks (true when tp > 1)"),
    "cp": ("N", "context parallel degree"),
    "ulysses": ("N", "part of cp that exchanges heads"),
    "cp_method": ("NAME", "the rest of cp: ring, all-gather"),
    "pp": ("N", "pipeline stages"),
    "vpp": ("N", "chunks of a stage"),
    "schedule": ("NAME", "pipeline schedule"),
    "stages": ("N,N,...", "layers of each chunk"),
    "ep": ("N", "expert parallel degree"),
    "etp": ("N", "tensor parallel degree inside experts"),
    "dp_replicate": ("N", "copies of the sharded model states"),
    "dp_shard": ("N", "ranks that share one copy"),
    "zero": ("0-3", "share optimizer states (1), gradients too (2), parameters too (3)"),
    "micro_batch": ("N", "samples of a rank in one forward pass"),
    "recompute": ("WHAT", "none, full, selective, or selective:norm,attention,mlp"),
    "dcp": ("N", "decode context parallel degree (serving)"),
}
_RUN = {
    "steps": ("N", "optimizer steps"),
    "seq_len": ("N", "tokens of a sample"),
    "global_batch": ("N", "samples of an optimizer step"),
    "accumulation": ("N", "micro batches of a rank in it"),
    "seed": ("N", "decides initial weights and the order of the data"),
    "dtype": ("NAME", "auto, float64, float32, bfloat16, float16"),
}

#: Flag -> dotted path of the field that it sets.
FLAGS = {f"--{path.replace('_', '-')}": path for path in job_paths()} | {
    f"--{name.replace('_', '-')}": path for name, path in SHORT.items()
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError([error("", None, message, rule="arguments")])


def parser(command: str, usage: str, words: str) -> argparse.ArgumentParser:
    """A parser without flags of its own but --json and --help."""
    result = _Parser(
        prog=f"plait {command}",
        usage=f"plait {command} {usage}",
        description=words,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "--json", action="store_true", default=False, help="one JSON object on stdout"
    )
    return result


def job_parser(command: str, usage: str, words: str) -> argparse.ArgumentParser:
    """A parser with a flag for every field of a job."""
    result = parser(command, usage, words)
    groups = (("job", _TOP), ("layout", _LAYOUT), ("batch and run", _RUN))
    shown = set()
    for title, entries in groups:
        group = result.add_argument_group(title)
        for name, (metavar, text) in entries.items():
            path = SHORT.get(name, name)
            flag = f"--{name.replace('_', '-')}"
            group.add_argument(flag, dest=path, metavar=metavar, help=text)
            shown.add(flag)
    for flag in FLAGS.keys() - shown:
        result.add_argument(flag, dest=FLAGS[flag], help=argparse.SUPPRESS)
    result.epilog = _epilog()
    return result


def add_launch(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Adds the flags of commands that read launches of other systems; returns them."""
    group = parser.add_argument_group("a launch of another system")
    words = "in whose words the layout is said (see `plait presets`)"
    group.add_argument("--from", metavar="DIALECT", help=words)
    words = "an environment variable that the launch is started with; may be said several times"
    group.add_argument("--set", metavar="NAME=VALUE", action="append", help=words)
    return {"--from": "from", "--set": "set"}


def _epilog() -> str:
    """Every other field with its default, table by table."""
    lines = ["any other field by its path in the job file, as --train.weight-decay 0.1:"]
    for table, cls in TABLES.items():
        names = []
        for f in fields(cls):
            if f"{table}.{f.name}" in SHORT.values():
                continue
            default = "" if f.default in (MISSING, None, "", ()) else f.default
            default = ",".join(default) if isinstance(default, tuple) else default
            names.append(f"{f.name.replace('_', '-')} {str(default).lower()}".strip())
        if names:
            text = textwrap.fill(", ".join(names), 78, break_on_hyphens=False)
            lines += [f"  {table}", textwrap.indent(text, "    ")]
    return "\n".join(lines)


def parse(
    argv: Sequence[str], parser: argparse.ArgumentParser, flags: Mapping[str, str] = FLAGS
) -> tuple[dict[str, Any], list[str], list[Finding]]:
    """Dotted path -> text of every flag, the arguments that are no flags, and what is wrong."""
    switches = [s for a in parser._actions if a.nargs == 0 for s in a.option_strings]
    tidy, words, findings = _pair(argv, flags, switches)
    return vars(parser.parse_args(tidy)), words, findings


def _pair(
    argv: Sequence[str], flags: Mapping[str, str], switches: Sequence[str]
) -> tuple[list[str], list[str], list[Finding]]:
    """Flags as --name=text, other words, unknown flags and flags without their text.

    argparse stops at the first problem, and takes the text "-1e-3" for a flag.
    """
    tidy: list[str] = []
    words: list[str] = []
    findings: list[Finding] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        flag, equals, text = token.partition("=")
        # Flags are written with dashes; with underscores they are understood.
        flag = flag if flag in flags else flag.replace("_", "-")
        if token == "--":
            words += rest
            break
        if not token.startswith("-") or token == "-":
            words.append(token)
        elif token in switches:
            tidy.append(token)
        elif flag in switches:
            findings.append(error(flag, text, f"{flag} takes no value", rule="arguments"))
        elif flag not in flags:
            match = closest(flag, (*flags, *(s for s in switches if s.startswith("--"))))
            text = text if equals else _text(rest)
            findings.append(error(flag, text, "no such flag", match, "unknown-flag"))
        elif equals:
            tidy.append(f"{flag}={text}")
        elif (following := _text(rest)) is not None:
            tidy.append(f"{flag}={following}")
        elif job_paths().get(flags[flag]) is bool:
            tidy.append(f"{flag}=true")
        else:
            findings.append(error(flag, None, "a value must follow", rule="no-value"))
    return tidy, words, findings


def _text(rest: list[str]) -> str | None:
    """Takes the text that belongs to a flag, if there is one."""
    return rest.pop(0) if rest and not rest[0].startswith("--") else None


def superfluous(words: Sequence[str]) -> list[Finding]:
    """Arguments for which there is no use."""
    return [error(word, word, "one argument too many", rule="arguments") for word in words]


def load_job(
    purpose: Purpose,
    given: Mapping[str, Any],
    findings: list[Finding],
    file: str | None = None,
    model: str | None = None,
    world: int | None = None,
    further: Callable[[Job], list[Finding]] | None = None,
) -> tuple[Job, list[Finding]]:
    """The job, and what the rules find about it.

    Args:
        given: as `parse` returns it; what is no field of a job is left alone. findings: what is
            wrong with the arguments already.
        further: finds more than the rules do.

    Raises:
        UserError: every problem of arguments, file, fields, and, where there is one, all that
            the rules say is illegal.
    """
    overrides = {path: text for path, text in given.items() if path in FLAGS.values()}
    if model is not None and "model" in overrides:
        message = f"two models: {model} and --model {overrides['model']}"
        findings = [*findings, error("model", overrides["model"], message, model)]
    job, problems = draft_job(purpose, file, overrides, model=model, world=world)
    if job is None:
        raise UserError([*findings, *problems])

    def ask(changes: Mapping[str, Any]) -> list[Finding]:
        told = {path: text for path, text in overrides.items() if path not in changes}
        other, wrong = draft_job(purpose, file, told | changes, model=model, world=world)
        return wrong + (errors(other, purpose) if other is not None else [])

    # A draft is good for finding what else is illegal, and for nothing more.
    found = errors(job, purpose) if problems else check(job, purpose)
    found = mended(job, [*problems, *found], ask)
    problems, found = found[: len(problems)], found[len(problems) :]
    found += further(job) if further is not None else []
    # A file that cannot be read, or a word that means nothing, is a wrong question and not a
    # layout that is illegal.
    unknown = (f for f in found if f.rule in ("unreadable", "words"))
    problems = [*findings, *problems, *unknown]
    if problems:
        said = {(f.where, f.message) for f in problems}
        more = [f for f in found if f.level == "error" and (f.where, f.message) not in said]
        raise UserError([*problems, *more])
    return job, found


def model_or_file(words: Sequence[str]) -> tuple[str | None, str | None, list[Finding]]:
    """(job file, model, what is wrong) of the arguments of `explain` and `dryrun`.

    A .toml file is a job; everything else is a model: a name, a folder, a config.json.
    """
    if not words:
        return None, None, []
    subject, *more = words
    is_job = Path(subject).suffix.lower() == ".toml"
    file, model = (subject, None) if is_job else (None, subject)
    return file, model, superfluous(more)
