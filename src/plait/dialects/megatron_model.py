"""The model in Megatron's arguments."""

from typing import Any

from plait.dialects.megatron_arguments import Arguments
from plait.spec.model import Model


def model_fields(arguments: Arguments, told: Model | None) -> dict[str, Any]:
    """`model.*`; nothing where the launch says too little of a model, or a person names one.

    Args:
        told: the model that a person names in place of the launch's.
    """
    take = arguments.take
    layers = take("num_layers", int, None, "model.layers")
    layers = layers or take("encoder_num_layers", int, None, "model.layers")
    arguments.values["num_layers"] = layers
    hidden = take("hidden_size", int, None, "model.hidden")
    heads = take("num_attention_heads", int, None, "model.heads")
    take("num_experts", int, None, "model.moe.experts")
    if told is not None or None in (layers, hidden, heads):
        return {}
    return {"model.layers": layers, "model.hidden": hidden, "model.heads": heads}
