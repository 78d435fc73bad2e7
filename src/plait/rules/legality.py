"""What is illegal: a job that breaks one of these rules cannot run, or would not mean anything.

Each rule is one function that yields findings of level "error", with the nearest legal value
where there is one. Whether the degrees multiply to the world and the batch adds up is decided
where they are derived (`Layout.fill`, `Batch.fill`).
"""

from collections.abc import Callable, Iterator
from math import gcd, isfinite
from operator import attrgetter
from typing import Any

from plait.spec.findings import Finding, closest, error
from plait.spec.job import DTYPE_BYTES, Job
from plait.spec.layout import divisors, nearest
from plait.spec.model import Model

_FLOATS = ("float64", "float32", "bfloat16", "float16")
assert set(_FLOATS) <= set(DTYPE_BYTES)

#: Field of a job -> the words that it knows.
WORDS = {
    "model.mlp": ("swiglu", "geglu", "swiglu-clamped", "gelu", "gelu-tanh"),
    "model.moe.score": ("softmax", "sigmoid"),
    "model.moe.group_score": ("max", "top2"),
    "model.moe.aux_form": ("sequence", "batch", "global"),
    "model.moe.drop": ("position", "probability"),
    "model.norm": ("rms", "layer"),
    "model.norm_at": ("input", "output", "both"),
    "model.qk_norm": (None, "head", "full"),
    "model.positions": ("rope", "learned", "alibi", "none"),
    "model.rope_scaling.kind": ("linear", "llama3", "yarn"),
    "train.dtype": ("auto", *_FLOATS),
    "train.grad_dtype": ("auto", *_FLOATS),
    "train.schedule": ("cosine", "wsd", "constant"),
    "train.check_collectives": ("first-step", "always", "never"),
}

#: Field of a job -> (lowest, highest, whether these two are legal themselves).
RANGES = {
    "model.dropout": (0, 1, (True, False)),
    "model.norm_eps": (0, None, (True, True)),
    "model.attention_scale": (0, None, (False, True)),
    "model.attention_softcap": (0, None, (False, True)),
    "model.logit_softcap": (0, None, (False, True)),
    "model.rope_theta": (0, None, (False, True)),
    "model.rope_local_theta": (0, None, (False, True)),
    "model.rope_scaling.factor": (0, None, (False, True)),
    "model.moe.scaling": (0, None, (False, True)),
    "model.moe.correction_speed": (0, None, (True, True)),
    "model.moe.aux_loss": (0, None, (True, True)),
    "model.moe.z_loss": (0, None, (True, True)),
    "model.moe.capacity": (0, None, (False, True)),
    "train.steps": (1, None, (True, True)),
    "train.learning_rate": (0, None, (True, True)),
    "train.min_learning_rate": (0, None, (True, True)),
    "train.warmup": (0, None, (True, True)),
    "train.decay": (0, None, (True, True)),
    "train.weight_decay": (0, None, (True, True)),
    "train.beta1": (0, 1, (True, False)),
    "train.beta2": (0, 1, (True, False)),
    "train.eps": (0, None, (False, True)),
    "train.clip": (0, None, (True, True)),
    "train.bucket_mib": (0, None, (False, True)),
    "train.loss_scale": (0, None, (False, True)),
    "train.timeout": (1, 1_000_000, (True, True)),
    "train.eval_every": (0, None, (True, True)),
    "train.eval_batches": (1, None, (True, True)),
    "checkpoint.every": (0, None, (True, True)),
    "checkpoint.keep": (1, None, (True, True)),
}


def _value(job: Job, path: str) -> Any:
    """The value at a dotted path, None where a table on the way is absent."""
    try:
        return attrgetter(path)(job)
    except AttributeError:
        return None


def words(job: Job) -> Iterator[Finding]:
    """A field that takes one of a few words has one of them."""
    for path, known in WORDS.items():
        value = _value(job, path)
        if value is not None and value not in known:
            names = [w for w in known if w is not None]
            message = f"{value!r} is none of {', '.join(names)}"
            yield error(path, value, message, closest(value, names), "words")


