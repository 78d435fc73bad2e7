"""A job as DeepSpeed's configuration, and as the script that starts a training with it.

What the configuration can say of a layout is AutoTP, Ulysses, AutoEP, ZeRO and hpZ; a pipeline is
Megatron-DeepSpeed's, and so are its flags in the script.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

from plait.dialects.deepspeed import megatron as deepspeed_megatron
from plait.dialects.deepspeed import trainer as deepspeed_trainer
from plait.dialects.launch import Written, note
from plait.dialects.megatron.writer import NODE, arguments_of, words_of
from plait.spec.findings import Finding
from plait.spec.job import Job
from plait.spec.layout import Layout, divisors

CONFIG, SCRIPT = "ds_config.json", "launch.sh"
#: plait's dtype -> DeepSpeed's, of gradients.
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass
class Writer:
    """A job that is made to fit, and the notes on what that took."""

    job: Job
    target: str
    notes: list[Finding]

    def say(self, rule: str, message: str, value: Any = None) -> None:
        self.notes.append(note(self.target, f"deepspeed-write-{rule}", message, value))


def written(job: Job) -> Written:
    """`ds_config.json`, and `launch.sh` beside it."""
    megatron = job.layout.pp > 1
    target = deepspeed_megatron.TARGET if megatron else "DeepSpeed"
    writer = Writer(job, target, [])
    layout = fitted(writer, megatron)
    tree = configuration(writer, layout, megatron)
    script = _megatron(writer, layout) if megatron else _trainer(writer, layout)
    text = json.dumps(tree, indent=2) + "\n"
    return Written({CONFIG: text, SCRIPT: script}, writer.notes)


def fitted(writer: Writer, megatron: bool) -> Layout:
    """The layout as DeepSpeed would run it, on the same number of ranks."""
    job, layout = writer.job, writer.job.layout
    changes: dict[str, Any] = {}
    if layout.cp > 1 and layout.ulysses != layout.cp:
        writer.say("ulysses", f"has Ulysses only: it takes the place of {layout.cp_method}")
    sp = _ulysses(job)
    if sp != layout.cp:
        message = f"sequence parallel {layout.cp} does not divide heads and KV heads: it is {sp}"
        writer.say("ulysses-heads", message, layout.cp)
    zero = layout.zero
    if megatron and zero > 1:
        writer.say("pipeline-zero", f"its pipeline engine takes ZeRO 0 or 1: ZeRO is 1, not {zero}")
        zero = 1
    if layout.dp_replicate > 1 and zero and not (zero == 3 and layout.dp_shard > 1):
        writer.say(
            "replicas", f"ZeRO {zero} shards over all ranks; groups of fewer (hpZ) are of ZeRO 3"
        )
    if layout.pp > 1 and layout.vpp > 1:
        writer.say("chunks", "its pipeline has one chunk a stage")
        changes["vpp"] = 1
    name = layout.schedule.partition(":")[0]
    if layout.pp > 1 and name not in ("1f1b", "interleaved-1f1b", "zb-h1"):
        writer.say("schedule", f"has no schedule {name}; it would run 1f1b", name)
    sp_norms = layout.sequence_parallel and (megatron and name != "zb-h1")
    if layout.sequence_parallel and not sp_norms:
        what = "ZB-H1" if megatron else "AutoTP"
        writer.say("norms", f"{what} keeps norms whole: there is no sequence parallelism")
    etp = layout.etp
    if etp > 1 and not (megatron and etp == layout.tp):
        writer.say("etp", f"experts are whole: ETP is 1, not {etp}")
        etp = 1
    ep = layout.ep
    if ep > 1 and not megatron and layout.tp > 1 and sp > 1:
        writer.say("autoep", "AutoEP goes with AutoTP or with Ulysses: EP is 1")
        ep = 1
    if ep > 1 and not megatron and zero == 3 and (layout.tp > 1 or sp > 1):
        writer.say("autoep-zero", "AutoEP with AutoTP or Ulysses takes ZeRO 0 to 2: ZeRO is 2")
        zero = 2
    dp = layout.world // (layout.tp * sp * layout.pp)
    groups = zero == 3 and layout.dp_replicate > 1 and layout.dp_shard > 1 and ep == 1
    shard = layout.dp_shard * layout.cp // sp if groups else dp
    if groups and dp % shard:
        shard = dp
    if zero == 3 and layout.dp_replicate > 1 and ep > 1 and layout.dp_shard > 1:
        writer.say("replicas-experts", "AutoEP goes without hpZ: states are sharded over all ranks")
    return replace(
        layout, cp=sp, ulysses=sp, cp_method="ring", etp=etp, ep=ep, zero=zero,
        dp_replicate=dp if zero == 0 else dp // shard, dp_shard=1 if zero == 0 else shard,
        sequence_parallel=sp_norms, stages=None,
        schedule="zb-h1" if layout.pp > 1 and name == "zb-h1" else "1f1b", **changes,
    )  # fmt: skip


def _ulysses(job: Job) -> int:
    """The largest degree up to cp that the heads allow."""
    cp, model = job.layout.cp, job.model
    kv = model.heads if model.mla is not None else max(1, model.kv_heads)
    length = job.train.seq_len or model.seq
    legal = [d for d in divisors(cp) if model.heads % d == 0 and (kv % d == 0 or d % kv == 0)
             and length % d == 0]  # fmt: skip
    return max(legal, default=1)


def batch_of(writer: Writer, layout: Layout) -> tuple[int, int, int]:
    """Global batch, micro batch, accumulation: their product holds."""
    micro, whole = layout.micro_batch, writer.job.train.global_batch
    unit = micro * layout.dp
    whole = whole or unit
    if whole % unit:
        fits = max(1, round(whole / unit)) * unit
        writer.say("batch", f"global batch {whole} becomes {fits}, a multiple of {unit}", whole)
        whole = fits
    return whole, micro, whole // unit


def configuration(writer: Writer, layout: Layout, megatron: bool = False) -> dict[str, Any]:
    """The tree of `ds_config.json`."""
    job = writer.job
    train = job.train
    whole, micro, accumulation = batch_of(writer, layout)
    tree: dict[str, Any] = {
        "train_batch_size": whole,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": layout.zero},
    }
    if layout.zero == 3 and layout.dp_replicate > 1:
        # MiCS, which shards gradients and states in the group too, is gone since 0.19.8.
        tree["zero_optimization"]["zero_hpz_partition_size"] = layout.dp_shard * layout.cp
        message = (
            "hpZ gathers parameters within a group; gradients and states stay sharded over all"
        )
        writer.say("hpz", message, layout.dp_shard * layout.cp)
    tree |= _precision(writer, layout)
    if not megatron:
        if layout.cp > 1:
            tree["sequence_parallel_size"] = layout.cp
        if layout.tp > 1:
            tree["tensor_parallel"] = {"autotp_size": layout.tp}
        if layout.ep > 1:
            tree["expert_parallel"] = {"enabled": True, "autoep_size": layout.ep}
    tree["gradient_clipping"] = train.clip
    tree["optimizer"] = {
        "type": "AdamW",
        "params": {
            "lr": train.learning_rate, "betas": [train.beta1, train.beta2], "eps": train.eps,
            "weight_decay": train.weight_decay,
        },
    }  # fmt: skip
    if train.schedule == "cosine" and train.steps > 0:
        lowest = train.min_learning_rate / train.learning_rate if train.learning_rate else 0.0
        tree["scheduler"] = {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": train.steps, "warmup_num_steps": max(2, train.warmup),
                       "cos_min_ratio": min(1.0, lowest)},
        }  # fmt: skip
    else:
        tree["scheduler"] = {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": train.learning_rate,
                       "warmup_num_steps": max(2, train.warmup)},
        }  # fmt: skip
        if train.schedule == "wsd":
            writer.say("schedule-wsd", "has no decay after a stable phase: the rate stays")
    return tree


def _precision(writer: Writer, layout: Layout) -> dict[str, Any]:
    train = writer.job.train
    dtype = "bfloat16" if train.dtype == "auto" else train.dtype
    if dtype == "float64":
        writer.say("dtype", "has no float64; it would train in float32")
        return {}
    wanted = "float32" if train.grad_dtype in ("auto", "float64") else train.grad_dtype
    tree: dict[str, Any] = {}
    if dtype == "bfloat16":
        tree["bf16"] = {"enabled": True}
    elif dtype == "float16":
        power = max(0, round(train.loss_scale).bit_length() - 1) if train.loss_scale >= 1 else 16
        tree["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": power}
    if wanted != dtype:
        if layout.zero == 0:
            message = f"without ZeRO gradients are in {dtype}, not {wanted}"
            writer.say("gradients", message, wanted)
        else:
            tree["data_types"] = {"grad_accum_dtype": _SHORT.get(wanted, "fp32")}
    return tree


def start_of(job: Job, layout: Layout) -> tuple[str, int]:
    most = job.cluster.node if job.cluster else NODE
    each = max(d for d in divisors(layout.world) if d <= max(1, most))
    nodes = layout.world // each
    return f"deepspeed --num_nodes {nodes} --num_gpus {each}", nodes


def _head(job: Job, nodes: int) -> list[str]:
    from plait.dialects.deepspeed import VERSION

    lines = ["#!/bin/bash", f"# {job.model.name} on {job.layout.world} devices, for {VERSION}."]
    if nodes > 1:
        lines.append(f"# A hostfile with {nodes} lines is needed (--hostfile).")
    return [*lines, "set -e", ""]


def _trainer(writer: Writer, layout: Layout) -> str:
    """A script of one's own, with the flags of Hugging Face's Trainer."""
    job = writer.job
    start, nodes = start_of(job, layout)
    _, micro, accumulation = batch_of(Writer(job, "", []), layout)
    message = (
        "the model, the length of a sequence and recompute are the training script's: train.py "
        "stands for a script that takes the flags of Hugging Face's Trainer"
    )
    writer.say("script", message)
    dtype = {"float16": ["--fp16 true"], "float32": [], "float64": []}.get(
        job.train.dtype, ["--bf16 true"]
    )
    recompute = layout.recompute != "none"
    if recompute and layout.recompute != "full":
        writer.say("recompute", "recomputes whole layers or nothing: whole layers")
    flags = [
        f"--deepspeed {CONFIG}",
        *deepspeed_trainer.written(job, micro, accumulation),
        *dtype,
        *(["--gradient_checkpointing true"] if recompute else []),
    ]
    lines = [*_head(job, nodes), f"{start} train.py \\"]
    lines += [f"    {flag} \\" for flag in flags[:-1]] + [f"    {flags[-1]}"]
    return "\n".join(lines) + "\n"


#: Megatron's arguments that the fork has no flag for and needs none.
_NEEDLESS = frozenset(
    "group_query_attention mock_data use_distributed_optimizer context_parallel_size cp_comm_type "
    "hierarchical_context_parallel_sizes use_megatron_fsdp data_parallel_sharding_strategy "
    "ckpt_format num_distributed_optimizer_instances recompute_granularity recompute_method "
    "recompute_num_layers recompute_modules expert_tensor_parallel_size moe_grouped_gemm "
    "moe_token_dispatcher_type moe_router_load_balancing_type accumulate_allreduce_grads_in_fp32 "
    "grad_reduce_in_bf16 lr_wsd_decay_style lr_wsd_decay_iters position_embedding_type "
    "num_virtual_stages_per_pipeline_rank pipeline_model_parallel_layout "
    "microbatch_group_size_per_vp_stage".split()
)


def _megatron(writer: Writer, layout: Layout) -> str:
    """Megatron-DeepSpeed's pretrain_gpt.py."""
    job = replace(writer.job, layout=layout)
    whole, _, _ = batch_of(Writer(job, "", []), layout)
    job = replace(job, train=replace(job.train, global_batch=whole))
    arguments, _ = arguments_of(job, writer.target)
    arguments["sequence_parallel"] = layout.sequence_parallel
    lost = []
    lines = []
    names = deepspeed_megatron.known()
    for name, value in arguments.items():
        if name in _NEEDLESS:
            continue
        flag = deepspeed_megatron.spell(name)
        if flag not in names or (name == "moe_layer_freq" and not isinstance(value, int)):
            lost.append(name)
            continue
        if name == "normalization":
            value = str(value).lower()
        if isinstance(value, bool):
            lines += words_of({name: value})
            continue
        word = words_of({name: value})[0].partition(" ")[2]
        lines.append(f"{flag} {word}")
    lines += _own_flags(writer, layout, arguments)
    if job.model.mla is not None:
        lost.append("latent attention")
    if lost:
        what = ", ".join(dict.fromkeys(lost))
        writer.say("model", f"pretrain_gpt.py of that fork has no word for {what}")
    writer.say("data", "data and tokenizer are stand-ins")
    start, nodes = start_of(job, layout)
    body = [*_head(job, nodes), "ARGS=(", *(f"    {line}" for line in lines), ")", ""]
    body.append(f'{start} pretrain_gpt.py "${{ARGS[@]}}"')
    return "\n".join(body) + "\n"


