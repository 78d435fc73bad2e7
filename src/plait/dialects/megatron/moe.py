"""Mixtures of experts in Megatron's arguments.

Sources: core/transformer/moe/{moe_utils,router,shared_experts}.py, arguments.py (moe_freq_type).
"""

import ast
from itertools import pairwise
from typing import Any

from plait.dialects.megatron.arguments import Arguments

#: `moe_router_load_balancing_type` -> the tokens over which plait takes the shares.
FORMS = {"aux_loss": "batch", "seq_aux_loss": "sequence", "global_aux_loss": "global"}

#: Layers of the longest pattern that is taken for one.
_LONGEST = 10_000


def moe_fields(arguments: Arguments, layers: int | None) -> dict[str, Any]:
    """`model.moe.*`; nothing for a dense model. The width of an expert may be left None: as wide
    as the MLP."""
    take = arguments.take
    experts = take("num_experts", int, None, "model.moe.experts") or None
    arguments.values["num_experts"] = experts
    frequency = take("moe_layer_freq", None, 1, "model.moe.first_dense and every")
    fields = _router(arguments) | _balance(arguments) | _shared(arguments)
    take("moe_token_dispatcher_type", str, "allgather", "how tokens reach their experts", False)
    ffn = take("moe_ffn_hidden_size", int, None, "model.moe.ffn")
    if experts is None:
        return {}
    fields |= {"experts": experts, "ffn": ffn, "bias": arguments.switch("add_bias_linear", True)}
    fields |= _layers(arguments, frequency, layers)
    return {f"model.moe.{name}": value for name, value in fields.items()}