def ranges(job: Job) -> Iterator[Finding]:
    """Numbers are finite and inside their range."""
    for path, (low, high, closed) in RANGES.items():
        value = _value(job, path)
        if value is None:
            continue
        name = path.rpartition(".")[2]
        default = _default(job, path)
        if not isfinite(value):
            yield error(path, value, f"{name} must be a finite number", default, "ranges")
        elif value < low or (value == low and not closed[0]):
            words = f"below {low}" if closed[0] else f"not above {low}"
            legal = low if closed[0] else default
            yield error(path, value, f"{name} {value} is {words}", legal, "ranges")
        elif high is not None and (value > high or (value == high and not closed[1])):
            words = f"above {high}" if closed[1] else f"not below {high}"
            legal = high if closed[1] else default
            yield error(path, value, f"{name} {value} is {words}", legal, "ranges")


def _default(job: Job, path: str) -> Any:
    table, _, name = path.rpartition(".")
    return getattr(type(attrgetter(table)(job)), name, None)


def learning_rates(job: Job) -> Iterator[Finding]:
    """The learning rate decays: it does not end above its peak."""
    low, peak = job.train.min_learning_rate, job.train.learning_rate
    if low > peak >= 0:
        message = f"ends at {low:g}, above the peak of {peak:g}"
        yield error("train.min_learning_rate", low, message, peak, "learning-rates")


def head_counts(job: Job) -> Iterator[Finding]:
    """Each KV head serves as many query heads as any other; RoPE turns pairs."""
    model = job.model
    if model.mla is None and model.heads % model.kv_heads:
        message = f"{model.heads} heads are no multiple of {model.kv_heads} KV heads"
        legal = nearest(model.kv_heads, divisors(model.heads))
        yield error("model.kv_heads", model.kv_heads, message, legal, "head-counts")
    if model.mla is None and model.positions == "rope" and model.head_dim % 2:
        message = f"RoPE turns pairs of numbers: head_dim {model.head_dim} is odd"
        yield error("model.head_dim", model.head_dim, message, model.head_dim + 1, "head-counts")


def experts_chosen(job: Job) -> Iterator[Finding]:
    """A token goes to no more experts than there are, or than its best groups have."""
    moe, rule = job.model.moe, "experts-chosen"
    if moe is None or min(moe.experts, moe.groups, moe.topk_groups) < 1:
        return
    if moe.experts % moe.groups:
        message = f"{moe.experts} experts do not make {moe.groups} equal groups"
        legal = nearest(moe.groups, divisors(moe.experts))
        yield error("model.moe.groups", moe.groups, message, legal, rule)
    elif moe.topk_groups > moe.groups:
        message = f"the best {moe.topk_groups} of {moe.groups} groups"
        yield error("model.moe.topk_groups", moe.topk_groups, message, moe.groups, rule)
    elif moe.topk > moe.experts // moe.groups * moe.topk_groups:
        most = moe.experts // moe.groups * moe.topk_groups
        where = f" in the best {moe.topk_groups} groups" if moe.groups > 1 else ""
        message = f"top {moe.topk} of {most} experts{where}"
        yield error("model.moe.topk", moe.topk, message, most, rule)


# ------------------------------------------------------------------------------------------
# Tensor parallelism


def tp_cuts(model: Model) -> list[tuple[str, str, Callable[[int], bool]]]:
    """What tensor parallelism cuts: (rule, what it is, whether a degree suits it)."""
    heads, kv, ffn = model.heads, model.kv_heads, model.ffn
    cuts = [("heads-divide-tp", f"{heads} attention heads", lambda t: heads % t == 0)]
    if model.mla is None:
        # Beyond their number each KV head is copied to several ranks, to all equally often.
        cuts.append(("kv-heads-divide-tp", f"{kv} KV heads", lambda t: kv % t == 0 or t % kv == 0))
    if not all(model.is_moe(layer) for layer in range(model.layers)):
        cuts.append(("ffn-divides-tp", f"{ffn} MLP columns", lambda t: ffn % t == 0))
    return cuts


def legal_tp(model: Model) -> list[int]:
    """Every tensor parallel degree that the model's sizes allow, ascending."""
    cuts = tp_cuts(model)
    return [t for t in divisors(model.heads) if all(suits(t) for *_, suits in cuts)]


