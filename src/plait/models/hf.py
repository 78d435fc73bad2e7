"""Weights to and from Hugging Face checkpoints: a table of names for each family.

A table maps our module paths to theirs; `*` stands for the layer, `+` for the expert. GPT-2 keeps
its matrices [inputs, outputs] and q, k, v in one, DeepSeek the rotated features in pairs, gpt-oss
gate and up in turns: a `Place` can say so. Mixtures stand in files expert by expert, in the memory
of `transformers` all together; both are read, the first is written.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.spec.findings import Finding, UserError, error
from plait.spec.model import Model
from plait.spec.parameters import Parameter, parameters


@dataclass(frozen=True)
class Place:
    """Where a checkpoint keeps the parameters of one of our modules.

    Attributes:
        path: their module path.
        transposed: its matrix is [inputs, outputs].
        part: (i, n): ours is the i-th of n equal pieces of the outputs; in_turns: every n-th of
            them from the i-th.
        pairs: (a, b): of each a + b outputs the last b are rotated in pairs of neighbours, where
            ours pairs the first half with the second.
        whole: the path is the name of the weight itself; a bias has "_bias" behind it.
    """

    path: str
    transposed: bool = False
    part: tuple[int, int] = (0, 1)
    in_turns: bool = False
    pairs: tuple[int, int] | None = None
    whole: bool = False

    def name(self, leaf: str, layer: str) -> str:
        """Of the tensor; `+` is left for the expert."""
        path = self.path.replace("*", layer)
        if self.whole:
            return path if leaf == "weight" else f"{path}_{leaf}"
        return f"{path}.{LEAVES.get(leaf, leaf)}"

    def outputs(self, total: int) -> Tensor | None:
        """Which of their outputs are ours, in our order, int64; None: all as they are."""
        index, pieces = self.part
        if self.pairs is not None:
            whole = torch.arange(total).view(-1, sum(self.pairs))
            still, turned = whole.split(self.pairs, 1)
            return torch.cat((still, turned[:, ::2], turned[:, 1::2]), 1).flatten()
        if self.in_turns:
            return torch.arange(index, total, pieces)
        return None if pieces == 1 else torch.arange(total).chunk(pieces)[index]


_LLAMA = {
    "embed.tokens": Place("model.embed_tokens"),
    "layers.*.attention.q": Place("model.layers.*.self_attn.q_proj"),
    "layers.*.attention.k": Place("model.layers.*.self_attn.k_proj"),
    "layers.*.attention.v": Place("model.layers.*.self_attn.v_proj"),
    "layers.*.attention.o": Place("model.layers.*.self_attn.o_proj"),
    "layers.*.attention.q_norm": Place("model.layers.*.self_attn.q_norm"),
    "layers.*.attention.k_norm": Place("model.layers.*.self_attn.k_norm"),
    "layers.*.attention": Place("model.layers.*.self_attn"),
    "layers.*.mlp.gate": Place("model.layers.*.mlp.gate_proj"),
    "layers.*.mlp.up": Place("model.layers.*.mlp.up_proj"),
    "layers.*.mlp.down": Place("model.layers.*.mlp.down_proj"),
    "head.norm": Place("model.norm"),
    "head.output": Place("lm_head"),
}

#: Llama, Mistral, Qwen 2 and 3, Gemma, and the mixtures: norms before the branches.
PRE_NORM = _LLAMA | {
    "layers.*.attention_norm": Place("model.layers.*.input_layernorm"),
    "layers.*.mlp_norm": Place("model.layers.*.post_attention_layernorm"),
}

#: OLMo 2: norms after the branches.
POST_NORM = _LLAMA | {
    "layers.*.attention_out_norm": Place("model.layers.*.post_attention_layernorm"),
    "layers.*.mlp_out_norm": Place("model.layers.*.post_feedforward_layernorm"),
}

#: Gemma 2 and 3: norms on both sides.
BOTH_NORMS = POST_NORM | {
    "layers.*.attention_norm": Place("model.layers.*.input_layernorm"),
    "layers.*.mlp_norm": Place("model.layers.*.pre_feedforward_layernorm"),
}

GPT2 = {
    "embed.tokens": Place("transformer.wte"),
    "embed.positions": Place("transformer.wpe"),
    "layers.*.attention_norm": Place("transformer.h.*.ln_1"),
    "layers.*.attention.q": Place("transformer.h.*.attn.c_attn", True, (0, 3)),
    "layers.*.attention.k": Place("transformer.h.*.attn.c_attn", True, (1, 3)),
    "layers.*.attention.v": Place("transformer.h.*.attn.c_attn", True, (2, 3)),
    "layers.*.attention.o": Place("transformer.h.*.attn.c_proj", True),
    "layers.*.mlp_norm": Place("transformer.h.*.ln_2"),
    "layers.*.mlp.up": Place("transformer.h.*.mlp.c_fc", True),
    "layers.*.mlp.down": Place("transformer.h.*.mlp.c_proj", True),
    "head.norm": Place("transformer.ln_f"),
    "head.output": Place("lm_head"),
}

#: Qwen 3, OLMoE and DeepSeek in files.
MIXTURE = {
    "layers.*.moe.router": Place("model.layers.*.mlp.gate"),
    "layers.*.moe.experts.gate": Place("model.layers.*.mlp.experts.+.gate_proj"),
    "layers.*.moe.experts.up": Place("model.layers.*.mlp.experts.+.up_proj"),
    "layers.*.moe.experts.down": Place("model.layers.*.mlp.experts.+.down_proj"),
    "layers.*.moe.shared.gate": Place("model.layers.*.mlp.shared_experts.gate_proj"),
    "layers.*.moe.shared.up": Place("model.layers.*.mlp.shared_experts.up_proj"),
    "layers.*.moe.shared.down": Place("model.layers.*.mlp.shared_experts.down_proj"),
}

MIXTRAL = {
    "layers.*.moe.router": Place("model.layers.*.block_sparse_moe.gate"),
    "layers.*.moe.experts.gate": Place("model.layers.*.block_sparse_moe.experts.+.w1"),
    "layers.*.moe.experts.up": Place("model.layers.*.block_sparse_moe.experts.+.w3"),
    "layers.*.moe.experts.down": Place("model.layers.*.block_sparse_moe.experts.+.w2"),
}

#: All of these as `transformers` holds them: [experts, gate and up, inputs].
_GATE_UP = Place("model.layers.*.mlp.experts.gate_up_proj", whole=True)
TOGETHER = MIXTURE | {
    "layers.*.moe.experts.gate": replace(_GATE_UP, part=(0, 2)),
    "layers.*.moe.experts.up": replace(_GATE_UP, part=(1, 2)),
    "layers.*.moe.experts.down": Place("model.layers.*.mlp.experts.down_proj", whole=True),
}

GPT_OSS = {
    "layers.*.moe.router": Place("model.layers.*.mlp.router"),
    "layers.*.moe.experts.gate": replace(_GATE_UP, transposed=True, part=(0, 2), in_turns=True),
    "layers.*.moe.experts.up": replace(_GATE_UP, transposed=True, part=(1, 2), in_turns=True),
    "layers.*.moe.experts.down": Place("model.layers.*.mlp.experts.down_proj", True, whole=True),
}

LATENT = {
    "layers.*.attention.q_down": Place("model.layers.*.self_attn.q_a_proj"),
    "layers.*.attention.q_norm": Place("model.layers.*.self_attn.q_a_layernorm"),
    "layers.*.attention.kv_norm": Place("model.layers.*.self_attn.kv_a_layernorm"),
    "layers.*.attention.kv_up": Place("model.layers.*.self_attn.kv_b_proj"),
}

#: Our names of what is neither a weight nor a bias -> theirs.
LEAVES = {"correction": "e_score_correction_bias"}

#: What checkpoints carry that is no parameter: tables and masks that can be computed.
COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def table(model: Model, names: Iterable[str] = ()) -> dict[str, Place]:
    """The names of the family that a model belongs to.

    names: of the tensors that are to be read; they tell how a mixture stands there. Without them
    as it is written.
    """
    if model.positions == "learned":
        return GPT2
    places = {"input": PRE_NORM, "output": POST_NORM, "both": BOTH_NORMS}[model.norm_at]
    if model.mla is not None:
        mla = model.mla
        pairs = (mla.nope_dim, mla.rope_dim)
        places = places | LATENT
        for ours, theirs in (("q", "q_proj"), ("q_up", "q_b_proj")):
            place = Place(f"model.layers.*.self_attn.{theirs}", pairs=pairs)
            places[f"layers.*.attention.{ours}"] = place
        down = Place(
            "model.layers.*.self_attn.kv_a_proj_with_mqa", pairs=(mla.kv_rank, mla.rope_dim)
        )
        places["layers.*.attention.kv_down"] = down
    if model.moe is None:
        return places
    names = list(names)
    if model.sinks:
        return places | GPT_OSS
    if any(".mlp.experts.gate_up_proj" in name for name in names):
        return places | TOGETHER
    if any(".block_sparse_moe." in name for name in names):
        return places | MIXTRAL
    plain = model.mla is None and model.qk_norm is None and not model.moe.shared
    return places | (MIXTRAL if plain and not names else MIXTURE)


def from_hf(state: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
    """Our parameters out of a Hugging Face state dict; dtypes are kept.

    A module for multi-token prediction is left out: `Model` has none.

    Raises:
        UserError: names every tensor that is missing, of a wrong shape, or left over.
    """
    problems: list[Finding] = []
    result, used = {}, set()
    # Checkpoints of a bare model leave out the name that the language model gives it.
    bare = not any(name.startswith(("model.", "transformer.")) for name in state)
    for p, theirs, place in _pairs(model, state):
        if bare:
            theirs = theirs.removeprefix("model.").removeprefix("transformer.")
        pieces = _each(theirs, p)
        missing = [name for name in pieces if name not in state]
        used.update(pieces)
        for name in missing:
            problems.append(error(name, None, f"missing; {p.name} is made from it", rule="weights"))
        if missing:
            continue
        shapes = {tuple(state[name].shape) for name in pieces}
        value = None
        if len(shapes) == 1:
            whole = state[theirs] if pieces == [theirs] else torch.stack([state[n] for n in pieces])
            value = _ours(whole, p, place)
        if value is None or tuple(value.shape) != p.shape:
            found = " or ".join(str(list(shape)) for shape in sorted(shapes))
            message = f"has shape {found}, but {p.name} of {model.name} is {p.shape}"
            problems.append(error(pieces[0], found, message, rule="weights"))
            continue
        result[p.name] = value.contiguous()
    # DeepSeek-V3 and its like have a layer more, which predicts the token after the next.
    beyond = f"layers.{model.layers}." if model.moe and model.moe.correction else None
    for name in state:
        known = name in used or name.endswith(COMPUTED)
        known |= model.tied and name == "lm_head.weight"
        known |= beyond is not None and name.removeprefix("model.").startswith(beyond)
        if not known:
            message = f"{model.name} has no place for it"
            problems.append(error(name, tuple(state[name].shape), message, rule="weights"))
    if problems:
        raise UserError(problems)
    return result


def to_hf(state: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
    """A Hugging Face state dict out of our parameters, named as in files."""
    result: dict[str, Tensor] = {}
    for p, theirs, place in _pairs(model):
        ours, dim = state[p.name], _outputs(p)
        count = ours.shape[dim] * place.part[1]
        index = place.outputs(count)
        if index is None:
            value = ours
        else:
            whole = result.get(theirs)
            if whole is None:
                shape = list(ours.shape)
                shape[dim] = count
                whole = ours.new_empty(shape)
            elif place.transposed and dim == -2:
                whole = whole.transpose(-1, -2)
            value = whole.index_copy_(dim, index.to(ours.device), ours)
        if place.transposed and dim == -2:
            value = value.transpose(-1, -2)
        pieces = _each(theirs, p)
        if pieces == [theirs]:
            result[theirs] = value
        else:
            result.update(zip(pieces, value.unbind(0), strict=True))
    return {name: value.contiguous() for name, value in result.items()}


def _ours(theirs: Tensor, p: Parameter, place: Place) -> Tensor | None:
    """Our part of their tensor; None where its dims are other ones."""
    dim = _outputs(p)
    if theirs.dim() != len(p.shape):
        return None
    value = theirs.transpose(-1, -2) if place.transposed and dim == -2 else theirs
    if place.pairs is not None and value.shape[dim] % sum(place.pairs):
        return None
    index = place.outputs(value.shape[dim])
    return value if index is None else value.index_select(dim, index.to(value.device))


def _outputs(p: Parameter) -> int:
    """The dim of a parameter that counts outputs."""
    return -1 if len(p.shape) == 1 or p.name.endswith(".bias") else -2


def _each(theirs: str, p: Parameter) -> list[str]:
    """The names of the tensors, one for each expert where the name has a place for its number."""
    if "+" not in theirs:
        return [theirs]
    return [theirs.replace("+", str(e)) for e in range(p.shape[0])]


def _pairs(model: Model, names: Iterable[str] = ()) -> Iterator[tuple[Parameter, str, Place]]:
    """(our parameter, the name of their tensor, where in it)."""
    places = table(model, names)
    for p in parameters(model):
        path, _, leaf = p.name.rpartition(".")
        layer = ""
        if path.startswith("layers."):
            _, layer, rest = path.split(".", 2)
            path = f"layers.*.{rest}"
        if path not in places:
            message = f"{p.name} has no name in a Hugging Face checkpoint"
            raise UserError([error("model", model.name, message, rule="weights")])
        yield p, places[path].name(leaf, layer), places[path]
