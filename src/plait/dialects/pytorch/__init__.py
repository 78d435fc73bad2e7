"""Mesh scripts of plain PyTorch: read as syntax, never run.

Read are a `.py` file, text that holds one, or the command that starts it (torchrun ... FILE.py
--tp 4), whose options replace the defaults of argparse. Written is a script that runs: a small
transformer, its mesh, plans, sharding and pipeline.
"""

import re
from contextlib import suppress
from typing import Any

from plait.dialects import shell
from plait.dialects.flags import settings_of
from plait.dialects.huggingface_names import named
from plait.dialects.launch import Launch, Told, Written
from plait.dialects.nearest import smallest_world
from plait.dialects.python.reader import Reader
from plait.dialects.python.values import Open, parse
from plait.dialects.pytorch.mesh import Meshes
from plait.dialects.pytorch.script import Script
from plait.dialects.pytorch.validation import plain_rules, rules
from plait.dialects.pytorch.writer import written
from plait.dialects.settings import Settings
from plait.dialects.shell import launchers
from plait.dialects.source import Source
from plait.spec.findings import Finding, UserError, error
from plait.spec.job import Job
from plait.spec.schedule import canonical

VERSION = "PyTorch 2.13 (DeviceMesh, DTensor plans, FSDP2, pipelining)"

_DTYPES = ("bfloat16", "float16", "float32", "float64")
#: Words without which a script has nothing to do with a mesh.
_SIGNS = (
    "init_device_mesh", "DeviceMesh", "parallelize_module", "fully_shard", "FullyShardedData",
    "DistributedDataParallel", "DDP(", "FSDP(", "PipelineStage", "context_parallel", "replicate(",
    "init_process_group", "tp_plan", "ParallelismConfig",
)  # fmt: skip


def read(source: Source, told: Told) -> Launch:
    """What a mesh script says.

    Raises:
        UserError: it is not Python, or makes no mesh and wraps no model.
    """
    script, world, arguments = _opened(source)
    world = told.world or world or _in_comments(script)
    where = str(script.path or script.name)
    tree = parse(script)
    if not any(sign in script.text for sign in _SIGNS):
        message = "no mesh script: it makes no device mesh and wraps no model"
        raise UserError([error(where, None, message, rule="no-mesh")])
    meshes = Meshes(world)
    reader = Reader(world, arguments, outside=meshes.hook)
    reader.run(tree)
    # What nothing calls is a library's: it is followed with what its callers may give.
    for name in reader.functions()[:100] if not _useful(reader) else ():
        reader.call(name)
    found = Script(reader, meshes)
    settings = Settings(found.settings(), told.given)
    fields = _fields(settings, found, told, world)
    notes = [*meshes.findings, *plain_rules(found)]
    return Launch(fields, settings, (), notes, facts=found.facts | {"plan": found.plan})


def check(launch: Launch, job: Job) -> list[Finding]:
    """What torch says to the job."""
    return rules(launch.facts, job)


def write(job: Job) -> Written:
    """A script that runs: model, mesh, plans, sharding, pipeline."""
    return written(job)


def _useful(reader: Reader) -> bool:
    words = {call.word for call in reader.calls}
    return bool(words & {"parallelize_module", "fully_shard", "FSDP", "DDP", "init_device_mesh"})


def _opened(source: Source) -> tuple[Source, int | None, dict[str, Any]]:
    """The script, the ranks that a command starts it on, and its options."""
    if source.suffix == ".py" or (source.path is None and "import " in source.text):
        return source, None, {}
    if source.path is not None and source.suffix not in (".sh", ".slurm", ".sbatch", ""):
        return source, None, {}
    if re.search(r"^(import|from) \w", source.text, re.M):
        return source, None, {}
    run = launchers.find(shell.read(source), ("*.py",))
    if run is None:
        where = str(source.path or source.name)
        raise UserError([error(where, None, "starts no Python script", rule="no-command")])
    said, _ = settings_of(run.words, {})
    options = {s.name: Open(s.open[0]) if s.open else s.value for s in said}
    options |= {s.name.replace("-", "_").replace("__", "--", 1): options[s.name] for s in said}
    return source.beside(run.program.text), run.world, options


def _in_comments(source: Source) -> int | None:
    """Ranks of a torchrun command in comments or docstrings."""
    for line in source.text.splitlines()[:2000]:
        if "torchrun" in line and "nproc" in line and len(line) < 2000:
            with suppress(UserError):
                text = line[line.index("torchrun") :].strip().rstrip("`\"'\\")
                for run in launchers.runs(shell.read(Source(text, "comment"))):
                    if run.world:
                        return run.world
    return None


