"""Megatron-LM's YAML: `model_config.yaml` of its functional tests, files for `--yaml-cfg`, and
plain arguments by their underscored names.

Sources: tests/functional_tests/shell_test_utils/_run_training.sh, training/yaml_arguments.py.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from plait.dialects import tree
from plait.dialects.launch import Launch, Told
from plait.dialects.megatron.arguments import understand
from plait.dialects.megatron.launch import launch_of
from plait.dialects.megatron.names import known, underscored
from plait.dialects.settings import Setting, Settings
from plait.dialects.source import Source
from plait.spec.findings import UserError, error

#: Names of the configuration class -> Megatron's arguments.
CONFIG_NAMES = {"num_moe_experts": "num_experts"}
#: Names of a trainer that runs the tests of NeMo's -> Megatron's arguments; None: of no matter.
_RUN = {
    "max_steps": "train_iters",
    "devices": None,
    "num_nodes": None,
    "val_check_interval": None,
    "limit_val_batches": None,
    "limit_test_batches": None,
    "log_every_n_steps": None,
    "accumulate_grad_batches": None,
    "log_dir": None,
    "precision": None,
    "bias_activation_fusion": None,
}
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
    partial = False
    if "MODEL_ARGS" in whole:
        arguments = _merged(whole["MODEL_ARGS"])
        environment = _variables(whole.get("ENV_VARS")) | dict(environment or {})
        if any(str(name).startswith("-") for name in arguments):
            said = [_argument(str(name), value, source.name) for name, value in arguments.items()]
            mode = "inference.py" if whole.get("MODE") == "inference" else ""
            return launch_of(said, told, environment, program=mode)
        # A test of NeMo's: dotted names, of the same arguments.
        whole, partial = arguments, True
    values = list(tree.flat(whole, source.name))
    names = {s.name.rpartition(".")[2] for s in values}
    world = world or _devices(values)
    arguments = {flag.argument for flag in known().values()} | CONFIG_NAMES.keys() | _RUN.keys()
    if not ({"hidden_size", "num_layers", "tensor_model_parallel_size"} & names):
        raise _not_megatron(source)
    paths = _paths(values)
    said = [_switched(s, paths) for s in values]
    settings = Settings(said, told.given)
    understood = understand(settings, told, lambda name: paths.get(name, name), world)
    names = arguments | {underscored(name) for name in known()}
    heard = {s.name for s in said if s.name.rpartition(".")[2] in names}
    sections = any(s.name.startswith(("language_model.", "model_parallel.")) for s in values)
    facts = understood.facts | {
        "spell": lambda name: paths.get(name, name),
        "open": partial,
        "yaml_cfg": sections,
    }
    return Launch(
        understood.fields, settings, heard | names, list(understood.findings),
        dict(environment or {}), facts=facts,
    )  # fmt: skip


def _devices(values: list[Setting]) -> int | None:
    """Devices in all, of a trainer's nodes and devices of a node."""
    told = {s.name.rpartition(".")[2]: s.value for s in values if s.name.startswith("trainer.")}
    each, nodes = told.get("devices"), told.get("num_nodes", 1)
    whole = isinstance(each, int) and isinstance(nodes, int) and 0 < each * nodes < 10**7
    return each * nodes if whole else None


def _paths(values: list[Setting]) -> dict[str, str | None]:
    """Argument -> the dotted path under which the file has it; None: it has no word for it."""
    found: dict[str, str | None] = {}
    for setting in values:
        name = setting.name.rpartition(".")[2]
        found[CONFIG_NAMES.get(name, _RUN.get(name) or name)] = setting.name
        switch = _ACTIVATIONS.get(str(setting.value)) if name == "activation_func" else None
        if switch:
            found[switch] = setting.name
    if any(s.name.startswith("language_model.") for s in values):
        # The configuration class has no such switch: it groups queries wherever they are counted.
        found.setdefault("group_query_attention", None)
    return found


def _switched(setting: Setting, paths: Mapping[str, str | None]) -> Setting:
    on = setting.name in (paths.get("swiglu"), paths.get("squared_relu"))
    return replace(setting, value=True) if on and isinstance(setting.value, str) else setting


def _merged(arguments: Any) -> dict[str, Any]:
    """MODEL_ARGS: flag -> value, true for a switch; or a list of such."""
    parts = arguments if isinstance(arguments, list) else [arguments]
    return {k: v for part in parts if isinstance(part, Mapping) for k, v in part.items()}


def _variables(said: Any) -> dict[str, str]:
    pairs = said.items() if isinstance(said, Mapping) else ()
    return {str(name): str(value) for name, value in pairs if value is not None}


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
    if not isinstance(value, str):
        return ()
    return tuple(re.findall(r"\$\{?\w+\}?", value))


def _not_megatron(source: Source) -> UserError:
    message = "no MODEL_ARGS, and no arguments of Megatron-LM (num_layers, hidden_size, ...)"
    return UserError([error("from", source.name, message, rule="no-command")])
