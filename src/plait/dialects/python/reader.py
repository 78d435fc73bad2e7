"""What the values of a Python file would be, as far as its text decides: read, never run.

Constants, arithmetic, names, containers, calls of the file's own functions and the defaults of its
classes and of argparse are followed; everything else is a call that is written down (`Made`) or
stays open (`Open`). Both branches of a condition that nothing decides are followed, the body of a
loop once.
"""

import ast
from collections.abc import Callable, Mapping
from typing import Any

from plait.dialects.python.values import (
    COMPARE,
    DEPTH,
    LARGEST,
    LONGEST,
    OPERATORS,
    PLAIN,
    STEPS,
    WORLD_CALLS,
    Function,
    Made,
    Open,
    Return,
    copied,
    element,
    first_open,
    loaded,
    method,
    plainly,
    sound,
    truth,
)


class Reader:
    """A file that is followed.

    Args:
        world: ranks, where they are known.
        arguments: option -> value of the command line that starts the file ("--tp" -> "4").
        environment: variables that are known.
        outside: asked for every call of something that the file does not define:
            (Made) -> value, or None for the call itself.
        imported: asked for every name that is imported: dotted name -> value, or None.

    Attributes:
        calls: every call of something from outside, in the order in which it would come.
        names: the values at the top level.
        options: argparse options of the file: name -> default.
    """

    def __init__(
        self,
        world: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        outside: Callable[[Made], Any] | None = None,
        imported: Callable[[str], Any] | None = None,
    ):
        self.world, self.arguments = world, dict(arguments or {})
        self.environment, self.outside = dict(environment or {}), outside
        self.imported = imported
        self.calls: list[Made] = []
        self.names: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self._left, self._depth = STEPS, 0

    def run(self, tree: ast.Module) -> None:
        """Follows the top level of a file."""
        self.names["__name__"] = "__main__"
        try:
            self._block(tree.body, self.names)
        except (Return, RecursionError):
            return

    def call(self, name: str, *args: Any) -> Any:
        """What a function of the file returns; Open where there is none of that name."""
        found = self.names.get(name)
        if not isinstance(found, Function):
            return Open(name)
        try:
            return self._enter(found, list(args), {})
        except RecursionError:
            return Open(name)

    def functions(self) -> list[str]:
        """Names of the functions of the top level, in order."""
        return [
            name
            for name, value in self.names.items()
            if isinstance(value, Function) and value.scope is self.names
        ]

    # -- statements

    def _block(self, body: list[ast.stmt], scope: dict[str, Any]) -> None:
        for statement in body:
            if self._left <= 0:
                return
            self._statement(statement, scope)

    def _statement(self, node: ast.stmt, scope: dict[str, Any]) -> None:
        match node:
            case ast.Import():
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    scope[alias.asname or top] = Made(alias.name if alias.asname else top)
            case ast.ImportFrom():
                base = "." * node.level + (node.module or "")
                dot = "" if base.endswith(".") or not base else "."
                for alias in node.names:
                    name = f"{base}{dot}{alias.name}"
                    known = self.imported(name) if self.imported else None
                    scope[alias.asname or alias.name] = Made(name) if known is None else known
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                scope[node.name] = Function(node, scope)
            case ast.ClassDef():
                scope[node.name] = Made(node.name, fields=self._class(node, scope))
            case ast.Return():
                raise Return(self.value(node.value, scope) if node.value else None)
            case ast.Assign():
                value = self.value(node.value, scope)
                for target in node.targets:
                    self._assign(target, value, scope)
            case ast.AnnAssign():
                if node.value is not None:
                    self._assign(node.target, self.value(node.value, scope), scope)
            case ast.AugAssign():
                joined = ast.BinOp(loaded(node.target), node.op, node.value)
                self._assign(node.target, self.value(joined, scope), scope)
            case ast.Expr():
                self.value(node.value, scope)
            case ast.If():
                self._if(node, scope)
            case ast.For() | ast.AsyncFor():
                self._for(node, scope)
            case ast.While():
                self._block(node.body, scope)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    value = self.value(item.context_expr, scope)
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, value, scope)
                self._block(node.body, scope)
            case ast.Try() | ast.TryStar():
                self._block([*node.body, *node.orelse, *node.finalbody], scope)

    def _if(self, node: ast.If, scope: dict[str, Any]) -> None:
        holds = truth(self.value(node.test, scope))
        if holds is None:
            # Nothing decides: what the body sets stands, for it is what was written first.
            self._block(node.orelse, scope)
            self._block(node.body, scope)
        else:
            self._block(node.body if holds else node.orelse, scope)

    def _for(self, node: ast.For | ast.AsyncFor, scope: dict[str, Any]) -> None:
        over = self.value(node.iter, scope)
        items = list(over) if isinstance(over, list | tuple | range) and len(over) <= 16 else []
        if not items:
            items = [over[0]] if isinstance(over, range) and len(over) else [element(over)]
        for item in items:
            self._assign(node.target, item, scope)
            self._block(node.body, scope)

    def _class(self, node: ast.ClassDef, scope: dict[str, Any]) -> dict[str, Any]:
        """Defaults of a class's attributes, those of its bases in this file first."""
        fields: dict[str, Any] = {}
        for base in node.bases:
            value = self.value(base, scope)
            if isinstance(value, Made) and not value.called:
                fields |= value.fields
        inner = dict(scope)
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign | ast.Assign | ast.ClassDef):
                before = set(inner)
                self._statement(statement, inner)
                names = [statement.name] if isinstance(statement, ast.ClassDef) else []
                names += [n.id for n in ast.walk(statement) if isinstance(n, ast.Name)]
                fields |= {n: inner[n] for n in names if n in inner and n not in before}
        return fields

    def _assign(self, target: ast.expr, value: Any, scope: dict[str, Any]) -> None:
        match target:
            case ast.Name():
                scope[target.id] = value
            case ast.Attribute():
                owner = self.value(target.value, scope)
                if isinstance(owner, Made):
                    owner.fields[target.attr] = value
            case ast.Subscript():
                owner, key = self.value(target.value, scope), self.value(target.slice, scope)
                if isinstance(owner, dict) and isinstance(key, str | int):
                    owner[key] = value
                elif isinstance(owner, Made) and isinstance(key, str):
                    owner.fields[key] = value
            case ast.Tuple() | ast.List():
                parts = value if isinstance(value, list | tuple) else []
                for i, part in enumerate(target.elts):
                    known = parts[i] if len(parts) == len(target.elts) else element(value)
                    self._assign(part, known, scope)

    # -- expressions

    def value(self, node: ast.expr, scope: dict[str, Any]) -> Any:
        """The value of an expression."""
        self._left -= 1
        if self._left <= 0:
            return Open("too much")
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return scope.get(node.id, self.names.get(node.id, Made(node.id)))
            case ast.Attribute():
                return self._attribute(self.value(node.value, scope), node.attr)
            case ast.Tuple():
                return tuple(self._elements(node.elts, scope))
            case ast.List() | ast.Set():
                return list(self._elements(node.elts, scope))
            case ast.Dict():
                return self._dict(node, scope)
            case ast.BinOp():
                return self._binary(node, scope)
            case ast.UnaryOp():
                return self._unary(node, scope)
            case ast.BoolOp():
                return self._bool(node, scope)
            case ast.Compare():
                return self._compare(node, scope)
            case ast.IfExp():
                holds = truth(self.value(node.test, scope))
                return self.value(node.orelse if holds is False else node.body, scope)
            case ast.JoinedStr():
                parts = [self.value(part, scope) for part in node.values]
                opened = [part for part in parts if not isinstance(part, str | int | float)]
                return Open(ast.unparse(node)) if opened else "".join(map(str, parts))
            case ast.FormattedValue():
                return self.value(node.value, scope)
            case ast.Subscript():
                return self._subscript(node, scope)
            case ast.Call():
                return self._call(node, scope)
            case ast.Lambda():
                return Function(node, scope)
            case ast.NamedExpr():
                value = self.value(node.value, scope)
                self._assign(node.target, value, scope)
                return value
            case ast.Await() | ast.Starred():
                return self.value(node.value, scope)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                return self._comprehension(node, scope)
        return Open("?")

    def _elements(self, nodes: list[ast.expr], scope: dict[str, Any]) -> list[Any]:
        found: list[Any] = []
        for node in nodes:
            value = self.value(node, scope)
            spread = isinstance(node, ast.Starred) and isinstance(value, list | tuple | range)
            found += self._charged(list(value)[:LONGEST]) if spread else [value]
        return found

    def _dict(self, node: ast.Dict, scope: dict[str, Any]) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            result = self.value(value, scope)
            if key is None:
                found |= result if isinstance(result, dict) else {}
                continue
            name = self.value(key, scope)
            found[name if isinstance(name, str | int) else ast.unparse(key)] = result
        return found

    def _comprehension(
        self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, scope: dict[str, Any]
    ) -> Any:
        first = node.generators[0]
        over = self.value(first.iter, scope)
        if len(node.generators) > 1 or not isinstance(over, list | tuple | range):
            return Open("?")
        found, inner = [], dict(scope)
        for item in list(over[:LONGEST]):
            self._assign(first.target, item, inner)
            if all(truth(self.value(test, inner)) is not False for test in first.ifs):
                found.append(self.value(node.elt, inner))
            if self._left <= 0:
                break
        return found

    def _binary(self, node: ast.BinOp, scope: dict[str, Any]) -> Any:
        left, right = self.value(node.left, scope), self.value(node.right, scope)
        work = OPERATORS.get(type(node.op))
        if work is None or not sound(node.op, left, right):
            return first_open(left, right) or Open(ast.unparse(node)[:80])
        try:
            value = work(left, right)
        except (ArithmeticError, TypeError, ValueError):
            return Open(ast.unparse(node)[:80])
        large = isinstance(value, int | float) and not -LARGEST < value < LARGEST
        return Open("a number beyond all bounds") if large else self._charged(value)

    def _charged(self, value: Any) -> Any:
        """What takes room counts as steps: nothing grows without end."""
        if isinstance(value, str | list | tuple | dict):
            self._left -= len(value) // 8
        return value

    def _unary(self, node: ast.UnaryOp, scope: dict[str, Any]) -> Any:
        value = self.value(node.operand, scope)
        if isinstance(node.op, ast.Not):
            holds = truth(value)
            return Open("?") if holds is None else not holds
        if isinstance(node.op, ast.USub) and isinstance(value, int | float):
            return -value
        return value if isinstance(value, Open) else Open("?")

    def _bool(self, node: ast.BoolOp, scope: dict[str, Any]) -> Any:
        stops = isinstance(node.op, ast.Or)
        value: Any = None
        opened = None
        for part in node.values:
            value = self.value(part, scope)
            holds = truth(value)
            if holds is stops:
                return value if opened is None else opened
            opened = opened or (value if holds is None else None)
        return value if opened is None else opened

    def _compare(self, node: ast.Compare, scope: dict[str, Any]) -> Any:
        left = self.value(node.left, scope)
        for op, other in zip(node.ops, node.comparators, strict=True):
            right = self.value(other, scope)
            if first_open(left, right) or isinstance(left, Made) or isinstance(right, Made):
                return Open(ast.unparse(node)[:80])
            try:
                if not COMPARE[type(op)](left, right):
                    return False
            except TypeError:
                return Open(ast.unparse(node)[:80])
            left = right
        return True

    def _subscript(self, node: ast.Subscript, scope: dict[str, Any]) -> Any:
        owner = self.value(node.value, scope)
        if isinstance(owner, Made) and owner.name.endswith("environ"):
            return self._variable(self.value(node.slice, scope))
        if isinstance(node.slice, ast.Slice):
            return Open("?")
        key = self.value(node.slice, scope)
        if isinstance(owner, Made):
            if isinstance(key, str) and key in owner.fields:
                return owner.fields[key]
            part = Made(f"{owner.name}[]", [owner, key], line=node.lineno, called=True)
            answer = self.outside(part) if self.outside else None
            return part if answer is None else answer
        try:
            return owner[key]
        except (KeyError, IndexError, TypeError):
            return Open(ast.unparse(node)[:80])

    def _variable(self, name: Any, default: Any = None) -> Any:
        """An environment variable."""
        if name == "WORLD_SIZE" and self.world is not None:
            return str(self.world)
        if name in self.environment:
            return self.environment[name]
        unset = default is None or name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")
        return Open(str(name)) if unset else default

    def _attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, Open):
            return Open(f"{owner.name}.{name}")
        if not isinstance(owner, Made):
            return Made(f"?.{name}", [owner])
        if name in owner.fields:
            return owner.fields[name]
        if owner.called and owner.name == "argparse":
            return Open(f"--{name.replace('_', '-')}")
        made = Made(f"{owner.name}.{name}", [owner] if owner.called else [])
        if owner.called:
            owner.fields[name] = made
        return made

    # -- calls

    def _call(self, node: ast.Call, scope: dict[str, Any]) -> Any:
        function = self.value(node.func, scope)
        args = self._elements(node.args, scope)
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, scope)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, dict):
                named |= {str(key): item for key, item in value.items()}
        if isinstance(function, Function):
            return self._enter(function, args, named)
        if not isinstance(function, Made):
            return Open(ast.unparse(node.func)[:80])
        return self._make(function, args, named, node.lineno)

    def _make(self, function: Made, args: list[Any], named: dict[str, Any], line: int) -> Any:
        name, word = function.name, function.word
        if word in WORLD_CALLS or name in ("os.getenv", "getenv", "os.environ.get"):
            if word in WORLD_CALLS:
                local = word == "device_count"
                return Open(word) if local or self.world is None else self.world
            return self._variable(*args[:2])
        if name in PLAIN:
            return self._charged(plainly(name, args, named))
        if name.startswith("?.") and function.args:
            return method(word, function.args[0], args)
        if word == "add_argument":
            self._option(args, named)
        if word in ("parse_args", "parse_known_args"):
            known = Made("argparse", fields=self._arguments(), called=True)
            return (known, []) if word == "parse_known_args" else known
        if word == "field" and ("default" in named or "default_factory" in named):
            made = named.get("default_factory")
            if isinstance(made, Function):
                return self._enter(made, [], {})
            if isinstance(made, Made):
                return plainly(made.name, [], {}) if made.name in PLAIN else self._make(
                    made, [], {}, line
                )  # fmt: skip
            return named.get("default")
        fields = {key: copied(value) for key, value in function.fields.items()} | named
        made = Made(name, [*function.args, *args], fields, line, True)
        answer = self.outside(made) if self.outside else None
        self.calls.append(made)
        return made if answer is None else answer

    def _option(self, args: list[Any], named: dict[str, Any]) -> None:
        names = [a for a in args if isinstance(a, str)]
        long = next((n for n in names if n.startswith("--")), names[0] if names else "")
        target = named.get("dest") or long.lstrip("-").replace("-", "_")
        default = named.get("default")
        if default is None:
            default = {"store_true": False, "store_false": True}.get(
                named.get("action"), Open(long)
            )
        for name in names:
            if name in self.arguments:
                default = self._typed(self.arguments[name], named)
        self.options[str(target)] = default

    def _typed(self, text: Any, named: dict[str, Any]) -> Any:
        if named.get("action") in ("store_true", "store_false"):
            return named["action"] == "store_true"
        kind = named.get("type")
        if isinstance(kind, Made) and kind.name in ("int", "float"):
            return plainly(kind.name, [text], {})
        return text

    def _arguments(self) -> dict[str, Any]:
        return dict(self.options)

    def _enter(self, function: Function, args: list[Any], named: dict[str, Any]) -> Any:
        """What a function of the file returns."""
        if self._depth >= DEPTH or self._left <= 0:
            return Open("too deep")
        node, scope = function.node, dict(function.scope)
        spec = node.args
        places = [*spec.posonlyargs, *spec.args]
        defaults = dict(zip(places[len(places) - len(spec.defaults) :], spec.defaults, strict=True))
        defaults |= {a: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d}
        for place in [*places, *spec.kwonlyargs]:
            if place.arg in named:
                scope[place.arg] = named[place.arg]
            elif place in defaults:
                scope[place.arg] = self.value(defaults[place], function.scope)
            else:
                scope[place.arg] = Open(place.arg)
        for place, value in zip(places, args, strict=False):
            scope[place.arg] = value
        if spec.vararg:
            scope[spec.vararg.arg] = tuple(args[len(places) :])
        if spec.kwarg:
            taken = {place.arg for place in [*places, *spec.kwonlyargs]}
            scope[spec.kwarg.arg] = {k: v for k, v in named.items() if k not in taken}
        self._depth += 1
        try:
            if isinstance(node, ast.Lambda):
                return self.value(node.body, scope)
            self._block(node.body, scope)
        except Return as end:
            return end.value
        finally:
            self._depth -= 1
        return None
