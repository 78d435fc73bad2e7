"""How Megatron-LM's arguments are called: on its command line, and in its namespace.

An argument goes by the name of its namespace everywhere in plait ("tensor_model_parallel_size").
Most flags are that name with dashes; some are called otherwise, and some switch an argument off.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from plait.dialects import tables


@dataclass(frozen=True)
class Flag:
    """A flag of the parser.

    Attributes:
        name: "--disable-bias-linear".
        arity: as `flags.settings_of` knows it.
        argument: the argument that it sets, "add_bias_linear".
        off: it switches the argument off.
        gone: only earlier versions have it.
    """

    name: str
    arity: str
    argument: str
    off: bool = False
    gone: bool = False


@lru_cache(maxsize=1)
def known() -> Mapping[str, Flag]:
    """Every flag that the parser, or one of Megatron-LM's own scripts, has or once had."""
    text = tables.text_of("megatron.txt")
    table, gone = {}, False
    for line in text.splitlines():
        if line.startswith("#"):
            gone = "earlier versions" in line
            continue
        name, arity, *other = line.split()
        argument = other[0].lstrip("!") if other else underscored(name)
        off = bool(other) and other[0].startswith("!")
        table[name] = Flag(name, arity, argument, off, gone)
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
    flags = flags_of(argument)
    now = [flag.name for flag in flags if not flag.gone] or [flag.name for flag in flags]
    if name in now or (not now and name in known()):
        return name
    return now[0] if now else None