def _router(arguments: Arguments) -> dict[str, Any]:
    take, where = arguments.take, "model.moe"
    topk = take("moe_router_topk", int, 2, f"{where}.topk")
    score = take("moe_router_score_function", str, "softmax", f"{where}.score")
    before = arguments.switch("moe_router_pre_softmax", False, f"{where}.normalize")
    scaling = take("moe_router_topk_scaling_factor", float, None, f"{where}.scaling", False)
    groups = take("moe_router_num_groups", int, None, f"{where}.groups", False)
    best = take("moe_router_group_topk", int, None, f"{where}.topk_groups", False)
    bias = arguments.switch("moe_router_enable_expert_bias", False, f"{where}.correction")
    speed = take("moe_router_bias_update_rate", float, 1e-3, f"{where}.correction_speed", False)
    if score == "sqrtsoftplus":
        arguments.note("megatron-router-score", "scores are sqrt(softplus); counted as sigmoid")
    fields = {
        "topk": topk,
        "score": "softmax" if score == "softmax" else "sigmoid",
        # The softmax of the chosen logits is that of all of them, divided by its sum.
        "normalize": not (score == "softmax" and before) and (score == "softmax" or topk != 1),
        "correction": bias,
    }
    if scaling:
        fields["scaling"] = scaling
    if bias and speed is not None:
        fields["correction_speed"] = speed
    if best and groups:
        # A group is as good as its best topk / topk_groups experts together.
        fields |= {"groups": groups, "topk_groups": best}
        summed = max(1, (topk or 1) // best)
        fields["group_score"] = "max" if summed == 1 else "top2"
        if summed > 2:
            message = f"a group is as good as its best {summed} experts; plait takes two"
            arguments.note("megatron-group-score", message)
    return fields


def _balance(arguments: Arguments) -> dict[str, Any]:
    take, where = arguments.take, "model.moe"
    kinds = arguments.words("moe_router_load_balancing_type", f"{where}.aux_form", False)
    numbers = arguments.words("moe_aux_loss_coeff", f"{where}.aux_loss", False)
    z_loss = take("moe_z_loss_coeff", float, None, f"{where}.z_loss", False)
    capacity = take("moe_expert_capacity_factor", float, None, f"{where}.capacity")
    policy = take("moe_token_drop_policy", str, "probs", f"{where}.drop")
    arguments.switch("moe_pad_expert_input_to_capacity", False, "every expert as full as it may be")
    kinds = tuple(k.strip("[],'\"") for k in kinds) or ("aux_loss",)
    arguments.values["moe_router_load_balancing_type"] = kinds
    weights = [_number(n.strip("[],'\"")) for n in numbers]
    arguments.values["moe_aux_loss_coeff"] = sum(weights)
    fields: dict[str, Any] = {}
    form = next((FORMS[k] for k in kinds if k in FORMS), None)
    if form and weights and weights[0]:
        fields = {"aux_form": form, "aux_loss": weights[0]}
    if len(kinds) > 1:
        arguments.note("megatron-aux-losses", f"several balancing losses ({', '.join(kinds)}); "
                       f"the first is kept")  # fmt: skip
    if kinds[0] in ("sinkhorn", "quantile_balancing"):
        message = f"{kinds[0]} balances the experts; plait has no such router, shapes are the same"
        arguments.note("megatron-balancing", message)
    if z_loss:
        fields["z_loss"] = z_loss
    if capacity is not None and capacity > 0:
        fields |= {"capacity": capacity,
                   "drop": "position" if policy == "position" else "probability"}  # fmt: skip
    return fields


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 <= value < 1e6 else 0.0


def _shared(arguments: Arguments) -> dict[str, Any]:
    width = arguments.take("moe_shared_expert_intermediate_size", int, None, "model.moe.shared_ffn")
    if not width or width < 1:
        return {}
    one = arguments.take("moe_ffn_hidden_size", int, None, "model.moe.ffn")
    one = one or arguments.values.get("ffn_hidden_size")
    shared = width // one if one and one > 0 and width % one == 0 else 1
    return {"shared": shared} | ({} if one and shared * one == width else {"shared_ffn": width})


def _layers(arguments: Arguments, frequency: Any, layers: int | None) -> dict[str, Any]:
    """Which layers are mixtures: all but the first few, or one in several."""
    pattern = pattern_of(frequency, layers or 0)
    if pattern is None:
        message = f"{frequency!r} is no frequency of layers; all are counted as mixtures"
        arguments.note("megatron-moe-layers", message, frequency)
        return {}
    if not layers or all(pattern):
        return {}
    ones = [i for i, is_moe in enumerate(pattern[:layers]) if is_moe]
    best = (layers, 1) if not ones else None
    for every in sorted({1, *(b - a for a, b in pairwise(ones))}, reverse=True) if ones else ():
        first = ones[0] - every + 1
        if first >= 0 and ones == list(range(ones[0], layers, every)):
            best = (first, every)
    if best is None:
        # Integers count from layer 0, which plait cannot say: as many mixtures, one layer later.
        every = max(1, round(layers / len(ones)))
        message = f"mixtures in layers {_short(ones)}; counted as one layer in {every}"
        arguments.note("megatron-moe-layers", message)
        best = (0, every) if every > 1 else (layers - len(ones), 1)
    return {"first_dense": best[0], "every": best[1]}


def _short(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")


def pattern_of(frequency: Any, layers: int) -> list[int] | None:
    """1 for each layer that is a mixture, 0 for each that is not, of an integer ("2": layers 0,
    2, 4, ...), a list, or an expression of lists ("([0]*3+[1]*58)"); None if it is none."""
    if isinstance(frequency, list):
        whole = all(n in (0, 1) for n in frequency if not isinstance(n, list | dict))
        return frequency if whole and len(frequency) <= _LONGEST else None
    text = str(frequency).strip("'\" ")
    if text.isdecimal() and len(text) < 8:
        return [int(i % max(1, int(text)) == 0) for i in range(min(layers, _LONGEST))]
    if len(text) > 500:
        return None
    try:
        made = _list(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return made if isinstance(made, list) else None


def _list(node: ast.expr) -> Any:
    """Lists of 0 and 1, their sums and multiples; nothing else is computed."""
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= _LONGEST:
        return node.value
    if isinstance(node, ast.List):
        items = [_list(n) for n in node.elts]
        if all(n in (0, 1) for n in items):
            return items
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _list(node.left), _list(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return (left + right)[:_LONGEST]
        if isinstance(node.op, ast.Mult):
            if isinstance(left, int):
                left, right = right, left
            fits = isinstance(left, list) and isinstance(right, int)
            if fits and len(left) * right <= _LONGEST:
                return left * right
    raise ValueError
