"""How a serving engine uses its ranks: in roles, so that one vocabulary says it of every engine.

What a rank holds then is in `serving_memory.py`, what it sends in `serving_traffic.py`.
"""

from dataclasses import dataclass, replace

from plait.spec.cluster import Cluster
from plait.spec.grid import Grid
from plait.spec.layout import Layout
from plait.spec.model import Model


@dataclass(frozen=True)
class Counted:
    """A limit that a person sets, and what it counts.

    Attributes:
        option: as the engine spells it. field: of `Serving`. what: it counts.
        each: "rank" (of each data-parallel rank), "engine" (of all attention-DP ranks together,
            which share it out) or "request".
    """

    option: str
    field: str
    what: str
    each: str


@dataclass(frozen=True)
class Engine:
    """What engines do each in its own way.

    Attributes:
        name: as people write it.
        order: axes of its ranks inside one replica, the fastest first.
        spare: the stages that get the layers which do not divide: "middle" (counted backwards
            from the last but one), "last" or "first".
        fraction: of memory, by default; None: what is left after a reserve (see
            `serving_memory.share`). `of`: what it is a fraction of: "device" (weights, cache and
            working memory fit into it), "static" (weights and cache do) or "free" (the cache
            does, in what weights and working memory leave).
        block: tokens of a block of the cache, by default.
        limits: what a person may limit.
        vocabulary: rows of embedding and head are padded to a multiple of it.
        any_experts: experts need not divide over their ranks.
    """

    name: str
    order: tuple[str, ...]
    spare: str
    fraction: float | None
    of: str
    block: int
    limits: tuple[Counted, ...]
    vocabulary: int = 64
    any_experts: bool = False


#: vLLM: config/cache.py, distributed/utils.py get_pp_indices, vocab_parallel_embedding.py (0.33.0).
#: SGLang: runtime_context.py derive_attention_ranks, arg_groups/memory_hook.py (0.5.23).
#: TensorRT-LLM: mapping.py pp_layers (torch.tensor_split), KvCacheConfig.
ENGINES = {
    "vllm": Engine(
        "vLLM",
        ("tp", "cp", "pp", "dp"),
        "middle",
        0.92,
        "device",
        16,
        (
            Counted("--max-num-seqs", "max_requests", "requests running at once", "rank"),
            Counted("--max-num-batched-tokens", "max_tokens", "tokens of a step", "rank"),
            Counted("--max-model-len", "max_len", "tokens of prompt and answer", "request"),
        ),
        any_experts=True,
    ),
    "sglang": Engine(
        "SGLang",
        ("tp", "cp", "dp", "pp"),
        "last",
        None,
        "static",
        1,
        (
            Counted("--max-running-requests", "max_requests", "requests running at once", "engine"),
            Counted("--chunked-prefill-size", "max_tokens", "tokens of a prompt chunk", "engine"),
            Counted("--context-length", "max_len", "tokens of prompt and answer", "request"),
        ),
    ),
    "trtllm": Engine(
        "TensorRT-LLM",
        ("tp", "dp", "cp", "pp"),
        "first",
        0.9,
        "free",
        32,
        (
            Counted("--max_batch_size", "max_requests", "requests running at once", "rank"),
            Counted("--max_num_tokens", "max_tokens", "tokens of a step", "rank"),
            Counted("--max_seq_len", "max_len", "tokens of prompt and answer", "request"),
        ),
    ),
}


@dataclass(frozen=True)
class Limit:
    """A number that a person sets, and what it counts.

    Attributes:
        option: as the engine spells it. value: None where the engine finds it out at start.
        counts: what, and of how many ranks. per: "rank", "engine" or "request", see `Counted`.
        of_rank: of one data-parallel rank.
        in_all: over all data-parallel ranks and replicas of the launch.
    """

    option: str
    value: int | None
    counts: str
    per: str
    of_rank: int | None
    in_all: int | None


