"""TorchTitan: recipes of its Python registry, TOML files of JobConfig, and the commands that start
them with their overrides.

Read are a `.py` file of recipes (as a command, "FILE.py --config NAME", where it holds several), a
`.toml` file, and commands or scripts: torchrun -m torchtitan.train, run_train.sh. Written is a
recipe that the release and today's main take, a TOML file for the versions before, and a script.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from plait.dialects import shell, tables
from plait.dialects.flags import Word, settings_of
from plait.dialects.launch import Launch, Told, Written
from plait.dialects.settings import Setting, Settings
from plait.dialects.shell import launchers
from plait.dialects.source import Source, read_file
from plait.dialects.torchtitan.config import SAMPLES, TOKENS, understand
from plait.dialects.torchtitan.files import files_of
from plait.dialects.torchtitan.python import read_registry, recipe
from plait.dialects.torchtitan.validation import rules
from plait.dialects.tree import flat
from plait.spec.findings import Finding, UserError, error
from plait.spec.job import Job
from plait.spec.schedule import is_file

VERSION = "TorchTitan main b5bcd76c6 (2026-08-21), 0.3.0, and JobConfig of 0.2.2"

#: What starts TorchTitan.
_PROGRAMS = (
    "torchtitan.train", "torchtitan.experiments.*train*", "torchtitan.*", "run_train*.sh",
    "*torchtitan*train*", "train.py", "*_train.py", "train_*.py", "*.py",
)  # fmt: skip
#: Sections in which nothing decides a layout, whatever a component calls its options.
_FREE = (
    "dataloader.", "tokenizer.", "loss.", "validator.", "override.", "profiler.", "metrics.",
    "comm.", "encoder.", "generator.", "renderer.", "model.", "optimizer.", "lr_scheduler.",
    "experimental.", "fault_tolerance.", "ft.", "memory_estimation.", "quantize.", "float8.",
    "mx.", "validation.", "inference.", "profiling.", "job.", "async_loop.", "compile.ep_overlap.",
    "rollouter.", "batcher.", "hf_transformers.", "data.", "eval.", "generators.",
    "num_generators", "hf_model", "trainer.",
)  # fmt: skip
#: Words of tyro's subcommands -> `activation_checkpoint.mode`.
_MODES = {
    "none": "none", "full": "full", "selective": "selective", "memory-budget": "memory_budget",
    "memory_budget": "memory_budget",
}  # fmt: skip
#: Names of 0.1 and before -> those of today.
_RENAMED = {
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.compile": "compile.enable",
    "training.batch_size": "training.local_batch_size",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "training.disable_loss_parallel": "parallelism.disable_loss_parallel",
    "experimental.pipeline_parallel_schedule_csv": "parallelism.pipeline_parallel_schedule_csv",
    "experimental.context_parallel_rotate_method": "parallelism.context_parallel_rotate_method",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
}
#: Ranks that run_train.sh starts where NGPU does not say.
_NGPU = 8


@cache
def _names() -> frozenset[str]:
    return frozenset(tables.first_words("torchtitan.txt"))


def read(source: Source, told: Told) -> Launch:
    """What a recipe, a TOML file, or a command of TorchTitan says.

    Raises:
        UserError: it is none of these, or does not say which recipe it means.
    """
    notes: list[Finding] = []
    world, version = None, None
    environment: dict[str, str] = {}
    if source.suffix == ".toml":
        said = _toml(source)
        version = None if any(s.name in TOKENS for s in said) else "0.2.2"
        world = _told_in_comments(source)
    elif source.suffix == ".py":
        said = read_registry(source, None, None, notes)
        world, version = _told_in_comments(source), "main"
    else:
        said, world, version, environment = _command(source, notes)
    said = [replace(s, name=_RENAMED.get(s.name, s.name)) for s in said]
    said, version = _of_one_age(said, version)
    settings = Settings(said, told.given)
    fields, facts = understand(settings, told, world, version)
    _table(source, fields, notes)
    free = {
        name for name in settings.said if name.startswith(_FREE) or name in ("module", "config")
    }
    return Launch(fields, settings, _names() | free, notes, environment, facts=facts)


def _table(source: Source, fields: dict[str, Any], notes: list[Finding]) -> None:
    """Where the table of a schedule is; it is named by its path from where the job is started."""
    name = str(fields.get("layout.schedule", ""))
    if not is_file(name):
        return
    file = next(_places(source, name), None)
    if file is not None and file.path is not None:
        fields["layout.schedule"] = str(file.path)
        return
    message = f"TorchTitan: the table {name} is not here; taken for interleaved 1F1B"
    notes.append(Finding("warning", "torchtitan-file", message))
    fields["layout.schedule"] = "interleaved-1f1b"


def check(launch: Launch, job: Job) -> list[Finding]:
    """What TorchTitan says to the job."""
    return rules(launch.facts, job)


def write(job: Job) -> Written:
    """A recipe, a TOML file for the versions before recipes, and the command that starts it."""
    return files_of(job)


def _toml(source: Source) -> list[Setting]:
    where = str(source.path or source.name)
    try:
        tree = tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as problem:
        raise UserError([error(where, None, f"not valid TOML: {problem}")]) from None
    except (RecursionError, ValueError):
        raise UserError([error(where, None, "not valid TOML: nested too deeply")]) from None
    return list(flat(_shallow(tree, where)))


def _shallow(tree: Any, where: str, depth: int = 0) -> Any:
    if depth > 32:
        raise UserError([error(where, None, "not valid TOML: nested too deeply")])
    if isinstance(tree, Mapping):
        return {str(k): _shallow(v, where, depth + 1) for k, v in tree.items()}
    return tree


def _of_one_age(said: list[Setting], version: str | None) -> tuple[list[Setting], str | None]:
    """A recipe that counts tokens under options that count samples, as one that counts samples."""
    names = {setting.name: setting for setting in said}
    if version == "0.2.2" or not names.keys() & set(SAMPLES):
        return said, version
    tokens, longest = names.get(TOKENS[0]), names.get(TOKENS[2])
    if tokens is None and longest is None:
        return said, "0.3.0"
    with suppress(TypeError, ValueError, ZeroDivisionError, OverflowError):
        seq = int(longest.value) if longest else 2048
        local = int(tokens.value) // seq if tokens else 8
        base = [Setting(SAMPLES[0], local), Setting(SAMPLES[2], seq)]
        return base + [s for s in said if s.name not in TOKENS], "0.3.0"
    return said, "0.3.0"


def _told_in_comments(source: Source) -> int | None:
    """Ranks of the torchrun command that stands in a file's comments."""
    for line in source.text.splitlines()[:400]:
        if "torchrun" in line and "nproc" in line and len(line) < 2000:
            with suppress(UserError):
                text = line[line.index("torchrun") :].strip().strip("`\"'")
                for run in launchers.runs(shell.read(Source(text, "comment"))):
                    if run.world:
                        return run.world
    return None


