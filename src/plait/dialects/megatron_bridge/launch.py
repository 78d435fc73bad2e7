"""Where a Megatron-Bridge launch says what it sets: a command, a shell script, a YAML file of
overrides, a Python file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from plait.dialects import shell, tree
from plait.dialects.megatron_bridge import recipes
from plait.dialects.megatron_bridge.python import Program, read_python
from plait.dialects.megatron_bridge.recipes import Recipe
from plait.dialects.megatron_bridge.words import Words, read_words
from plait.dialects.settings import Setting
from plait.dialects.shell import launchers
from plait.dialects.source import Source
from plait.spec.findings import Finding, UserError, error

#: Programs that train what their arguments say; the last kind is anybody's own script.
_RUNNERS = (
    "run_recipe.py", "setup_experiment.py", "train.sh", "run_script.py", "bootstrap.py",
    "launch_with_nemo_run.py",
)  # fmt: skip
_SCRIPTS = ("*pretrain*.py", "*finetune*.py", "*train*.py", "*sft*.py", "*distill*.py", "*.py")
#: Those that make the model's length that of the data before they check the two.
_SYNCHRONIZED = ("run_recipe.py", "setup_experiment.py", "train.sh", "launch_with_nemo_run.py")
#: GPUs of a node by kind, where a performance script is not told (scripts/performance).
_PARTS = (
    "model", "train", "ddp", "dist", "optimizer", "scheduler", "dataset", "mixed_precision",
    "comm_overlap", "checkpoint", "validation", "logger", "tokenizer", "rng", "peft",
)  # fmt: skip


@dataclass
class Said:
    """What a launch says, by dotted paths in the ConfigContainer.

    Attributes:
        settings: in the order in which they hold: the last of a name.
        flags: of the launcher that stand for no field.
        recipe: from which it starts.
        model: as fields of a job file; hub: its name there.
        world: processes, where they are known.
        synchronized: the launcher makes model.seq_length that of the data.
        added: fields that may be new ("+key=").
    """

    settings: list[Setting] = field(default_factory=list)
    flags: list[Setting] = field(default_factory=list)
    recipe: Recipe | None = None
    model: dict[str, Any] = field(default_factory=dict)
    hub: str = ""
    world: int | None = None
    synchronized: bool = False
    added: set[str] = field(default_factory=set)
    environment: Mapping[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def read_launch(source: Source) -> Said:
    """What a launch says.

    Raises:
        UserError: it cannot be read, or holds no launch of Megatron-Bridge.
    """
    if source.suffix in (".yaml", ".yml"):
        return Said(list(_yaml(source)))
    if source.suffix == ".py":
        return _of_program(read_python(source), source)
    return _command(source)


def _of_program(program: Program, source: Source) -> Said:
    if not program.settings and program.recipe is None:
        message = "no ConfigContainer is built here, and no recipe of Megatron-Bridge called"
        raise UserError([error(str(source.path or source.name), None, message, rule="no-launch")])
    return Said(program.settings, [], program.recipe, program.model, program.hub)


def _yaml(source: Source) -> Iterator[Setting]:
    """The fields of an override file, or of a ConfigContainer that was saved."""
    content = tree.read_yaml(source)
    if not isinstance(content, Mapping) or not any(part in content for part in _PARTS):
        message = "no part of a ConfigContainer (model, train, ddp, ...) stands in it"
        raise UserError([error(str(source.path or source.name), None, message, rule="no-launch")])
    yield from tree.flat(_folded(content), source.name)


def _folded(value: Any) -> Any:
    """Without what a saved ConfigContainer says of classes: {_target_: torch.bfloat16} is its
    last name."""
    if not isinstance(value, Mapping):
        return value
    target = value.get("_target_")
    plain = {k: v for k, v in value.items() if k not in ("_target_", "_call_", "_partial_")}
    if target is not None and set(plain) <= {"_args_", "_name_"}:
        return str(target).rpartition(".")[2]
    return {k: _folded(v) for k, v in plain.items()}


def _command(source: Source) -> Said:
    script = shell.read(source)
    best: tuple[int, launchers.Run, Words] | None = None
    for run in launchers.runs(script):
        tests = run.name == "pytest"
        words = Words({}, [], loose=list(run.words)) if tests else read_words(run.words)
        rank = _rank(run, words)
        if rank and (best is None or rank > best[0]):
            best = rank, run, words
    if best is None:
        message = "no launch of Megatron-Bridge: a script with --recipe or overrides (model.x=...)"
        raise UserError([error(str(source.path or source.name), None, message, rule="no-launch")])
    _, run, words = best
    said = Said(environment=dict(run.environment), world=run.world)
    said.added = words.added
    said.synchronized = run.name in _SYNCHRONIZED
    _base(said, run, words, source)
    said.settings += _config_file(said, words, source)
    said.settings += words.overrides
    said.settings = [s for s in said.settings if s.name not in words.removed]
    said.flags = [s for name, s in words.flags.items() if name not in _fields_of_flags()]
    said.world = _asked_world(words.flags) or said.world
    return said


def _rank(run: launchers.Run, words: Words) -> int:
    """How surely a command is a launch of Megatron-Bridge; 0: it is none."""
    if run.name == "pytest":
        return 1 + run.command.sure if any(w.text.endswith(".py") for w in words.loose) else 0
    flags = words.flags.keys() & {"--recipe", "--model_recipe_name", "--recipe_name"}
    selects = bool(flags) or ("--model" in words.flags and "--mode" in words.flags)
    selects = selects or {"--model_name", "--model_size"} <= words.flags.keys()
    runner = run.name in _RUNNERS
    parts = {s.name.partition(".")[0] for s in words.overrides} & set(_PARTS)
    script = any(fnmatchcase(run.name, p) for p in _SCRIPTS)
    if not ((runner and (selects or parts)) or (script and (parts or selects))):
        own = "--config_file" in words.flags and script
        named = script and any(fnmatchcase(run.name, p) for p in _SCRIPTS[:2])
        return (1 + run.command.sure) if own or named else 0
    return 4 + 4 * run.command.sure + 2 * bool(selects) + bool(parts)


def _base(said: Said, run: launchers.Run, words: Words, source: Source) -> None:
    """The recipe that the flags select, or the script builds."""
    flags = words.flags

    def text(name: str) -> str:
        setting = flags.get(name)
        return str(setting.value) if setting and isinstance(setting.value, str) else ""

    name, given = "", None
    for flag in ("--recipe", "--recipe_name"):
        if text(flag):
            name, given = text(flag), flags[flag]
    if not name and text("--model") and text("--mode"):
        name, given = recipes.selected(text("--model"), text("--mode")), flags["--model"]
    model = text("--model_recipe_name")
    if not name and text("--model_name") and text("--model_size"):
        model = f"{text('--model_name')}_{text('--model_size')}".replace(".", "")
        given = flags["--model_name"]
    elif not name and model:
        given = flags["--model_recipe_name"]
    if not name and model:
        name = _benchmark(said, model, flags, text)
    if given is not None and given.open:
        said.settings.append(Setting("recipe", name, given.where, given.open))
        return
    if name:
        said.recipe = recipes.recipe(name) or recipes.recipe(f"{name}_config")
        if said.recipe is None:
            assert given is not None
            near = recipes.nearest_recipe(name)
            message = f"Megatron-Bridge has no recipe {name!r}"
            where = f"{given.where} {given.name}".strip()
            said.findings.append(error(where, name, message, near, "megatron-bridge-recipe"))
        return
    for path in _scripts(run, words):
        try:
            program = read_python(source.beside(path))
        except UserError:
            continue
        said.settings += program.settings
        said.recipe, said.model, said.hub = program.recipe, program.model, program.hub
        return


def _scripts(run: launchers.Run, words: Words) -> list[str]:
    """Where the script that a command runs may lie, from the folder of the launch."""
    if run.name == "pytest":
        # Tests are named from the root of a repository, somewhere above the launch.
        tests = [w.text for w in words.loose if w.text.endswith(".py") and not w.open]
        return ["../" * up + path for path in tests for up in range(8)]
    if not run.program.text.endswith(".py"):
        return []
    # The folder of a script is often asked of the shell, and is that of the launch.
    return [run.name] if run.program.open else [run.program.text, run.name]


def _benchmark(said: Said, model: str, flags: Mapping[str, Setting], text: Any) -> str:
    """The recipe that scripts/performance selects."""
    task, gpu = text("--task") or "pretrain", (text("--gpu") or "h100").lower()
    number = text("--num_gpus")
    gpus = int(number) if number.isascii() and number.isdecimal() and len(number) < 7 else None
    if "--use_recipes" in flags:
        return f"{model}_{task}_config"
    precision = text("--compute_dtype") or "bf16"
    if precision == "fp8" and text("--fp8_recipe"):
        precision = f"fp8_{text('--fp8_recipe')}"
    found = recipes.benchmark(model, task, gpus, gpu, precision, text("--config_variant"))
    return found or f"{model}_{task}_config"


def _config_file(said: Said, words: Words, source: Source) -> list[Setting]:
    setting = words.flags.get("--config_file")
    if setting is None or not isinstance(setting.value, str):
        return []
    if setting.open:
        message = f"{', '.join(setting.open)} is set outside of the file: which configuration?"
        where = f"{setting.where} {setting.name}".strip()
        said.findings.append(error(where, setting.value, message, rule="open-variable"))
        return []
    for path in (setting.value, setting.value.rpartition("/")[2], *_conf(setting.value)):
        try:
            file = source.beside(path)
        except UserError:
            continue
        return list(_yaml(replace(file)))
    said.findings += _missing(source, setting)
    return []


def _conf(path: str) -> list[str]:
    return ["conf/" + path.rpartition("/")[2]]


def _missing(source: Source, setting: Setting) -> list[Finding]:
    try:
        source.beside(str(setting.value))
    except UserError as problem:
        return list(problem.findings)
    return []


def _asked_world(flags: Mapping[str, Setting]) -> int | None:
    """GPUs that a launcher which submits the job asks for."""

    def count(*names: str) -> int | None:
        for name in names:
            text = str(flags[name].value) if name in flags else ""
            if text.isascii() and text.isdecimal() and 0 < len(text) < 7:
                return int(text)
        return None

    if (whole := count("--num_gpus")) is not None:
        return whole
    each = count("--gpus_per_node", "--devices")
    return each * (count("--nodes") or 1) if each else None


def _fields_of_flags() -> frozenset[str]:
    from plait.dialects.megatron_bridge.words import FIELDS

    return frozenset(FIELDS)
