"""How Megatron's arguments split a model: degrees, chunks, schedule, sharding, recompute.

Sources: megatron/training/arguments.py (validate_args), megatron/core/parallel_state.py,
transformer/transformer_block.py (get_num_layers_to_build), pipeline_parallel_layer_layout.py.
"""

import re
from typing import Any

from plait.dialects.megatron.arguments import Arguments
from plait.spec.layout import LARGEST
from plait.spec.model import Model

#: `data_parallel_sharding_strategy` of Megatron-FSDP -> ZeRO stage.
SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}

#: `cp_comm_type` -> plait's (cp_method, whether Ulysses takes the whole degree).
CP_TYPES = {"p2p": ("ring", False), "a2a": ("ring", True), "allgather": ("all-gather", False)}

#: `recompute_modules` -> plait's module; those of "" keep nothing that plait's kernels keep.
RECOMPUTED = {"layernorm": "norm", "mlp": "mlp", "moe": "mlp", "core_attn": ""}

#: Arguments that say what is recomputed.
_RECOMPUTE = (
    "recompute_activations recompute_granularity recompute_method recompute_num_layers "
    "recompute_modules"
)
#: Arguments that say how layers are shared out, how many chunks a rank has, and in which groups
#: micro batches go through them.
_SPLIT = (
    "pipeline_model_parallel_layout decoder_first_pipeline_num_layers "
    "decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split "
    "account_for_loss_in_pipeline_split"
)
_CHUNKS = (
    "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank "
    "virtual_pipeline_model_parallel_size"
)
_GROUP = "microbatch_group_size_per_vp_stage"
#: Longest layout string that is unrolled, in characters.
_LONGEST = 100_000


def layout_fields(arguments: Arguments, model: Model | None) -> dict[str, Any]:
    """`layout.*`.

    Args:
        model: that a person names in place of the launch's.
    """
    take = arguments.take
    tp = take("tensor_model_parallel_size", int, 1, "layout.tp")
    pp = take("pipeline_model_parallel_size", int, 1, "layout.pp")
    cp = take("context_parallel_size", int, 1, "layout.cp")
    said = arguments.switch("sequence_parallel", False, "layout.sequence_parallel")
    fields = {
        "layout.tp": tp,
        "layout.sequence_parallel": said and tp > 1,
        "layout.pp": pp,
        "layout.cp": cp,
    }
    fields |= _context(arguments, cp)
    fields |= _experts(arguments, tp, model)
    fields |= _sharding(arguments)
    fields |= _pipeline(arguments, pp, model.layers if model else arguments.values["num_layers"])
    fields |= _recompute(arguments, model)
    micro = take("micro_batch_size", int, None, "layout.micro_batch")
    return fields | ({} if micro is None else {"layout.micro_batch": micro})


def _context(arguments: Arguments, cp: int) -> dict[str, Any]:
    types = arguments.words("cp_comm_type", "layout.cp_method")
    sizes = arguments.numbers("hierarchical_context_parallel_sizes", "layout.ulysses")
    arguments.switch("hybrid_context_parallel", False, "context parallel degree by sample")
    if cp <= 1:
        return {}
    kind = types[0] if types else "p2p"
    if len(set(types)) > 1:
        message = f"cp_comm_type differs by layer ({', '.join(dict.fromkeys(types))}); "
        arguments.note("megatron-cp-by-layer", f"{message}all layers are counted as {kind}")
    if kind == "a2a+p2p":
        # The inner level exchanges heads, the outer one passes keys and values on.
        inner = sizes[0] if sizes and cp % max(1, sizes[0]) == 0 else 1
        return {"layout.ulysses": inner, "layout.cp_method": "ring"}
    method, whole = CP_TYPES.get(kind, CP_TYPES["p2p"])
    return {"layout.ulysses": cp if whole else 1, "layout.cp_method": method}