def _command(
    source: Source, notes: list[Finding]
) -> tuple[list[Setting], int | None, str | None, dict[str, str]]:
    """The options, ranks and age of what a command or a script starts."""
    script = shell.read(source)
    where = str(source.path or source.name)
    run = launchers.find(script, _PROGRAMS)
    if run is None:
        message = "starts no torchtitan: no `-m torchtitan.train`, no run_train.sh"
        raise UserError([error(where, None, message, rule="no-command")])
    environment = dict(run.environment)
    said = _options(run.words)
    by_name = {setting.name: setting for setting in said}
    world = run.world
    starter = run.name.endswith(".sh")
    if starter and world is None:
        gpus = environment.get("NGPU", str(_NGPU))
        world = int(gpus) if gpus.isdecimal() and 0 < len(gpus) < 7 else None
        nodes = environment.get("NNODES", "1")
        world = world * int(nodes) if world and nodes.isdecimal() and len(nodes) < 6 else world
    if run.name.endswith(".py") and ("config" in by_name or not by_name):
        with suppress(UserError):
            file = source.beside(run.program.text)
            if "Config" in file.text and "job.config_file" not in by_name:
                config = by_name.get("config")
                name = str(config.value) if config is not None else None
                return [*read_registry(file, name, None, notes), *said], world, "main", environment
    if any(word.text.startswith("--trainer.") for word in run.words):
        world = None  # reinforcement learning: the trainer has a part of the ranks
    toml = by_name.get("job.config_file")
    path = str(toml.value) if toml else environment.get("CONFIG_FILE") if starter else None
    if path is not None:
        opened = toml.open if toml else ()
        return [*_beside(source, path, opened, notes), *said], world, "0.2.2", environment
    module, config = _registered(by_name, environment, starter)
    if config is not None:
        return [*_recipe(source, module, config, notes), *said], world, "main", environment
    return said, world, None, environment


