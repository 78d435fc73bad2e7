"""YAML and JSON as trees of plain values: safely, within bounds, and flat where settings are."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from plait.dialects.settings import Setting
from plait.dialects.source import Source
from plait.spec.findings import UserError, error

#: Levels and values of the largest tree that is taken for a configuration.
DEEPEST = 64
MOST = 200_000


def read_yaml(source: Source) -> Any:
    """What a YAML file holds: mappings, lists, texts, numbers.

    Raises:
        UserError: not YAML, several documents, too deep, or too much (aliases of aliases).
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        tree = yaml.load(source.text, Loader=_plain(loader))
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        said = getattr(problem, "problem", None) or str(problem).partition("\n")[0]
        raise UserError([_error(source, f"not valid YAML{line}: {said}")]) from None
    except (RecursionError, ValueError, OverflowError, MemoryError):
        raise UserError([_error(source, "not valid YAML: nested too deeply")]) from None
    return bounded(tree, source)


def _plain(loader: type) -> type:
    """A loader that keeps dates as the texts that they are, and tags of a target's own as plain
    values."""
    import yaml

    class Plain(loader):  # type: ignore[misc, valid-type]
        pass

    def unknown(loader: Any, suffix: str, node: Any) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node, deep=True)
        return loader.construct_scalar(node)

    Plain.add_multi_constructor("!", unknown)
    Plain.add_constructor(
        "tag:yaml.org,2002:timestamp", lambda loader, node: loader.construct_scalar(node)
    )
    return Plain


def read_json(source: Source) -> Any:
    """What a JSON file holds.

    Raises:
        UserError: not JSON, too deep, or too much.
    """
    try:
        return bounded(json.loads(source.text), source)
    except ValueError as problem:
        raise UserError([_error(source, f"not valid JSON: {problem}")]) from None
    except RecursionError:
        raise UserError([_error(source, "not valid JSON: nested too deeply")]) from None


def _error(source: Source, message: str) -> Any:
    return error(str(source.path or source.name), None, message, rule="unreadable-file")


def bounded(tree: Any, source: Source) -> Any:
    """The tree, if walking it takes a bearable time."""
    count = 0
    level = [tree]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                below += value.values()
            elif isinstance(value, list):
                below += value
            if count + len(below) > MOST:
                raise UserError([_error(source, f"more than {MOST} values")])
        count += len(below)
        level = below
        if not level:
            return tree
    raise UserError([_error(source, f"nested more than {DEEPEST} levels deep")])


def flat(tree: Mapping[Any, Any], where: str = "", prefix: str = "") -> Iterator[Setting]:
    """A setting for each leaf, named by its dotted path; empty mappings and lists are leaves."""
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from flat(value, where, name)
        else:
            yield Setting(name, value, where)
