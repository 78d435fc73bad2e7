"""Models and clusters by the names that people say, or from a file.

The presets are data: `presets/models.json` and `presets/clusters.json`. Dropout is a choice of
a training run, not of a model, and is 0 in all of them.
"""

import json
import os
import tomllib
from dataclasses import MISSING, fields
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any

from plait.spec.build import check_fields
from plait.spec.cluster import Cluster
from plait.spec.findings import Finding, UserError, closest, error
from plait.spec.huggingface import from_config
from plait.spec.layout import LARGEST
from plait.spec.model import Model

#: Keys of a preset that say something about it and are no fields of `Model` or `Cluster`.
ABOUT = ("published", "note", "aliases")
#: Dtypes that a device may have a peak for.
_PEAKS = ("float64", "float32", "bfloat16", "float16", "float8", "float4")


def model(name: str) -> Model:
    """A model by its preset name ("llama3.1-8b", in any case) or from a Hugging Face config.

    A config is a `config.json` or a folder that holds one.

    Raises:
        UserError: no such preset (with the nearest), or a file that cannot be read or understood.
    """
    presets = _table("models")
    key = name.strip().lower()
    if key in presets:
        return _build(Model, presets[key] | {"name": key}, key)
    path = Path(name).expanduser()
    if not _names_a_file(name):
        match = closest(key, presets)
        message = f"no model is called {name!r}, and it is no folder or config.json either"
        raise UserError([error("model", name, message, match, rule="unknown-model")])
    if path.is_dir():
        path = path / "config.json"
    config = _read(path, "model")
    title = path.parent.resolve().name if path.name == "config.json" else path.stem
    return from_config(config, title, where=str(path))


def model_names() -> list[str]:
    """Every preset model, in the order of the data file."""
    return list(_table("models"))


def published_parameters(name: str) -> int | None:
    """The exact parameter count that a preset model was published with, where there is one."""
    return _table("models")[name].get("published")


def cluster(text: str) -> Cluster:
    """A cluster as "GPU:COUNT" ("h100:64", in any case), or from a JSON or TOML file.

    A file holds the fields of `Cluster`; `name` may be left out.

    Raises:
        UserError: an unknown GPU (with the nearest), a count that is no positive whole number,
            or a file that cannot be read or understood.
    """
    if _names_a_file(text):
        path = Path(text).expanduser()
        given = {"name": path.stem} | _read(path, "gpus")
        return _build(Cluster, given, str(path))
    presets = _table("clusters")
    names = {alias: key for key, entry in presets.items() for alias in entry.get("aliases", [])}
    names |= {key: key for key in presets}
    device, colon, count = text.strip().lower().partition(":")
    device, count = device.strip(), count.strip()
    findings, right_device, right_count = [], names.get(device), "8"
    if right_device is None:
        right_device = names.get(closest(device, names, 0.3) or "")
        findings.append(f"no GPU is called {device!r}")
    if count.isascii() and count.isdecimal() and count.strip("0"):
        too_many = len(count.lstrip("0")) > 8 or int(count) > LARGEST
        right_count = str(LARGEST if too_many else int(count))
        if too_many:
            findings.append(f"{count} devices are more than {LARGEST}")
    elif not colon:
        findings.append(f"{text!r} does not say how many: write GPU:COUNT")
    else:
        findings.append(f"{count!r} is not a positive whole number of devices")
    if findings:
        suggestion = f"{right_device}:{right_count}" if right_device else None
        raise UserError(
            error("gpus", text, message, suggestion, rule="unknown-cluster") for message in findings
        )
    entry = presets[right_device]
    given = entry | {"name": f"{right_device}:{int(count)}", "devices": int(count)}
    return _build(Cluster, given, text)


def cluster_names() -> list[str]:
    """Every preset GPU, in the order of the data file."""
    return list(_table("clusters"))


def _table(kind: str) -> dict[str, dict[str, Any]]:
    return json.loads(files("plait.spec").joinpath("presets", f"{kind}.json").read_text("utf-8"))


def _names_a_file(text: str) -> bool:
    return "/" in text or text.lower().endswith((".json", ".toml")) or os.path.exists(text)


def _read(path: Path, where: str) -> dict[str, Any]:
    """A JSON or TOML file that holds one table."""
    toml = path.suffix.lower() == ".toml"
    try:
        text = path.read_text("utf-8")
        content = tomllib.loads(text) if toml else json.loads(text)
    except FileNotFoundError:
        problem = f"there is no file {path}"
    except OSError as failure:
        problem = f"{path} cannot be read: {(failure.strerror or 'unknown reason').lower()}"
    except UnicodeDecodeError:
        problem = f"{path} is not a text file in UTF-8"
    except (ValueError, RecursionError) as failure:
        kind = "TOML" if toml else "JSON"
        problem = f"{path} is not valid {kind}: {str(failure).splitlines()[0]}"
    else:
        if isinstance(content, dict):
            return content
        problem = f"{path} holds a {type(content).__name__}, not an object of keys and values"
    raise UserError([error(where, str(path), problem, rule="unreadable-file")])


def _build(cls: type, given: dict[str, Any], where: str) -> Any:
    """An object out of a table, or every problem with the table at once."""
    findings: list[Finding] = []
    values = check_fields(cls, {k: v for k, v in given.items() if k not in ABOUT}, where, findings)
    for field in fields(cls):
        if field.default is MISSING and field.name not in given and field.name != "nic":
            findings.append(error(f"{where}.{field.name}", None, "is missing"))
    if cls is Cluster:
        values.setdefault("nic", None)
        above_0 = ("devices", "node", "fast_domain", "memory", "memory_bandwidth", "link", "nic")
        numbers = {name: values.get(name) for name in (*above_0, "peer")}
        for dtype, value in (values.get("peak_flops") or {}).items():
            if dtype not in _PEAKS:
                place, match = f"{where}.peak_flops.{dtype}", closest(dtype, _PEAKS)
                findings.append(error(place, value, "no such dtype", match, "unknown-key"))
            else:
                numbers[f"peak_flops.{dtype}"] = value
        for name, value in numbers.items():
            if value is not None and not 0 < value < inf:
                findings.append(error(f"{where}.{name}", value, f"{value} is not above 0", 1))
    if findings:
        raise UserError(findings)
    return cls(**values)
