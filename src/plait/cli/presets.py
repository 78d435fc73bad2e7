"""plait presets: the names that may be said."""

import json
from typing import Any

from plait.cli.arguments import parse, parser, superfluous
from plait.dialects import DIALECTS, dialect
from plait.spec import presets
from plait.spec.findings import UserError
from plait.spec.parameters import active_count, parameter_count
from plait.spec.schedule import SCHEDULES

#: As many chunks a rank as anyone has, or more: no limit.
_MANY = 1000


def run(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    words = "The models, clusters, schedules and dialects that have names."
    given, more, findings = parse(argv, parser("presets", "[--json]", words), flags={})
    if problems := [*findings, *superfluous(more)]:
        raise UserError(problems)
    answer = {
        "models": [_model(name) for name in presets.model_names()],
        "clusters": [_cluster(name) for name in presets.cluster_names()],
        "schedules": [_schedule(name) for name in SCHEDULES],
        "dialects": [_dialect(name) for name in DIALECTS],
    }
    print(json.dumps(answer) if given["json"] else _text(answer))
    return 0


def _model(name: str) -> dict[str, Any]:
    model = presets.model(name)
    sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq")
    return {
        "name": name,
        "parameters": parameter_count(model),
        "active_parameters": active_count(model),
        **{size: getattr(model, size) for size in sizes},
        "experts": model.moe.experts if model.moe else 0,
    }


def _cluster(name: str) -> dict[str, Any]:
    cluster = presets.cluster(f"{name}:1")
    fields = ("device", "memory", "node", "fast_domain", "link", "nic", "peak_flops")
    return {"name": name, **{field: getattr(cluster, field) for field in fields}}


def _schedule(name: str) -> dict[str, Any]:
    schedule = SCHEDULES[name]
    few, many = schedule.vpp
    return {
        "name": name,
        "vpp": [few, many if many < _MANY else None],
        "placement": schedule.placement,
        "split_backward": schedule.split,
        "aliases": list(schedule.aliases),
    }


def _dialect(name: str) -> dict[str, Any]:
    return {"name": name, "of": DIALECTS[name], "version": dialect(name).VERSION}


def _text(answer: dict[str, Any]) -> str:
    models = [("model", "parameters", "layers", "hidden", "heads", "kv", "vocab", "seq", "experts")]
    for m in answer["models"]:
        sizes = (m[k] for k in ("layers", "hidden", "heads", "kv_heads", "vocab", "seq"))
        models.append((m["name"], _count(m["parameters"]), *sizes, m["experts"] or ""))
    clusters = [("GPU", "memory", "node", "domain", "link", "network", "device")]
    for c in answer["clusters"]:
        memory, speeds = f"{c['memory'] / 1e9:.0f} GB", (_speed(c["link"]), _speed(c["nic"]))
        clusters.append((c["name"], memory, c["node"], c["fast_domain"], *speeds, c["device"]))
    schedules = [("schedule", "chunks", "placement", "backward", "also called")]
    for s in answer["schedules"]:
        few, many = s["vpp"]
        chunks = str(few) if few == many else f"{few}.."
        backward = "I, W" if s["split_backward"] else "B"
        schedules.append((s["name"], chunks, s["placement"], backward, ", ".join(s["aliases"])))
    cluster = "A cluster is GPU:COUNT, as h100:64."
    dialects = [("dialect", "of", "version"), *(tuple(d.values()) for d in answer["dialects"])]
    tables = (models, clusters, schedules, dialects)
    shown = [_columns(table) for table in tables]
    return "\n\n".join([*shown[:2], cluster, *shown[2:]])


def _count(n: int) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if n >= size:
            return f"{n / size:.3g} {unit}" if n < 999.5 * size else f"{n / size:.0f} {unit}"
    return str(n)


def _speed(rate: float | None) -> str:
    return "" if rate is None else f"{rate / 1e9:.0f} GB/s"


def _columns(rows: list[tuple]) -> str:
    """Rows as aligned columns: the first and text at the left, numbers at the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(texts[0]))]
    lines = []
    for row in texts:
        cells = [row[0].ljust(widths[0])]
        cells += [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        if not row[-1].isdigit() and texts[0][-1] in ("device", "also called"):
            cells[-1] = row[-1]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
