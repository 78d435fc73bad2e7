"""Megatron's own validation: what it refuses, at start or in the first step, and what it changes.

Sources: megatron/training/arguments.py (validate_args), megatron/core/parallel_state.py,
core/model_parallel_config.py, core/transformer/transformer_config.py,
core/transformer/moe/moe_layer.py, core/num_microbatches_calculator.py.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from plait.dialects.launch import AT_START, FIRST_STEP, changed, note, refused
from plait.dialects.megatron.names import dashed
from plait.spec.findings import Finding
from plait.spec.job import Job
from plait.spec.layout import Layout, divisors, nearest

#: First word of a device's name -> whether it is of Blackwell's generation or later.
_BLACKWELL = ("b200", "b300", "gb200", "gb300", "b100", "rtx pro", "thor")


@dataclass(frozen=True)
class Case:
    """What a rule is asked about.

    Attributes:
        facts, job, environment, target, spell: see `rules`.
        config_class: see `rules`.
    """

    facts: Mapping[str, Any]
    job: Job
    environment: Mapping[str, str]
    target: str
    spell: Callable[[str], str | None]
    config_class: bool = False

    def fact(self, name: str, default: Any = None) -> Any:
        value = self.facts.get(name)
        return default if value is None else value

    def said(self, name: str) -> bool:
        return name in self.facts.get("given", ())

    def name(self, argument: str) -> str:
        """An argument as a person would write it."""
        return self.spell(argument) or argument

    @property
    def world(self) -> int:
        return self.fact("world") or self.job.layout.world

    @property
    def sequence_parallel(self) -> bool:
        """As the launch says it: the layout of a stand-in has none."""
        return bool(self.fact("sequence_parallel", self.job.layout.sequence_parallel))

    def refused(
        self, rule: str, message: str, when: str = AT_START, value: Any = None, **suggest: Any
    ) -> Finding:
        return refused(self.target, f"megatron-{rule}", when, message, value, **suggest)

    def changed(self, rule: str, message: str, value: Any = None, **suggest: Any) -> Finding:
        return changed(self.target, f"megatron-{rule}", message, value, **suggest)

    def note(self, rule: str, message: str, value: Any = None) -> Finding:
        return note(self.target, f"megatron-{rule}", message, value)


def rules(
    facts: Mapping[str, Any],
    job: Job,
    environment: Mapping[str, str] | None = None,
    target: str = "Megatron-LM",
    spell: Callable[[str], str | None] = dashed,
    config_class: bool = False,
) -> list[Finding]:
    """What Megatron says to a job, in the order of its own checks.

    Args:
        facts: of `arguments.Understood`; {} for a job that comes from elsewhere.
        job: complete, or a stand-in for one whose degrees do not go together.
        environment: environment variables as far as the launch sets them.
        target: who refuses, for messages. spell: how an argument is called in them.
        config_class: the target builds TransformerConfig without Megatron's argument layer
            (Megatron-Bridge): what that layer repairs is an error then.
    """
    from plait.dialects.megatron.validation_options import OPTIONS
    from plait.dialects.megatron.validation_pipeline import PIPELINE

    case = Case(facts, job, environment or {}, target, spell, config_class)
    return [finding for rule in (*_RULES, *PIPELINE, *OPTIONS) for finding in rule(case)]


def grids(case: Case) -> Iterator[Finding]:
    """Both grids tile the world (core/parallel_state.py)."""
    layout, world = case.job.layout, case.world
    gathered = case.fact("tensor_parallel_num_weight_shards", layout.tp)
    if gathered < layout.tp or gathered % max(1, layout.tp):
        yield case.refused("weight-shards", f"{case.name('tensor_parallel_num_weight_shards')} "
                           f"{gathered} is no multiple of TP {layout.tp}")  # fmt: skip
        gathered = layout.tp
    if case.fact("yaml_cfg") and (finding := _cut(case)):
        yield finding
        return
    dense = layout.pp * layout.cp * max(1, gathered)
    if world % max(1, dense):
        parts = f"TP {layout.tp} x PP {layout.pp} x CP {layout.cp}"
        message = f"{parts} = {dense} does not divide the world of {world}"
        yield case.refused("world", message, value=world, **_legal_dense(layout, world, case))
        return
    experts = layout.etp * layout.ep * layout.pp
    has = case.job.model.moe is not None or layout.ep > 1
    if has and world % max(1, experts):
        hidden = ", which by default is as large as TP," if not case.said(
            "expert_tensor_parallel_size") else ""  # fmt: skip
        message = (
            f"ETP {layout.etp}{hidden} x EP {layout.ep} x PP {layout.pp} = {experts} does not "
            f"divide the world of {world}"
        )
        yield case.refused(
            "expert-grid", message, value=layout.etp, **_legal_experts(layout, world // layout.pp)
        )
    if has and case.fact("use_tp_pp_dp_mapping") and layout.pp > 1 and layout.edp != layout.dp:
        message = f"{case.name('use_tp_pp_dp_mapping')} with EDP {layout.edp} other than DP "
        yield case.refused("rank-order", f"{message}{layout.dp}")
    elif case.fact("use_tp_pp_dp_mapping") and layout.pp > 1:
        message = "places stages next to each other and data-parallel ranks apart; plait counts "
        yield case.note("rank-order", f"{message}stages apart")
    copies = case.fact("num_distributed_optimizer_instances", 1)
    shared = world // max(1, layout.tp * layout.pp)
    if copies > 1 and shared % copies:
        yield case.refused(
            "instances",
            f"{copies} instances of the distributed optimizer do not divide DP x CP = {shared}",
            value=copies,
            layout__dp_replicate=nearest(copies, divisors(shared)),
        )


def _cut(case: Case) -> Finding | None:
    """A file for --yaml-cfg has degrees above the world cut down (yaml_arguments.py)."""
    layout = case.job.layout
    tp = min(layout.tp, case.world)
    pp = min(layout.pp, case.world // max(1, tp))
    if (tp, pp) == (layout.tp, layout.pp):
        return None
    message = f"TP {layout.tp} and PP {layout.pp} are cut to {tp} and {pp}, on {case.world} ranks"
    return case.changed("yaml-cut", message, case.world, layout__tp=tp, layout__pp=pp)


def _legal_dense(layout: Layout, world: int, case: Case) -> dict[str, Any]:
    """The change of one degree that makes the dense grid tile the world, the pipeline's first and
    that within a node last; or else another world."""
    total = layout.tp * layout.pp * layout.cp
    model, length = case.job.model, case.job.train.seq_len or case.job.model.seq
    fits = {
        "pp": lambda d: model.layers % d == 0,
        "cp": lambda d: d == 1 or length % (2 * d * layout.tp) == 0,
        "tp": lambda d: model.heads % d == 0 and model.kv_heads % d == 0,
    }
    for axis in ("pp", "cp", "tp"):
        degree = getattr(layout, axis)
        rest = max(1, total // max(1, degree))
        if degree > 1 and world % rest == 0:
            legal = nearest(degree, [d for d in divisors(world // rest) if fits[axis](d)])
            mended: dict[str, Any] = {f"layout__{axis}": legal}
            if axis == "pp" and layout.stages is not None:
                mended["layout__stages"] = "balanced"
            if axis == "pp" and legal == 1 and case.fact("vpp", 1) > 1:
                mended |= {"layout__vpp": 1, "layout__schedule": "1f1b"}
            if axis == "cp" and legal % max(1, layout.ulysses):
                mended["layout__ulysses"] = legal
            return mended
    return {"ranks": max(1, round(world / max(1, total))) * total}


def _legal_experts(layout: Layout, stage: int) -> dict[str, int]:
    """The smallest change of ETP, or else of EP, that makes the expert grid tile a stage."""
    if stage % layout.ep == 0:
        fits = [d for d in divisors(stage // layout.ep) if layout.tp % d == 0]
        return {"layout__etp": max((d for d in fits if d < layout.etp), default=1)
                if layout.etp != layout.tp else 1}  # fmt: skip
    return {"layout__etp": 1, "layout__ep": nearest(layout.ep, divisors(stage))}


def experts(case: Case) -> Iterator[Finding]:
    """Expert parallelism needs experts, evenly spread, and sequence parallelism beside TP."""
    layout, moe = case.job.layout, case.job.model.moe
    if layout.ep > 1 and case.facts and not case.fact("open") and not case.fact("num_experts"):
        suggest = {case.name("num_experts"): moe.experts} if moe else {}
        message = f"EP {layout.ep} without {case.name('num_experts')}"
        finding = case.refused("no-experts", message, value=layout.ep)
        yield Finding(finding.level, finding.rule, finding.message, "", layout.ep, suggest)
    if moe is None:
        return
    if moe.experts % max(1, layout.ep):
        legal = nearest(layout.ep, divisors(moe.experts))
        message = f"{moe.experts} experts are no multiple of EP {layout.ep}"
        yield case.refused("experts-divide", message, value=layout.ep, layout__ep=legal)
    if layout.tp > 1 and not case.sequence_parallel and not case.fact("inference"):
        message = f"a mixture of experts under TP {layout.tp} needs "
        message += case.name("sequence_parallel")
        rule, mended = "moe-sequence-parallel", {"layout__sequence_parallel": True}
        if case.fact("open"):  # what stands elsewhere may switch it on
            yield case.changed(rule, f"{message}, or stops in the first step", **mended)
        elif case.fact("yaml_cfg"):
            yield case.refused(rule, message, **mended)
        else:
            message += "; the configuration only warns"
            yield case.refused(rule, message, FIRST_STEP, **mended)
    if moe.bias and layout.etp > 1:
        message = f"biases in experts need ETP 1, not {layout.etp}"
        yield case.refused("expert-bias-etp", message, value=layout.etp, layout__etp=1)


def batch(case: Case) -> Iterator[Finding]:
    """GBS = MBS x DP x micro batches (core/num_microbatches_calculator.py); EP is no part of
    DP."""
    layout, train = case.job.layout, case.job.train
    model_ranks = max(1, layout.tp * layout.pp * layout.cp)
    if case.world % model_ranks:
        return
    dp = case.world // model_ranks
    micro = case.fact("micro_batch_size", layout.micro_batch)
    total = case.fact("global_batch_size") or train.global_batch or 0
    one = micro * dp
    if micro < 1 or one < 1:
        yield case.refused("micro-batch", f"micro batch {micro}", value=micro)
        return
    if total and total % one:
        legal = max(1, round(total / one)) * one
        shown = f"global batch {total} is no multiple of micro batch {micro} x DP {dp} = {one}"
        if case.fact("decrease_batch_size_if_needed"):
            message = f"{shown}; it runs with {max(1, total // one) * one}"
            yield case.changed("batch", message, total, train__global_batch=legal)
        else:
            yield case.refused("batch", shown, value=total, train__global_batch=legal)
    ramp = case.fact("rampup_batch_size")
    if ramp:
        yield from _rampup(case, ramp, total, one)
    if case.said("step_batch_size_schedule") and case.said("global_batch_size"):
        names = f"{case.name('step_batch_size_schedule')} and {case.name('global_batch_size')}"
        yield case.refused("batch-schedule", f"{names} cannot both be given")


def _rampup(case: Case, ramp: tuple[int, ...], total: int, one: int) -> Iterator[Finding]:
    name = case.name("rampup_batch_size")
    if len(ramp) != 3 or min(ramp) < 0 or ramp[1] < 1:
        yield case.refused("rampup", f"{name} takes a start, a step and samples", value=ramp)
        return
    start, step, _ = ramp
    if total and (total - start) % step:
        message = f"{name}: from {start} to {total} is no multiple of the step {step}"
        yield case.refused("rampup", message, value=ramp)
    wrong = next((n for n in range(start, total, step) if n % one), None) if start > 0 else start
    if wrong is not None and not case.fact("decrease_batch_size_if_needed"):
        message = f"{name}: {wrong} is no multiple of micro batch x DP = {one}"
        yield case.refused("rampup", message, value=ramp)


def shapes(case: Case) -> Iterator[Finding]:
    """What TP and CP cut (arguments.py, transformer_config.py)."""
    model, layout, train = case.job.model, case.job.layout, case.job.train
    if model.heads % max(1, layout.tp):
        legal = nearest(layout.tp, divisors(model.heads))
        message = f"{model.heads} heads are no multiple of TP {layout.tp}"
        yield case.refused("heads", message, value=layout.tp, layout__tp=legal)
    groups = model.kv_heads
    if model.mla is None and groups % max(1, layout.tp) and layout.tp % max(1, groups):
        message = f"{groups} query groups are neither a multiple nor a divisor of TP {layout.tp}"
        fits = [d for d in divisors(model.heads) if groups % d == 0 or d % groups == 0]
        yield case.refused(
            "query-groups", message, value=layout.tp, layout__tp=nearest(layout.tp, fits)
        )
    elif model.mla is None and layout.tp > groups:
        message = (
            f"{groups} KV heads under TP {layout.tp}: each is kept {layout.tp // groups} times"
        )
        yield case.note("kv-copies", message)
    length = train.seq_len or model.seq
    if layout.cp > 1 and length % (2 * layout.cp):
        unit = 2 * layout.cp
        message = f"{length} tokens are no multiple of 2 x CP = {unit}"
        legal = max(1, round(length / unit)) * unit
        yield case.refused("sequence-cp", message, value=length, train__seq_len=legal)
    elif layout.sequence_parallel and (length // max(1, layout.cp)) % max(1, layout.tp):
        unit = layout.tp * layout.cp * (2 if layout.cp > 1 else 1)
        message = f"{length} tokens / CP {layout.cp} are no multiple of TP {layout.tp}"
        yield case.refused(
            "sequence-tp", message, FIRST_STEP, length,
            train__seq_len=max(1, round(length / unit)) * unit,
        )  # fmt: skip
    longest = case.fact("max_position_embeddings")
    if longest is not None and length > longest and case.said("hidden_size"):
        message = f"{length} tokens are more than the {longest} positions of "
        message += case.name("max_position_embeddings")
        yield case.refused("positions", message, value=length, train__seq_len=longest)
    if case.fact("multi_latent_attention") and case.fact("group_query_attention"):
        yield case.refused("mla-gqa", "latent attention and grouped queries exclude each other")


def sequence_parallel(case: Case) -> Iterator[Finding]:
    """Without TP the argument layer switches it off, and the config class refuses it."""
    if not case.fact("sequence_parallel") or case.job.layout.tp > 1:
        return
    if case.config_class:
        message = "sequence parallelism without tensor parallelism"
        yield case.refused("sequence-parallel-tp", message, layout__sequence_parallel=False)
    else:
        message = f"{case.name('sequence_parallel')} is switched off at TP 1"
        yield case.changed("sequence-parallel-off", message)


def context(case: Case) -> Iterator[Finding]:
    """How context parallel ranks talk (arguments.py, transformer_config.py)."""
    layout, model = case.job.layout, case.job.model
    kinds = case.fact("cp_comm_type", ())
    sizes = case.fact("hierarchical_context_parallel_sizes")
    strange = [k for k in kinds if k not in ("p2p", "a2a", "allgather", "a2a+p2p")]
    if strange:
        message = f"{case.name('cp_comm_type')} {strange[0]!r} is none of p2p, a2a, allgather, "
        yield case.refused("cp-type", f"{message}a2a+p2p", value=strange[0])
    if sizes:
        product = 1
        for size in sizes:
            product *= size
        if product != layout.cp:
            message = f"{case.name('hierarchical_context_parallel_sizes')} multiply to {product}, "
            yield case.refused("cp-hierarchy", f"{message}not to CP {layout.cp}", value=product)
    elif "a2a+p2p" in kinds:
        message = f"a2a+p2p needs {case.name('hierarchical_context_parallel_sizes')}"
        yield case.refused("cp-hierarchy", message)
    if layout.cp > 1 and len(kinds) > 1 and len(kinds) != model.layers:
        message = f"{case.name('cp_comm_type')} has {len(kinds)} entries for {model.layers} layers"
        yield case.refused("cp-by-layer", message, value=len(kinds))
    heads = model.heads // max(1, layout.tp)
    if layout.ulysses > 1 and heads % layout.ulysses:
        message = f"{heads} heads of a TP rank are no multiple of {layout.ulysses} a2a ranks"
        legal = nearest(layout.ulysses, [d for d in divisors(layout.cp) if heads % d == 0])
        yield case.refused("cp-heads", message, FIRST_STEP, layout.ulysses, layout__ulysses=legal)
    if case.fact("hybrid_context_parallel"):
        wrong = [
            what
            for what, is_wrong in (
                ("pipeline parallelism", layout.pp > 1),
                ("Megatron-FSDP", case.fact("use_megatron_fsdp")),
                ("a loss that is not per token", not case.fact("calculate_per_token_loss")),
            )
            if is_wrong
        ]
        if wrong:
            message = f"{case.name('hybrid_context_parallel')} with {', '.join(wrong)}"
            yield case.refused("hybrid-cp", message)


def connections(case: Case) -> Iterator[Finding]:
    """CUDA_DEVICE_MAX_CONNECTIONS: 1 with TP or CP before Blackwell; anything else with FSDP."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = case.environment.get(name)
    layout, cluster = case.job.layout, case.job.cluster
    fsdp = case.fact("use_megatron_fsdp") or case.fact("use_torch_fsdp2")
    device = cluster.device.lower() if cluster else ""
    later = any(word in device for word in _BLACKWELL)
    if fsdp:
        if value == "1":
            yield case.refused("connections", f"FSDP needs {name} unset or above 1", value=value)
        if (layout.tp > 1 or layout.cp > 1) and not later:
            message = f"TP or CP wants {name}=1 before Blackwell, FSDP wants it otherwise"
            yield case.changed("connections-fsdp", message)
        return
    if (layout.tp <= 1 and layout.cp <= 1) or value == "1" or later:
        return
    if case.fact("overlap_moe_expert_parallel_comm"):
        message = f"TP or CP wants {name}=1 before Blackwell, the overlap of experts a larger one"
        yield case.changed("connections-overlap", message, value)
        return
    message = f"TP or CP needs {name}=1 before Blackwell"
    if value is not None and cluster:
        yield case.refused("connections", f"{message}, not {value}", value=value)
    elif value is not None:
        yield case.changed("connections", f"{message}, not {value}, or it stops at start")
    else:
        on = f" (as {cluster.device} is)" if cluster else ""
        yield case.changed(
            "connections", f"{message}{on}, or it stops at start; nothing here sets it"
        )


_RULES = (grids, experts, batch, shapes, sequence_parallel, context, connections)
