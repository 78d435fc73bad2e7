"""Python that builds a ConfigContainer, read as syntax: what it would set. Nothing is run.

Followed are assignments, keyword arguments, functions and classes of the same file, defaults of
arguments and of environment variables. A condition that the file does not decide counts as false,
a loop is gone through once. What is not known stays open.
"""

import ast
from dataclasses import dataclass, field
from typing import Any

from plait.dialects.megatron_bridge.reader import Node, Open, Reader, placed
from plait.dialects.megatron_bridge.recipes import Recipe, model_of, provided
from plait.dialects.settings import Setting
from plait.dialects.source import Source
from plait.spec.findings import UserError, error


@dataclass(frozen=True)
class Program:
    """What a Python file sets.

    Attributes:
        settings: by dotted path, with the lines on which they stand.
        recipe: the one that it starts from.
        model: as fields of a job file, where it names one on the hub.
        hub: that name.
    """

    settings: list[Setting]
    recipe: Recipe | None = None
    model: dict[str, Any] = field(default_factory=dict)
    hub: str = ""


def read_python(source: Source) -> Program:
    """A Python file's ConfigContainer; of several the last.

    Raises:
        UserError: not Python.
    """
    where = str(source.path or source.name)
    try:
        tree = ast.parse(source.text)
    except SyntaxError as problem:
        message = f"not valid Python, line {problem.lineno}: {problem.msg}"
        raise UserError([error(where, None, message, rule="unreadable-file")]) from None
    except (RecursionError, MemoryError, ValueError):
        message = "not valid Python: nested too deeply"
        raise UserError([error(where, None, message, rule="unreadable-file")]) from None
    reader = Reader(source.name)
    try:
        container = reader.container(tree)
    except RecursionError:
        message = "nested too deeply"
        raise UserError([error(where, None, message, rule="unreadable-file")]) from None
    return _program(container, source.name) if container else Program([])


def _program(container: Node, name: str) -> Program:
    model = container.fields.get("model")
    hub = model.hub if isinstance(model, Node) else ""
    settings = [*_settings(container, name)]
    known = model_of(hub) if hub else provided(model.kind) if isinstance(model, Node) else {}
    return Program(settings, container.recipe, known, hub)


def _settings(node: Node, name: str, prefix: str = "") -> list[Setting]:
    found = []
    for key, value in node.fields.items():
        path = f"{prefix}.{key}" if prefix else key
        if key.startswith("_"):
            continue
        where, value = (f"{name}:{value[1]}", value[0]) if placed(value) else (name, value)
        if isinstance(value, Node):
            if path == "mixed_precision" and value.kind.endswith("_mixed"):
                found.append(Setting(path, value.kind.rpartition(".")[2], where))
            if path == "peft":
                found.append(Setting(path, value.kind or "peft", where))
            elif path.count(".") < 3:
                found += _settings(value, name, path)
        elif isinstance(value, Open):
            found.append(Setting(path, value.text, where, (value.text,)))
        else:
            found.append(Setting(path, value, where))
    return found
