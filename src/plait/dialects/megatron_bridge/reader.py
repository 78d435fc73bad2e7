"""Statements and expressions of a Python file that builds a ConfigContainer, followed as syntax.

Nothing is run. What is not known stays open.
"""

import ast
from dataclasses import dataclass, field, replace
from typing import Any

from plait.dialects.megatron_bridge.recipes import (
    ARGUMENTS,
    MODEL_ARGUMENTS,
    Recipe,
    common,
    recipe,
)

#: Calls within calls, and statements in all, that are followed.
_DEEPEST = 12
_MOST = 50_000
#: Names of what `_pretrain_common()` and its like start a recipe from.
_COMMON = {
    "_pretrain_common": "pretrain", "_sft_common": "sft", "_peft_common": "peft",
    "_sft_common_vlm": "sft_vlm", "_peft_common_vlm": "peft_vlm",
}  # fmt: skip
#: What people call the container where it comes from outside of the file.
_CONTAINERS = ("cfg", "config", "recipe", "config_container")


@dataclass
class Node:
    """An object: fields by name. `kind` is the callable that made it."""

    kind: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    line: int = 0
    recipe: Recipe | None = None
    hub: str = ""


@dataclass(frozen=True)
class Open:
    """A value that nothing in the file decides."""

    text: str


