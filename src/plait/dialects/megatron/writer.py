"""A job in Megatron's arguments, and as a bash script."""

from collections.abc import Mapping
from shlex import quote
from typing import Any

from plait.dialects.launch import Written, note
from plait.dialects.megatron.names import flags_of
from plait.dialects.megatron.writer_model import model_arguments
from plait.spec.chunks import chunk_layers
from plait.spec.findings import Finding
from plait.spec.job import Job
from plait.spec.layout import Layout, divisors

#: plait's ZeRO stage -> Megatron-FSDP's strategy.
_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
_DECAYS = {"cosine": "cosine", "constant": "constant", "wsd": "WSD"}
#: Devices of a node where no cluster says otherwise.
NODE = 8


def arguments_of(job: Job, target: str = "Megatron-LM") -> tuple[dict[str, Any], list[Finding]]:
    """The arguments that make Megatron run a job, and a note for each thing that they cannot say.

    Returns:
        argument -> value by Megatron's names, in the order in which a person would write them:
        numbers and texts; True and False for switches; a list for several words, a tuple for
        numbers joined by commas. Those that are at Megatron's default are left out unless they
        decide the layout.
    """
    notes: list[Finding] = []

    def say(rule: str, message: str, value: Any = None) -> None:
        notes.append(note(target, f"megatron-{rule}", message, value))

    made = model_arguments(job, say)
    for part in (_grid, _sharding, _pipeline, _recompute, _batch, _training, _precision):
        made |= part(job, say)
    return made, notes


def _grid(job: Job, say: Any) -> dict[str, Any]:
    layout, moe = job.layout, job.model.moe
    made: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
    }
    if layout.tp > 1 and moe and not layout.sequence_parallel:
        say("write-sp", "a mixture under TP needs sequence parallelism: it is switched on")
    if layout.tp > 1 and (layout.sequence_parallel or moe):
        made["sequence_parallel"] = True
    if moe:
        etp = layout.etp
        if moe.bias and etp > 1:
            etp = 1
            say("write-etp", f"biases in experts need ETP 1, not {layout.etp}: ETP is 1")
        made |= {"expert_model_parallel_size": layout.ep, "expert_tensor_parallel_size": etp}
    if layout.cp > 1:
        made |= _context(layout, say)
    return made


