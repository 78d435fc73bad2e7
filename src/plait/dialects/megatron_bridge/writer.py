"""A job as a command of Megatron-Bridge: a recipe, and overrides for all that differs from it."""

import json
from dataclasses import replace
from math import gcd
from typing import Any

from plait.dialects.launch import Written, changed, note
from plait.dialects.megatron.writer import arguments_of
from plait.dialects.megatron_bridge.fields import TARGET, spell
from plait.dialects.megatron_bridge.recipes import recipe, recipe_for
from plait.spec import presets
from plait.spec.findings import UserError
from plait.spec.job import Job

#: A recipe of no model in particular: its sizes are overrides (recipes/gpt/h100/vanilla_gpt.py).
_PLAIN = "vanilla_gpt_pretrain_config"
#: What a field is where a recipe leaves it alone.
_DEFAULTS: dict[str, Any] = {
    "model.tensor_model_parallel_size": 1,
    "model.pipeline_model_parallel_size": 1,
    "model.virtual_pipeline_model_parallel_size": None,
    "model.context_parallel_size": 1,
    "model.cp_comm_type": None,
    "model.expert_model_parallel_size": 1,
    "model.expert_tensor_parallel_size": 1,
    "model.sequence_parallel": False,
    "model.pipeline_model_parallel_layout": None,
    "model.num_layers_in_first_pipeline_stage": None,
    "model.num_layers_in_last_pipeline_stage": None,
    "model.account_for_embedding_in_pipeline_split": False,
    "model.account_for_loss_in_pipeline_split": False,
    "model.microbatch_group_size_per_vp_stage": None,
    "model.recompute_granularity": None,
    "model.recompute_method": None,
    "model.recompute_num_layers": None,
    "model.recompute_modules": None,
    "model.mtp_num_layers": None,
    "model.moe_shared_expert_overlap": False,
    "comm_overlap.overlap_moe_expert_parallel_comm": False,
    "comm_overlap.delay_wgrad_compute": False,
    "comm_overlap.tp_comm_overlap": False,
    "ddp.use_distributed_optimizer": False,
    "optimizer.use_distributed_optimizer": False,
    "ddp.use_megatron_fsdp": False,
    "ddp.num_distributed_optimizer_instances": 1,
    "checkpoint.ckpt_format": "torch_dist",
    "optimizer.use_precision_aware_optimizer": False,
    "optimizer.optimizer": "adam",
}
_PARTS = ("model", "mixed_precision", "train", "dataset", "ddp", "dist", "optimizer", "scheduler")
#: GPUs of a node, for torchrun.
_NODE = 8


def command_of(job: Job) -> Written:
    """A shell script that holds the command."""
    arguments, notes = arguments_of(job, TARGET)
    name, sizes = _recipe(job)
    fields = _fields(job, arguments, sizes)
    base = recipe(name)
    assert base is not None
    for path, value in _DEFAULTS.items():
        there = base.settings.get(path, value)
        if path not in fields and there != value:
            fields[path] = value
    if "model.expert_tensor_parallel_size" not in fields and job.model.moe is not None:
        # Left out, it is as large as TP.
        fields["model.expert_tensor_parallel_size"] = job.layout.etp
    own = "float16" if job.train.dtype == "float16" else "float32"
    if job.train.grad_dtype != own:
        message = f"an override names a precision as a whole, in which gradients are {own}"
        notes = [*notes, note(TARGET, "megatron-bridge-write-gradients", message, own)]
    if name == _PLAIN:
        message = "no recipe has this model: its sizes are overrides of one of no model's own"
        notes = [*notes, note(TARGET, "megatron-bridge-no-recipe", message, job.model.name)]
    if name == _PLAIN and job.model.mla:
        message = (
            "the provider of that recipe has no latent attention: its sizes (model.kv_lora_rank, "
            "...) are fields of MLAModelProvider, which Python must put in its place"
        )
        notes = [*notes, changed(TARGET, "megatron-bridge-write-mla", message)]
    order = sorted(fields, key=lambda path: _PARTS.index(path.partition(".")[0])
                   if path.partition(".")[0] in _PARTS else len(_PARTS))  # fmt: skip
    said = [f"{path}={_text(fields[path])}" for path in order]
    return Written({"launch.sh": _script(job, name, said, fields)}, notes)


