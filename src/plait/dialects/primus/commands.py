"""Commands and scripts that start Primus: which experiment, what is said after it, on how many.

primus-cli [options] direct|container|slurm [...] -- train pretrain --config X.yaml --key value
EXP=X.yaml bash examples/run_pretrain.sh --key value
torchrun ... primus/cli/main.py train pretrain --config X.yaml key=value
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any

from plait.dialects import shell
from plait.dialects.flags import Word
from plait.dialects.settings import Setting
from plait.dialects.shell import launchers
from plait.dialects.source import Source, read_file
from plait.spec.findings import Finding, UserError, error

#: Programs that take the experiment as --config, and those that take it as EXP.
CLI = ("primus-cli", "primus_cli.py", "primus-cli-*.sh")
SCRIPTS = ("run_pretrain*.sh", "run_local_pretrain*.sh", "run_slurm_pretrain*.sh",
           "run_k8s_pretrain*.sh")  # fmt: skip
MODULES = ("primus.cli.main", "primus.train", "primus.pretrain")
FILES = ("primus/cli/main.py", "primus/train.py", "primus/pretrain.py", "train.py", "pretrain.py")
#: Commands that only mention others.
_TALKERS = ("echo", "printf", "cat", "ls", "cp", "grep", "chmod", "tee", "cd", "source", ".")
#: Options of the training command that are no overrides (launcher/parser.py).
_OWN = ("data_path", "backend_path", "export_config")
#: Options of run_k8s_pretrain.sh -> the variable that they set; "": they decide nothing.
_CLOUD = {"replica": "NNODES", "gpu": "GPUS_PER_NODE"} | dict.fromkeys(
    ("url", "cpu", "image", "hf_token", "workspace", "exp_name", "nodelist", "memory"), ""
)
#: GPUs of a node where nothing says otherwise (runner/primus-cli-direct.sh).
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Started:
    """One start of Primus.

    Attributes:
        experiment: the file.
        suite: "pretrain" or "posttrain", "".
        overrides: what is said after it.
        environment: variables that are set.
        world: ranks; None where the command does not say.
        open: what decides the number of ranks and is not known.
    """

    experiment: Source
    suite: str
    overrides: tuple[Setting, ...]
    environment: dict[str, str]
    world: int | None
    open: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Found:
    """A command that starts Primus.

    Attributes:
        program: the word that is Primus' own. words: those after it.
        run: how the command is started, where that is known.
    """

    program: Word
    words: tuple[Word, ...]
    command: shell.Command
    run: launchers.Run | None

    @property
    def name(self) -> str:
        return self.program.text.rstrip("/").rpartition("/")[2]

    @property
    def cli(self) -> bool:
        return any(fnmatchcase(self.name, pattern) for pattern in CLI)

    @property
    def trains(self) -> bool:
        words = {word.text.partition("=")[0] for word in self.words}
        script = any(fnmatchcase(self.name, pattern) for pattern in SCRIPTS)
        return script or bool(words & {"--config", "--exp", "pretrain", "posttrain"})


def read_command(source: Source) -> Started:
    """The start of Primus that a script or a command holds.

    Raises:
        UserError: there is none, or its experiment cannot be found or read.
    """
    script = shell.read(source)
    found = _training(script)
    if found is None:
        raise UserError([_error(source, "no command that starts Primus was found in it")])
    words, environment = _split(found)
    named, suite, rest = _experiment(words, environment, script)
    if named is None:
        message = "it does not say which experiment to run (EXP=..., or --config ...)"
        raise UserError([_error(source, message)])
    if named.open or not named.text:
        message = f"the experiment {named.text!r} depends on {', '.join(named.open)}, which is "
        raise UserError([_error(source, message + "set outside of the file: pass EXP=FILE.yaml")])
    experiment = _find(source, named.text)
    world, opened = _world(found, environment)
    overrides = tuple(settings_of(rest))
    return Started(experiment, suite, overrides, environment, world, opened)


def _error(source: Source, message: str) -> Finding:
    return error(source.name, None, message, rule="unreadable-file")


def _training(script: shell.Script) -> _Found | None:
    """The command that trains, the outermost where one starts another."""
    started = {id(run.command): run for run in launchers.runs(script)}
    found: list[_Found] = []
    for command in script.commands:
        for layer in (*command.under, command):
            at = next((i for i, w in enumerate(layer.words) if _is_primus(layer.words, i)), None)
            if at is not None:
                program, rest = layer.words[at], tuple(layer.words[at + 1 :])
                found.append(_Found(program, rest, layer, started.get(id(layer))))
                break
    found.sort(key=lambda one: (not one.trains, not one.command.sure))
    return found[0] if found else None


def _is_primus(words: Sequence[Word], at: int) -> bool:
    """Whether a word of a command is the program of Primus that it starts."""
    if words[0].text in _TALKERS:
        return False
    path = words[at].text
    name = path.rstrip("/").rpartition("/")[2]
    if any(fnmatchcase(name, pattern) for pattern in (*CLI, *SCRIPTS)):
        return True
    main = path in MODULES or path.endswith(FILES[:3])
    main = main or (name == "primus" and [w.text for w in words[at + 1 : at + 2]] == ["train"])
    loose = path.endswith(FILES[3:]) and any(
        w.text.partition("=")[0] in ("--config", "--exp") for w in words[at:]
    )
    return main or loose


def _split(found: _Found) -> tuple[list[Word], dict[str, str]]:
    """The words of the training command, and the variables that hold for it."""
    environment = dict(found.command.environment)
    words = list(found.words)
    if fnmatchcase(found.name, "run_k8s_pretrain*.sh"):
        words = _cloudless(words, environment)
    if not found.cli:
        return words, environment
    at = next((i for i, w in enumerate(words) if w.text in ("pretrain", "posttrain")), None)
    before = words if at is None else words[:at]
    for flag, word in pairwise(before):
        if flag.text == "--env" and "=" in word.text:
            name, _, value = word.text.partition("=")
            if not word.open:
                environment[name] = value
        if flag.text in ("-N", "--nodes", "--nnodes") and "slurm" in {w.text for w in before}:
            environment["NNODES"] = word.text
        if flag.text in ("--gpus-per-node", "--nproc_per_node"):
            environment["GPUS_PER_NODE"] = word.text
    for word in before:
        name, equals, value = word.text.partition("=")
        if equals and name in ("--nodes", "--gpus-per-node"):
            environment["NNODES" if name == "--nodes" else "GPUS_PER_NODE"] = value
    return words if at is None else words[at:], environment


def _cloudless(words: list[Word], environment: dict[str, str]) -> list[Word]:
    """The words that are for the training command; what asks for machines goes to `environment`."""
    kept: list[Word] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.text.partition("=")
        key = name.removeprefix("--")
        if not (name.startswith("--") and key in _CLOUD):
            kept.append(word)
            continue
        if not equals and rest:
            value = rest.pop(0).text
        if _CLOUD[key]:
            environment[_CLOUD[key]] = value
    return kept


def _experiment(
    words: Sequence[Word], environment: dict[str, str], script: shell.Script
) -> tuple[Word | None, str, list[Word]]:
    """The experiment, the suite, and the words that override it."""
    rest = list(words)
    suite = next((w.text for w in rest[:3] if w.text in ("pretrain", "posttrain")), "")
    rest = [w for i, w in enumerate(rest) if not (i < 3 and w.text in ("train", suite))]
    named: Word | None = None
    kept: list[Word] = []
    while rest:
        word = rest.pop(0)
        name, equals, value = word.text.partition("=")
        key = name.lstrip("-")
        if name in ("--config", "--exp"):
            named = Word(value, word.where, word.open) if equals else rest.pop(0) if rest else None
        elif name.startswith("--") and key in _OWN:
            if not equals and rest and not rest[0].text.startswith("--"):
                rest.pop(0)
        else:
            kept.append(word)
    if named is None:
        value = environment.get("EXP", script.variables.get("EXP"))
        named = _word(value) if value else None
    return named, suite, kept


def _word(text: str) -> Word:
    return Word(text, "", tuple(re.findall(r"\$\{?\w+|\$\(", text)))


def _find(source: Source, name: str) -> Source:
    """The experiment's file: by its path from here, or from a folder above the script."""
    path = Path(name).expanduser()
    above = [source.path.expanduser().resolve().parent] if source.path else []
    folders = [*above, *(above[0].parents if above else ())]
    for folder in (Path(), *folders):
        try:
            if (folder / path).is_file():
                return read_file(folder / path)
        except (OSError, ValueError):
            break
    # Last: beside the script, by its name alone.
    for folder in folders[:1]:
        if (folder / path.name).is_file():
            return read_file(folder / path.name)
    message = f"its experiment {name} is neither here nor in a folder above the script"
    raise UserError([_error(source, message)])