@dataclass(frozen=True)
class Serving:
    """How an engine uses its ranks, in roles (degrees are of one replica and default to 1).

    Attributes:
        engine: the dialect, "vllm".
        attn_tp, attn_dp: tensor and data parallel degree of attention.
        stages: pipeline stages; `layers`: of each (empty: as the engine shares them out).
        moe_ep, moe_tp: expert parallel degree, and tensor parallel degree inside experts.
        kv_cp: ranks that share the cache of a request in decode, token by token.
        q_cp: ranks that share the tokens of a prompt.
        replicas: engines that know nothing of each other.
        kv_tp: ranks over which KV heads are cut; dense_tp, shared_tp: of dense MLPs and of shared
            experts; embed_tp, head_tp: of the vocabulary.
        model: as the launch calls it, "" where it is a preset's own.
        dtype: of activations and of weights that are not quantised.
        weights: a scheme of `serving_memory.SCHEMES`. kv_dtype: as the engine spells it.
        max_len: longest request, tokens of prompt and answer (None: the model's own). positions:
            that its published configuration allows, where they are more than the model says.
        max_requests, max_tokens: most requests, and tokens, of one step, as the engine counts
            them (see `limits`; None: what it finds out at start).
        fraction: of memory, see `Engine`. block: tokens of a block of the cache.
        interleave: tokens that lie together on one of the kv_cp ranks.
        redundant: copies of experts beyond one of each. balanced: the engine moves experts.
        exchange: how tokens reach their experts: "sum" (every rank has all tokens, outputs are
            summed), "gather" (tokens are gathered, outputs scattered) or "dispatch" (all-to-all).
        backend: of that exchange, as the engine spells it.
        kv_exchange: between kv_cp ranks, "ag_rs" or "a2a". q_copied: each of them projects the
            queries of all.
        moe_tokens_cut: tokens are split over attn_tp between attention and experts.
        dense_copied: dense MLPs are whole on each rank. head_apart: the head is not where the
            engine usually has it: SGLang's over attention tp alone, TensorRT-LLM's over the
            attention-DP ranks.
        node: devices of a node, where the launch says so. nodes: how many.
    """

    engine: str
    attn_tp: int = 1
    attn_dp: int = 1
    stages: int = 1
    moe_ep: int = 1
    moe_tp: int = 1
    kv_cp: int = 1
    q_cp: int = 1
    replicas: int = 1
    layers: tuple[int, ...] = ()
    kv_tp: int = 1
    dense_tp: int = 1
    shared_tp: int = 1
    embed_tp: int = 1
    head_tp: int = 1
    model: str = ""
    dtype: str = "bfloat16"
    weights: str | None = None
    kv_dtype: str = "auto"
    max_len: int | None = None
    positions: int | None = None
    max_requests: int | None = None
    max_tokens: int | None = None
    fraction: float | None = None
    block: int | None = None
    interleave: int = 1
    redundant: int = 0
    balanced: bool = False
    exchange: str = "sum"
    backend: str = ""
    kv_exchange: str = "ag_rs"
    q_copied: bool = False
    moe_tokens_cut: bool = False
    dense_copied: bool = False
    head_apart: bool = False
    node: int | None = None
    nodes: int = 1

    @property
    def kind(self) -> Engine:
        return ENGINES[self.engine]

    @property
    def world(self) -> int:
        """Ranks of one replica."""
        return self.attn_tp * self.q_cp * self.attn_dp * self.stages

    @property
    def tokens_of_block(self) -> int:
        return self.block or self.kind.block

    def grid(self) -> Grid:
        """The ranks of one replica in the order of the engine."""
        sizes = {"tp": self.attn_tp, "cp": self.q_cp, "dp": self.attn_dp, "pp": self.stages}
        return Grid(self.kind.order, tuple(sizes[axis] for axis in self.kind.order))


def on(serving: Serving, layout: Layout) -> Serving:
    """The same engine with the same choices on another layout.

    In serving, dp_shard is attention-DP inside one engine, dp_replicate are replicas and cp is
    context parallelism of prefill, and where dcp is cp of decode too (TensorRT-LLM's Helix).
    """
    roles = replace(
        serving,
        attn_tp=layout.tp,
        attn_dp=layout.dp_shard,
        stages=layout.pp,
        moe_ep=layout.ep,
        moe_tp=layout.etp,
        kv_cp=layout.dcp,
        q_cp=layout.cp,
        replicas=layout.dp_replicate,
        layers=serving.layers if len(serving.layers) == layout.pp else layout.stages or (),
    )
    return _OWN[serving.engine](roles)


def _vllm(s: Serving) -> Serving:
    # config/parallel.py: use_sequence_parallel_moe, use_all2all.
    cut = s.moe_ep > 1 and s.attn_tp > 1 and s.attn_dp > 1 and s.backend not in _WITHOUT_CUT
    gather = s.attn_dp > 1 or cut or (s.moe_ep > 1 and s.q_cp > 1)
    exchange = ("gather" if s.backend in _GATHER else "dispatch") if gather else "sum"
    return replace(
        s,
        kv_tp=s.attn_tp,
        dense_tp=s.attn_tp,
        shared_tp=1 if cut else s.attn_tp,
        embed_tp=s.attn_tp,
        head_tp=s.attn_tp,
        exchange=exchange,
        moe_tokens_cut=cut,
    )


#: All-to-all backends of vLLM that gather; and those under which tokens are not cut over tp.
_GATHER = ("", "allgather_reducescatter", "naive", "pplx")
_WITHOUT_CUT = ("moonep", "flashinfer_nvlink_two_sided", "flashinfer_all2allv")


