"""What Megatron says to a pipeline.

Sources: megatron/training/arguments.py, core/transformer/transformer_config.py,
core/transformer/pipeline_parallel_layer_layout.py, core/pipeline_parallel/schedules.py.
"""

from collections.abc import Iterator
from typing import Any

from plait.dialects.launch import FIRST_STEP
from plait.dialects.megatron.layout import rows_of
from plait.dialects.megatron.validation import Case
from plait.spec.chunks import balanced
from plait.spec.findings import Finding
from plait.spec.layout import divisors, nearest

#: Arguments that each say how many chunks a rank has.
SELECTORS = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
)


def selectors(case: Case) -> Iterator[Finding]:
    """At most one way to say the chunks; a layout string stands alone."""
    several = [case.name(name) for name in SELECTORS if case.fact(name) is not None]
    if len(several) > 1:
        yield case.refused("chunk-selectors", f"only one of {', '.join(several)} may be given")
    others = [
        case.name(name)
        for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
                     "account_for_embedding_in_pipeline_split",
                     "account_for_loss_in_pipeline_split")
        if case.fact(name)
    ]  # fmt: skip
    if others and case.fact("pipeline_model_parallel_layout") is not None:
        message = f"{case.name('pipeline_model_parallel_layout')} beside {', '.join(others)}"
        yield case.refused("layout-alone", message)
    ends = [n for n in others if "account" not in n]
    if ends and case.fact("num_layers_per_virtual_pipeline_stage") is not None:
        message = f"{ends[0]} takes {case.name('num_virtual_stages_per_pipeline_rank')}, not "
        message += case.name("num_layers_per_virtual_pipeline_stage")
        yield case.refused("uneven-chunks", message)


def layers(case: Case) -> Iterator[Finding]:
    """Layers go evenly over the stages, and over the chunks of a stage."""
    pp, total = case.job.layout.pp, case.job.model.layers
    if pp <= 1 or case.fact("hybrid_layer_pattern") or case.fact("hybrid_override_pattern"):
        return
    text = case.fact("pipeline_model_parallel_layout")
    first = case.fact("decoder_first_pipeline_num_layers")
    last = case.fact("decoder_last_pipeline_num_layers")
    if text is not None:
        yield from _layout_string(case, text, pp, total)
        return
    if first is not None or last is not None:
        yield from _ends(case, first, last, pp, total)
        return
    extra = bool(case.fact("account_for_embedding_in_pipeline_split"))
    extra += bool(case.fact("account_for_loss_in_pipeline_split"))
    if case.job.layout.stages is not None and not extra:
        return  # said beside the launch: a layout string will say them
    whole = total + extra
    counted = f"{total} layers" + (f" and {extra} more for embedding and loss" if extra else "")
    if whole % pp:
        message = f"{counted} are no multiple of PP {pp}"
        chunks = pp * max(1, case.job.layout.vpp)
        uneven = (
            {"layout__stages": balanced(total, chunks)} if chunks <= total else {"layout__pp": 1}
        )
        yield case.refused("stage-layers", message, value=pp, **uneven)
        return
    per, each = whole // pp, case.fact("num_layers_per_virtual_pipeline_stage")
    if each is not None and (each < 1 or per % each):
        message = f"{per} layers of a stage are no multiple of {each} layers a chunk"
        yield case.refused("chunk-layers", message, value=each, layout__vpp=1)
    vpp = case.job.layout.vpp
    if each is None and vpp > 1 and per % vpp:
        message = f"{per} layers of a stage are no multiple of {vpp} chunks"
        legal = nearest(vpp, divisors(per))
        yield case.refused("chunk-layers", message, value=vpp, layout__vpp=legal)