def _recipe(job: Job) -> tuple[str, bool]:
    """The recipe to start from, and whether the model's sizes must be said."""
    try:
        same = presets.model(job.model.name) == replace(job.model, name=job.model.name)
    except UserError:
        same = False
    found = recipe_for(job.model.name) if same else None
    return (found[0], False) if found else (_PLAIN, True)


def _fields(job: Job, arguments: dict[str, Any], sizes: bool) -> dict[str, Any]:
    """Fields of the container for Megatron's arguments."""
    fields: dict[str, Any] = {}
    for name, value in arguments.items():
        path = spell(name)
        if path is None or name in _OWN:
            continue
        if path.startswith("model.") and not sizes and name not in _LAYOUT:
            continue
        fields[path] = value
    if _CHUNKS & arguments.keys():
        fields["model.virtual_pipeline_model_parallel_size"] = job.layout.vpp
    if sizes:
        if arguments.get("swiglu"):
            fields["model.activation_func"] = "silu"
        fields["model.share_embeddings_and_output_weights"] = job.model.tied
    fields["mixed_precision"] = "fp16_mixed" if job.train.dtype == "float16" else "bf16_mixed"
    if job.train.dtype == "float32":
        fields["mixed_precision"] = None
        fields |= {"model.bf16": False, "optimizer.bf16": False}
    fields["dataset.seq_length"] = fields["model.seq_length"] = job.train.seq_len
    # Recipes take the vocabulary of a stand-in for a tokenizer, unless told not to.
    fields["tokenizer.use_tokenizer_vocab_size"] = False
    fields["tokenizer.vocab_size"] = job.model.vocab
    on = job.layout.zero >= 1
    fields["ddp.use_distributed_optimizer"] = on
    fields["optimizer.use_distributed_optimizer"] = on
    return fields


#: Arguments that Bridge says otherwise, or through a precision recipe.
_OWN = frozenset(
    {
        "bf16", "fp16", "seq_length", "use_distributed_optimizer",
        "untie_embeddings_and_output_weights",
        "group_query_attention", "use_mcore_models", "transformer_impl", "max_position_embeddings",
        "tokenizer_type", "vocab_size_padded", "attention_backend", "mock_data",
    }
)  # fmt: skip
#: Ways to say how many chunks a rank has, which Bridge has not.
_CHUNKS = {"num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"}
#: Arguments of the model part that a recipe's model does not bring.
_LAYOUT = frozenset(
    {
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
        "virtual_pipeline_model_parallel_size", "sequence_parallel", "cp_comm_type",
        "hierarchical_context_parallel_sizes", "expert_model_parallel_size",
        "expert_tensor_parallel_size", "pipeline_model_parallel_layout",
        "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
        "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
        "microbatch_group_size_per_vp_stage", "recompute_granularity", "recompute_method",
        "recompute_num_layers", "recompute_modules", "moe_token_dispatcher_type",
        "num_virtual_stages_per_pipeline_rank",
    }
)  # fmt: skip


def _text(value: Any) -> str:
    """A value as an override says it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(_text(v) for v in value) + "]"
    text = str(value)
    return (
        text
        if text.replace(".", "").replace("-", "").replace("_", "").isalnum()
        else (json.dumps(text))
    )


def _script(job: Job, name: str, said: list[str], fields: dict[str, Any]) -> str:
    world = job.layout.world
    node = gcd(world, job.cluster.node if job.cluster else _NODE)
    fsdp = fields.get("ddp.use_megatron_fsdp")
    # FSDP needs several connections; TP and CP before Blackwell need one.
    one = "" if fsdp else "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    nodes = f" --nnodes {world // node}" if world > node else ""
    lines = [
        f"torchrun --nproc-per-node {node}{nodes} scripts/training/run_recipe.py",
        f"--recipe {name}",
        "--mode pretrain",
        *(_quoted(text) for text in said),
    ]
    return f"#!/bin/bash\n{one}" + " \\\n    ".join(lines) + "\n"


def _quoted(text: str) -> str:
    safe = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.=-+/:,")
    return text if set(text) <= safe else "'" + text.replace("'", "") + "'"
