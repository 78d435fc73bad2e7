"""What Megatron-LM holds, and programs grown from it: accounting of other programs than ours.

The ledger (`cost/memory.py`) is of plait's own program, where it is exact. Published measurements
are of other programs. Here is what those hold, module by module, for comparing with them. Bytes
that a layer keeps for backward, of a micro batch; c = 2 bytes an element, T tokens of this rank
(samples x sequence / cp), r = T, or T / tp where sequence parallelism splits the norm regions:

    module       keeps                                                   dropped by recompute
    -----------  ------------------------------------------------------  --------------------
    norms        input c r h                                             full
                 output c r h, the input of the linear maps              layernorm, full
    attention    q, k, v: c T (q + 2 kv) / tp                            full
                 output c T q / tp                                       full
                 flash: log-sum-exp 4 T heads / tp; Ulysses: the output  core_attn, full
                 once more, before it is sent back
                 unfused: softmax c T heads s / tp; with dropout its     core_attn, full
                 mask and its output besides: 5 T heads s / tp in all
    latent       of q and of kv: norm input, c r rank                    full
                 norm output, c r rank                                   mla_up_proj, full
                 queries, keys, values, as if each head had its own      mla_up_proj, full
    MLP          gate and up (or up): c T 2 f / tp                       mlp, full
                 product (or activation): c T f / tp                     mlp, full
    mixture      for each of topk copies of a token: input c h,          moe, full
                 gate and up c 2 f, product c f; 13 bytes an expert of   (moe_act: the product,
                 the router and 16 a copy of maps and weights            shared_experts)
    dropout      mask of each branch, r h                                full

With dropout and unfused attention this is Korthikanti et al. (2205.05198): equations 1 to 6 follow
from it (`tests/test_published_memory.py`). What a measured peak has beside these, and a closed
formula lacks, each from the source of its program:

- TransformerEngine (2.3 and later, `module/base.py`, get_dummy_wgrad) keeps one bf16 tensor for
  each distinct shape of a weight, for as long as the program lives: it stands in as .grad while the
  gradient is added to the main gradient in the kernel. Of wide models that is gigabytes.
- The output layer makes such a tensor for a moment (`tensor_parallel/layers.py`), while all
  activations live. That, the logits and the gradient of its input make the peak of a last stage.
- The vocabulary is padded to a multiple of 128 tp.
- Workspaces of cuBLAS: PyTorch's and TransformerEngine's, 32 MiB each on Hopper and Blackwell.

The peak is the largest over the actions of the stage in the schedule's table.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from plait.cost.recipes import RECIPES, Recipe, stage_states
from plait.schedules.build import build
from plait.schedules.job import TIMED, chunk_times, split_name
from plait.schedules.table import Action, Table
from plait.spec.chunks import chunk_layers, chunk_parameters
from plait.spec.layout import Layout
from plait.spec.model import Model
from plait.spec.parameters import Parameter, local_shape

C = 2  # bytes of a bf16 or fp16 element
WIDE = 4  # of a float32 element
MIB = 2**20


@dataclass(frozen=True)
class Program:
    """What of a program decides its memory.

    Attributes:
        recipe: bytes of its model states.
        flash: attention is one kernel and stores no scores.
        logits: bytes of an element of the logits while the loss is computed. 2: their gradient
            takes their place (TransformerEngine's cross entropy). 6: beside a float32 copy that is
            worked on in place (Megatron-Core). 10: beside two of them (Megatron-LM of 2022).
        fused_gradients: weight gradients go to the main gradient within the kernel, and
            TransformerEngine's stand-ins for them stay.
        late_weights: routing weights multiply what experts give, which is kept for it, and not
            their activations.
        vocab_multiple: the vocabulary is padded to a multiple of it times tp.
        workspace: bytes that stay for kernels and for messages.
        keeps_outputs: a stage keeps its output until backward, though it has been sent.
        sums: bytes of each element of the largest weight, for a moment after a backward: what its
            gradient is cast to before it is summed up.
        step: bytes of each element whose optimizer state a rank owns, during the optimizer step.
    """

    recipe: Recipe
    flash: bool = True
    logits: int = C
    fused_gradients: bool = True
    late_weights: bool = False
    vocab_multiple: int = 128
    workspace: int = 64 * MIB
    keeps_outputs: bool = False
    sums: int = 0
    step: int = 0


#: Elements that DeepSpeed puts together for one message (runtime/engine.py,
#: MEMORY_OPT_ALLREDUCE_SIZE; zero/config.py, reduce_bucket_size).
DEEPSPEED_MESSAGE = 500_000_000

#: BigScience's Megatron-DeepSpeed: kernels of 2022, ZeRO-1 of DeepSpeed, its pipeline engine
#: (runtime/pipe/engine.py, pipe_buffers["outputs"]).
_DEEPSPEED = Program(
    RECIPES["zero-fp16-adam"],
    flash=False,
    logits=C + 2 * WIDE,
    fused_gradients=False,
    workspace=C * DEEPSPEED_MESSAGE,
    keeps_outputs=True,
)

PROGRAMS = {
    # Megatron-Core with TransformerEngine and its fused cross entropy.
    "megatron": Program(RECIPES["megatron-bf16"]),
    # Megatron-LM of 2022, as in Korthikanti et al.
    "megatron-2022": Program(
        RECIPES["megatron-bf16"],
        flash=False,
        logits=C + 2 * WIDE,
        fused_gradients=False,
        workspace=0,
    ),
    # Primus's mixtures before its own kernels; see docs/memory.md on how far this is known.
    "primus": Program(RECIPES["megatron-bf16"], logits=C + WIDE, late_weights=True),
    # zero/stage_1_and_2.py, step: gradients of a rank's own part are cast to float32.
    "megatron-deepspeed-fp16": replace(_DEEPSPEED, step=WIDE),
    # bf16_optimizer.py, update_hp_grads: sums in float32, of whole gradients.
    "megatron-deepspeed-bf16": replace(
        _DEEPSPEED,
        recipe=RECIPES["deepspeed-bf16"],
        workspace=WIDE * DEEPSPEED_MESSAGE,
        sums=WIDE,
    ),
}

#: What Megatron's --recompute-modules drop of the parts that `kept` names.
RECOMPUTE = {
    "core_attn": ("scores", "log-sum-exp"),
    "layernorm": ("norm outputs",),
    "mla_up_proj": ("latent norm outputs", "queries, keys, values"),
    "mlp": ("mlp",),
    "moe_act": ("expert products",),
    "shared_experts": ("shared expert",),
    "moe": (
        "expert inputs",
        "expert gates",
        "expert products",
        "expert outputs",
        "shared expert",
        "router",
    ),
}


class Held(NamedTuple):
    """Bytes of a rank of one stage at its peak.

    Attributes:
        parameters, gradients, optimizer: model states. stand_ins: for gradients, and workspaces.
        activations: kept for backward. passing: what comes and goes at that moment.
    """

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    stand_ins: float
    activations: float
    passing: float

    @property
    def total(self) -> float:
        return sum(self[1:])


def held(
    model: Model,
    layout: Layout,
    program: Program,
    seq_len: int,
    micro_batches: int,
    recompute: Sequence[str] = (),
) -> list[Held]:
    """What a rank of each stage holds at its peak.

    Args:
        seq_len: tokens of a sample. micro_batches: of a step.
        recompute: words of `RECOMPUTE`; the layout's own "full" holds too.

    Raises:
        UserError: the schedule cannot be built for these stages and micro batches.
    """
    model = padded(model, layout, program)
    table = _table(model, layout, seq_len, micro_batches)
    chunks = chunk_layers(model, layout)
    rows = []
    for stage, actions in enumerate(table.ranks):
        mine = [p for c in table.held[stage] for p in chunk_parameters(model, layout, c)]
        fixed = stage_states(mine, model, layout, program.recipe)
        stand_ins = program.workspace + _stand_ins(mine, model, layout, program)
        sizes = {
            c: _chunk(model, layout, program, seq_len, chunks[c], c == len(chunks) - 1, recompute)
            for c in table.held[stage]
        }
        largest = max(prod(local_shape(p, model, layout)) for p in mine)
        step = program.step * fixed["optimizer"] / program.recipe.optimizer
        kept, passing = _peak(actions, sizes, program.sums * largest, step)
        states = (fixed["parameters"] + fixed["gathered"], fixed["gradients"], fixed["optimizer"])
        rows.append(Held(stage, *states, stand_ins, kept, passing))
    return rows


def padded(model: Model, layout: Layout, program: Program) -> Model:
    """The model with the vocabulary that the program makes of it."""
    multiple = program.vocab_multiple * layout.tp
    return replace(model, vocab=-(-model.vocab // multiple) * multiple)


def kept(
    model: Model,
    layout: Layout,
    program: Program,
    seq_len: int,
    layer: int,
    recompute: Sequence[str] = (),
) -> dict[str, float]:
    """Bytes that a layer keeps for the backward of a micro batch, by part."""
    if layout.recompute == "full":
        return {"layer input": C * _tokens(layout, seq_len)[1] * model.hidden}
    dropped = {part for word in recompute for part in RECOMPUTE[word]}
    parts = _parts(model, layout, program, seq_len, layer)
    return {part: n for part, n in parts.items() if part not in dropped}


# ------------------------------------------------------------------------------------------
# Parts


def _tokens(layout: Layout, seq_len: int) -> tuple[float, float]:
    """Tokens of a micro batch on this rank, and rows of it in the norm regions."""
    tokens = layout.micro_batch * seq_len / layout.cp
    return tokens, tokens / (layout.tp if layout.sequence_parallel else 1)


def _parts(
    model: Model, layout: Layout, program: Program, seq_len: int, layer: int
) -> dict[str, float]:
    """`kept` with nothing recomputed."""
    tokens, rows = _tokens(layout, seq_len)
    heads, h, tp = model.heads / layout.tp, model.hidden, layout.tp
    parts = Counter({"norm inputs": 2 * C * rows * h, "norm outputs": 2 * C * rows * h})
    if mla := model.mla:
        q = k = heads * (mla.nope_dim + mla.rope_dim)
        v = heads * mla.v_dim
        ranks = (mla.q_rank or 0) + mla.kv_rank
        parts["latents"] = C * rows * (ranks + mla.rope_dim)
        parts["latent norm outputs"] = C * rows * ranks
    else:
        q = heads * model.head_dim
        k = v = model.head_dim * max(model.kv_heads / tp, 1)
    out = v if mla else q
    parts["queries, keys, values"] = C * tokens * (q + k + v)
    parts["attention output"] = C * tokens * out
    if program.flash:
        parts["log-sum-exp"] = WIDE * tokens * heads + (
            C * tokens * out if layout.ulysses > 1 else 0
        )
    else:
        parts["scores"] = (2 * C + 1 if model.dropout else C) * tokens * heads * seq_len
    if model.dropout:
        parts["dropout masks"] = 2 * rows * h
    if model.is_moe(layer):
        parts.update(_mixture(model, layout, tokens, rows))
        if program.late_weights:
            parts["expert outputs"] = parts["expert inputs"]
    else:
        parts["mlp"] = C * tokens * (_up(model) + 1) * model.ffn / tp
    return dict(parts)


def _up(model: Model) -> int:
    """Maps before the activation."""
    return 2 if model.gated else 1


def _mixture(model: Model, layout: Layout, tokens: float, rows: float) -> dict[str, float]:
    """The parts of a mixture: routing gives each rank its equal share of the copies."""
    moe, h = model.moe, model.hidden
    copies = rows * moe.topk * layout.etp
    width = moe.ffn / layout.etp
    shared = (moe.shared_ffn or moe.shared * moe.ffn) / layout.tp
    return {
        # Logits, scores and probabilities in float32, a mask of a byte; of a copy its place
        # before and after sorting (int32 or int64) and its weight.
        "router": rows * 13 * moe.experts + 16 * copies,
        "expert inputs": C * copies * h,
        "expert gates": C * copies * _up(model) * width,
        "expert products": C * copies * width,
        "shared expert": C * tokens * (_up(model) + 1) * shared,
    }


class _Chunk(NamedTuple):
    """kept: for the backward of a micro batch. passing: the most that comes and goes besides
    while its backward runs."""

    kept: float
    passing: float


def _chunk(
    model: Model,
    layout: Layout,
    program: Program,
    seq_len: int,
    layers: range,
    head: bool,
    recompute: Sequence[str],
) -> _Chunk:
    tokens, rows = _tokens(layout, seq_len)
    stay, passing = 0.0, 0.0
    for layer in layers:
        here = sum(kept(model, layout, program, seq_len, layer, recompute).values())
        again = sum(_parts(model, layout, program, seq_len, layer).values()) - here
        stay += here
        passing = max(passing, again + _layer_backward(model, layout, tokens, rows, layer))
    if program.keeps_outputs and not head:
        stay += C * rows * model.hidden
    if head:
        stay += 2 * C * rows * model.hidden  # input and output of the final norm
        passing = max(passing, _head(model, layout, program, tokens, rows))
    return _Chunk(stay, passing)


def _layer_backward(model: Model, layout: Layout, tokens: float, rows: float, layer: int) -> float:
    """Gradients of the residual stream and of gate and up, where most is held."""
    if model.is_moe(layer):
        wide = _mixture(model, layout, tokens, rows)["expert gates"]
    else:
        wide = C * tokens * _up(model) * model.ffn / layout.tp
    return C * rows * model.hidden + wide


def _head(model: Model, layout: Layout, program: Program, tokens: float, rows: float) -> float:
    """Logits, and what their backward holds: the gradients of the output layer's input and
    weight, and under sequence parallelism the input itself, gathered."""
    logits = tokens * model.vocab / layout.tp
    stream = C * tokens * model.hidden
    backward = stream + C * model.vocab * model.hidden / layout.tp
    if layout.tp > 1:
        backward += C * rows * model.hidden + (stream if layout.sequence_parallel else 0)
    # In the loss; then with at most a float32 gradient and what it is cast to.
    return max(program.logits * logits, min(program.logits, C + WIDE) * logits + backward)


def _stand_ins(mine: Sequence[Parameter], model: Model, layout: Layout, program: Program) -> float:
    """One tensor for each distinct shape of a linear map of the layers. Queries, keys and values
    are one map there, and so are gate and up."""
    if not program.fused_gradients:
        return 0.0
    shapes = set()
    joined: Counter[tuple[str, int]] = Counter()
    for p in mine:
        if not p.unit.startswith("layers.") or not p.name.endswith(".weight") or len(p.shape) < 2:
            continue
        *_, rows, width = local_shape(p, model, layout)
        module, name = p.name.removesuffix(".weight").rsplit(".", 1)
        if name in ("q", "k", "v", "gate", "up"):
            joined[module, width] += rows
        elif name != "router":
            shapes.add((rows, width))
    shapes |= {(rows, width) for (_, width), rows in joined.items()}
    return C * sum(rows * width for rows, width in shapes)


# ------------------------------------------------------------------------------------------
# Time


def _table(model: Model, layout: Layout, seq_len: int, micro_batches: int) -> Table:
    if layout.pp == 1:  # one micro batch after the other
        return Table("", ((Action("F", 0, 0), Action("B", 0, 0)),))
    name, group = split_name(layout.schedule)
    timed = name in TIMED
    times, cap = (chunk_times(model, layout, seq_len), layout.pp) if timed else (None, None)
    return build(name, layout.pp, micro_batches, layout.vpp, group, times, cap)


def _peak(
    actions: Sequence[Action], sizes: Mapping[int, _Chunk], sums: float, step: float
) -> tuple[float, float]:
    """(kept, passing) at the moment when their sum is largest: of each forward, within each
    backward, after each, and in the optimizer step."""
    live, moments = 0.0, [(0.0, step)]
    for a in actions:
        chunk = sizes[a.chunk]
        if a.kind == "F":
            live += chunk.kept
            moments.append((live, 0.0))
        if a.kind in "BI":
            moments.append((live, chunk.passing))
        if a.kind in "BW":
            live -= chunk.kept
            moments.append((live, sums))
    return max(moments, key=sum)
