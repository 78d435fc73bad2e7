"""Hugging Face Accelerate: its configuration, and `accelerate launch` commands over it."""

import json
import re
from collections.abc import Mapping
from typing import Any

from plait.dialects import shell
from plait.dialects.accelerate import config as accelerate_config
from plait.dialects.accelerate.config import TARGET, Said
from plait.dialects.deepspeed import config as deepspeed_config
from plait.dialects.deepspeed import json as deepspeed_json
from plait.dialects.deepspeed import trainer as deepspeed_trainer
from plait.dialects.deepspeed import validation as deepspeed_rules
from plait.dialects.launch import (
    AT_START,
    FIRST_STEP,
    Launch,
    Told,
    Written,
    changed,
    note,
    refused,
)
from plait.dialects.settings import Setting, Settings
from plait.dialects.shell import launchers
from plait.dialects.source import Source
from plait.dialects.tree import flat, read_yaml
from plait.spec.findings import Finding, UserError, error
from plait.spec.job import Job
from plait.spec.layout import divisors, nearest

VERSION = "accelerate 1.15.0.dev0 (2026-08)"


def read(source: Source, told: Told) -> Launch:
    """What a configuration, a script or a command says.

    Raises:
        UserError: it is none of these.
    """
    if source.suffix in (".yaml", ".yml", ".json") or _is_config(source):
        script = source.starter()
        if script is None:
            return _launch(source, _tree(source), [], None, told, [])
        source = script
    script = shell.read(source)
    run = next(
        iter(sorted((r for r in launchers.runs(script) if r.launcher == "accelerate"),
                    key=lambda r: not r.command.sure)),
        None,
    )  # fmt: skip
    if run is None:
        message = "no `accelerate launch` in it, and no configuration of Accelerate's"
        raise UserError([error("from", source.name, message, rule="no-command")])
    found: list[Finding] = []
    tree: Mapping[str, Any] = {}
    place = source
    named = next((s for s in run.settings if s.name == "--config-file"), None)
    if named is not None:
        place, tree = _named(source, script, named, found)
    return _launch(place, tree, list(run.settings), run, told, found)


def _is_config(source: Source) -> bool:
    keys = r"^(compute_environment|distributed_type|fsdp_config|num_processes)\s*:"
    return source.path is not None and bool(re.search(keys, source.text, re.M))


def _tree(source: Source) -> Mapping[str, Any]:
    tree = read_yaml(source)
    if not isinstance(tree, Mapping):
        where = str(source.path or source.name)
        message = "not a configuration of Accelerate's: its outermost value is no mapping"
        raise UserError([error(where, None, message, rule="unreadable-file")])
    return tree


def _named(
    source: Source, script: shell.Script, named: Setting, found: list[Finding]
) -> tuple[Source, Mapping[str, Any]]:
    """The configuration that a command names, and where it lies."""
    text = str(named.value)
    written = script.files.get(text)
    if written is not None:
        place = Source(written, text.rpartition("/")[2])
        return place, _tree(place)
    place = source.at_hand(text)
    if place is not None:
        return place, _tree(place)
    message = f"its configuration {text} is not at hand: what it says is not known"
    found.append(changed(TARGET, "accelerate-no-configuration", message, text))
    return source, {}


def _launch(
    place: Source,
    tree: Mapping[str, Any],
    flags: list[Setting],
    run: launchers.Run | None,
    told: Told,
    found: list[Finding],
) -> Launch:
    own = deepspeed_trainer.flags(run.words) if run else []
    # A flag of the script may be called as one of the launcher's: each keeps its own.
    launched = {s.name for s in flags}
    own = [s for s in own if s.name not in launched]
    said_keys = [*flat(tree, place.name if run else "")]
    base = Settings([*own, *said_keys, *flags], told.given)
    said = Said(base)
    scripted = {s.name for s in own}
    for short in list(said.places):
        said.places[short] = [n for n in said.places[short] if n not in scripted]
        if not said.places[short]:
            del said.places[short]
    fields, world = accelerate_config.understand(said, told.world)
    facts: dict[str, Any] = said.values
    settings = base
    if said.values["kind"] == "DEEPSPEED":
        more, settings, notes = _deepspeed(place, said, world, told, own)
        fields |= more
        found = [*found, *notes]
        facts = said.values
    scripts, notes = deepspeed_trainer.fields_of(settings, bool(run) and told.model is None)
    dtype = scripts.pop("train.dtype", None)
    if dtype and facts["precision"] == "no" and facts["kind"] != "DEEPSPEED":
        fields |= {"train.dtype": dtype, "train.grad_dtype": "float32"}
    fields = scripts | fields
    found = [*found, *notes, *said.findings, *_strangers(settings, tree)]
    if facts.get("num_processes") == -1:
        message = "num_processes is -1: it wants --num_processes on the command line"
        found.append(refused(TARGET, "accelerate-processes", AT_START, message, -1))
    if not world and run is not None and told.world is None:
        message = "the number of processes is that of the machine's devices"
        found.append(note(TARGET, "accelerate-world-open", message))
    environment = dict(run.environment) if run else {}
    known = [*accelerate_config.known_of(settings), *scripted]
    known += deepspeed_json.known_of(iter(settings.said))
    return Launch(fields, settings, known, found, environment, facts=facts)