def placed(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and type(value[1]) is _Line


class _Line(int):
    """A line number: no value of a program's own is one."""


class _Return(Exception):
    def __init__(self, value: Any):
        self.value = value


class Reader:
    """Goes through a file's statements, with the names that it has seen."""

    def __init__(self, name: str):
        self.name = name
        self.functions: dict[str, ast.FunctionDef] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.aliases: dict[str, str] = {}
        self.defaults: dict[str, Any] = {}
        self.found: list[Node] = []
        self.depth = 0
        self.steps = 0

    def container(self, tree: ast.Module) -> Node | None:
        """The last container that the file builds at its top, or else in a function."""
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions.setdefault(node.name, node)  # type: ignore[arg-type]
            elif isinstance(node, ast.ClassDef):
                self.classes.setdefault(node.name, node)
            elif isinstance(node, ast.Call) and _name(node.func).endswith("add_argument"):
                self._argument(node)
        names: dict[str, Any] = {}
        self.block(tree.body, names)
        made = self._whole(self.found)
        called = {
            _name(n.func).rpartition(".")[2] for n in ast.walk(tree) if isinstance(n, ast.Call)
        }
        # Without a main program, the first function that nobody calls is taken for one.
        for function in list(self.functions.values()):
            if made is None and function.name not in called:
                self.found = []
                self._called(function, [], {}, names)
                made = self._whole(self.found)
        return made or self._listed(tree, names)

    def _listed(self, tree: ast.Module, names: dict[str, Any]) -> Node | None:
        """The first recipe of a table of recipes with what each of them shall differ in:
        (recipe, "name", {"tensor_model_parallel_size": 2}), parts of the container or fields of
        its model."""
        for node in ast.walk(tree):
            if not isinstance(node, ast.Tuple) or not node.elts:
                continue
            name = _name(node.elts[0]).rpartition(".")[2]
            base = recipe(self.aliases.get(name, name))
            if base is None:
                continue
            made = Node("ConfigContainer", {}, node.lineno, base)
            for part in node.elts[1:]:
                said = self.value(part, names)
                if isinstance(said, Node):
                    nested = all(isinstance(v, Node) for v in said.fields.values())
                    owner = made if nested else made.fields.setdefault("model", Node())
                    owner.fields |= said.fields
            return made
        return None

    @staticmethod
    def _whole(found: list[Node]) -> Node | None:
        """The last container that says which model, or else any."""
        made = [n for n in found if n.fields or n.recipe]
        whole = [n for n in made if n.recipe or "model" in n.fields]
        return whole[-1] if whole else made[-1] if made else None

    def _argument(self, call: ast.Call) -> None:
        flags = [a.value for a in call.args if isinstance(a, ast.Constant)]
        flags = [f for f in flags if isinstance(f, str) and f.startswith("--")]
        given = {k.arg: k.value for k in call.keywords}
        action = self.value(given["action"], {}) if "action" in given else ""
        for name in flags[:1]:
            if action in ("store_true", "store_false"):
                self.defaults[name[2:].replace("-", "_")] = action == "store_false"
            elif "default" in given:
                self.defaults[name[2:].replace("-", "_")] = self.value(given["default"], {})

    def block(self, body: list[ast.stmt], names: dict[str, Any]) -> None:
        for statement in body:
            self.steps += 1
            if self.steps > _MOST:
                return
            self.statement(statement, names)

    def statement(self, node: ast.stmt, names: dict[str, Any]) -> None:
        match node:
            case ast.Assign():
                value = self.value(node.value, names)
                for target in node.targets:
                    self.assign(target, value, names, node.lineno)
            case ast.AnnAssign(value=value) if value is not None:
                self.assign(node.target, self.value(value, names), names, node.lineno)
            case ast.Expr():
                self.value(node.value, names)
            case ast.If():
                self.block(node.body if self._true(node.test, names) else node.orelse, names)
            case ast.With() | ast.Try():
                self.block(node.body, names)
                self.block(getattr(node, "finalbody", []), names)
            case ast.For():
                items = self.value(node.iter, names)
                if isinstance(items, list | tuple) and items:
                    self.assign(node.target, items[0], names, node.lineno)
                self.block(node.body, names)
            case ast.ImportFrom() | ast.Import():
                for alias in node.names:
                    if alias.asname:
                        self.aliases[alias.asname] = alias.name.rpartition(".")[2]
            case ast.Return():
                raise _Return(self.value(node.value, names) if node.value else None)
            case _:
                pass

    def _true(self, test: ast.expr, names: dict[str, Any]) -> bool:
        if isinstance(test, ast.Compare) and _name(test.left) == "__name__":
            return True
        if isinstance(test, ast.Call) and _name(test.func) in ("isinstance", "hasattr"):
            return True
        value = self.value(test, names)
        return bool(value) and not isinstance(value, Open | Node)

    def assign(self, target: ast.expr, value: Any, names: dict[str, Any], line: int) -> None:
        match target:
            case ast.Name():
                names[target.id] = value
            case ast.Attribute():
                owner = self.value(target.value, names)
                if isinstance(owner, Node):
                    placed = value if isinstance(value, Node) else (value, _Line(line))
                    owner.fields.pop(target.attr, None)
                    owner.fields[target.attr] = placed
            case ast.Tuple() | ast.List():
                parts = value if isinstance(value, list | tuple) else []
                for i, part in enumerate(target.elts):
                    item = parts[i] if i < len(parts) else Open(ast.unparse(part))
                    self.assign(part, item, names, line)
            case _:
                pass

    def value(self, node: ast.expr, names: dict[str, Any]) -> Any:
        self.steps += 1
        if self.steps > _MOST:
            return Open("...")
        match node:
            case ast.Constant():
                return node.value if not isinstance(node.value, complex | bytes) else Open("...")
            case ast.Name():
                return self._named(node.id, names)
            case ast.Attribute():
                return self._attribute(node, names)
            case ast.List() | ast.Tuple():
                return [self.value(e, names) for e in node.elts]
            case ast.Dict():
                keys = [self.value(k, names) if k else None for k in node.keys]
                values = [self.value(v, names) for v in node.values]
                return Node("dict", {str(k): v for k, v in zip(keys, values, strict=True) if k})
            case ast.Subscript():
                return self._item(node, names)
            case ast.UnaryOp(op=ast.USub()):
                inner = self.value(node.operand, names)
                return -inner if isinstance(inner, int | float) else Open(_text(node))
            case ast.UnaryOp(op=ast.Not()):
                inner = self.value(node.operand, names)
                return Open(_text(node)) if isinstance(inner, Open | Node) else not inner
            case ast.BinOp():
                return self._binary(node, names)
            case ast.BoolOp():
                return self._either(node, names)
            case ast.Compare() if len(node.ops) == 1:
                return self._compared(node, names)
            case ast.IfExp():
                chosen = node.body if self._true(node.test, names) else node.orelse
                return self.value(chosen, names)
            case ast.Call():
                return self._call(node, names)
            case _:
                return Open(_text(node))

    def _named(self, name: str, names: dict[str, Any]) -> Any:
        if name not in names and name in _CONTAINERS:
            names[name] = self._found(Node("ConfigContainer"))
        return names.get(name, Open(name))

    def _attribute(self, node: ast.Attribute, names: dict[str, Any]) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id not in names:
            if node.value.id in ("torch", "F"):
                return node.attr
            if node.attr in self.defaults:
                return self.defaults[node.attr]
        owner = self.value(node.value, names)
        if not isinstance(owner, Node):
            return self.defaults.get(node.attr, Open(_text(node)))
        if node.attr not in owner.fields:
            said = owner.recipe.settings if owner.recipe else {}
            if any(path.startswith(f"{node.attr}.") for path in said) or owner.kind in (
                "",
                "ConfigContainer",
            ):
                owner.fields[node.attr] = Node()
            else:
                return self.defaults.get(node.attr, Open(_text(node)))
        value = owner.fields[node.attr]
        return value[0] if placed(value) else value

    def _item(self, node: ast.Subscript, names: dict[str, Any]) -> Any:
        owner, key = self.value(node.value, names), self.value(node.slice, names)
        if isinstance(owner, Node) and str(key) in owner.fields:
            value = owner.fields[str(key)]
            return value[0] if placed(value) else value
        if isinstance(owner, list) and isinstance(key, int) and -len(owner) <= key < len(owner):
            return owner[key]
        return Open(_text(node))

    def _binary(self, node: ast.BinOp, names: dict[str, Any]) -> Any:
        left, right = self.value(node.left, names), self.value(node.right, names)
        plain = (bool, int, float)
        if type(left) in plain and type(right) in plain and max(abs(left), abs(right)) < 1e15:
            match node.op:
                case ast.Add():
                    return left + right
                case ast.Sub():
                    return left - right
                case ast.Mult():
                    return left * right
                case ast.FloorDiv() if right:
                    return left // right
                case ast.Div() if right:
                    return left / right
                case ast.Mod() if right:
                    return left % right
        if isinstance(left, list) and isinstance(right, list) and isinstance(node.op, ast.Add):
            return (left + right)[:10_000]
        if isinstance(left, list) and isinstance(right, int) and isinstance(node.op, ast.Mult):
            return (left * min(right, 1000))[:10_000]
        if isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add):
            return (left + right)[:10_000]
        return Open(_text(node))

    def _either(self, node: ast.BoolOp, names: dict[str, Any]) -> Any:
        last: Any = None
        for part in node.values:
            last = self.value(part, names)
            true = bool(last) and not isinstance(last, Open)
            if true == isinstance(node.op, ast.Or):
                return last
        return last

    def _compared(self, node: ast.Compare, names: dict[str, Any]) -> Any:
        left, right = self.value(node.left, names), self.value(node.comparators[0], names)
        if isinstance(left, Open | Node) or isinstance(right, Open | Node):
            return Open(_text(node))
        match node.ops[0]:
            case ast.Eq() | ast.Is():
                return left == right
            case ast.NotEq() | ast.IsNot():
                return left != right
        try:
            match node.ops[0]:
                case ast.Gt():
                    return left > right
                case ast.GtE():
                    return left >= right
                case ast.Lt():
                    return left < right
                case ast.LtE():
                    return left <= right
                case ast.In():
                    return left in right
        except TypeError:
            pass
        return Open(_text(node))

    def _call(self, node: ast.Call, names: dict[str, Any]) -> Any:
        name = _name(node.func)
        short = name.rpartition(".")[2]
        short = self.aliases.get(short, short)
        args = [self.value(a, names) for a in node.args if not isinstance(a, ast.Starred)]
        kwargs = {k.arg: self.value(k.value, names) for k in node.keywords if k.arg}
        for keyword in node.keywords:
            spread = self.value(keyword.value, names) if keyword.arg is None else None
            if isinstance(spread, Node):
                kwargs = spread.fields | kwargs
        if short in ("int", "float", "str", "bool") and args:
            return self._cast(short, args[0], node)
        if short in ("getenv", "get") and "environ" in name + short and len(args) == 2:
            return args[1]
        if short == "getenv" and len(args) == 2:
            return args[1]
        if short == "from_hf_pretrained" and args and isinstance(args[0], str):
            return Node("bridge", hub=args[0])
        if short == "getattr" and len(args) > 1 and isinstance(args[0], Node):
            there = args[0].fields.get(str(args[1]), args[2] if len(args) > 2 else None)
            return there[0] if placed(there) else there
        if short.startswith("distributed_fused_adam_with_"):
            return _adam(kwargs)
        if short == "from_hf_config":
            return Node("bridge", hub=args[0].hub if args and isinstance(args[0], Node) else "?")
        if short == "from_pretrained" and args and isinstance(args[0], str):
            return Node("hub", hub=args[0])
        if short == "setattr" and len(args) == 3 and isinstance(args[0], Node):
            if isinstance(args[1], str):
                args[0].fields[args[1]] = args[2]
            return None
        if short == "replace" and args and isinstance(args[0], Node):
            return replace(args[0], fields=args[0].fields | kwargs)
        if short == "dict":
            return Node("dict", dict(kwargs))
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value, names)
            if isinstance(owner, Node):
                if owner.hub:
                    return Node("model", {}, node.lineno, hub=owner.hub)
                if short in ("copy", "deepcopy"):
                    return owner
                if short == "get" and args:
                    last = args[1] if len(args) > 1 else None
                    return owner.fields.get(str(args[0]), last)
                if short == "update" and args and isinstance(args[0], Node):
                    owner.fields |= args[0].fields
                    return None
        if short == "deepcopy" and args:
            return args[0]
        if (base := recipe(short)) or short in _COMMON:
            base = base or common(_COMMON[short])
            return self._found(self._from_recipe(base, kwargs, node.lineno))
        if short in self.functions and self.functions[short].name == short:
            return self._called(self.functions[short], args, kwargs, names)
        made = Node(short, self._class_fields(short) | _lined(kwargs, node.lineno), node.lineno)
        return self._found(made) if short == "ConfigContainer" else made

    def _from_recipe(self, base: Recipe, kwargs: dict[str, Any], line: int) -> Node:
        made = Node("ConfigContainer", {}, line, base)
        for name, value in kwargs.items():
            path = ARGUMENTS.get(name)
            if name in MODEL_ARGUMENTS:
                path = f"model.{name}"
            if path is None:
                continue
            owner = made
            *parts, last = path.split(".")
            for part in parts:
                owner = owner.fields.setdefault(part, Node())
            owner.fields[last] = (value, _Line(line))
        return made

    @staticmethod
    def _cast(kind: str, value: Any, node: ast.Call) -> Any:
        if isinstance(value, Open | Node | list):
            return value if isinstance(value, Open) else Open(_text(node))
        try:
            number = float(value) if kind in ("int", "float") else value
            return int(number) if kind == "int" else number
        except (TypeError, ValueError, OverflowError):
            return Open(_text(node))

    def _class_fields(self, name: str, depth: int = 0) -> dict[str, Any]:
        """Defaults of a class that the file holds, those of its bases first."""
        known = self.classes.get(name)
        if known is None or depth > _DEEPEST:
            return {}
        fields: dict[str, Any] = {}
        for base in known.bases:
            fields |= self._class_fields(_name(base), depth + 1)
        for statement in known.body:
            if isinstance(statement, ast.AnnAssign | ast.Assign) and statement.value is not None:
                target = (
                    statement.target
                    if isinstance(statement, ast.AnnAssign)
                    else statement.targets[0]
                )
                if isinstance(target, ast.Name):
                    value = self.value(statement.value, {})
                    fields[target.id] = (value, _Line(statement.lineno))
        return fields

    def _called(
        self, function: ast.FunctionDef, args: list[Any], kwargs: dict[str, Any], names: dict
    ) -> Any:
        """What a function of the file returns: its body, with its arguments."""
        if self.depth >= _DEEPEST:
            return Open(function.name)
        given = function.args
        inner = {k: v for k, v in names.items()}
        parameters = [*given.posonlyargs, *given.args]
        for parameter, default in zip(reversed(parameters), reversed(given.defaults), strict=False):
            inner[parameter.arg] = self.value(default, names)
        for parameter, default in zip(given.kwonlyargs, given.kw_defaults, strict=False):
            if default is not None:
                inner[parameter.arg] = self.value(default, names)
        for parameter, value in zip(parameters, args, strict=False):
            inner[parameter.arg] = value
        inner |= kwargs
        if given.kwarg:
            own = {p.arg for p in (*parameters, *given.kwonlyargs)}
            inner[given.kwarg.arg] = Node("dict", {k: v for k, v in kwargs.items() if k not in own})
        self.depth += 1
        try:
            self.block(function.body, inner)
        except _Return as answer:
            return answer.value
        finally:
            self.depth -= 1
        return None

    def _found(self, node: Node) -> Node:
        self.found.append(node)
        return node


