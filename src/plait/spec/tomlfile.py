"""Files that a person names: a job's TOML as nested tables, and what lies beside a missing one."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.spec.findings import Finding, closest, error


def read_toml(path: Path, findings: list[Finding]) -> dict[str, Any]:
    """The file as nested dicts with underscored keys, the model always a table."""
    where = str(path)
    try:
        tree = _underscored(tomllib.loads(path.read_bytes().decode("utf-8")))
    except FileNotFoundError:
        hint = neighbour(path, ".toml")
        findings.append(error(where, where, "no such file", hint))
    except IsADirectoryError:
        findings.append(error(where, where, "a folder, not a job file"))
    except OSError as problem:
        findings.append(error(where, where, f"cannot be read: {problem.strerror}"))
    except UnicodeDecodeError:
        findings.append(error(where, where, "not a text file (TOML is UTF-8)"))
    except (ValueError, RecursionError) as problem:
        line = str(problem).partition("\n")[0]
        findings.append(error(where, where, f"not valid TOML: {line}"))
    else:
        if isinstance(tree.get("model"), str):
            tree["model"] = {"name": tree["model"]}
        return tree
    return {}


def neighbour(path: Path, suffix: str = "") -> str | None:
    """The file beside a missing one that is named most like it, of those that end in `suffix`."""
    try:
        names = [p.name for p in path.parent.iterdir() if p.name.endswith(suffix) and p.is_file()]
    except (OSError, ValueError):
        return None
    match = closest(path.name, names)
    return str(path.parent / match) if match else None


def _underscored(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key.replace("-", "_"): _underscored(value) for key, value in tree.items()}
    return tree