def _sglang(s: Serving) -> Serving:
    whole = s.attn_tp * s.q_cp * s.attn_dp
    dispatch = s.backend not in ("", "none")
    return replace(
        s,
        kv_tp=max(1, s.attn_tp // s.kv_cp),
        dense_tp=1 if s.dense_copied else whole,
        shared_tp=1 if dispatch else whole,
        embed_tp=1 if s.attn_dp > 1 else whole,
        head_tp=s.attn_tp if s.head_apart else whole,
        exchange="dispatch" if dispatch else "gather" if s.attn_dp > 1 else "sum",
    )


def _trtllm(s: Serving) -> Serving:
    # Attention DP has no tensor parallelism beside it; MLPs and the vocabulary are copied then.
    cut = 1 if s.attn_dp > 1 else s.attn_tp
    # Helix: the ranks that share the cache cut the MLPs too.
    helix = s.kv_cp > 1
    return replace(
        s,
        kv_tp=s.attn_tp,
        dense_tp=cut * (s.q_cp if helix else 1),
        shared_tp=cut * (s.q_cp if helix else 1),
        embed_tp=cut,
        head_tp=s.attn_dp if s.attn_dp > 1 and s.head_apart else cut,
        exchange="gather" if s.attn_dp > 1 else "sum",
    )


_OWN = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}


def on_devices(serving: Serving, cluster: Cluster | None) -> Serving:
    """With the limits that the engine chooses by its devices, where none are said: vLLM
    (engine/arg_utils.py get_batch_defaults) and SGLang (arg_groups/memory_hook.py)."""
    requests, tokens = None, None
    if cluster is not None and serving.engine == "vllm":
        gib = cluster.memory / 2**30
        large = gib >= 70 and "a100" not in cluster.device.lower()
        requests = 1024 if large else 256
        tokens = 16384 if gib >= 160 else 8192 if large else 2048
    elif cluster is not None and serving.engine == "sglang":
        mib = cluster.memory / 2**20
        steps = ((20 * 1024, 2048), (60 * 1024, 4096), (160 * 1024, 8192))
        tokens = next((tokens for below, tokens in steps if mib < below), 16384)
    elif serving.engine == "trtllm":
        requests, tokens = 2048, 8192
    return replace(
        serving,
        max_requests=serving.max_requests or requests,
        max_tokens=serving.max_tokens or tokens,
    )


def limits(serving: Serving) -> list[Limit]:
    """What its limits count, of a rank and in all."""
    found = []
    for c in serving.kind.limits:
        value = getattr(serving, c.field)
        if c.each == "request":
            found.append(Limit(c.option, value, f"{c.what} of one request", c.each, value, None))
            continue
        of_rank = value
        if c.each == "engine" and value is not None:
            of_rank = max(1, value // serving.attn_dp)
        ranks = serving.attn_dp * serving.replicas
        whose = f"of each of {ranks} data-parallel ranks" if ranks > 1 else "in all"
        if c.each == "engine" and serving.attn_dp > 1:
            whose = f"of an engine, shared out over its {serving.attn_dp} attention-DP ranks"
        elif c.each == "engine" and ranks > 1:
            whose = f"of each of {ranks} replicas"
        whole = None if of_rank is None else of_rank * ranks
        found.append(Limit(c.option, value, f"{c.what}, {whose}", c.each, of_rank, whole))
    return found


def of_rank(serving: Serving, field: str) -> int | None:
    """A limit of one data-parallel rank."""
    options = {c.option: c.field for c in serving.kind.limits}
    return next((x.of_rank for x in limits(serving) if options[x.option] == field), None)


def allowed(serving: Serving, model: Model) -> int:
    """Positions of the model, as published."""
    return max(serving.positions or 0, model.seq)


def longest(serving: Serving, model: Model) -> int:
    """Tokens of prompt and answer that a request may have."""
    return serving.max_len or allowed(serving, model)


def carried(serving: Serving, engine: str) -> Serving:
    """What another engine can take over of a launch's choices, on the same layout: the model, its
    lengths and dtypes, and the most requests, counted as it counts them. Its cache's dtype is
    still the old engine's word."""
    requests = of_rank(serving, "max_requests")
    each = {c.field: c.each for c in ENGINES[engine].limits}
    if requests is not None and each["max_requests"] == "engine":
        requests *= serving.attn_dp
    kept = ("model", "dtype", "weights", "kv_dtype", "max_len", "positions", "redundant")
    kept = (*kept, "balanced")
    return Serving(engine, max_requests=requests, **{k: getattr(serving, k) for k in kept})


def stage_layers(serving: Serving, model: Model) -> tuple[int, ...]:
    """Layers of each stage, as the launch says or the engine shares them out."""
    stages = serving.stages
    if len(serving.layers) == stages and sum(serving.layers) == model.layers:
        return serving.layers
    least, more = divmod(model.layers, stages)
    first = {
        "middle": stages - 1 - more,
        "last": stages - more,
        "first": 0,
    }[serving.kind.spare]
    return tuple(least + (first <= stage < first + more) for stage in range(stages))
