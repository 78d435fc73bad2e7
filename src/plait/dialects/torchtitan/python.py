"""TorchTitan's Python registry: functions that return a configuration, read and never run.

A function is followed through its own file, the files it imports where they are there, and the
recipes that TorchTitan itself comes with (known/titan_recipes.json).
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from plait.dialects import tables
from plait.dialects.python.reader import Reader
from plait.dialects.python.values import Made, Open, parse
from plait.dialects.settings import Setting
from plait.dialects.source import Source, read_file
from plait.dialects.torchtitan.models import flavors
from plait.spec.findings import Finding, UserError, closest, error

#: Classes of activation checkpointing -> `activation_checkpoint.mode`.
_MODES = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}
#: Arguments of model_registry that decide a rule.
_MODEL_ARGUMENTS = {
    "attn_backend": "model.attention",
    "moe_comm_backend": "model.moe_comm_backend",
    "non_blocking_capacity_factor": "model.non_blocking_capacity_factor",
}
#: Under this name a model_registry of another file has its model.
_OF = "?model"
#: Files that are followed from one, and folders above it that are searched for them.
_FILES, _ABOVE = 12, 8


@cache
def recipes() -> dict[str, dict[str, Any]]:
    """TorchTitan's own recipes: name of the function -> option -> value."""
    return tables.tree("titan_recipes.json")


def read_registry(
    source: Source, config: str | None, module: str | None, notes: list[Finding]
) -> list[Setting]:
    """The options that a recipe of a file sets.

    Args:
        config: the function's name; None: the only one. module: what --module says.
        notes: gets what is not known.

    Raises:
        UserError: not Python, no such function, or several and none named.
    """
    registry = _Registry(source, module)
    name = registry.pick(config)
    registry.unseen.clear()
    said = list(flat(registry.reader.call(name), registry.model(name)))
    for function in dict.fromkeys(registry.unseen):
        message = f"TorchTitan: {function} is not here; what it changes is not known"
        notes.append(Finding("warning", "torchtitan-file", message))
    return said


def recipe(name: str, module: str | None) -> list[Setting] | None:
    """A recipe of TorchTitan's own by the name of its function."""
    known = recipes().get(name)
    if known is None:
        return None
    return [Setting(option, value, name) for option, value in known.items()]


