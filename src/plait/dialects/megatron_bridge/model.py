"""The model of a Megatron-Bridge launch: that of its recipe, with what the launch changes of it."""

import ast
from typing import Any

from plait.dialects.launch import Told, changed
from plait.dialects.megatron_bridge.fields import TARGET, Container
from plait.dialects.megatron_bridge.launch import Said
from plait.dialects.settings import Settings
from plait.spec.findings import Finding, error
from plait.spec.jobfile import draft
from plait.spec.model import Model

#: Field of the container -> (field of a job, kind), for what people change of a recipe's model.
_CHANGED: dict[str, tuple[str, Any]] = {
    "model.num_layers": ("model.layers", int),
    "model.hidden_size": ("model.hidden", int),
    "model.num_attention_heads": ("model.heads", int),
    "model.num_query_groups": ("model.kv_heads", int),
    "model.kv_channels": ("model.head_dim", int),
    "model.ffn_hidden_size": ("model.ffn", int),
    "model.vocab_size": ("model.vocab", int),
    "model.num_moe_experts": ("model.moe.experts", int),
    "model.moe_router_topk": ("model.moe.topk", int),
    "model.moe_ffn_hidden_size": ("model.moe.ffn", int),
    "model.moe_shared_expert_intermediate_size": ("model.moe.shared_ffn", int),
    "model.share_embeddings_and_output_weights": ("model.tied", bool),
    "model.rotary_base": ("model.rope_theta", float),
    "model.layernorm_epsilon": ("model.norm_eps", float),
    "model.kv_lora_rank": ("model.mla.kv_rank", int),
    "model.q_lora_rank": ("model.mla.q_rank", int),
    "model.qk_head_dim": ("model.mla.nope_dim", int),
    "model.qk_pos_emb_head_dim": ("model.mla.rope_dim", int),
    "model.v_head_dim": ("model.mla.v_dim", int),
    "model.hidden_dropout": ("model.dropout", float),
}


def model_of_launch(
    said: Said, c: Container, settings: Settings, told: Told, findings: list[Finding]
) -> tuple[dict[str, Any], Model | None]:
    """`model.*` of a recipe or of a name on the hub, and the model; ({}, None) where the launch
    says its sizes itself, or nothing."""
    if told.model is not None or "model" in told.given:
        return {}, told.model
    recipe = said.recipe
    base = dict(said.model or (recipe.model if recipe else {}))
    hub = said.hub or (recipe.hub if recipe else "")
    if not base:
        if hub:
            _ask(said, settings, hub)
        return {}, None
    _vocabulary(c, base, findings)
    for path, (field, kind) in _CHANGED.items():
        if path in c.said and (value := settings.take(path, kind, None, field)) is not None:
            base[field] = value
    if (first := _first_dense(c)) is not None and _has_moe(base):
        settings.take("model.moe_layer_freq", None, None, "model.moe.first_dense")
        base["model.moe.first_dense"] = first
    job = draft("plan", None, base | {"ranks": 1}).job
    return base, job.model if job else None


def finished(fields: dict[str, Any], c: Container, settings: Settings) -> dict[str, Any]:
    """What Megatron's arguments do not say, of a model that is given by its sizes: here groups of
    queries need no switch, and ends are tied unless it is said otherwise."""
    if "model.layers" not in fields:
        return {}
    groups = c.value("model.num_query_groups", int)
    tied = settings.take("model.share_embeddings_and_output_weights", bool, True, "model.tied")
    fields = fields | {"model.tied": tied}
    if groups and "model.mla.kv_rank" not in fields:
        fields["model.kv_heads"] = groups
    if c.value("model.vocab_size", int) is None and (vocab := c.value("tokenizer.vocab_size", int)):
        settings.take("tokenizer.vocab_size", int, None, "model.vocab")
        unit = c.value("model.make_vocab_size_divisible_by", int, 128)
        step = max(1, unit * c.value("model.tensor_model_parallel_size", int, 1))
        fields["model.vocab"] = -(-vocab // step) * step
    return fields


def _ask(said: Said, settings: Settings, hub: str) -> None:
    """The model is known by name, and plait cannot say it."""
    lacks = said.recipe.lacks if said.recipe else ""
    why = f": {lacks}" if lacks else ", whose sizes are not known here"
    message = f"the model is {hub}{why}; say which to count in its place: --model"
    settings.findings.append(error("model", hub, message, rule="open-variable"))


def _vocabulary(c: Container, base: dict[str, Any], findings: list[Finding]) -> None:
    """A recipe without a tokenizer takes the vocabulary of its stand-in (training/setup.py)."""
    if any(path.startswith("tokenizer.") for path in c.said) or "model.vocab_size" in c.said:
        return
    size = c.value("tokenizer.vocab_size", int)
    if size:
        message = (
            f"the recipe has a stand-in for a tokenizer, of {size} tokens, and takes the model's "
            "vocabulary from it; counted is the model's own (tokenizer.use_tokenizer_vocab_size)"
        )
        findings.append(changed(TARGET, "megatron-bridge-vocabulary", message, size))


def _has_moe(base: dict[str, Any]) -> bool:
    job = draft("plan", None, base | {"ranks": 1}).job
    return job is not None and job.model.moe is not None


def _first_dense(c: Container) -> int | None:
    """Leading zeros of `moe_layer_freq=[0,0,0,1,...]`."""
    if "model.moe_layer_freq" not in c.said:
        return None
    value = c.settings["model.moe_layer_freq"].value
    if isinstance(value, str) and value.startswith("[") and len(value) < 10_000:
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    if not isinstance(value, list) or not value:
        return None
    flags = [str(v).strip() for v in value]
    return next((i for i, flag in enumerate(flags) if flag != "0"), len(flags))
