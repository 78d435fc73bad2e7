"""A model in Megatron's arguments."""

from collections.abc import Callable
from math import log, sqrt
from typing import Any

from plait.dialects.megatron.model import magnitude
from plait.spec.job import Job
from plait.spec.model import Model, MoE

Say = Callable[..., None]

_FORMS = {"batch": "aux_loss", "sequence": "seq_aux_loss", "global": "global_aux_loss"}


def model_arguments(job: Job, say: Say) -> dict[str, Any]:
    """Arguments of the model's shape; `say(rule, message)` notes what they cannot say."""
    model = job.model
    made = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
    }
    made |= _attention(model, say) | _mlp(model, say) | _norms(model, say)
    made |= {"max_position_embeddings": max(model.seq, job.train.seq_len or 0)}
    made |= _positions(model, say)
    if model.moe is not None:
        made |= _moe(model, model.moe, say)
    made |= _vocabulary(model, job.layout.tp, say)
    for name, what in _UNSAID.items():
        if getattr(model, name) not in (None, False):
            say("write-model", f"has no {what}: left out")
    if model.norm_at != "input":
        say("write-model", f"has no norms at {model.norm_at}: written with norms at the input")
    return made


#: Fields of a model that Megatron's arguments have no word for.
_UNSAID = {
    "embed_scale": "scaling of the embedding",
    "embed_norm": "norm after the embedding",
    "attention_softcap": "soft cap of scores",
    "logit_softcap": "soft cap of logits",
    "rope_local_theta": "rotary base of windowed layers",
}


def _attention(model: Model, say: Say) -> dict[str, Any]:
    made: dict[str, Any] = {}
    mla = model.mla
    if mla is not None:
        made = {"multi_latent_attention": True}
        if mla.q_rank is not None:
            made["q_lora_rank"] = mla.q_rank
        made |= {
            "kv_lora_rank": mla.kv_rank,
            "qk_head_dim": mla.nope_dim,
            "qk_pos_emb_head_dim": mla.rope_dim,
            "v_head_dim": mla.v_dim,
            "qk_layernorm": True,
        }
    else:
        if model.kv_heads != model.heads:
            made = {"group_query_attention": True, "num_query_groups": model.kv_heads}
        if model.head_dim * model.heads != model.hidden:
            made["kv_channels"] = model.head_dim
        if model.qk_norm == "head":
            made["qk_layernorm"] = True
        elif model.qk_norm:
            say("write-model", "norms queries and keys by head, not over all heads: left out")
        scale = model.attention_scale
        if scale is not None and abs(scale * sqrt(model.head_dim) - 1) > 1e-6:
            say("write-model", f"has no scale of scores of its own ({scale:g}): left out")
    if model.window is not None:
        made["window_size"] = (model.window - 1, 0)
        if model.full_every is not None:
            made["window_attn_skip_freq"] = model.full_every
    if model.sinks:
        made["softmax_type"] = "learnable"
    return made