def tensor_degree(job: Job) -> Iterator[Finding]:
    """Heads, KV heads and MLP columns divide over the tp ranks."""
    tp = job.layout.tp
    legal = legal_tp(job.model)
    # The nearest of those that divide the ranks which tp and dp share.
    room = tp * job.layout.dp
    best = nearest(tp, [t for t in legal if room % t == 0])
    for rule, cut, suits in tp_cuts(job.model):
        if not suits(tp):
            message = f"{cut} do not divide over tp {tp}; legal: {', '.join(map(str, legal))}"
            yield error("layout.tp", tp, message, best, rule)


def norm_over_ranks(job: Job) -> Iterator[Finding]:
    """A norm over all heads is cut with them; only the root mean square one can be."""
    model, tp = job.model, job.layout.tp
    if tp > 1 and model.qk_norm == "full" and model.norm == "layer":
        message = f"a layer norm over all query heads cannot be cut over tp {tp}, an RMS norm can"
        yield error("model.qk_norm", model.qk_norm, message, "head", "norm-over-ranks")


def sequence_pieces(job: Job) -> Iterator[Finding]:
    """Sequence parallelism cuts the tokens of a micro batch that a rank has in equal pieces."""
    layout, seq_len = job.layout, job.train.seq_len
    micro, tp, cp = layout.micro_batch, layout.tp, layout.cp
    tokens = micro * seq_len // cp
    if not layout.sequence_parallel or tp == 1 or seq_len % cp or tokens % tp == 0:
        return
    step = cp * tp // gcd(micro, tp)
    legal = max(step, seq_len // step * step)
    over = f" / cp {cp}" if cp > 1 else ""
    message = (
        f"sequence parallelism cuts micro batch {micro} x {seq_len}{over} = {tokens} tokens "
        f"in {tp} equal pieces, and they do not divide"
    )
    yield error("train.seq_len", seq_len, message, legal, "sequence-pieces")


# ------------------------------------------------------------------------------------------
# Sequence and vocabulary


def learned_positions(job: Job) -> Iterator[Finding]:
    """With learned positions there is nothing beyond the last one."""
    model, seq_len = job.model, job.train.seq_len
    if model.positions == "learned" and seq_len > model.seq:
        message = f"{model.name} has learned {model.seq} positions, {seq_len} are asked for"
        yield error("train.seq_len", seq_len, message, model.seq, "learned-positions")


def byte_vocabulary(job: Job) -> Iterator[Finding]:
    """Text is read as bytes: each of the 256 needs a row in the embedding."""
    if job.model.vocab < 256:
        message = f"text is read as bytes, which takes 256 tokens, not {job.model.vocab}"
        yield error("model.vocab", job.model.vocab, message, 256, "byte-vocabulary")


# ------------------------------------------------------------------------------------------
# What later versions will do


def built_axes(job: Job) -> Iterator[Finding]:
    """Everything of training runs; serving does not yet."""
    dcp = job.layout.dcp
    if dcp > 1:
        message = f"decode context parallelism is not built yet (dcp {dcp})"
        yield error("layout.dcp", dcp, message, 1, "not-built")


def built_models(job: Job) -> Iterator[Finding]:
    """Every model can be trained but those with ALiBi."""
    model = job.model
    if model.positions == "alibi":
        message = f"ALiBi ({model.name}) is not built yet"
        yield error("model.positions", "alibi", message, rule="not-built")


def batch_product(job: Job) -> Iterator[Finding]:
    """global = micro x dp x accumulation."""
    batch, dp = job.batch, job.layout.dp
    product = batch.micro * dp * batch.accumulation
    if batch.global_ != product:
        message = (
            f"micro batch {batch.micro} x dp {dp} x accumulation {batch.accumulation} = "
            f"{product}, not the global batch {batch.global_}"
        )
        yield error("train.global_batch", batch.global_, message, product, "batch-product")


#: Rules of every job, and of those that read text.
RULES = (
    words,
    ranges,
    learning_rates,
    head_counts,
    experts_chosen,
    tensor_degree,
    norm_over_ranks,
    sequence_pieces,
    learned_positions,
    built_axes,
    built_models,
    batch_product,
)
TRAIN_RULES = (byte_vocabulary,)