def _deepspeed(
    place: Source, said: Said, world: int | None, told: Told, own: list[Setting]
) -> tuple[dict[str, Any], Settings, list[Finding]]:
    """`deepspeed_config`, inline or in a file of its own."""
    settings = said.settings
    path = said.take("deepspeed_config_file", str, None, "DeepSpeed's own configuration")
    if not path:
        return accelerate_config.inline(said, world), settings, []
    found = accelerate_config.overridden(said)
    named = place.at_hand(path)
    if named is None:
        message = f"its {path} is not at hand: what it says is not known"
        found.append(changed(TARGET, "accelerate-no-deepspeed", message, path))
        return accelerate_config.inline(said, world), settings, found
    tree, notes = deepspeed_json.read(named)
    inner = Settings(deepspeed_json.settings_of(tree, named.name), told.given)
    understood = deepspeed_config.understand(inner, world)
    strangers = deepspeed_config.strangers(inner, deepspeed_json.known_of(iter(inner.said)))
    facts = dict(understood.facts)
    if facts["batch"] is None and facts["micro"] is None:
        facts["batch_elsewhere"] = True
    said.values["deepspeed"] = facts
    merged = Settings([*settings.said.values(), *inner.said.values()], told.given)
    merged.taken = settings.taken | inner.taken
    merged.defaults = settings.defaults | inner.defaults
    merged.findings = [*settings.findings, *inner.findings]
    fields = dict(understood.fields)
    if "fp16.enabled" in understood.autos or "bf16.enabled" in understood.autos:
        dtype = accelerate_config.DTYPES.get(said.values["precision"], "bfloat16")
        fields |= {"train.dtype": dtype, "train.grad_dtype": facts["grad"] if facts["grad_said"]
                   else dtype}  # fmt: skip
        facts["dtype"] = dtype
    return fields, merged, [*found, *notes, *understood.findings, *strangers]


def _strangers(settings: Settings, tree: Mapping[str, Any]) -> list[Finding]:
    """Keys that ClusterConfig refuses."""
    names = {key.partition(".")[0] for key in accelerate_config.known()}
    unknown = sorted(str(key) for key in tree if str(key) not in names)
    if not unknown:
        return []
    message = f"unknown keys: {', '.join(unknown[:8])}"
    return [refused(TARGET, "accelerate-unknown-key", AT_START, message, unknown[0])]


def check(launch: Launch, job: Job) -> list[Finding]:
    """What Accelerate, and what stands behind it, says to the job."""
    facts, layout = launch.facts, job.layout
    found = [*_sizes(facts, job), *_fsdp_rules(facts)]
    if facts.get("kind") == "DEEPSPEED":
        found += deepspeed_rules.rules(facts.get("deepspeed", {}), job)
    elif facts.get("kind") == "MEGATRON_LM":
        if layout.sequence_parallel and layout.tp <= 1:
            message = "sequence parallelism without tensor parallelism is switched off"
            found.append(changed(TARGET, "accelerate-megatron-sp", message))
        if job.model.heads % max(1, layout.tp):
            message = f"{job.model.heads} heads do not divide over TP {layout.tp}"
            legal = nearest(layout.tp, divisors(max(1, job.model.heads)))
            found.append(refused(TARGET, "accelerate-megatron-heads", AT_START, message,
                                 layout.tp, layout__tp=legal))  # fmt: skip
    elif layout.pp > 1 or layout.ep > 1:
        message = "it has neither pipeline nor expert parallelism outside of Megatron-LM"
        found.append(refused(TARGET, "accelerate-no-pipeline", AT_START, message, layout.pp,
                             layout__pp=1, layout__ep=1))  # fmt: skip
    return found


