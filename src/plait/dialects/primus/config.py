"""A Primus experiment: one YAML file over layered presets, as settings.

The values of a module are, from the weakest: the model's preset, the module's preset (it wins
where both have a key: `merge_namespace` of primus/core/utils/yaml_utils.py), `overrides`, and
what the command says after the file. Presets extend one another; texts may name environment
variables, `${VAR}` and `${VAR:default}`. Presets live in Primus' own tree: they are read from it
where the file lies in one, and from what this version is known to have otherwise.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from plait.dialects import tables
from plait.dialects.launch import AT_START, changed, note, refused
from plait.dialects.settings import Setting, Settings
from plait.dialects.source import Source, read_file
from plait.dialects.tree import flat, read_yaml
from plait.spec.findings import Finding, UserError, closest, error

#: The backends of Primus that are read here.
FRAMEWORKS = ("megatron", "torchtitan")
#: And those that Primus drives, and that this dialect does not read.
OTHERS = (
    "maxtext",
    "maxdiffusion",
    "diffusion",
    "megatron_bridge",
    "nemo_automodel",
    "hummingbirdxt",
)
#: Keys that every experiment must have (`PrimusParser.parse_meta_info`).
REQUIRED = ("work_group", "user_name", "exp_name", "workspace")
#: Everything that has a meaning at the top of one.
TOP = (*REQUIRED, "modules", "platform", "env", "extends")
#: Keys of a module that are no values of its backend (`parse_trainer_module`).
RESERVED = frozenset(
    ("name", "framework", "config", "model", "overrides", "params", "trainer_class")
)
#: Presets that extend one another, at most.
_DEEPEST = 16
_VARIABLE = re.compile(r"\$\{([^:{}]+)(?::([^}]*))?\}")
_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


@dataclass
class Variables:
    """What texts say of environment variables.

    Attributes:
        environment: those that are set, by the script that starts Primus.
        defaults: variable -> the default that was taken for it, in the order of the file.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)

    def put_in(self, value: Any) -> tuple[Any, tuple[str, ...]]:
        """A value with its variables put in, as Primus does it, and those that are not set.

        A text in which something was put becomes true, false or a number where it looks like one
        (`yaml_loader._try_scalar`); "null" is nothing at all (`set_value_by_key`).
        """
        if isinstance(value, Mapping):
            parts = {key: self.put_in(v) for key, v in value.items()}
            return {k: v for k, (v, _) in parts.items()}, _joined(parts.values())
        if isinstance(value, list):
            items = [self.put_in(v) for v in value]
            return [v for v, _ in items], _joined(items)
        if not isinstance(value, str):
            return value, ()
        missing: list[str] = []

        def one(match: re.Match[str]) -> str:
            name, default = match.group(1), match.group(2)
            if name in self.environment:
                return self.environment[name]
            if default is None:
                missing.append(name)
                return match.group(0)
            self.defaults[name] = default
            return default

        text = _VARIABLE.sub(one, value)
        if missing:
            return text, tuple(missing)
        opened = _outside(text) if text != value else ()
        return (_scalar(text) if text != value else None if text == "null" else text), opened


def _joined(parts: Iterable[tuple[Any, tuple[str, ...]]]) -> tuple[str, ...]:
    return tuple(name for _, names in parts for name in names)


def _outside(text: str) -> tuple[str, ...]:
    """Variables that a shell left open in what it exports ("$1", "${X}")."""
    return tuple(dict.fromkeys(re.findall(r"\$\{?\w+\}?|\$\(", text)))


def _scalar(text: str) -> Any:
    low = text.lower()
    if low in ("true", "false"):
        return low == "true"
    if low == "null":
        return None
    if re.fullmatch(r"-?\d{1,30}", text, re.ASCII):
        return int(text)
    if len(text) < 64 and _NUMBER.fullmatch(text) and text.isascii():
        return float(text)
    return text


@dataclass(frozen=True)
class Experiment:
    """What an experiment says of its trainer.

    Attributes:
        framework: "megatron" or "torchtitan".
        module: "pre_trainer" or "post_trainer".
        config, model: the presets that it names, without ".yaml"; "" where it names none.
        trainer_class: that it asks for, "".
        said: what the file says; nested mappings of TorchTitan by their dotted paths.
        presets: what stands beneath it, weakest first.
        environment: what its `env:` block sets.
        defaults: variable -> the default that was taken.
        findings: what is wrong with it.
    """

    framework: str
    module: str
    config: str
    model: str
    trainer_class: str
    said: tuple[Setting, ...]
    presets: tuple[Setting, ...]
    environment: dict[str, str]
    defaults: dict[str, str]
    findings: tuple[Finding, ...]


