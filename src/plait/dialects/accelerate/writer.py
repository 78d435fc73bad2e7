"""A job as Accelerate's configuration. What stands behind it depends on the layout: a pipeline is
Megatron-LM's; ZeRO 1, Ulysses and experts are DeepSpeed's; the rest is FSDP2's."""

import json
from dataclasses import replace
from typing import Any

from plait.dialects.deepspeed import trainer as deepspeed_trainer
from plait.dialects.deepspeed import writer as deepspeed_write
from plait.dialects.launch import Written, note
from plait.spec.findings import Finding
from plait.spec.job import Job
from plait.spec.layout import Layout

CONFIG, SCRIPT = "accelerate.yaml", "launch.sh"
_PRECISION = {"bfloat16": "bf16", "auto": "bf16", "float16": "fp16"}


def written(job: Job) -> Written:
    """`accelerate.yaml`, `launch.sh`, and `ds_config.json` where DeepSpeed stands behind it."""
    from plait.dialects.accelerate import dumped

    notes: list[Finding] = []
    if job.layout.recompute not in ("none", "full"):
        _say(notes, "recompute", "recomputes whole layers or nothing: whole layers")
        job = replace(job, layout=replace(job.layout, recompute="full"))
    kind = _kind(job)
    files: dict[str, str] = {}
    if kind == "DEEPSPEED":
        tree, layout, more = _deepspeed(job, notes)
        files = {deepspeed_write.CONFIG: json.dumps(more, indent=2) + "\n"}
    elif kind == "MEGATRON_LM":
        tree, layout = _megatron(job, notes)
    else:
        tree, layout = _torch(job, notes)
    head = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": tree.pop("distributed_type"),
        "machine_rank": 0,
        "main_training_function": "main",
    }
    if kind != "DEEPSPEED":
        head["mixed_precision"] = _PRECISION.get(job.train.dtype, "no")
        if job.train.dtype == "float64":
            _say(notes, "dtype", "has no float64; it would train in float32")
    _, nodes = deepspeed_write.start_of(job, layout)
    head |= {"num_machines": nodes, "num_processes": layout.world}
    tail = {"rdzv_backend": "static", "same_network": True, "use_cpu": False}
    script = _script(job, layout, notes)
    return Written({CONFIG: dumped(head | tree | tail), SCRIPT: script} | files, notes)


def _say(notes: list[Finding], rule: str, message: str, value: Any = None) -> None:
    notes.append(note("Accelerate", f"accelerate-write-{rule}", message, value))


def _kind(job: Job) -> str:
    layout = job.layout
    if layout.pp > 1:
        return "MEGATRON_LM"
    if layout.ulysses > 1 or layout.ep > 1 or layout.zero == 1:
        return "DEEPSPEED"
    if layout.zero == 0 and layout.tp > 1 and layout.dp > 1:
        return "DEEPSPEED"
    if layout.tp > 1 and (job.model.mla is None and job.model.kv_heads % layout.tp):
        return "DEEPSPEED"
    if layout.zero == 2 and layout.dp_replicate > 1 and layout.dp_shard == 1:
        return "DEEPSPEED"
    return "FSDP"


def _deepspeed(job: Job, notes: list[Finding]) -> tuple[dict[str, Any], Layout, dict[str, Any]]:
    writer = deepspeed_write.Writer(job, "DeepSpeed", notes)
    layout = deepspeed_write.fitted(writer, False)
    config = deepspeed_write.configuration(writer, layout)
    tree = {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "deepspeed_config_file": deepspeed_write.CONFIG,
            "zero3_init_flag": layout.zero == 3,
        },
    }
    if layout.cp > 1:
        tree["parallelism_config"] = _sizes({
            "sp_size": layout.cp, "sp_backend": "deepspeed",
            "sp_seq_length": job.train.seq_len or job.model.seq,
            "sp_seq_length_is_variable": False,
        })  # fmt: skip
    return tree, layout, config


def _sizes(sizes: dict[str, Any]) -> dict[str, Any]:
    return {f"parallelism_config_{name}": value for name, value in sizes.items()}