def _sizes(facts: Mapping[str, Any], job: Job) -> list[Finding]:
    """ParallelismConfig.__post_init__ and _validate_accelerator."""
    sizes = facts.get("sizes")
    if not sizes:
        return []
    found: list[Finding] = []
    paths = {"sp": "layout__ulysses"}
    for name, size in sizes.items():
        if size is not None and size < 1:
            message = f"{name}_size must be at least 1, not {size}"
            cure = {paths.get(name, f"layout__{name}"): 1}
            found.append(refused(TARGET, "accelerate-size", AT_START, message, size, **cure))
    values = {name: max(1, size or 1) for name, size in sizes.items()}
    world = facts.get("world") or job.layout.world
    if values["cp"] > 1 and values["sp"] > 1:
        message = f"cp_size {values['cp']} and sp_size {values['sp']}: one of them must be 1"
        found.append(refused(TARGET, "accelerate-cp-sp", AT_START, message, values["sp"],
                             layout__ulysses=1, layout__cp=values["cp"]))  # fmt: skip
    pure = values["dp_replicate"] > 1 and values["dp_shard"] == 1
    if (values["tp"] > 1 or values["cp"] > 1) and pure:
        message = "tp or cp with dp_replicate_size and without dp_shard_size"
        found.append(refused(TARGET, "accelerate-replicas", AT_START, message,
                             values["dp_replicate"], layout__dp_replicate=1,
                             layout__dp_shard=values["dp_replicate"]))  # fmt: skip
    product = 1
    for size in values.values():
        product *= size
    if product > 1 and product != world and values["sp"] == 1:
        rest = values["tp"] * values["cp"] * values["dp_replicate"]
        message = f"the sizes multiply to {product}, not to the {world} processes"
        cure = {"layout__dp_shard": world // rest} if world % rest == 0 else {"ranks": product}
        found.append(refused(TARGET, "accelerate-product", AT_START, message, product, **cure))
    kind, version = facts.get("kind"), facts.get("fsdp_version")
    if product > 1 and kind == "FSDP" and version != 2:
        message = "parallelism_config wants FSDP2 (fsdp_version: 2)"
        found.append(refused(TARGET, "accelerate-fsdp1", AT_START, message, version))
    if product > 1 and kind in ("NO", "", "MEGATRON_LM"):
        message = f"parallelism_config goes with FSDP2, DeepSpeed or several devices, not {kind}"
        found.append(refused(TARGET, "accelerate-parallelism-type", AT_START, message, kind))
    if values["sp"] > 1 and kind != "DEEPSPEED":
        message = "sp_size is DeepSpeed's Ulysses: distributed_type must be DEEPSPEED"
        found.append(refused(TARGET, "accelerate-sp-backend", AT_START, message, kind))
    length, cp = job.train.seq_len or job.model.seq, values["cp"]
    if cp > 1 and length % (2 * cp):
        message = f"sequences of {length} tokens do not divide into 2 x cp {cp} chunks"
        found.append(refused(TARGET, "accelerate-cp-length", FIRST_STEP, message, length,
                             train__seq_len=max(1, length // (2 * cp)) * 2 * cp))  # fmt: skip
    heads, tp = job.model.heads, values["tp"]
    if tp > 1 and (heads % tp or (job.model.mla is None and job.model.kv_heads % tp)):
        message = f"{heads} heads and {job.model.kv_heads} KV heads do not divide over tp {tp}"
        legal = nearest(tp, divisors(max(1, job.model.kv_heads)))
        found.append(refused(TARGET, "accelerate-tp-heads", FIRST_STEP, message, tp,
                             layout__tp=legal))  # fmt: skip
    return found


def _fsdp_rules(facts: Mapping[str, Any]) -> list[Finding]:
    """FullyShardedDataParallelPlugin.__post_init__."""
    if facts.get("kind") != "FSDP":
        return []
    found = []
    reshard = str(facts.get("fsdp_reshard_after_forward") or "").lower()
    switch = reshard in ("true", "false", "yes", "no", "1", "0", "")
    if facts.get("fsdp_version") == 2:
        if not switch:
            message = f"fsdp_reshard_after_forward {reshard} is no true or false"
            found.append(refused(TARGET, "accelerate-reshard", AT_START, message, reshard))
        if facts.get("fsdp_forward_prefetch"):
            message = "FSDP2 has no forward prefetch"
            found.append(refused(TARGET, "accelerate-prefetch", AT_START, message, True))
    elif facts.get("strategy") not in accelerate_config.STRATEGIES:
        message = f"there is no sharding strategy {facts.get('strategy')}"
        found.append(refused(TARGET, "accelerate-strategy", AT_START, message,
                             facts.get("strategy"), layout__zero=3))  # fmt: skip
    return found


def write(job: Job) -> Written:
    """A configuration, and the script that starts a training with it."""
    from plait.dialects.accelerate.writer import written

    return written(job)


def dumped(tree: Mapping[str, Any]) -> str:
    """YAML of plain values, as Accelerate writes it."""
    lines = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            lines.append(f"{key}:")
            lines += [f"  {name}: {_scalar(inner)}" for name, inner in value.items()]
        else:
            lines.append(f"{key}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    if value == "no":
        return "'no'"
    return json.dumps(value) if isinstance(value, bool) else str(value)