def _experts(arguments: Arguments, tp: int, model: Model | None) -> dict[str, Any]:
    ep = arguments.take("expert_model_parallel_size", int, 1, "layout.ep")
    etp = arguments.take("expert_tensor_parallel_size", int, None, "layout.etp")
    has = model.moe is not None if model else bool(arguments.values.get("num_experts"))
    if etp is None:
        etp = tp
        if place := arguments.spell("expert_tensor_parallel_size"):
            arguments.settings.defaults[place] = (tp, "layout.etp: by default as large as tp")
    arguments.values["expert_tensor_parallel_size"] = etp
    # A dense model has no expert grid; its degrees would only stand in the way.
    return {"layout.ep": ep, "layout.etp": etp} if has or ep > 1 else {}


def _sharding(arguments: Arguments) -> dict[str, Any]:
    switch, take = arguments.switch, arguments.take
    distributed = switch("use_distributed_optimizer", False, "layout.zero: 1 if on, 0 if off")
    fsdp = switch("use_megatron_fsdp", False, "layout.zero by the sharding strategy")
    fsdp = switch("use_custom_fsdp", False, "layout.zero by the sharding strategy") or fsdp
    torch_fsdp = switch("use_torch_fsdp2", False, "layout.zero: 3, or 2 without resharding")
    means = "layout.zero"
    strategy = take("data_parallel_sharding_strategy", str, "optim_grads_params", means)
    reshard = switch("torch_fsdp2_reshard_after_forward", True, "layout.zero: 2 if off")
    copies = take("num_distributed_optimizer_instances", int, 1, "layout.dp_replicate")
    zero = 1 if distributed else 0
    if fsdp:
        zero = SHARDING.get(strategy, 3)
    elif torch_fsdp:
        zero = 3 if reshard else 2
    arguments.values["zero"] = zero
    fields: dict[str, Any] = {"layout.zero": zero}
    if zero and copies > 1:
        fields["layout.dp_replicate"] = copies
    return fields


def _pipeline(arguments: Arguments, pp: int, layers: int | None) -> dict[str, Any]:
    """Chunks of a rank, layers of a chunk, and the order of the micro batches."""
    take, switch = arguments.take, arguments.switch
    text = take("pipeline_model_parallel_layout", None, None, "layout.stages")
    first = take("decoder_first_pipeline_num_layers", int, None, "layout.stages")
    last = take("decoder_last_pipeline_num_layers", int, None, "layout.stages")
    embedding = switch("account_for_embedding_in_pipeline_split", False, "layout.stages")
    loss = switch("account_for_loss_in_pipeline_split", False, "layout.stages")
    each = take("num_layers_per_virtual_pipeline_stage", int, None, "layout.vpp")
    chunks = take("num_virtual_stages_per_pipeline_rank", int, None, "layout.vpp")
    direct = take("virtual_pipeline_model_parallel_size", int, None, "layout.vpp")
    group = take("microbatch_group_size_per_vp_stage", int, None, "layout.schedule")
    switch("overlap_p2p_comm", True, "which pipelines may be interleaved")
    if arguments.forget("layout.vpp", f"{_SPLIT} {_CHUNKS} {_GROUP}"):
        return {}
    vpp, stages = 1, None
    if text is not None:
        counts = counts_of(text)
        if counts and pp > 0 and len(counts) % pp == 0:
            vpp, stages = len(counts) // pp, counts
    else:
        vpp = chunks or direct or 1
        extra = embedding + loss
        if each and layers and pp > 0 and (layers + extra) % (pp * each) == 0:
            vpp = (layers + extra) // (pp * each)
        if layers and 0 < pp <= LARGEST and 0 < vpp <= LARGEST:
            stages = _uneven(layers, pp, vpp, first, last, embedding, loss)
    arguments.values["vpp"] = vpp
    if pp <= 1:
        return {}
    if arguments.forget("layout.stages", _SPLIT):
        stages = None
    if arguments.forget("layout.schedule", _GROUP):
        return {"layout.vpp": vpp} | ({} if stages is None else {"layout.stages": stages})
    fields: dict[str, Any] = {"layout.vpp": vpp, "layout.schedule": "1f1b"}
    if vpp > 1:
        grouped = group is not None and group != pp
        fields["layout.schedule"] = "interleaved-1f1b" + (f":{group}" if grouped else "")
    if stages is not None:
        fields["layout.stages"] = stages
    return fields


