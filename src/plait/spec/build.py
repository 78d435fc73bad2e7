"""Strict building of dataclasses from what a person wrote: TOML tables or flags.

Unknown keys are errors with the closest known key; every problem is collected, none raised.
"""

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any, Union, get_args, get_origin, get_type_hints

from plait.spec.findings import Finding, closest, error

#: Nothing that is counted here comes near; larger numbers only overflow somewhere.
LARGEST = 10**15


def check_fields(
    cls: type, given: Mapping[str, Any], where: str, findings: list[Finding]
) -> dict[str, Any]:
    """The fields of a dataclass out of a mapping, converted to their types.

    Keys may be written with dashes. What is unknown or of the wrong type goes into `findings`
    and is left out of the result.
    """
    hints = get_type_hints(cls)
    known = {f.name for f in fields(cls)}
    result = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        path = f"{where}.{name}" if where else name
        if name not in known:
            match = closest(name, known)
            nearest = (f"{where}.{match}" if where else match) if match else None
            message = f"no such key{f'; did you mean {match}?' if match else ''}"
            findings.append(
                Finding(
                    "error",
                    "unknown-key",
                    message,
                    path,
                    value,
                    {} if nearest is None else {path: nearest},
                )
            )
            continue
        _put(result, name, value, hints[name], path, findings)
    return result


def _put(
    result: dict[str, Any], name: str, value: Any, kind: Any, path: str, findings: list[Finding]
) -> None:
    """The value as its type into `result`, or what is wrong with it into `findings`."""
    try:
        result[name] = convert(value, kind, path, findings)
    except OverflowError:
        findings.append(error(path, value, f"{value} is beyond all sizes"))
    except (TypeError, ValueError):
        findings.append(error(path, value, f"{value!r} is not {describe(kind)}"))


def convert(value: Any, kind: Any, where: str, findings: list[Finding]) -> Any:
    """A value of a TOML file or the text of a flag as the type of its field.

    Raises:
        ValueError, TypeError: it is not of that type.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None or (value == "none" and str not in args):
            return None
        return convert(value, next(a for a in args if a is not type(None)), where, findings)
    if origin is tuple:
        parts = value.split(",") if value and isinstance(value, str) else list(value)
        return tuple(convert(p, args[0], where, findings) for p in parts)
    if origin is dict:
        result: dict[str, Any] = {}
        for key, inner in _table(value).items():
            name = convert(key, args[0], where, findings)
            _put(result, name, inner, args[1], f"{where}.{key}", findings)
        return result
    if is_dataclass(kind):
        return kind(**check_fields(kind, _table(value), where, findings))
    if kind is bool:
        words = {"true": True, "false": False, "1": True, "0": False}
        if str(value).lower() not in words:
            raise ValueError(value)
        return words[str(value).lower()]
    if kind is int:
        if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
            raise ValueError(value)
        if abs(int(value)) > LARGEST:
            raise OverflowError(value)
        return int(value)
    if kind is float:
        if isinstance(value, bool) or not isfinite(float(value)):
            raise ValueError(value)
        return float(value)
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(value)
        return value
    return value


def _table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(value)
    return value


def describe(kind: Any) -> str:
    """A type in a person's words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return describe(next(a for a in args if a is not type(None)))
    if origin is dict:
        return "a table"
    if origin is tuple:
        return f"a list of {describe(args[0]).removeprefix('a ').removeprefix('an ')}s"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    return names.get(kind, "a table")
