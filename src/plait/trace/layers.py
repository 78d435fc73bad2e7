"""Without a pipeline: a deep model from a shallow one.

All layers of a model are one chunk, and most of them are alike, or come round in a pattern (every
sixth with full attention, every second a mixture). So a model that is a few periods deep is run,
cut at its layers, and a period in its middle is repeated: forward and backward piece by piece,
to the byte, and what belongs to no layer (states, the optimizer) in equal steps. Whether that is
so is no matter of faith: a model one period deeper is run too, and must be found the same. Where
it is not (buckets that reach over the border of a layer and come round in another rhythm),
every layer has to be run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from plait.cost.data import buckets_of
from plait.cost.ledger import NOTHING, Amount, TrafficLedger, wire_bytes
from plait.cost.tape import Tape
from plait.spec.buckets import Bucket
from plait.spec.job import Job
from plait.spec.model import Model
from plait.trace.actions import Segment, Traced

#: Periods that are run before the one that is repeated, and after it.
MARGIN = 2
#: The longest period that is looked for.
LONGEST = 8


def shallow(job: Job) -> tuple[Job, Job, range, int] | None:
    """The model in a few layers, the same a period deeper, the layers of the first that are to be
    repeated, and how often more they are in the whole model; None where that saves nothing."""
    deep = job.model.layers
    layers = [layer_kind(job.model, i) for i in range(deep)]
    for period in range(1, LONGEST + 1):
        odd = [i for i in range(deep - period) if layers[i] != layers[i + period]]
        first = odd[-1] + 1 if odd else 0
        rest = (deep - first) % period
        short = first + (2 * MARGIN + 1) * period + rest
        start = first + MARGIN * period
        if short + 2 * period < deep:
            jobs = (replace(job, model=job.model.with_layers(short + n)) for n in (0, period))
            return *jobs, range(start, start + period), (deep - short) // period
    return None


def layer_kind(model: Model, layer: int) -> tuple[bool, bool]:
    """What makes one layer another than the next."""
    return model.is_moe(layer), model.is_full_attention(layer)


def rhythm(job: Job, layers: range, times: int) -> bool:
    """Whether the buckets of the whole model have the layers' period."""
    sizes: dict[str, list[tuple]] = {}
    for b in buckets_of(job):
        if len(b.units) > 1:
            return False
        sizes.setdefault(b.units[0], []).append(_size(b))
    period = len(layers)
    repeated = range(layers.start - period, layers.stop + times * period)
    return all(
        sizes[f"layers.{i}"] == sizes[f"layers.{layers[(i - layers.start) % period]}"]
        for i in repeated
    )


def _size(b: Bucket) -> tuple:
    return b.size, b.expert, tuple((r.start, r.stop, r.partial, r.decay, r.by_load) for r in b.runs)


def deepened(short: Traced, longer: Traced, layers: range, times: int, world: int) -> Traced | None:
    """What would be seen of a model in which `layers` come so many times more; None where that
    cannot be told.

    short, longer: seen of the models of `shallow`. world: all ranks.
    """
    once = _repeated(short, longer, layers, 1, world)
    alike = all(once[key].same(longer[key]) for key in once.parts if short.cut(key))
    if not alike or once.parts.keys() != longer.parts.keys():
        return None
    return _repeated(short, longer, layers, times, world)


def _repeated(short: Traced, longer: Traced, layers: range, times: int, world: int) -> Traced:
    held = _grown(short.held, longer.held, times)
    parts = {}
    for key, pieces in short.parts.items():
        if short.cut(key):
            parts[key] = list(_with_more(pieces, layers, times))
        else:
            grown = _grown_segment(short[key], longer[key], times, world)
            parts[key] = [(-1, grown)]
    return Traced(held, parts, short.odd)


def _with_more(
    pieces: list[tuple[int, Segment]], layers: range, times: int
) -> Iterator[tuple[int, Segment]]:
    """The pieces with those of some layers again, behind the last of them."""
    inside = [i for i, (layer, _) in enumerate(pieces) if layer in layers]
    block = pieces[inside[0] : inside[-1] + 1]
    yield from pieces[: inside[-1] + 1]
    for _ in range(times):
        yield from block
    yield from pieces[inside[-1] + 1 :]


# What belongs to no layer grows in equal steps.


def _grown(a: Mapping[str, int], b: Mapping[str, int], times: int) -> dict[str, int]:
    return {key: n + times * (b[key] - n) for key, n in a.items()}


def _grown_segment(a: Segment, b: Segment, times: int, world: int) -> Segment:
    tape = Tape(_grown(a.tape.now, b.tape.now, times))
    for moment in a.tape.peaks.keys() & b.tape.peaks.keys():
        tape.peaks[moment] = _grown(a.tape.peaks[moment], b.tape.peaks[moment], times)
        tape.most[moment] = sum(tape.peaks[moment].values())
    ledger = TrafficLedger()
    for entry in a.traffic.entries | b.traffic.entries:
        pairs = zip(*(s.traffic.entries.get(entry, NOTHING) for s in (a, b)), strict=True)
        grown = Amount(*(x + times * (y - x) for x, y in pairs))
        if entry.axis == "world" and grown.count == 1:  # a message that grows, rounded once
            wire = wire_bytes(entry.collective, grown.bytes, world)
            grown = grown._replace(wire_bytes=wire)
        ledger.entries[entry] = grown
    return Segment(ledger, a.issued, tape)