def _context(layout: Layout, say: Any) -> dict[str, Any]:
    if layout.ulysses == layout.cp:
        return {"cp_comm_type": ["a2a"]}
    if layout.ulysses > 1:
        if layout.cp_method != "ring":
            say("write-cp", f"{layout.cp_method} beside Ulysses becomes a ring (a2a+p2p)")
        sizes = [layout.ulysses, layout.cp // layout.ulysses]
        return {"cp_comm_type": ["a2a+p2p"], "hierarchical_context_parallel_sizes": sizes}
    return {"cp_comm_type": ["p2p" if layout.cp_method == "ring" else "allgather"]}


def _sharding(job: Job, say: Any) -> dict[str, Any]:
    layout = job.layout
    if layout.zero == 0:
        return {}
    made: dict[str, Any] = {"use_distributed_optimizer": True}
    if layout.zero > 1:
        made |= {
            "use_megatron_fsdp": True,
            "data_parallel_sharding_strategy": _STRATEGIES[layout.zero],
            "ckpt_format": "fsdp_dtensor",
        }
    if layout.dp_replicate > 1:
        made["num_distributed_optimizer_instances"] = layout.dp_replicate
    return made


def _pipeline(job: Job, say: Any) -> dict[str, Any]:
    layout = job.layout
    if layout.pp == 1:
        return {}
    name, _, group = layout.schedule.partition(":")
    vpp = layout.vpp
    if name not in ("1f1b", "interleaved-1f1b"):
        runs = "interleaved-1f1b" if vpp > 1 else "1f1b"
        say("write-schedule", f"has no schedule {name}; it would run {runs}", name)
    counts = tuple(len(layers) for layers in chunk_layers(job.model, layout))
    size, m = int(group) if group else layout.pp, job.train.accumulation or 1
    if vpp > 1 and (not layout.pp <= size <= m or 0 < m % size < layout.pp):
        if not group and layout.pp <= m and layout.pp <= _fitting(m, layout.pp):
            size = _fitting(m, layout.pp)
            say("write-group", f"{m} micro batches go in groups of {size} through the chunks")
        else:
            say("write-chunks", f"{m} micro batches do not go through {vpp} chunks of {layout.pp} "
                "stages; each stage is one chunk")  # fmt: skip
            counts = tuple(sum(counts[r :: layout.pp]) for r in range(layout.pp))
            vpp = 1
    made: dict[str, Any] = {}
    if len(set(counts)) > 1:
        made["pipeline_model_parallel_layout"] = _layout_string(counts)
    elif vpp > 1:
        made["num_virtual_stages_per_pipeline_rank"] = vpp
    if vpp > 1 and size != layout.pp:
        made["microbatch_group_size_per_vp_stage"] = size
    return made


def _fitting(m: int, pp: int) -> int:
    """The smallest group of micro batches that Megatron takes; 0: there is none."""
    return next((n for n in range(pp, m + 1) if m % n == 0 or m % n >= pp), 0)


def _layout_string(counts: tuple[int, ...]) -> str:
    """Megatron's own notation: "Et*5|t*6|t*5L"."""
    rows = ["" if n == 0 else "t" if n == 1 else f"t*{n}" for n in counts]
    rows[0] = "E" + rows[0]
    rows[-1] += "L"
    return "|".join(rows)


def _recompute(job: Job, say: Any) -> dict[str, Any]:
    layout, model = job.layout, job.model
    if layout.recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    modules: list[str] = []
    if "norm" in layout.recomputed:
        modules.append("layernorm")
    if "mlp" in layout.recomputed:
        mixtures = [model.is_moe(i) for i in range(model.layers)]
        modules += ["mlp"] * (not all(mixtures)) + ["moe"] * any(mixtures)
    if "attention" in layout.recomputed:
        say("write-recompute", "cannot recompute attention as a whole, only its kernel: it is kept")
    return {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}


def _batch(job: Job, say: Any) -> dict[str, Any]:
    return {
        "micro_batch_size": job.layout.micro_batch,
        "global_batch_size": job.train.global_batch or job.layout.micro_batch * job.layout.dp,
        "seq_length": job.train.seq_len or job.model.seq,
    }


def _training(job: Job, say: Any) -> dict[str, Any]:
    train = job.train
    made: dict[str, Any] = {
        "train_iters": train.steps,
        "lr": train.learning_rate,
        "min_lr": min(train.min_learning_rate, train.learning_rate),
        "lr_decay_style": _DECAYS.get(train.schedule, "cosine"),
        "lr_decay_iters": max(train.steps, train.warmup + 1),
        "lr_warmup_iters": train.warmup,
    }
    if train.schedule == "wsd":
        made |= {"lr_wsd_decay_style": "linear", "lr_wsd_decay_iters": train.decay}
    made |= {
        "weight_decay": train.weight_decay,
        "adam_beta1": train.beta1,
        "adam_beta2": train.beta2,
        "adam_eps": train.eps,
        "clip_grad": train.clip,
        "seed": train.seed,
        "mock_data": True,
    }
    say("write-data", "data and tokenizer are stand-ins (mock data, NullTokenizer)")
    if job.checkpoint.folder not in ("", "none"):
        every = job.checkpoint.every or train.steps
        made |= {"save": job.checkpoint.folder, "save_interval": every}
    return made


def _precision(job: Job, say: Any) -> dict[str, Any]:
    dtype, grad = job.train.dtype, job.train.grad_dtype
    if dtype in ("bfloat16", "auto"):
        return {"bf16": True} | ({"grad_reduce_in_bf16": True} if grad == "bfloat16" else {})
    if dtype == "float16":
        wide = grad in ("auto", "float32")
        return {"fp16": True} | ({"accumulate_allreduce_grads_in_fp32": True} if wide else {})
    if dtype == "float64":
        say("write-dtype", "has no float64; it would train in float32")
    return {}


def words_of(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments as flags and their values, a line each."""
    lines = []
    for name, value in arguments.items():
        if isinstance(value, bool):
            flag = next((f for f in flags_of(name) if f.arity == "0" and f.off != value), None)
            lines += [flag.name] if flag else []
            continue
        flag = next((f for f in flags_of(name) if not f.off), None)
        spelled = flag.name if flag else "--" + name.replace("_", "-")
        if isinstance(value, tuple):
            text = ",".join(map(str, value))
        elif isinstance(value, list):
            text = " ".join(map(_quoted, value))
        else:
            text = _quoted(value)
        lines.append(f"{spelled} {text}")
    return lines


def _quoted(value: Any) -> str:
    return quote(f"{value!r}" if isinstance(value, float) else str(value))


def script_of(job: Job, version: str) -> Written:
    """A bash script that starts `pretrain_gpt.py` with torchrun on each node.

    Args:
        version: of the target, for its first lines.
    """
    arguments, notes = arguments_of(job)
    world = job.layout.world
    most = job.cluster.node if job.cluster else NODE
    each = max(d for d in divisors(world) if d <= max(1, most))
    lines = ["#!/bin/bash", f"# {job.model.name} on {world} devices, for {version}.", "set -e"]
    fsdp = job.layout.zero > 1
    if (job.layout.tp > 1 or job.layout.cp > 1) and not fsdp:
        lines.append("export CUDA_DEVICE_MAX_CONNECTIONS=1  # TP and CP before Blackwell")
    lines += ["", "ARGS=(", *(f"    {line}" for line in words_of(arguments)), ")", ""]
    start = f"torchrun --nproc-per-node {each} --nnodes {world // each}"
    if world > each:
        start += (
            ' \\\n    --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}"'
            ' --master-port "${MASTER_PORT:-29500}"'
        )
    lines.append(f'{start} \\\n    pretrain_gpt.py "${{ARGS[@]}}"')
    return Written({"train.sh": "\n".join(lines) + "\n"}, notes)