def _world(found: _Found, environment: dict[str, str]) -> tuple[int | None, tuple[str, ...]]:
    """Ranks: NNODES x GPUS_PER_NODE, or as torchrun says."""
    run = found.run
    if run is not None and run.launcher == "torchrun" and not found.cli:
        return run.world, run.open
    nodes = environment.get("NNODES") or environment.get("SLURM_NNODES") or "1"
    each = environment.get("GPUS_PER_NODE") or str(GPUS_PER_NODE)
    counts = [_count(text) for text in (nodes, each)]
    if None in counts:
        opened = [text for text, count in zip((nodes, each), counts, strict=True) if count is None]
        return None, tuple(opened)
    return counts[0] * counts[1], ()  # type: ignore[operator]


def _count(text: str) -> int | None:
    good = text.isascii() and text.isdecimal() and 0 < len(text) < 7
    return int(text) or None if good else None


def settings_of(words: Sequence[Word]) -> Iterator[Setting]:
    """Overrides: key=value, --key=value, --key value, and --key alone for true
    (core/utils/arg_utils.py)."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        text = word.text.strip()
        if "=" in text:
            key, _, value = text.partition("=")
            yield Setting(key.lstrip("-").strip(), _value(value.strip()), word.where, word.open)
        elif text.startswith("--") and len(text) > 2:
            key = text.lstrip("-")
            if rest and not rest[0].text.startswith("--"):
                value = rest.pop(0)
                yield Setting(key, _value(value.text), value.where, value.open)
            else:
                yield Setting(key, True, word.where, word.open)


def _value(text: str) -> Any:
    """A word as Primus takes it: true and false, None and lists, numbers, or text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text in ("None", "null"):
        return None
    bare = text.strip("'\"")
    if text[:1] == "[" and text[-1:] == "]":
        return [_value(part.strip()) for part in text[1:-1].split(",") if part.strip()]
    if re.fullmatch(r"-?\d{1,30}", bare, re.ASCII):
        return int(bare)
    return bare