def read_experiment(source: Source, environment: Mapping[str, str], suite: str = "") -> Experiment:
    """An experiment file.

    Args:
        environment: variables that are set when it is read.
        suite: "pretrain" or "posttrain" where a command says which; "": whichever there is.

    Raises:
        UserError: not an experiment, or of a backend that is not read here: one line.
    """
    variables = Variables(environment)
    tree = _loaded(source, variables, 0)
    modules = tree.get("modules")
    if not isinstance(modules, Mapping) or not modules:
        raise _wrong(source, "no Primus experiment: it has no table `modules`")
    module, body = _module(source, modules, suite)
    framework = body.get("framework")
    if framework not in FRAMEWORKS:
        raise _wrong(source, _not_read(framework))
    findings = _missing(tree, body)
    config, model = (_stem(body.get(key)) for key in ("config", "model"))
    own = {k: v for k, v in body.items() if k not in RESERVED}
    beneath: list[Setting] = []
    if config or not model:  # else it was exported whole: everything stands in the module itself
        for kind, name, title in (("models", model, "model"), ("modules", config, "module")):
            if name and not _VARIABLE.search(name):
                where = f"{title} preset"
                beneath += _preset(source, framework, kind, name, where, variables, findings)
        # `parse_trainer_module` lets a preset of the module stand before what it says itself.
        for key in own.keys() & {s.name for s in beneath if s.where.startswith("module")}:
            message = f"{key} beside overrides is read by nothing: the module's preset has it"
            findings.append(changed("Primus", "primus-beside-overrides", message, own.pop(key)))
    for table in ("params", "overrides"):
        values = body.get(table) or {}
        if not isinstance(values, Mapping):
            raise _wrong(source, f"modules.{module}.{table} is not a table")
        own |= values
    said = tuple(_settings(own, framework))
    missing = sorted({name for setting in said for name in setting.open})
    if missing:
        message = f"{', '.join(missing)} must be set in the environment, or it refuses to start"
        findings.append(note("Primus", "primus-required-variables", message))
    block = tree.get("env")
    sets = {str(k): str(v) for k, v in block.items()} if isinstance(block, Mapping) else {}
    return Experiment(
        framework,
        module,
        config,
        model,
        str(body.get("trainer_class") or ""),
        said,
        tuple(beneath),
        sets,
        variables.defaults,
        tuple(findings),
    )


def name_settings(experiment: Experiment, settings: Settings) -> None:
    """Takes what the module says of itself; a model in a variable is asked for."""
    for name, value, means in (
        ("framework", experiment.framework, "which backend"),
        ("config", experiment.config, "the preset of the module"),
        ("model", experiment.model, "model"),
    ):
        if value:
            settings.said[name] = Setting(name, value, open=_open_in(value))
            settings.take(name, str, None, means)


def _wrong(source: Source, message: str) -> UserError:
    return UserError([error(source.name, None, message, rule="unreadable-file")])


def _not_read(framework: Any) -> str:
    known = " and ".join(FRAMEWORKS)
    if framework in OTHERS:
        return f"its backend is {framework}; of Primus' backends only {known} are read"
    if framework is None:
        return f"the module names no framework ({known} are read)"
    near = closest(str(framework), (*FRAMEWORKS, *OTHERS))
    hint = f"; did you mean {near}?" if near else ""
    return f"framework {framework!r} is none that Primus is known to have{hint}"


def _module(
    source: Source, modules: Mapping[str, Any], suite: str
) -> tuple[str, Mapping[str, Any]]:
    """The module that is trained: of the suite that is asked for, or the other where there is but
    one (`primus.config.get_module_config`)."""
    order = ["pre_trainer", "post_trainer", *modules]
    if suite.startswith("post"):
        order.insert(0, "post_trainer")
    name = next(n for n in order if n in modules)
    body = modules[name]
    if not isinstance(body, Mapping):
        raise _wrong(source, f"modules.{name} is not a table")
    return str(name), body


def _missing(tree: Mapping[str, Any], body: Mapping[str, Any]) -> list[Finding]:
    found = []
    missing = [key for key in REQUIRED if key not in tree]
    if missing:
        message = f"the file must say {', '.join(missing)}"
        found.append(refused("Primus", "primus-required-keys", AT_START, message))
    for key in tree.keys() - set(TOP):
        near = closest(key, TOP, 0.75)
        hint = f"; did you mean {near}?" if near else "; values stand under overrides"
        message = f"{key} at the top of the file is read by nothing{hint}"
        found.append(changed("Primus", "primus-top-level", message, key))
    strange = [name for name in tree["modules"] if "trainer" not in str(name)]
    if strange:
        message = f"a module must be a trainer, not {', '.join(map(str, strange))}"
        found.append(refused("Primus", "primus-module-name", AT_START, message))
    if "config" in body and "model" not in body:
        message = "the module names a config and no model"
        found.append(refused("Primus", "primus-required-keys", AT_START, message))
    return found


