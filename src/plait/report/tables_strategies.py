"""The strategies of the field as data: the flags that make a job of each, and what is said of it.

What can be computed is not said here: `tables_cost.py` reads it off the ledger of the job.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from plait.rules.context import legal_ulysses
from plait.rules.legality import legal_tp, tp_cuts
from plait.spec.job import Job
from plait.spec.layout import Layout
from plait.spec.model import Model


@dataclass(frozen=True)
class Strategy:
    """One way to split.

    Attributes:
        name: its short name. title: how people call it.
        flags: layout field -> value; "N" is all devices, "S" the shards of HSDP, "R" its replicas.
        split, whole: what is cut, and what every rank still has whole.
        saves: what it is for.
        limit: what bounds its degree, in numbers of the job's model.
        used: "training", "inference" or "both".
        training, serving: frameworks that have it, by their sources in 2026.
        experts: it needs a mixture of experts.
    """

    name: str
    title: str
    flags: dict[str, int | str | bool]
    split: str
    whole: str
    saves: str
    limit: Callable[[Job], str]
    used: str
    training: tuple[str, ...] = ()
    serving: tuple[str, ...] = ()
    experts: bool = False


# ------------------------------------------------------------------------------------------
# Limits


def _samples(job: Job) -> str:
    batch = job.train.global_batch
    return f"samples of a global batch: {batch}"


def _shards(job: Job) -> str:
    return f"{_samples(job)}; with cp the shards are dp x cp"


def _heads(job: Job) -> str:
    model = job.model
    most = max(legal_tp(model))
    cut = ", ".join(what for _, what, _ in tp_cuts(model))
    return f"must divide {cut}: at most {most}{_copied(model, most)}{_domain(job)}"


def _copied(model: Model, most: int) -> str:
    """From which degree on KV heads are on several ranks."""
    if model.mla or most <= model.kv_heads:
        return ""
    return f"; beyond {model.kv_heads} each KV head is copied"


def _domain(job: Job) -> str:
    cluster = job.cluster
    return f"; fast links join {cluster.fast_domain}" if cluster else ""


def _rows(job: Job) -> str:
    return f"{_heads(job)}; tokens of a micro batch must divide too"


def _layers(job: Job) -> str:
    return f"layers: {job.model.layers}; and micro batches well above the stages"


def _chunks(job: Job) -> str:
    return f"stages x chunks at most {job.model.layers} layers"


def _pieces(job: Job) -> str:
    return f"two pieces a rank: {job.train.seq_len // 2} for {job.train.seq_len} tokens"


def _exchanged_heads(job: Job) -> str:
    model = job.model
    most = max(legal_ulysses(replace(job, layout=Layout(cp=model.heads))))
    return f"query heads of a tp rank: at most {most} with tp 1{_copied(model, most)}"


def _experts(job: Job) -> str:
    return f"experts: {job.model.moe.experts}" if job.model.moe else "needs a mixture of experts"


def _expert_width(job: Job) -> str:
    moe = job.model.moe
    return f"must divide the width of an expert: {moe.ffn}" if moe else _experts(job)


# ------------------------------------------------------------------------------------------
# Strategies

_PIPELINES = ("torchtitan", "Megatron-LM", "Primus")
_SERVERS = ("vLLM", "SGLang", "TensorRT-LLM")
_ALL = ("torchtitan", "Megatron-LM", "Primus", "nanotron", "DeepSpeed", "MaxText")
_STAGED = "layers: a stage has its own, with their states"
_NOT_STAGED = "activations of the micro batches under way"
_TOKENS = "the sequence: a rank has its part of the tokens of each sample"
_WEIGHTS = "weights (states are shared as under ZeRO)"

STRATEGIES = (
    Strategy(
        "ddp",
        "DDP",
        {"zero": 0},
        "samples",
        "weights, gradients, optimizer states",
        "time; of memory only activations, where the global batch stays",
        _samples,
        "both",
        _ALL,
        _SERVERS,
    ),
    Strategy(
        "zero-1",
        "ZeRO-1",
        {"zero": 1},
        "samples; optimizer states",
        "weights, gradients",
        "optimizer states / N, for no more traffic",
        _shards,
        "training",
        ("Megatron-LM", "Primus", "nanotron", "DeepSpeed", "MaxText"),
    ),
    Strategy(
        "zero-2",
        "ZeRO-2",
        {"zero": 2},
        "samples; optimizer states, gradients",
        "weights",
        "gradients / N too; reduces in every micro batch",
        _shards,
        "training",
        (
            "torchtitan (FSDP2 that never reshards)",
            "Megatron-LM (Megatron-FSDP)",
            "Primus",
            "DeepSpeed",
        ),
    ),
    Strategy(
        "zero-3",
        "ZeRO-3 / FSDP",
        {"zero": 3},
        "samples; optimizer states, gradients, weights",
        "the layer in use",
        "all model states / N",
        _shards,
        "training",
        ("torchtitan", "Megatron-LM", "Primus", "DeepSpeed", "MaxText"),
    ),
    Strategy(
        "hsdp",
        "HSDP",
        {"zero": 3, "dp_shard": "S", "dp_replicate": "R"},
        "samples; model states among S shards",
        "a copy of the shards in each of R replicas",
        "states / S; gathers stay among S ranks, on fast links",
        _shards,
        "training",
        ("torchtitan", "Megatron-LM", "Primus", "DeepSpeed (hpZ, MiCS)", "MaxText"),
    ),
    Strategy(
        "tp",
        "TP",
        {"tp": "N", "sequence_parallel": False},
        "matrices: heads, MLP width, vocabulary",
        "norms, the residual stream, inputs of the maps; routed experts",
        "weights, states, inner activations / N",
        _heads,
        "both",
        _ALL,
        _SERVERS,
    ),
    Strategy(
        "tp-sp",
        "TP + SP",
        {"tp": "N"},
        "matrices; between them the sequence",
        "weights of norms; routed experts",
        "all activations / N; TP alone leaves the stream whole",
        _rows,
        "both",
        ("torchtitan", "Megatron-LM", "Primus", "nanotron", "MaxText"),
        ("SGLang (in prefill)",),
    ),
    Strategy(
        "pp",
        "PP, 1F1B",
        {"pp": "N"},
        _STAGED,
        _NOT_STAGED,
        "weights and states / N, for the least traffic",
        _layers,
        "both",
        (*_PIPELINES, "nanotron", "DeepSpeed"),
        _SERVERS,
    ),
    Strategy(
        "pp-interleaved",
        "PP, interleaved",
        {"pp": "N", "vpp": 2},
        _STAGED,
        _NOT_STAGED,
        "half the bubble of 1F1B, for twice the messages",
        _chunks,
        "training",
        _PIPELINES,
    ),
    Strategy(
        "pp-zb-h1",
        "PP, ZB-H1",
        {"pp": "N", "schedule": "zb-h1"},
        _STAGED,
        _NOT_STAGED,
        "a smaller bubble than 1F1B: weight gradients fill it",
        _layers,
        "training",
        ("torchtitan (interleaved zero bubble)", "Primus", "Megatron-DeepSpeed"),
    ),
    Strategy(
        "cp-ring",
        "CP, ring",
        {"cp": "N"},
        _TOKENS,
        _WEIGHTS,
        "activations / N, for any number of heads",
        _pieces,
        "both",
        ("Megatron-LM", "Primus", "nanotron", "MaxText"),
        ("TensorRT-LLM (some releases)",),
    ),
    Strategy(
        "cp-all-gather",
        "CP, all-gather",
        {"cp": "N", "cp_method": "all-gather"},
        _TOKENS,
        f"{_WEIGHTS}; keys and values of one layer",
        "activations / N; one message a layer",
        _pieces,
        "both",
        ("torchtitan", "Megatron-LM", "Primus", "MaxText"),
        ("vLLM (prefill)", "SGLang (prefill)"),
    ),
    Strategy(
        "ulysses",
        "CP, Ulysses",
        {"cp": "N", "ulysses": "N"},
        "the sequence; inside attention the heads",
        _WEIGHTS,
        "activations / N; what a rank sends falls with N",
        _exchanged_heads,
        "both",
        ("Megatron-LM (a2a)", "Primus", "DeepSpeed", "MaxText"),
        ("TensorRT-LLM (some releases)",),
    ),
    Strategy(
        "ep",
        "EP",
        {"ep": "N"},
        "experts: a rank has whole ones",
        "attention, router, shared experts",
        "weights and states of experts / N",
        _experts,
        "both",
        ("torchtitan", "Megatron-LM", "Primus", "DeepSpeed", "MaxText"),
        _SERVERS,
        experts=True,
    ),
    Strategy(
        "etp",
        "ETP",
        {"etp": "N"},
        "experts: a rank has a part of each",
        "attention, router, shared experts",
        "weights and states of experts / N, whatever is routed",
        _expert_width,
        "both",
        ("Megatron-LM", "Primus"),
        ("vLLM (without -ep)", "SGLang", "TensorRT-LLM"),
        experts=True,
    ),
)
