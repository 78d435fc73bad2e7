"""What tensor and sequence parallelism send. It mirrors `parallel/tensor.py`.

With [T, h] the residual stream of a micro batch (T tokens; under context parallelism those that are
here), messages are of T h elements in the
compute dtype:

                                        forward           backward
    enter a region (fan out)            -                 all-reduce
    leave it (o, down, embedding)       all-reduce        -
    the same under sequence parallelism:
    enter                               all-gather        all-gather, reduce-scatter
    leave                               reduce-scatter    all-gather

A layer has two regions, so 4 all-reduces, or 4 all-gathers and 4 reduce-scatters and 2 all-gathers
more because only a rank's own rows of a region's input are kept (Megatron-LM 1909.08053 section 3;
2205.05198 section 4.2.2). Latent attention enters with its latents instead of the stream, and a
mixture has a second region only for its shared experts. The embedding leaves a region, the head
enters one. Where a pipeline puts weight gradients off, a rank keeps its own rows of a region's
output gradient too: an all-gather more a region.
"""

from collections.abc import Callable

from plait.cost.dtypes import dtypes_of, size_of
from plait.cost.ledger import TrafficLedger
from plait.cost.parts import Part
from plait.cost.shapes import local_seq
from plait.spec.job import Job
from plait.spec.model import Model


def tensor_traffic(job: Job, ledger: TrafficLedger, stage: int, part: Part) -> None:
    """Enters what the tp axis sends in one step for a part of the model on a stage, gradients of
    whole parameters left out."""
    model, layout = job.model, job.layout
    dtypes, micro_batches, layers = dtypes_of(job), part.micro_batches, len(part.layers)
    tokens = layout.micro_batch * local_seq(job)
    mlps = sum(has_mlp(model, layer) for layer in part.layers)
    stream = size_of(dtypes.compute, tokens, model.hidden)
    scalars = size_of(dtypes.wide, tokens)  # one number for each token

    def add(collective: str, phase: str, dtype: str, bytes: int, count: int) -> None:
        ledger.add(stage, "tp", collective, phase, dtype, bytes, layout.tp, count * micro_batches)

    def regions(phase: str, entered: int, left: int) -> None:
        """Regions entered and left by a pass in the direction of the forward."""
        if layout.sequence_parallel:
            add("all-gather", phase, dtypes.compute, stream, entered)
            add("reduce-scatter", phase, dtypes.compute, stream, left)
        else:
            add("all-reduce", phase, dtypes.compute, stream, left)

    attention = 0 if latent(model) else layers  # regions that the stream enters
    entered, left = attention + mlps + part.head, layers + mlps + part.embed
    regions("forward", entered, left)
    if layout.sequence_parallel:
        add("all-gather", "backward", dtypes.compute, stream, entered + left)
        # Where weight gradients are put off, what leaves a region gathers its gradient once more;
        # not the embedding, which has no input gradient.
        again = (layers + mlps) * part.put_off
        ledger.add(stage, "tp", "all-gather", "backward", dtypes.compute, stream, layout.tp, again)
        add("reduce-scatter", "backward", dtypes.compute, stream, entered)
    else:
        add("all-reduce", "backward", dtypes.compute, stream, entered)

    # A norm over all heads sums squares over the ranks: of q, of k; the gradient likewise.
    norms = 2 * layers if model.qk_norm == "full" else 0
    add("all-reduce", "forward", dtypes.wide, scalars, norms)
    add("all-reduce", "backward", dtypes.wide, scalars, norms)

    # Cross entropy over a cut vocabulary: the maxima, then exponentials and targets in one.
    add("all-reduce", "loss", dtypes.wide, scalars, part.head)
    add("all-reduce", "loss", dtypes.wide, 2 * scalars, part.head)

    for layer in part.layers:
        entered, left, norms = _recomputed(job, layer)
        regions("recompute", entered, left)
        add("all-reduce", "recompute", dtypes.wide, scalars, norms)
    _latents(job, part, add)


def has_mlp(model: Model, layer: int) -> bool:
    """Whether a layer has an MLP that tensor parallelism cuts: not if all of it are experts."""
    return not model.is_moe(layer) or model.moe.shared > 0


def latent(model: Model) -> bool:
    """Whether attention enters its region with latents alone."""
    return model.mla is not None and model.mla.q_rank is not None


def _latents(job: Job, part: Part, add: Callable) -> None:
    """Latents enter the region of attention in place of the stream, and the rotated part of the
    key does: `models.heads.MLA`."""
    model, layout, dtype, layers = job.model, job.layout, dtypes_of(job).compute, len(part.layers)
    if model.mla is None:
        return
    again = layout.recompute == "full" or "attention" in layout.recomputed
    mla, tokens = model.mla, layout.micro_batch * local_seq(job)
    widths = [mla.kv_rank] + ([mla.q_rank] if mla.q_rank is not None else [])
    for width, kept in [(w, True) for w in widths] + [(mla.rope_dim, False)]:
        bytes = size_of(dtype, tokens, width)
        if not layout.sequence_parallel:
            add("all-reduce", "backward", dtype, bytes, layers)
            continue
        for phase in ["forward"] + ["recompute"] * again + ["backward"] * kept:
            add("all-gather", phase, dtype, bytes, layers)
        add("reduce-scatter", "backward", dtype, bytes, layers)


def _recomputed(job: Job, layer: int) -> tuple[int, int, int]:
    """Regions that the stream enters, regions left and sums for norms that a layer's recomputation
    repeats.

    Recomputation ends as soon as it has every tensor that backward asks for (torch's early stop).
    Leaving a region keeps nothing, so the sum that ends what is recomputed is not repeated, unless
    something after it keeps a tensor: the norm of a branch's output its input, dropout its mask.
    """
    model, layout = job.model, job.layout
    sums = 2 if model.qk_norm == "full" else 0
    heads, mlps = not latent(model), has_mlp(model, layer)
    if layout.recompute == "full":
        kept_after = model.norm_at in ("output", "both") or model.dropout > 0
        return heads + mlps, 1 + mlps if kept_after else 1, sums
    attention, mlp = "attention" in layout.recomputed, "mlp" in layout.recomputed
    return attention * heads + mlp * mlps, 0, sums * attention