def _uneven(
    layers: int,
    pp: int,
    vpp: int,
    first: int | None,
    last: int | None,
    embedding: bool,
    loss: bool,
) -> tuple[int, ...] | None:
    """Layers of each chunk in the order of the model where they are not all equal; None where
    they are, or where Megatron refuses them."""
    if (first is None and last is None and not (embedding or loss)) or pp * vpp > layers + 2:
        return None
    if first is not None or last is not None:
        between = pp - (first is not None) - (last is not None)
        left = layers - (first or 0) - (last or 0)
        if left < 0 or between < 0 or (left and not between) or (between and left % between):
            return None
        per = [left // between if between else 0] * pp
        per[0] = per[0] if first is None else first
        per[-1] = per[-1] if last is None else last
    else:
        whole = layers + embedding + loss
        if whole % pp:
            return None
        per = [whole // pp] * pp
    if any(n % vpp for n in per):
        return None
    counts = [n // vpp for n in per] * vpp
    counts[0] -= embedding
    counts[-1] -= loss
    return tuple(counts) if min(counts) >= 0 else None


def counts_of(layout: Any) -> tuple[int, ...] | None:
    """Decoder layers of each stage of a layout, "Ett|tt|L" or a list of lists; None where it is
    none."""
    rows = rows_of(layout)
    return None if rows is None else tuple(row.count("t") for row in rows)


def rows_of(layout: Any) -> list[str] | None:
    """The stages of a layout in the letters of its string form (E, t, m, L)."""
    if isinstance(layout, list):
        letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
        rows = [[letters.get(str(n).lower(), "?") for n in row] for row in layout
                if isinstance(row, list)]  # fmt: skip
        found = ["".join(row) for row in rows]
        return found if len(rows) == len(layout) and "?" not in "".join(found) else None
    if not isinstance(layout, str) or len(layout) > 4096:
        return None
    text = layout.strip("'\" ").replace(",", "")
    for pattern in (r"\(([^()]+)\)\*(\d{1,5})", r"(.)\*(\d{1,5})"):
        while match := re.search(pattern, text):
            longer = match[1] * int(match[2])
            text = text[: match.start()] + longer + text[match.end() :]
            if len(text) > _LONGEST:
                return None
            if pattern[0] == "\\" and "(" not in text:
                break
    return text.split("|") if re.fullmatch(r"[EtmL|]+", text) else None


def _recompute(arguments: Arguments, model: Model | None) -> dict[str, Any]:
    take = arguments.take
    short = arguments.switch("recompute_activations", False, "layout.recompute: selective")
    kind = take("recompute_granularity", str, None, "layout.recompute")
    method = take("recompute_method", str, None, "layout.recompute")
    count = take("recompute_num_layers", int, None, "layout.recompute")
    modules = arguments.words("recompute_modules", "layout.recompute")
    if arguments.forget("layout.recompute", _RECOMPUTE):
        return {}
    kind = "selective" if short else kind
    if kind is None and arguments.spell("activations_checkpoint_method") in arguments.settings:
        kind = "full"  # earlier versions knew no other
    arguments.values["recompute_granularity"] = kind
    if kind == "full":
        if method == "block" and count is not None:
            message = f"recomputes {count} layers of each stage; all are counted as recomputed"
            arguments.note("megatron-recompute-block", message, count)
        return {"layout.recompute": "full"}
    if kind != "selective":
        return {"layout.recompute": "none"}
    modules = modules or ("core_attn",)
    names = {RECOMPUTED[m] for m in modules if m in RECOMPUTED}
    other = [m for m in modules if m not in RECOMPUTED]
    if "core_attn" in modules:
        message = "recomputing core_attn frees nothing where attention is fused, as it is here"
        arguments.note("megatron-recompute-attention", message)
    if other:
        message = f"recomputes {', '.join(other)}, parts of modules; counted as kept"
        arguments.note("megatron-recompute-parts", message)
    ordered = [m for m in ("norm", "attention", "mlp") if m in names]
    return {"layout.recompute": f"selective:{','.join(ordered)}" if ordered else "none"}
