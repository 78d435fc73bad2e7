"""Values of a Python file that is read and never run, and the arithmetic on them that is safe."""

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from plait.dialects.source import Source
from plait.spec.findings import UserError, error

#: Expressions that are looked at, and calls within calls, at most.
STEPS, DEPTH = 200_000, 40
#: The largest number and the longest container that arithmetic may give.
LARGEST, LONGEST = 10**18, 100_000


@dataclass(frozen=True)
class Open:
    """A value that nothing in the file decides. `name`: of what it depends on."""

    name: str


@dataclass
class Made:
    """What a call would give, or a thing that is known by its name.

    Attributes:
        name: dotted, as far as imports tell ("torch.nn.Linear"); "?" where nothing does.
        args, fields: what it was called with; attributes that are set later are fields too.
        line: where it is called.
        called: whether it is the result of a call, and not the thing itself.
    """

    name: str
    args: list[Any] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    line: int = 0
    called: bool = False

    @property
    def word(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Function:
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: "dict[str, Any]"


class Return(Exception):
    def __init__(self, value: Any):
        self.value = value


OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: lambda a, b: a is b,
    ast.IsNot: lambda a, b: a is not b,
}
PLAIN: dict[str, Callable[..., Any]] = {
    "int": int, "float": float, "str": str, "bool": bool, "len": len, "min": min, "max": max,
    "sum": sum, "abs": abs, "tuple": tuple, "list": list, "round": round, "range": range,
    "dict": dict, "sorted": sorted,
}  # fmt: skip
#: Environment variables and calls that tell how many ranks there are.
WORLD_CALLS = ("get_world_size", "device_count")


def parse(source: Source) -> ast.Module:
    """The file as a tree.

    Raises:
        UserError: it is not Python: one line.
    """
    where = str(source.path or source.name)
    try:
        return ast.parse(source.text)
    except SyntaxError as problem:
        message = f"not valid Python, line {problem.lineno}: {problem.msg}"
    except (RecursionError, MemoryError, ValueError, OverflowError):
        message = "not valid Python: nested too deeply"
    raise UserError([error(where, None, message, rule="unreadable-file")])


def loaded(target: ast.expr) -> ast.expr:
    """A target of an assignment as something to be read."""
    return ast.parse(ast.unparse(target), mode="eval").body


def truth(value: Any) -> bool | None:
    """Whether a condition holds; None where nothing decides."""
    if isinstance(value, Open | Made | Function):
        return None
    return bool(value)


def element(value: Any) -> Any:
    """One element of something that is gone through."""
    if isinstance(value, Made):
        return Made(f"{value.name}[]", [value], called=True)
    return value[0] if isinstance(value, list | tuple) and value else Open("?")


def first_open(*values: Any) -> Open | None:
    return next((v for v in values if isinstance(v, Open)), None)


def sound(op: ast.operator, left: Any, right: Any) -> bool:
    """Whether arithmetic of the two ends soon and in little space."""
    if isinstance(op, ast.Pow):
        small = isinstance(right, int | float) and abs(right) <= 64
        return small and isinstance(left, int | float) and abs(left) < LARGEST
    if isinstance(op, ast.Mult):
        for text, times in ((left, right), (right, left)):
            if isinstance(text, str | list | tuple):
                return isinstance(times, int) and len(text) * max(times, 1) <= LONGEST
    if isinstance(op, ast.Add) and isinstance(left, str | list | tuple):
        return isinstance(right, type(left)) and len(left) + len(right) <= LONGEST
    if isinstance(op, ast.Mod) and isinstance(left, str):
        return False
    return isinstance(left, int | float) and isinstance(right, int | float)


def copied(value: Any) -> Any:
    """Defaults of a class are an object's own."""
    if isinstance(value, list):
        return [copied(item) for item in value]
    if isinstance(value, Made):
        return Made(
            value.name,
            list(value.args),
            {k: copied(v) for k, v in value.fields.items()} if value.called else value.fields,
            value.line,
            value.called,
        )
    return value


def plainly(name: str, args: list[Any], named: dict[str, Any]) -> Any:
    """A call of one of Python's own functions on plain values."""
    opened = first_open(*args, *named.values())
    if opened or any(isinstance(a, Made) for a in args):
        return opened or Open(name)
    wide = name in ("range", "list", "tuple") and args and isinstance(args[0], int)
    if wide and any(isinstance(a, int) and abs(a) > LONGEST for a in args):
        return Open(name)
    try:
        return PLAIN[name](*args, **named)
    except Exception:
        return Open(name)


def method(name: str, owner: Any, args: list[Any]) -> Any:
    """Methods of plain values that configurations use."""
    if isinstance(owner, list) and name in ("append", "extend") and args:
        new = args[0] if name == "extend" and isinstance(args[0], list | tuple) else args[:1]
        if len(owner) < LONGEST:
            owner.extend(new)
        return None
    if isinstance(owner, dict) and name in ("get", "update", "items", "keys", "values", "pop"):
        if name == "update" and args and isinstance(args[0], dict):
            owner.update(args[0])
            return None
        if name in ("get", "pop") and args and isinstance(args[0], str | int):
            return owner.get(args[0], args[1] if len(args) > 1 else None)
        return list(getattr(owner, name)()) if name in ("items", "keys", "values") else None
    plain = isinstance(owner, str) and name in ("lower", "upper", "strip", "split")
    if plain and all(isinstance(a, str) for a in args):
        return getattr(owner, name)(*args)
    return Open(name)