def _torch(job: Job, notes: list[Finding]) -> tuple[dict[str, Any], Layout]:
    """FSDP2 with the mesh of `parallelism_config`, or DDP."""
    layout = job.layout
    if layout.sequence_parallel:
        _say(notes, "norms", "tensor parallelism keeps norms whole: no sequence parallelism")
    if layout.etp > 1:
        _say(notes, "etp", f"experts are whole: ETP is 1, not {layout.etp}")
    layout = replace(layout, sequence_parallel=False, etp=1)
    if layout.zero == 0 and layout.tp == layout.cp == 1:
        kind = "MULTI_GPU" if layout.world > 1 else "'NO'"
        if layout.recompute != "none":
            _say(notes, "recompute-ddp", "recompute is the training script's under DDP")
        return {"distributed_type": kind}, layout
    if layout.zero == 0:
        _say(notes, "ddp", "without ZeRO tensor and context parallelism run under FSDP2")
        layout = replace(layout, zero=2, dp_replicate=1, dp_shard=layout.dp)
    if layout.dp_replicate > 1 and layout.dp_shard == 1 and (layout.tp > 1 or layout.cp > 1):
        _say(notes, "replicas", "copies only do not go with tp and cp: states are sharded")
        layout = replace(layout, dp_replicate=1, dp_shard=layout.dp)
    if job.train.grad_dtype not in ("auto", "float32"):
        _say(notes, "gradients", f"keeps gradients in float32, not {job.train.grad_dtype}")
    tree: dict[str, Any] = {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_activation_checkpointing": layout.recompute != "none",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": False,
            "fsdp_reshard_after_forward": layout.zero == 3,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_version": 2,
        },
    }
    sizes: dict[str, Any] = {
        "dp_replicate_size": layout.dp_replicate, "dp_shard_size": layout.dp_shard,
        "tp_size": layout.tp, "cp_size": layout.cp,
    }  # fmt: skip
    if layout.cp > 1:
        sizes |= {
            "cp_backend": "torch",
            "cp_comm_strategy": "allgather" if layout.cp_method == "all-gather" else "alltoall",
        }
    tree["parallelism_config"] = _sizes(sizes)
    return tree, layout


def _megatron(job: Job, notes: list[Finding]) -> tuple[dict[str, Any], Layout]:
    layout = job.layout
    if layout.vpp > 1 or layout.schedule.partition(":")[0] not in ("1f1b", "interleaved-1f1b"):
        _say(notes, "schedule", "its pipeline runs 1f1b with one chunk a stage")
    if layout.zero > 1:
        _say(notes, "zero", "Megatron-LM's distributed optimizer is ZeRO 1")
    if layout.dp_replicate > 1 and layout.zero:
        _say(notes, "replicas", "optimizer states are sharded over all replicas")
    zero = min(layout.zero, 1)
    if layout.cp > 1 and (layout.ulysses > 1 or layout.cp_method != "ring"):
        _say(notes, "context", "context parallelism is Megatron-LM's ring")
    layout = replace(
        layout, vpp=1, schedule="1f1b", stages=None, zero=zero, ulysses=1, cp_method="ring",
        dp_replicate=1 if zero else layout.dp, dp_shard=layout.dp if zero else 1,
    )  # fmt: skip
    config: dict[str, Any] = {
        "tp_degree": layout.tp, "pp_degree": layout.pp,
        "num_micro_batches": job.train.accumulation or 1,
        "sequence_parallelism": layout.sequence_parallel,
        "use_distributed_optimizer": zero == 1,
        "gradient_clipping": job.train.clip,
    }  # fmt: skip
    if layout.cp > 1:
        config["context_parallel_size"] = layout.cp
    if job.model.moe is not None:
        config["expert_model_parallel_size"] = layout.ep
        config["expert_tensor_parallel_size"] = layout.etp
    if layout.recompute == "full":
        config |= {"recompute_granularity": "full", "recompute_method": "uniform",
                   "recompute_num_layers": 1}  # fmt: skip
    named = {f"megatron_lm_{name}": value for name, value in config.items()}
    return {"distributed_type": "MEGATRON_LM", "megatron_lm_config": named}, layout


def _script(job: Job, layout: Layout, notes: list[Finding]) -> str:
    from plait.dialects.accelerate import VERSION

    _say(notes, "script", "batch, model, lengths and steps are the training script's: train.py "
         "stands for one that takes the flags of Hugging Face's Trainer")  # fmt: skip
    quiet = deepspeed_write.Writer(job, "", [])
    _, micro, accumulation = deepspeed_write.batch_of(quiet, layout)
    flags = [
        *deepspeed_trainer.written(job, micro, accumulation),
        f"--weight_decay {job.train.weight_decay!r}",
        f"--max_grad_norm {job.train.clip!r}",
    ]
    if layout.recompute != "none":
        flags.append("--gradient_checkpointing true")
    head = ["#!/bin/bash", f"# {job.model.name} on {layout.world} devices, for {VERSION}.",
            "set -e", "", f"accelerate launch --config_file {CONFIG} train.py \\"]  # fmt: skip
    lines = [f"    {flag} \\" for flag in flags[:-1]] + [f"    {flags[-1]}"]
    return "\n".join([*head, *lines]) + "\n"