def _adam(said: dict[str, Any]) -> list[Node]:
    """The optimizer and the scheduler of recipes (recipes/utils/optimizer_utils.py)."""
    optimizer = {
        "optimizer": "adam", "lr": said.get("max_lr", 1e-4), "min_lr": said.get("min_lr", 1e-5),
        "weight_decay": said.get("weight_decay", 0.1), "adam_beta1": said.get("adam_beta1", 0.9),
        "adam_beta2": said.get("adam_beta2", 0.95), "adam_eps": said.get("adam_eps", 1e-8),
        "clip_grad": said.get("clip_grad", 1.0), "use_distributed_optimizer": True,
    }  # fmt: skip
    scheduler = {
        "lr_decay_style": "cosine",
        "lr_warmup_iters": said.get("lr_warmup_iters", 2000),
        "lr_decay_iters": said.get("lr_decay_iters"),
    }
    return [Node("OptimizerConfig", optimizer), Node("SchedulerConfig", scheduler)]


def _lined(kwargs: dict[str, Any], line: int) -> dict[str, Any]:
    return {k: v if isinstance(v, Node) else (v, _Line(line)) for k, v in kwargs.items()}


def _name(node: ast.expr) -> str:
    """A dotted name, as far as it is one."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return ""


def _text(node: ast.expr) -> str:
    return ast.unparse(node)[:80]