def _registered(
    said: Mapping[str, Setting], environment: Mapping[str, str], starter: bool
) -> tuple[str | None, str | None]:
    """What --module and --config say; run_train.sh has them from its environment."""
    found: list[str | None] = []
    for name in ("module", "config"):
        setting = said.get(name)
        value = str(setting.value) if setting is not None else None
        if value is None and starter:
            value = environment.get(name.upper())
        found.append(value)
    return found[0], found[1]


def _options(words: tuple[Word, ...]) -> list[Setting]:
    """Options of tyro: dots, dashes or underscores, `no-` for a switch that is off."""
    said, loose = settings_of(words, {})
    found = []
    for setting in said:
        name = setting.name.lstrip("-").replace("-", "_").removeprefix("trainer.")
        value = setting.value
        section, dot, last = name.rpartition(".")
        if last.startswith("no_") and value is True:
            name, value = f"{section}{dot}{last.removeprefix('no_')}", False
        elif value == "None":
            value = None
        found.append(Setting(name, value, setting.where, setting.open))
    for word in loose:
        section, colon, kind = word.text.partition(":")
        if colon and section.replace("_", "-") == "activation-checkpoint" and kind in _MODES:
            found.append(Setting("activation_checkpoint.mode", _MODES[kind], word.where))
    return found


def _beside(
    source: Source, path: str, opened: tuple[str, ...], notes: list[Finding]
) -> list[Setting]:
    """The TOML file that a command names."""
    if opened or "$" in path:
        names = opened or (path,)
        return [Setting("model.flavor", path, source.name, names)]
    for file in _places(source, path):
        with suppress(UserError):
            return _toml(file)
    own = re.search(r"(\w+)/train_configs/(\w+)\.toml$", path)
    known = recipe(f"{own[1]}/{own[2]}.toml", None) if own else None
    if known is not None:
        message = f"TorchTitan: {path} is not here; taken for the one of TorchTitan 0.2.2"
        notes.append(Finding("note", "torchtitan-file", message))
        return known
    message = f"TorchTitan: {path} is not here; what it says is not known"
    notes.append(Finding("warning", "torchtitan-file", message))
    return [Setting("model.flavor", path, source.name, (path,))]


def _places(source: Source, path: str) -> Iterator[Source]:
    """A file that a command names by its path from the folder in which it is given."""
    with suppress(UserError):
        yield source.beside(path)
    folders = [*source.path.resolve().parents][:6] if source.path else []
    for folder in [*folders, Path()]:
        with suppress(UserError):
            yield read_file(folder / path)


def _recipe(source: Source, module: str | None, config: str, notes: list[Finding]) -> list[Setting]:
    """The recipe that --module and --config name: of a file that is here, or TorchTitan's own."""
    if "$" in config:
        return [Setting("model.flavor", config, source.name, (config,))]
    parts = re.sub(r"[^\w.]", "", module or "").replace(".", "/")
    places = (
        f"{parts}.py", f"{parts}/config_registry.py",
        f"torchtitan/models/{parts}/config_registry.py",
        f"torchtitan/experiments/{parts}/config_registry.py",
        f"torchtitan/experiments/rl/examples/{parts}/config_registry.py",
    )  # fmt: skip
    for place in places if parts else ():
        for file in _places(source, place):
            with suppress(UserError):
                return read_registry(file, config, module, notes)
    known = recipe(config, module)
    if known is not None:
        return known
    message = f"TorchTitan: the recipe {config} of {module} is not here; what it says is not known"
    notes.append(Finding("warning", "torchtitan-file", message))
    return [Setting("model.flavor", config, source.name, (config,))]