def _own_flags(writer: Writer, layout: Layout, arguments: dict[str, Any]) -> list[str]:
    moe = writer.job.model.moe
    lines = []
    if arguments.get("position_embedding_type") == "rope":
        lines.append("--use-rotary-position-embeddings")
    if layout.cp > 1:
        lines.append(f"--ds-sequence-parallel-size {layout.cp}")
    if layout.schedule == "zb-h1":
        lines.append("--enable-zbh1-pipeline")
    if layout.recompute != "none":
        if layout.recompute != "full":
            writer.say("recompute", "recomputes whole layers or nothing: whole layers")
        lines += ["--checkpoint-activations", "--deepspeed-activation-checkpointing"]
    if moe is not None:
        if "moe_layer_freq" not in arguments:
            lines.append("--expert-interval 1")
        if moe.capacity is None:
            lines.append("--disable-moe-token-dropping")
        if not moe.aux_loss:
            lines.append("--moe-loss-coeff 0.0")
        if layout.etp > 1:
            lines.append("--enable-expert-tensor-parallelism")
        if moe.ffn != writer.job.model.ffn or moe.shared:
            message = "experts are as wide as the MLP there, and none is shared"
            writer.say("experts", message, moe.ffn)
    return [*lines, "--deepspeed", f"--deepspeed_config {CONFIG}", f"--zero-stage {layout.zero}"]
