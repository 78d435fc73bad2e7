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
2205.05198 section 4.2.2). The embedding leaves a region, the head enters one. Where a pipeline
puts weight gradients off, a rank keeps its own rows of a region's output gradient too: 2
all-gathers more a layer.
"""

from plait.cost.dtypes import dtypes_of, size_of
from plait.cost.ledger import TrafficLedger
from plait.cost.parts import Part
from plait.cost.shapes import local_seq
from plait.spec.job import Job


def tensor_traffic(job: Job, ledger: TrafficLedger, stage: int, part: Part) -> None:
    """Enters what the tp axis sends in one step for a part of the model on a stage, gradients of
    whole parameters left out."""
    model, layout = job.model, job.layout
    dtypes, micro_batches, layers = dtypes_of(job), part.micro_batches, len(part.layers)
    tokens = layout.micro_batch * local_seq(job)
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

    entered, left = 2 * layers + part.head, 2 * layers + part.embed
    regions("forward", entered, left)
    if layout.sequence_parallel:
        add("all-gather", "backward", dtypes.compute, stream, entered + left)
        # Where weight gradients are put off, what leaves a region gathers its gradient once more;
        # not the embedding, which has no input gradient.
        again = 2 * layers * part.put_off
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

    entered, left, norms = _recomputed(job)
    regions("recompute", entered * layers, left * layers)
    add("all-reduce", "recompute", dtypes.wide, scalars, norms * layers)


def _recomputed(job: Job) -> tuple[int, int, int]:
    """Regions entered, regions left and sums for norms that a layer's recomputation repeats.

    Recomputation ends as soon as it has every tensor that backward asks for (torch's early stop).
    Leaving a region keeps nothing, so the sum that ends what is recomputed is not repeated, unless
    something after it keeps a tensor: the norm of a branch's output its input, dropout its mask.
    """
    model, layout = job.model, job.layout
    sums = 2 if model.qk_norm == "full" else 0
    if layout.recompute == "full":
        kept_after = model.norm_at in ("output", "both") or model.dropout > 0
        return 2, 2 if kept_after else 1, sums
    attention, mlp = "attention" in layout.recomputed, "mlp" in layout.recomputed
    return attention + mlp, 0, sums * attention
