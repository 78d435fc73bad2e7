"""Megatron-LM's YAML: `model_config.yaml` of its functional tests, files for `--yaml-cfg`, and
plain arguments by their underscored names.

Sources: tests/functional_tests/shell_test_utils/_run_training.sh, training/yaml_arguments.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from plait.dialects import tree
from plait.dialects.launch import Launch, Told
from plait.dialects.megatron_arguments import understand
from plait.dialects.megatron_names import known, underscored
from plait.dialects.settings import Setting, Settings
from plait.dialects.source import Source
from plait.spec.findings import UserError, error

#: Names of the configuration class -> Megatron's arguments.
CONFIG_NAMES = {"num_moe_experts": "num_experts"}
#: `activation_func` of a file for `--yaml-cfg` -> the switch that it is.
_ACTIVATIONS = {"swiglu": "swiglu", "squaredrelu": "squared_relu", "gelu": None}


def read_yaml(
    source: Source,
    told: Told,
    environment: Mapping[str, str] | None = None,
    world: int | None = None,
) -> Launch:
    """What a YAML file says, whichever of the three shapes it has.

    Raises:
        UserError: it has none of them.
    """
    whole = tree.read_yaml(source)
    if not isinstance(whole, Mapping):
        raise _not_megatron(source)
    if isinstance(whole.get("MODEL_ARGS"), Mapping | list):
        return _functional_test(source, whole, told)
    values = list(tree.flat(whole, source.name))
    names = {s.name.rpartition(".")[2] for s in values}
    arguments = {flag.argument for flag in known().values()} | CONFIG_NAMES.keys()
    if not ({"hidden_size", "num_layers", "tensor_model_parallel_size"} & names):
        raise _not_megatron(source)
    paths = _paths(values)
    said = [_switched(s, paths) for s in values]
    settings = Settings(said, told.given)
    understood = understand(settings, told, lambda name: paths.get(name, name), world)
    names = arguments | {underscored(name) for name in known()}
    heard = {s.name for s in said if s.name.rpartition(".")[2] in names}
    facts = understood.facts | {"spell": lambda name: paths.get(name, name)}
    return Launch(
        understood.fields, settings, heard | names, list(understood.findings),
        dict(environment or {}), facts=facts,
    )  # fmt: skip


def _paths(values: list[Setting]) -> dict[str, str]:
    """Argument -> the dotted path under which the file has it."""
    found = {}
    for setting in values:
        name = setting.name.rpartition(".")[2]
        found[CONFIG_NAMES.get(name, name)] = setting.name
        switch = _ACTIVATIONS.get(str(setting.value)) if name == "activation_func" else None
        if switch:
            found[switch] = setting.name
        if name == "num_query_groups" and setting.value is not None:
            # The configuration class groups queries wherever their number is given.
            found.setdefault("group_query_attention", "")
    return found


def _switched(setting: Setting, paths: Mapping[str, str]) -> Setting:
    on = setting.name in (paths.get("swiglu"), paths.get("squared_relu"))
    return replace(setting, value=True) if on and isinstance(setting.value, str) else setting


def _functional_test(source: Source, whole: Mapping[str, Any], told: Told) -> Launch:
    """MODEL_ARGS: flag -> value, true for a switch; lists in brackets, "[a b]"."""
    from plait.dialects.megatron import launch_of

    arguments = whole["MODEL_ARGS"]
    if isinstance(arguments, list):
        merged: dict[str, Any] = {}
        for part in arguments:
            merged |= part if isinstance(part, Mapping) else {}
        arguments = merged
    said = [_argument(str(name), value, source.name) for name, value in arguments.items()]
    variables = whole.get("ENV_VARS")
    environment = {
        str(name): str(value)
        for name, value in (variables.items() if isinstance(variables, Mapping) else ())
        if value is not None
    }
    return launch_of(said, told, environment)


def _argument(name: str, value: Any, where: str) -> Setting:
    flag = known().get(name) or known().get(name.replace("_", "-"))
    name = flag.name if flag else name
    open_names = _open(value)
    if isinstance(value, str) and flag and flag.arity in "*+":
        value = value.strip("[] ").split() if not value.startswith("(") else [value]
    elif isinstance(value, str) and value.startswith("[") and flag and flag.arity == "1":
        value = value.strip()
    if value is True and flag and flag.arity == "1":
        value = "true"
    return Setting(name, value, where, open_names)


def _open(value: Any) -> tuple[str, ...]:
    """`${NAME}` in a value: set by whoever runs the test."""
    import re

    if not isinstance(value, str):
        return ()
    return tuple(re.findall(r"\$\{?\w+\}?", value))


def _not_megatron(source: Source) -> UserError:
    message = "no MODEL_ARGS, and no arguments of Megatron-LM (num_layers, hidden_size, ...)"
    return UserError([error("from", source.name, message, rule="no-command")])
