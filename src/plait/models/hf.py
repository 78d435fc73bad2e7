"""Weights to and from Hugging Face checkpoints: a table of names for each family.

A table maps our module paths to theirs; `*` stands for the layer. GPT-2 keeps its matrices
[inputs, outputs] and q, k, v in one, which a `Place` can say.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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
        part: (i, n): ours is the i-th of n equal pieces of the outputs.
    """

    path: str
    transposed: bool = False
    part: tuple[int, int] = (0, 1)


_LLAMA = {
    "embed.tokens": Place("model.embed_tokens"),
    "layers.*.attention.q": Place("model.layers.*.self_attn.q_proj"),
    "layers.*.attention.k": Place("model.layers.*.self_attn.k_proj"),
    "layers.*.attention.v": Place("model.layers.*.self_attn.v_proj"),
    "layers.*.attention.o": Place("model.layers.*.self_attn.o_proj"),
    "layers.*.attention.q_norm": Place("model.layers.*.self_attn.q_norm"),
    "layers.*.attention.k_norm": Place("model.layers.*.self_attn.k_norm"),
    "layers.*.mlp.gate": Place("model.layers.*.mlp.gate_proj"),
    "layers.*.mlp.up": Place("model.layers.*.mlp.up_proj"),
    "layers.*.mlp.down": Place("model.layers.*.mlp.down_proj"),
    "head.norm": Place("model.norm"),
    "head.output": Place("lm_head"),
}

#: Llama, Mistral, Qwen 2 and 3, Gemma: norms before the branches.
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

#: What checkpoints carry that is no parameter: tables and masks that can be computed.
COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def table(model: Model) -> dict[str, Place]:
    """The names of the family that a model belongs to."""
    if model.positions == "learned":
        return GPT2
    return {"input": PRE_NORM, "output": POST_NORM, "both": BOTH_NORMS}[model.norm_at]


def from_hf(state: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
    """Our parameters out of a Hugging Face state dict; dtypes are kept.

    Raises:
        UserError: names every tensor that is missing, of a wrong shape, or left over.
    """
    problems: list[Finding] = []
    result, used = {}, set()
    # Checkpoints of a bare model leave out the name that the language model gives it.
    bare = not any(name.startswith(("model.", "transformer.")) for name in state)
    for p, theirs, place in _pairs(model):
        name = theirs.removeprefix("model.").removeprefix("transformer.") if bare else theirs
        if name not in state:
            problems.append(error(name, None, f"missing; {p.name} is made from it", rule="weights"))
            continue
        used.add(name)
        whole = state[name]
        value = whole.t() if place.transposed and whole.dim() == 2 else whole
        index, pieces = place.part
        value = value.chunk(pieces)[index]
        if tuple(value.shape) != p.shape:
            message = f"has shape {list(whole.shape)}, but {p.name} of {model.name} is {p.shape}"
            problems.append(error(name, tuple(whole.shape), message, rule="weights"))
            continue
        result[p.name] = value.contiguous()
    for name in state:
        copy_of_embedding = model.tied and name == "lm_head.weight"
        if name not in used and not copy_of_embedding and not name.endswith(COMPUTED):
            message = f"{model.name} has no place for it"
            problems.append(error(name, tuple(state[name].shape), message, rule="weights"))
    if problems:
        raise UserError(problems)
    return result


def to_hf(state: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
    """A Hugging Face state dict out of our parameters; the inverse of `from_hf`."""
    parts: dict[str, list[Tensor]] = {}
    transposed = set()
    for p, theirs, place in _pairs(model):
        parts.setdefault(theirs, []).append(state[p.name])  # the table has q, k, v in order
        if place.transposed and len(p.shape) == 2:
            transposed.add(theirs)
    joined = {
        name: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for name, pieces in parts.items()
    }
    return {name: (x.t().contiguous() if name in transposed else x) for name, x in joined.items()}


def _pairs(model: Model) -> Iterator[tuple[Parameter, str, Place]]:
    """(our parameter, the name of their tensor, where in it)."""
    names = table(model)
    for p in parameters(model):
        path, _, leaf = p.name.rpartition(".")
        layer = ""
        if path.startswith("layers."):
            _, layer, rest = path.split(".", 2)
            path = f"layers.*.{rest}"
        if path not in names:
            message = f"{p.name} has no name in a Hugging Face checkpoint"
            raise UserError([error("model", model.name, message, rule="weights")])
        yield p, f"{names[path].path.replace('*', layer)}.{leaf}", names[path]
