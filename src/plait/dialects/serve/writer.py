"""Serve commands as text: flags one a line, a file a node where several are needed."""

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from plait.cost.serving import Serving
from plait.dialects.huggingface_names import named, repository_of
from plait.dialects.launch import note
from plait.spec.findings import Finding
from plait.spec.job import Job
from plait.spec.model import Model

#: Of more nodes there is one file, in which the node says its number.
_FILES = 64
ADDRESS = "$MASTER_ADDR"


def command(words: Sequence[str], flags: Iterable[tuple[str, Any]]) -> str:
    """A command, with a flag and its value a line; True stands for a switch, None and False for
    nothing."""
    lines = [" ".join(_quoted(w) for w in words)]
    for name, value in flags:
        if value is None or value is False:
            continue
        lines.append(name if value is True else f"{name} {_quoted(str(value))}")
    return " \\\n    ".join(lines)


def _quoted(text: str) -> str:
    return f'"{text}"' if text.startswith("$") or ADDRESS in text else shlex.quote(text)


def scripts(commands: Sequence[str], first: str = "serve.sh") -> dict[str, str]:
    """A file for each node; of one node one file."""
    if len(commands) == 1:
        return {first: f"#!/bin/sh\n{commands[0]}\n"}
    files = {}
    for rank, text in enumerate(commands):
        head = f"#!/bin/sh\n# Node {rank} of {len(commands)}. MASTER_ADDR: address of node 0.\n"
        files[f"serve-node{rank}.sh"] = f"{head}{text}\n"
    return files


def devices_of_node(job: Job, serving: Serving | None) -> int:
    if serving is not None and serving.node:
        return serving.node
    return job.cluster.node if job.cluster else 8


def repository(job: Job, serving: Serving | None, engine: str) -> tuple[str, list[Finding]]:
    """What to call the model: as the launch did, or where it lies on the hub."""
    if serving is not None and serving.model and _of(serving.model, job.model):
        return serving.model, []
    found = repository_of(job.model.name)
    if found is not None:
        return found, []
    words = f"{job.model.name} has no repository that is known: ./{job.model.name} is a folder"
    return f"./{job.model.name}", [note(engine, "model-folder", words)]


def _of(name: str, model: Model) -> bool:
    """Whether a name is of this model, as far as names tell."""
    known = named(name)
    return known is None or model.name in known.fields.values()


def dropped(job: Job, engine: str) -> list[Finding]:
    """What a serving engine has no use for."""
    layout = job.layout
    named_ = []
    if layout.recompute != "none":
        named_.append(f"recompute {layout.recompute}")
    if layout.vpp > 1:
        named_.append(f"vpp {layout.vpp}")
    if layout.pp > 1 and layout.schedule.partition(":")[0] not in ("1f1b", "interleaved-1f1b"):
        named_.append(f"schedule {layout.schedule}")
    if layout.ulysses > 1:
        named_.append(f"ulysses {layout.ulysses}")
    if layout.sequence_parallel:
        named_.append("sequence parallelism of norm regions")
    if not named_:
        return []
    return [note(engine, "training-only", f"training has {', '.join(named_)}; serving does not")]