def _fields(settings: Settings, found: Script, told: Told, world: int | None) -> dict[str, Any]:
    take = settings.take
    fields: dict[str, Any] = {}
    for axis in ("tp", "cp", "pp", "dp_replicate", "dp_shard"):
        size = take(f"mesh.{axis}", int, None, f"layout.{axis}")
        if size is not None:
            fields[f"layout.{axis}"] = size
    expert = take("mesh.ep", int, None, "layout.ep")
    if expert is not None:
        fields["layout.ep"] = expert
    for name in [name for name in settings.said if name.startswith("mesh.")]:
        if name not in settings.taken:
            take(name, int, None, "a mesh dim that no call uses")
    split = take("plan.sequence_parallel", bool, False, "layout.sequence_parallel")
    if fields.get("layout.tp", 1) > 1:
        fields["layout.sequence_parallel"] = split
    fields |= _zero(settings, found, fields)
    fields |= _pipeline(settings, fields)
    size = found.facts.get("mesh")
    if world is not None or size:
        fields["ranks"] = world or size
    elif "layout.zero" in fields:
        size = smallest_world(fields)[0]
    found.facts["world"] = world
    if take("checkpoint_wrapper", bool, False, "layout.recompute"):
        fields["layout.recompute"] = "full"
    rotate = take("rotate_method", str, "allgather", "layout.cp_method")
    if fields.get("layout.cp", 1) > 1:
        fields["layout.cp_method"] = "ring" if rotate == "alltoall" else "all-gather"
    return fields | _batch(settings, fields) | _model(settings, found, told)


def _zero(settings: Settings, found: Script, fields: dict[str, Any]) -> dict[str, Any]:
    """The ZeRO stage, and which of the data-parallel dims are sharded."""
    take = settings.take
    take("sharding_strategy", str, None, "layout.zero")
    zero = take("fully_shard", int, None, "layout.zero")
    shard, replicate = fields.get("layout.dp_shard"), fields.get("layout.dp_replicate")
    if zero is None:
        # Nothing shards: what a dim is called does not make it so.
        if shard is not None and shard * (replicate or 1) > 1:
            return {"layout.dp_replicate": shard * (replicate or 1), "layout.dp_shard": 1,
                    "layout.zero": 0}  # fmt: skip
        return {}
    if zero == 0:
        total = (shard or 1) * (replicate or 1)
        if shard is None and replicate is None:
            return {"layout.zero": 0}
        return {"layout.zero": 0, "layout.dp_replicate": total, "layout.dp_shard": 1}
    if shard is not None and shard * (fields.get("layout.cp") or 1) == 1:
        return {"layout.zero": 0, "layout.dp_replicate": replicate or 1, "layout.dp_shard": 1}
    return {"layout.zero": zero}


def _pipeline(settings: Settings, fields: dict[str, Any]) -> dict[str, Any]:
    name = settings.take("schedule", str, None, "layout.schedule")
    stages = settings.take("num_stages", int, None, "layout.vpp")
    many = settings.take("n_microbatches", int, None, "train.accumulation")
    found: dict[str, Any] = {}
    pp = fields.get("layout.pp", 1)
    if name is None or pp <= 1:
        return found
    found["layout.schedule"] = canonical(name) or name
    if stages:
        found["layout.vpp"] = max(1, stages // pp)
    if many:
        found["train.accumulation"] = many
    table = settings.take("STAGES", tuple[int, ...], None, "layout.stages")
    if table and len(table) == pp * found.get("layout.vpp", 1):
        found["layout.stages"] = tuple(table)
    return found


def _batch(settings: Settings, fields: dict[str, Any]) -> dict[str, Any]:
    take = settings.take
    found: dict[str, Any] = {}
    loaded = take("DataLoader.batch_size", int, None, "layout.micro_batch")
    for path in ("train.global_batch", "train.seq_len", "train.steps", "train.accumulation"):
        value = take(path, int, None, path)
        if value is not None:
            found[path] = value
    micro = take("layout.micro_batch", int, None, "layout.micro_batch")
    batch = take("rank_batch", int, None, "layout.micro_batch") or loaded
    many = fields.get("train.accumulation")
    if many:
        found.pop("train.accumulation", None)
    if micro is None and batch is not None:
        # A schedule cuts a rank's batch into as many micro batches.
        micro = batch if not many else batch // many if batch % many == 0 else None
    if micro:
        found["layout.micro_batch"] = micro
    total = found.get("train.global_batch")
    if total is not None and (many or "train.accumulation" in found) and micro:
        found.pop("train.global_batch")
    rate = take("lr", float, None, "train.learning_rate")
    if rate is not None:
        found["train.learning_rate"] = rate
    for name, path in (("param_dtype", "train.dtype"), ("reduce_dtype", "train.grad_dtype")):
        word = take(name, str, None, path)
        if word in _DTYPES and (path == "train.dtype" or word in ("float32", "bfloat16")):
            found[path] = word
    return found


def _model(settings: Settings, found: Script, told: Told) -> dict[str, Any]:
    """The model, where the script says it: a repository's name, or sizes."""
    paths = [path for path in settings.said if path.startswith("model.")]
    repository = settings.take("from_pretrained", str, None, "model")
    sizes = {}
    for path in paths:
        kind = float if path == "model.rope_theta" else int
        sizes[path] = settings.take(path, kind, None, path)
    if told.model is not None:
        return {}
    if repository is not None:
        known = named(repository)
        return dict(known.fields) if known is not None else {}
    return {path: value for path, value in sizes.items() if value}