class _Registry:
    """A file of recipes, and those that it imports."""

    def __init__(
        self, source: Source, module: str | None, shared: dict[Path, "_Registry"] | None = None
    ):
        self.source, self.module = source, module
        self.shared = {} if shared is None else shared
        #: Functions of files that are not here and are given a configuration.
        self.unseen: list[str] = []
        if source.path is not None:
            self.shared[source.path] = self
        self.reader = Reader(outside=self.outside, imported=self.imported)
        self.reader.run(parse(source))

    def pick(self, config: str | None) -> str:
        named = [name for name in self.reader.functions() if not name.startswith("_")]
        where = str(self.source.path or self.source.name)
        if config is not None:
            if config in named:
                return config
            message = f"no recipe is called {config!r}"
            raise UserError([error(where, config, message, closest(config, named), "no-recipe")])
        returning = [name for name in named if self.returns(name)]
        if len(returning) == 1:
            return returning[0]
        if not returning:
            raise UserError([error(where, None, "no function returns a configuration")])
        shown = ", ".join(returning[:12]) + (", ..." if len(returning) > 12 else "")
        message = f"which of its recipes? {shown}: say it as a command, --config NAME {where}"
        raise UserError([error(where, None, message, rule="no-recipe")])

    def returns(self, name: str) -> bool:
        """Whether a function looks as if it returned a configuration."""
        node = self.reader.names[name].node
        text = getattr(node.returns, "attr", getattr(node.returns, "id", ""))
        if node.returns is not None and text:
            return text == "Config"
        return not node.args.args and isinstance(_config(self.reader.call(name)), Made)

    def model(self, name: str) -> str | None:
        """The model whose registry this is: by the folder, --module, or the recipe's name."""
        path = self.source.path
        folder = path.resolve().parent.name if path else ""
        for word in (self.module or "", folder):
            if word.rpartition(".")[2] in flavors():
                return word.rpartition(".")[2]
        close = [known for known in flavors() if name.startswith(known.split("_k2")[0])]
        return max(close, key=len, default=None)

    def outside(self, made: Made) -> Any:
        """A call of something that another file defines."""
        word, base = made.word, made.name.rpartition(".")[0]
        if word == "model_registry":
            return None
        if word in ("deepcopy", "copy", "replace") and made.args:
            first = made.args[0]
            if isinstance(first, Made):
                first.fields |= made.fields if word == "replace" else {}
            return first
        found = self.file_of(base) if base else None
        if found is not None and word in found.reader.functions():
            node = found.reader.names[word].node
            names = [a.arg for a in node.args.args + node.args.kwonlyargs]
            arguments = [made.fields.get(n) for n in names[len(made.args) :] if n in made.fields]
            value = found.reader.call(word, *made.args, *arguments)
            first = made.args[0] if made.args else None
            if _whole(first) and not _whole(_config(value)):
                return first  # made over into another kind of configuration
            if _whole(value):
                _settle(value, found.model(word))
            return value
        if word in recipes() and not made.args:
            return Made("Trainer.Config", fields=_nested(recipes()[word]), called=True)
        changed = [value for value in (*made.args, *made.fields.values()) if _whole(value)]
        if changed and word == "_use_spmd_types":
            # TorchTitan's own (torchtitan_recipes/tests): types are not checked under recompute.
            if made.fields.get("typechecking") is True:
                changed[0].fields["activation_checkpoint"] = None
        elif changed and base and word[:1].islower():
            self.unseen.append(made.name)
            return changed[0]  # made over, or changed in place: the configuration as it was
        return None

    def imported(self, name: str) -> Any:
        """A constant of another file."""
        base, _, word = name.rpartition(".")
        found = self.file_of(base) if word.isupper() else None
        value = found.reader.names.get(word) if found is not None else None
        return value if isinstance(value, str | int | float | list | tuple) else None

    def file_of(self, module: str) -> "_Registry | None":
        """The file of an imported module, where it is there."""
        path = self.source.path
        if path is None or len(self.shared) >= _FILES:
            return None
        parts = [part for part in module.lstrip(".").split(".") if part]
        level = len(module) - len(module.lstrip("."))
        folders = list(path.resolve().parents)
        tried = folders[level - 1 : level] if level else folders[:_ABOVE]
        for folder in tried:
            package = folder.joinpath(*parts, "__init__.py")
            plain = [folder.joinpath(*parts[:-1], f"{parts[-1]}.py")] if parts else []
            for file in (*plain, package):
                if file in self.shared:
                    return self.shared[file]
                if file.is_file():
                    try:
                        return _Registry(read_file(file), self.module, self.shared)
                    except UserError:
                        return None
        return None


def _whole(value: Any) -> bool:
    """Whether a value is a configuration."""
    keys = {"training", "parallelism", "model_spec", "trainer"}
    return isinstance(value, Made) and value.called and bool(value.fields.keys() & keys)


def _settle(config: Made, model: str | None) -> None:
    """Writes down which model a configuration from another file is of."""
    spec = config.fields.get("model_spec")
    if isinstance(spec, Made) and spec.word == "model_registry" and model:
        spec.fields.setdefault(_OF, model)


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with dotted names as a configuration's fields."""
    tree: dict[str, Any] = {}
    for name, value in options.items():
        *path, last = name.split(".")
        into = tree
        for part in path:
            into = into.setdefault(part, Made("?", called=True)).fields
        into[last] = list(value) if isinstance(value, list) else value
    return tree


def _config(value: Any) -> Any:
    """The configuration in what a function returned: itself, or what a wrapper was given."""
    for _ in range(4):
        if not isinstance(value, Made) or _whole(value) or not value.args:
            return value
        value = value.args[0]
    return value


def flat(config: Any, model: str | None) -> Iterator[Setting]:
    """The options of a configuration, by their dotted names."""
    made = _config(config)
    if not isinstance(made, Made):
        return
    trainer = made.fields.get("trainer")
    for name, value in made.fields.items():
        if name == "trainer" and isinstance(trainer, Made):
            # Reinforcement learning: one configuration of a trainer among others.
            yield from flat(Made(trainer.name, [], trainer.fields, called=True), model)
            yield Setting("training.disable_cuda_graphs", True, "reinforcement learning")
        elif name == "model_spec":
            yield from _spec(value, model)
        elif name == "activation_checkpoint":
            yield from _activations(value)
        elif name == "optimizer" and isinstance(value, Made):
            yield from _optimizer(value)
        else:
            yield from _leaves(name, value)