def _layout_string(case: Case, text: Any, pp: int, total: int) -> Iterator[Finding]:
    name, rows = case.name("pipeline_model_parallel_layout"), rows_of(text)
    if rows is None:
        yield case.refused("layout-string", f"{name} {text!r} is no layout of E, t, m, L and |")
        return
    if len(rows) % pp:
        message = f"{name} has {len(rows)} stages, no multiple of PP {pp}"
        yield case.refused("layout-length", message, value=len(rows))
    whole = "".join(rows)
    if whole.count("t") != total:
        message = f"{name} has {whole.count('t')} layers, the model {total}"
        yield case.refused("layout-layers", message, value=whole.count("t"))
    if not whole.startswith("E") or not whole.endswith("L") or whole.count("E") != 1:
        yield case.refused("layout-ends", f"{name} must start with E and end with L, once each")
    depth = case.fact("mtp_num_layers", 0)
    counts = str(depth).isdecimal() and len(str(depth)) < 9
    if counts and whole.count("m") != int(depth):
        message = f"{name} has {whole.count('m')} layers for further tokens, "
        yield case.refused("layout-mtp", f"{message}{case.name('mtp_num_layers')} says {depth}")


def _ends(
    case: Case, first: int | None, last: int | None, pp: int, total: int
) -> Iterator[Finding]:
    ends = [n for n in (first, last) if n is not None]
    between, left = pp - len(ends), total - sum(ends)
    vpp = case.job.layout.vpp
    if min(ends) < 1 or left < 0:
        yield case.refused("uneven-layers", f"{ends} layers at the ends of {total}", value=ends)
    elif bool(left) != bool(between > 0):
        message = f"{left} layers are left for the {max(0, between)} stages in between"
        yield case.refused("uneven-layers", message, value=ends)
    elif between > 0 and left % between:
        message = f"{left} layers do not go evenly over the {between} stages in between"
        yield case.refused("uneven-layers", message, value=ends)
    elif vpp > 1:
        per = [*ends, *([left // between] if between > 0 else [])]
        wrong = next((n for n in per if n % vpp), None)
        if wrong is not None:
            message = f"{wrong} layers of a stage are no multiple of {vpp} chunks"
            yield case.refused("chunk-layers", message, value=vpp, layout__vpp=1)


def interleaving(case: Case) -> Iterator[Finding]:
    """When chunks may be interleaved, and in which groups of micro batches."""
    layout, train = case.job.layout, case.job.train
    chunks = max(layout.vpp, case.fact("vpp", 1))
    if chunks <= 1:
        return
    if layout.pp <= 1:
        message = f"{chunks} chunks a rank need PP above 1"
        yield case.refused("interleave-pp", message, value=layout.pp, layout__vpp=1)
        return
    if case.fact("overlap_p2p_comm") is False and layout.pp <= 2:
        message = "chunks a rank without overlapped messages need PP above 2"
        yield case.refused("interleave-pp", message, value=layout.pp, layout__vpp=1)
    m = train.accumulation or 1
    group = case.fact("microbatch_group_size_per_vp_stage", layout.pp)
    name, head = "microbatch_group_size_per_vp_stage", f"{layout.pp} stages, {m} micro batches"
    if not layout.pp <= group <= m:
        message = f"{case.name(name)} {group} is not between the {head}"
        yield case.refused("interleave-group", message, FIRST_STEP, group,
                           **_more_batches(case, max(group, layout.pp)))  # fmt: skip
    elif 0 < m % group < layout.pp:
        message = f"of {m} micro batches in groups of {group} the last {m % group} are fewer than "
        yield case.refused("interleave-rest", f"{message}the {layout.pp} stages", FIRST_STEP, m,
                           **_more_batches(case, group))  # fmt: skip


def _more_batches(case: Case, unit: int) -> dict[str, int]:
    """The nearest number of micro batches that is a multiple of `unit`, as a global batch."""
    layout, m = case.job.layout, case.job.train.accumulation or 1
    count = max(1, round(m / max(1, unit))) * unit
    return {"train__global_batch": count * layout.micro_batch * layout.dp}


def schedules(case: Case) -> Iterator[Finding]:
    """Megatron has 1F1B, with one chunk a rank or several."""
    layout = case.job.layout
    own = layout.schedule.partition(":")[0]
    if layout.pp > 1 and own not in ("1f1b", "interleaved-1f1b"):
        runs = "interleaved-1f1b" if layout.vpp > 1 else "1f1b"
        message = f"has no schedule {own}; it would run {runs}"
        yield case.changed("schedule", message, own, layout__schedule=runs)


PIPELINE = (selectors, layers, interleaving, schedules)
