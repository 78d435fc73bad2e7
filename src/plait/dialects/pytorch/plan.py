"""Tensor-parallel plans of a script: which linear maps are split, how, and which are forgotten."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from plait.dialects.launch import FIRST_STEP, refused
from plait.dialects.python.values import Made
from plait.spec.findings import Finding

#: Names of linear maps in public models -> what they are.
# fmt: off
ROLES: dict[str, str] = {
    **dict.fromkeys(("wq", "wk", "wv", "q_proj", "k_proj", "v_proj", "qkv", "wqkv", "qkv_proj",
                     "query", "key", "value", "to_q", "to_k", "to_v", "c_attn", "in_proj",
                     "query_key_value", "wkv", "kv_proj", "q", "k", "v", "wq_b", "wkv_b",
                     "q_b_proj", "kv_b_proj"), "attention in"),
    **dict.fromkeys(("wo", "o_proj", "out_proj", "to_out", "o", "proj", "resid_proj"),
                    "attention out"),
    **dict.fromkeys(("w1", "w3", "gate_proj", "up_proj", "fc1", "c_fc", "w_gate", "w_up", "net1",
                     "lin1", "linear1", "dense_h_to_4h", "gate_up_proj", "up", "gate", "fc_in",
                     "linear_1", "wi", "intermediate"), "mlp in"),
    **dict.fromkeys(("w2", "down_proj", "fc2", "w_down", "net2", "lin2", "linear2", "down",
                     "dense_4h_to_h", "fc_out", "linear_2"), "mlp out"),
    **dict.fromkeys(("tok_embeddings", "embed_tokens", "wte", "embedding", "embeddings",
                     "token_embedding", "tok_emb", "embed"), "embedding"),
    **dict.fromkeys(("output", "lm_head", "head", "unembed"), "head"),
}
# fmt: on
#: In a block that is named like one of these, every map is of that kind.
_BLOCKS = {
    "attention": ("attn", "attention"),
    "mlp": ("mlp", "feed_forward", "ffn", "feedforward", "ff"),
}
#: Names that say nothing outside of such a block.
_EITHER = ("in_proj", "out_proj", "proj", "o", "q", "k", "v", "up", "down", "gate")
_COLUMN = ("ColwiseParallel", "AsyncColwiseParallel", "Float8ColwiseParallel")
_ROW = ("RowwiseParallel", "AsyncRowwiseParallel", "Float8RowwiseParallel")


@dataclass
class Plan:
    """What the plans of a script say together.

    Attributes:
        styles: full pattern ("layers.*.attention.wq") -> the style's class.
        where: pattern -> what it was applied to.
        sequence_parallel: norm regions are split along the sequence.
        loss_parallel: logits stay split over the vocabulary.
    """

    styles: dict[str, Made] = field(default_factory=dict)
    sequence_parallel: bool = False
    loss_parallel: bool = False
    line: int = 0
    open: bool = False

    def roles(self) -> set[str]:
        return {role for name in self.styles if (role := role_of(name))}


def role_of(pattern: str) -> str | None:
    """What a module is, by its name and the block in which it stands."""
    *above, leaf = pattern.replace("[]", "").split(".")
    role = ROLES.get(leaf)
    for kind, words in _BLOCKS.items():
        if any(part in words or part.endswith(words) for part in above[-2:]):
            if role and role.startswith(kind):
                return role
            if leaf in ("c_proj", "dense", "proj", "out_proj", "wo", "w2", "o_proj"):
                return f"{kind} out"
            if role or leaf in ("c_attn", "c_fc"):
                return f"{kind} in"
            return None
    return None if leaf in _EITHER else role


def plan_of(calls: list[Made]) -> Plan:
    """All plans of `parallelize_module` calls."""
    plan = Plan()
    for call in calls:
        if call.word == "loss_parallel":
            plan.loss_parallel = True
        if call.word != "parallelize_module":
            continue
        plan.line = plan.line or call.line
        module = call.args[0] if call.args else call.fields.get("module")
        base = module.name if isinstance(module, Made) else "?"
        said = call.fields.get("parallelize_plan", call.args[2] if len(call.args) > 2 else None)
        if isinstance(said, dict):
            for name, style in said.items():
                path = f"{base}.{name}" if name else base
                _add(plan, path, style)
        elif isinstance(said, Made) and said.called:
            _add(plan, base, said)
        else:
            plan.open = True
    return plan


def _add(plan: Plan, path: str, style: Any) -> None:
    if not isinstance(style, Made):
        plan.open = True
        return
    plan.styles[path] = style
    # A sequence-parallel region is one whose activations are split along dim 1.
    layouts = (*style.fields.items(), *(("0", arg) for arg in style.args))
    split = any("layout" in name and _shards_sequence(value) for name, value in layouts)
    plan.sequence_parallel |= style.word == "SequenceParallel" or split


def _shards_sequence(value: Any) -> bool:
    """Dim 1 is the sequence; dim 0, where batch and sequence are one."""
    values = value if isinstance(value, list | tuple) else (value,)
    return any(
        isinstance(v, Made) and v.word == "Shard" and v.args[:1] in ([0], [1]) for v in values
    )


def unmatched(plan: Plan) -> Iterator[Finding]:
    """Maps split by columns whose result nobody sums, and by rows whose input is not split."""
    blocks: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, style in plan.styles.items():
        role = role_of(name)
        if role is None or " " not in role:
            continue
        kind, end = role.split()
        block = blocks.setdefault((name.rpartition(".")[0], kind), {"in": [], "out": []})
        block[end].append(name)
        wrong = {"in": _ROW, "out": _COLUMN}[end]
        if style.word in wrong:
            message = f"{name} is split by {style.word}, the wrong way round for {role}"
            yield refused("PyTorch", "pytorch-plan", FIRST_STEP, message)
    for (base, kind), ends in blocks.items():
        columns = [n for n in ends["in"] if plan.styles[n].word in _COLUMN]
        rows = [n for n in ends["out"] if plan.styles[n].word in _ROW]
        gathered = any("output_layouts" in plan.styles[n].fields for n in columns)
        told = any("input_layouts" in plan.styles[n].fields for n in rows)
        if rows and not columns and not told:
            message = f"{rows[0]} is split by rows, but nothing in {base} is split by columns:"
            text = f"{message} its input is whole ({kind})"
            yield refused("PyTorch", "pytorch-plan", FIRST_STEP, text)
        elif columns and not rows and not gathered:
            message = f"{columns[0]} is split by columns, but nothing in {base} is split by rows:"
            text = f"{message} its result stays in pieces ({kind})"
            yield refused("PyTorch", "pytorch-plan", FIRST_STEP, text)
