"""How Megatron-LM's arguments are called: on its command line, and in its namespace.

An argument goes by the name of its namespace everywhere in plait ("tensor_model_parallel_size").
Most flags are that name with dashes; some are called otherwise, and some switch an argument off.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files


@dataclass(frozen=True)
class Flag:
    """A flag of the parser.

    Attributes:
        name: "--disable-bias-linear".
        arity: as `flags.settings_of` knows it.
        argument: the argument that it sets, "add_bias_linear".
        off: it switches the argument off.
    """

    name: str
    arity: str
    argument: str
    off: bool = False


@lru_cache(maxsize=1)
def known() -> Mapping[str, Flag]:
    """Every flag that the parser, or one of Megatron-LM's own scripts, has."""
    text = files("plait.dialects.known").joinpath("megatron.txt").read_text("utf-8")
    table = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, arity, *other = line.split()
        argument = other[0].lstrip("!") if other else underscored(name)
        table[name] = Flag(name, arity, argument, bool(other) and other[0].startswith("!"))
    return table


@lru_cache(maxsize=1)
def _by_argument() -> Mapping[str, tuple[Flag, ...]]:
    table: dict[str, tuple[Flag, ...]] = {}
    for flag in known().values():
        table[flag.argument] = (*table.get(flag.argument, ()), flag)
    return table


def flags_of(argument: str) -> tuple[Flag, ...]:
    """The flags that set an argument, in the order of their names."""
    return _by_argument().get(argument, ())


def underscored(flag: str) -> str:
    """ "--num-layers" -> "num_layers"."""
    return flag.lstrip("-").replace("-", "_")


def dashed(argument: str) -> str | None:
    """ "num_layers" -> "--num-layers": how a command line spells it; None: no flag sets it."""
    name = "--" + argument.replace("_", "-")
    if name in known():
        return name
    flags = flags_of(argument)
    return flags[0].name if flags else None