def _leaves(name: str, value: Any, depth: int = 0) -> Iterator[Setting]:
    if isinstance(value, Open):
        yield Setting(name, value.name, open=(value.name,))
    elif isinstance(value, Made):
        if not value.called and not value.args and not value.fields:
            yield Setting(name, value.name)
        for inner, part in value.fields.items() if depth < 12 else ():
            yield from _leaves(f"{name}.{inner}", part, depth + 1)
    elif isinstance(value, list | tuple) and any(isinstance(v, Made | Open) for v in value):
        return
    elif isinstance(value, str | int | float | list | tuple | None):
        yield Setting(name, list(value) if isinstance(value, tuple) else value)


def _spec(value: Any, model: str | None) -> Iterator[Setting]:
    """model_registry("8B", attn_backend="flex"), of the model whose package it is from."""
    if isinstance(value, Made) and value.word != "model_registry":
        named = [a for a in value.args if isinstance(a, Made) and a.word == "model_registry"]
        value = named[0] if named else value
    if not isinstance(value, Made) or value.word != "model_registry":
        if isinstance(value, Made) and "flavor" in value.fields:
            yield Setting("model.name", value.fields.get("name", model))
            yield Setting("model.flavor", value.fields["flavor"])
            return
        text = value.name if isinstance(value, Made | Open) else str(value)
        yield Setting("model.flavor", text, open=(text,))
        return
    package = [part for part in value.name.split(".") if part in flavors()]
    name = package[-1] if package else value.fields.get(_OF, model)
    said = [value.fields.get("flavor"), *value.args[:1]]
    said = [one for one in said if not isinstance(one, Made) or one.called]  # not merely looked at
    flavor = next((one for one in said if one is not None), None)
    if name is None:
        yield Setting("model.name", "model_registry", open=("model_registry",))
    else:
        yield Setting("model.name", name)
    if isinstance(flavor, str):
        yield Setting("model.flavor", flavor)
    else:
        text = flavor.name if isinstance(flavor, Open | Made) else "flavor"
        yield Setting("model.flavor", text, open=(text,))
    built = value.fields.get("model")
    if isinstance(built, Made):
        yield from _sizes(built)
    for argument, option in _MODEL_ARGUMENTS.items():
        said = value.fields.get(argument)
        if isinstance(said, str | int | float):
            yield Setting(option, said)


def _sizes(model: Made) -> Iterator[Setting]:
    """A model that a recipe builds of llama3's or qwen3's blocks."""
    layers = model.fields.get("layers")
    builders = ("_build_llama3_layers", "_build_qwen3_layers", "_build_qwen3_moe_layers")
    if not isinstance(layers, Made) or layers.word not in builders:
        return
    rope = layers.fields.get("rope")
    found = {**layers.fields, **(rope.fields if isinstance(rope, Made) else {}), **model.fields}
    found |= {name: layers.fields.get(name) for name in ("dim", "hidden_dim")}
    for name, value in found.items():
        if isinstance(value, int | float):
            yield Setting(f"model.{name}", value)
    if "qwen3" in layers.word:
        yield Setting("model.qk_norm", "head")


def _activations(value: Any) -> Iterator[Setting]:
    name = "activation_checkpoint.mode"
    if value is None:
        yield Setting(name, "none")
        return
    if not isinstance(value, Made):
        yield Setting(name, str(value), open=(getattr(value, "name", "?"),))
        return
    kind = next((mode for part, mode in _MODES.items() if part in value.name.split(".")), None)
    if kind is not None:
        yield Setting(name, kind)
    elif value.word not in ("Config", "?"):
        yield Setting(name, value.name)
    yield from _leaves("activation_checkpoint", Made("?", [], value.fields, called=True))


def _optimizer(value: Made) -> Iterator[Setting]:
    """default_adamw(lr=3e-4), or a Config with groups of parameters: the first one counts."""
    groups = value.fields.get("param_groups")
    fields = dict(value.fields)
    if isinstance(groups, list) and groups and isinstance(groups[0], Made):
        inner = groups[0].fields.get("optimizer_kwargs")
        if isinstance(inner, Made):
            inner = inner.fields
        fields = {k: v for k, v in fields.items() if k != "param_groups"}
        fields |= inner if isinstance(inner, dict) else {}
    if value.word == "default_adamw" and value.args:
        fields.setdefault("lr", value.args[0])
    betas = fields.pop("betas", None)
    if isinstance(betas, list | tuple) and len(betas) == 2:
        fields |= {"beta1": betas[0], "beta2": betas[1]}
    yield from _leaves("optimizer", Made("?", [], fields, called=True))