def _mlp(model: Model, say: Say) -> dict[str, Any]:
    made: dict[str, Any] = {"ffn_hidden_size": model.ffn}
    moe = model.moe
    pure = moe is not None and all(model.is_moe(i) for i in range(model.layers))
    ours = {model.o_bias, *([] if pure else [model.mlp_bias]), *([moe.bias] if moe else [])}
    bias = ours == {True}
    if len(ours) > 1:
        say("write-model", "has biases in attention output and MLP together or in neither: none")
    if bias and not model.qkv_bias:
        say("write-model", "has biases of queries, keys and values wherever it has others: added")
    if not bias:
        made["add_bias_linear"] = False
        if model.qkv_bias:
            made["add_qkv_bias"] = True
    if model.mlp == "swiglu":
        made["swiglu"] = True
    elif model.mlp == "swiglu-clamped":
        made |= {"quick_geglu": True, "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0}
    elif model.mlp == "geglu":
        made["quick_geglu"] = True
        say("write-model", "gates with a sigmoid in place of GELU (quick GeGLU), the same in shape")
    elif model.mlp == "gelu" and bias:
        made["bias_gelu_fusion"] = False
    elif model.mlp == "gelu-tanh" and not bias:
        say("write-model", "has GELU in its tanh form only with biases: the exact form is taken")
    return made | {"hidden_dropout": model.dropout, "attention_dropout": 0.0}


def _norms(model: Model, say: Say) -> dict[str, Any]:
    made: dict[str, Any] = {
        "normalization": "RMSNorm" if model.norm == "rms" else "LayerNorm",
        "layernorm_epsilon": model.norm_eps,
    }
    if model.norm_offset:
        made["layernorm_zero_centered_gamma"] = True
    if not model.tied:
        made["untie_embeddings_and_output_weights"] = True
    return made


def _positions(model: Model, say: Say) -> dict[str, Any]:
    if model.positions != "rope":
        if model.positions == "alibi":
            say("write-model", "has no ALiBi: written without positions")
        kind = "learned_absolute" if model.positions == "learned" else "none"
        return {"position_embedding_type": kind}
    made: dict[str, Any] = {"position_embedding_type": "rope"}
    if model.rope_theta != int(model.rope_theta):
        say("write-model", f"takes whole rotary bases: {int(model.rope_theta)}")
    made["rotary_base"] = int(model.rope_theta)
    stretched = model.rope_scaling
    if stretched is None:
        return made | ({"rope_type": "rope"} if model.mla else {})
    if stretched.kind == "llama3":
        own = (stretched.original, stretched.low, stretched.high)
        if own != (8192, 1.0, 4.0):
            say("write-model", "scales rotary embeddings from 8192 positions by 1 and 4 only")
        return made | {"use_rope_scaling": True, "rope_scaling_factor": stretched.factor}
    if stretched.kind == "linear":
        whole = max(1, round(stretched.factor))
        if whole != stretched.factor:
            say("write-model", f"stretches positions by whole numbers: {whole}")
        return made | {"rotary_seq_len_interpolation_factor": whole}
    made["rotary_scaling_factor"] = stretched.factor
    if model.mla is None:
        return made | {
            "position_embedding_type": "yarn",
            "yarn_original_max_position_embeddings": stretched.original,
            "yarn_beta_fast": stretched.high,
            "yarn_beta_slow": stretched.low,
            "yarn_correction_range_round_to_int": stretched.truncate,
        }
    if (stretched.original, stretched.low, stretched.high) != (4096, 1.0, 32.0):
        say("write-model", "stretches latent attention from 4096 positions, with 1 and 32, only")
    return made | {"rope_type": "yarn"} | _magnitudes(model)


def _magnitudes(model: Model) -> dict[str, Any]:
    """`mscale` and `mscale_all_dim`: how much scores grow, in the rotation and in the softmax."""
    stretched, mla = model.rope_scaling, model.mla
    assert stretched is not None
    assert mla is not None
    grows = 0.1 * log(stretched.factor) if stretched.factor > 1 else 0.0
    if not grows:
        return {}
    width = mla.nope_dim + mla.rope_dim
    scale = model.attention_scale or 1 / sqrt(width)
    whole = max(0.0, (sqrt(scale * sqrt(width)) - 1) / grows)
    ratio = stretched.attention_factor
    ratio = magnitude(stretched.factor, 1.0) if ratio is None else ratio
    one = (ratio * (1 + whole * grows) - 1) / grows
    return {"mscale": round(one, 6), "mscale_all_dim": round(whole, 6)}


def _moe(model: Model, moe: MoE, say: Say) -> dict[str, Any]:
    made: dict[str, Any] = {
        "num_experts": moe.experts,
        "moe_ffn_hidden_size": moe.ffn,
        "moe_router_topk": moe.topk,
    }
    if not all(model.is_moe(i) for i in range(model.layers)):
        made["moe_layer_freq"] = _frequency(model)
    if moe.shared:
        made["moe_shared_expert_intermediate_size"] = moe.shared_ffn or moe.shared * moe.ffn
    if moe.score != "softmax":
        made["moe_router_score_function"] = moe.score
        if moe.topk > 1 and not moe.normalize:
            say("write-model", "divides sigmoid weights by their sum")
    elif moe.topk == 1 or not (moe.normalize or moe.topk_first):
        made["moe_router_pre_softmax"] = True
        if moe.topk == 1 and (moe.normalize or moe.topk_first):
            say("write-model", "weighs the one expert of a token by its softmax, not by 1")
    if moe.scaling != 1:
        made["moe_router_topk_scaling_factor"] = moe.scaling
    if moe.groups > 1:
        made |= {"moe_router_num_groups": moe.groups, "moe_router_group_topk": moe.topk_groups}
        summed = {"max": 1, "top2": 2}[moe.group_score]
        if max(1, moe.topk // moe.topk_groups) != summed:
            say("write-model", "takes a group as good as its best topk / topk_groups experts")
    if moe.correction:
        if moe.score == "softmax":
            say("write-model", "corrects the choice of experts only with sigmoid: left out")
        else:
            made |= {"moe_router_enable_expert_bias": True,
                     "moe_router_bias_update_rate": moe.correction_speed}  # fmt: skip
    if moe.router_bias:
        say("write-model", "has no bias in the router: left out")
    made["moe_router_load_balancing_type"] = [_FORMS[moe.aux_form] if moe.aux_loss else "none"]
    if moe.aux_loss:
        made["moe_aux_loss_coeff"] = [moe.aux_loss]
    if moe.z_loss:
        made["moe_z_loss_coeff"] = moe.z_loss
    if moe.capacity is not None:
        policy = "position" if moe.drop == "position" else "probs"
        made |= {"moe_expert_capacity_factor": moe.capacity, "moe_token_drop_policy": policy}
        say("write-model", "counts capacity over a micro batch, not over a sequence")
    return made | {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}


def _frequency(model: Model) -> str:
    """Which layers are mixtures, as Megatron's expression of lists."""
    moe, rest = model.moe, 0
    assert moe is not None
    first = min(moe.first_dense, model.layers)
    rest = model.layers - first
    if moe.every == 1:
        return f"([0]*{first}+[1]*{rest})"
    period = f"[{','.join(['0'] * (moe.every - 1))},1]"
    parts = [f"[0]*{first}"] if first else []
    parts += [f"{period}*{rest // moe.every}"] if rest >= moe.every else []
    parts += [f"[0]*{rest % moe.every}"] if rest % moe.every else []
    return f"({'+'.join(parts)})"


def _vocabulary(model: Model, tp: int, say: Say) -> dict[str, Any]:
    padded = -(-model.vocab // tp) * tp
    if padded != model.vocab:
        say("write-vocabulary", f"pads {model.vocab} tokens to {padded}, a multiple of TP {tp}")
    return {
        "tokenizer_type": "NullTokenizer",
        "vocab_size": model.vocab,
        "make_vocab_size_divisible_by": 1,
    }