def _stem(name: Any) -> str:
    return str(name).removesuffix(".yaml").removesuffix(".yml") if name is not None else ""


def _settings(tree: Mapping[str, Any], framework: str, where: str = "") -> Iterator[Setting]:
    """A setting for each key; TorchTitan's sections by dotted paths, Megatron's keys are flat."""
    leaves = flat(tree, where) if framework == "torchtitan" else _level(tree, where)
    for leaf in leaves:
        yield replace(leaf, open=_open_in(leaf.value))


def _level(tree: Mapping[str, Any], where: str) -> Iterator[Setting]:
    for key, value in tree.items():
        yield Setting(str(key), value, where)


def _open_in(value: Any) -> tuple[str, ...]:
    """The variables that are still open in a value."""
    if isinstance(value, str):
        return tuple(m.group(1) for m in _VARIABLE.finditer(value)) or (
            _outside(value) if "$" in value else ()
        )
    parts = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping | list):
        return tuple(name for part in parts for name in _open_in(part))
    return ()


# ------------------------------------------------------------------------------------------
# Files over files


def _loaded(source: Source, variables: Variables, depth: int) -> dict[str, Any]:
    """A file over those that it extends."""
    tree = read_yaml(source)
    if not isinstance(tree, Mapping):
        raise _wrong(source, "no Primus experiment: the file is no table")
    names = Variables(variables.environment)  # what the run is called decides nothing
    tree = {str(k): (names if k in REQUIRED else variables).put_in(v)[0] for k, v in tree.items()}
    merged: dict[str, Any] = {}
    for name in _extended(tree):
        if depth >= _DEEPEST:
            raise _wrong(source, f"files that extend one another more than {_DEEPEST} deep")
        below = _loaded(source.beside(str(name)), variables, depth + 1)
        merged = merge(merged, below)
    return merge(merged, {k: v for k, v in tree.items() if k != "extends"})


def _extended(tree: Mapping[str, Any]) -> list[Any]:
    said = tree.get("extends") or []
    return said if isinstance(said, list) else [said]


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables into one another; of anything else the upper value."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        result[key] = merge(below, value) if both else value
    return result


def _preset(
    source: Source,
    framework: str,
    kind: str,
    name: str,
    title: str,
    variables: Variables,
    findings: list[Finding],
) -> list[Setting]:
    """The values of a preset, from Primus' tree or from what is known of it."""
    where = f"{title} {name}"
    for root in _roots(source):
        path = root / kind / framework / f"{name}.yaml"
        if not _stands_in(root, path):
            continue
        tree = _loaded(read_file(path), variables, 1)
        return [replace(s, where=where) for s in _settings(tree, framework)]
    known = presets(framework, kind)
    if name not in known:
        near = closest(name.rpartition("/")[2], known)
        hint = f"; did you mean {near}?" if near else ""
        message = f"{title} {name}.yaml is not among those that are known{hint}"
        findings.append(note("Primus", "primus-unknown-preset", message, name))
        if kind == "models":
            return []
        known = {name: {}}
    tree = presets(framework, kind, "base") | known[name]
    return [Setting(key, value, where) for key, value in tree.items()]


def _stands_in(root: Path, path: Path) -> bool:
    """Whether a preset is a file of that tree (`PresetLoader.load` refuses others)."""
    try:
        return path.is_file() and path.resolve().is_relative_to(root.resolve())
    except (OSError, ValueError):
        return False


def _roots(source: Source) -> Iterator[Path]:
    """Folders of presets in a tree of Primus that the file lies in."""
    if source.path is None:
        return
    try:
        above = source.path.expanduser().resolve().parents
    except (OSError, ValueError, RuntimeError):
        return
    for folder in above:
        root = folder / "primus" / "configs"
        if root.is_dir():
            yield root
            return


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    return tables.tree("primus.json")


def presets(framework: str, kind: str, layer: str = "named") -> dict[str, Any]:
    """What is known of Primus' own presets.

    Args:
        kind: "models" or "modules". layer: "named" (name -> what differs from the base) or
            "base" (what all of them share).
    """
    return _data()[framework][kind][layer]
