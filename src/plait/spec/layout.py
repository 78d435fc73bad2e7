"""How a model is split over ranks: the one object that every part of plait takes."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isqrt, log, prod
from typing import Any

from plait.spec.build import check_fields
from plait.spec.findings import Finding, UserError, closest, error
from plait.spec.schedule import SCHEDULES, canonical, is_file

#: More ranks or samples than anyone has; keeps every search for a nearest legal value short.
LARGEST = 1_000_000

#: Modules that `recompute selective:...` may name. Attention is fused and stores no scores, so
#: recomputing "attention" means its projections, rotary embedding and kernel as a whole.
RECOMPUTE_MODULES = ("norm", "attention", "mlp")

#: Rules that say that a layout which was understood is illegal: its degrees or its batch do not
#: go together. Everything else that is wrong with a question leaves it without a meaning.
ILLEGAL = frozenset(
    {
        "degrees-divide", "degrees-divide-world", "dp-product", "zero-0-shards-nothing",
        "expert-grid", "chunks", "stages", "batch-product",
    }
)  # fmt: skip

CP_METHODS = ("ring", "all-gather")


@dataclass(frozen=True)
class Layout:
    """A complete layout: every field has its value, nothing is left to be derived silently.

    Build it with `Layout.fill(world, ...)`, which derives the fields that were not given.

    Attributes:
        tp: tensor parallel degree.
        sequence_parallel: norm regions split along the sequence over the tp ranks.
        cp: context parallel degree; `ulysses` divides it, the rest is `cp_method`.
        pp: pipeline ranks; `vpp` chunks of layers on each.
        schedule: a name of `spec.schedule.SCHEDULES`, "interleaved-1f1b:GROUP" with the micro
            batches that a chunk does before the next chunk, or a table in a file ("my.csv").
        stages: layers of each chunk in model order (None: balanced, see `spec.chunks`).
        ep: expert parallel degree; `etp`: tensor parallel degree inside experts.
        dp_replicate: copies of the sharded model states (HSDP's outer axis).
        dp_shard: data-parallel ranks over which model states are sharded.
        zero: 0 nothing sharded, 1 optimizer states, 2 gradients too, 3 parameters too.
        micro_batch: samples in one forward pass of one data-parallel rank.
        recompute: "none", "full" or "selective:<module>,...".
        dcp: decode context parallel degree (serving only): ranks of tp that share a cache; with cp
            it may be cp, or tp x cp.
    """

    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    ulysses: int = 1
    cp_method: str = "ring"
    pp: int = 1
    vpp: int = 1
    schedule: str = "1f1b"
    stages: tuple[int, ...] | None = None
    ep: int = 1
    etp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    zero: int = 1
    micro_batch: int = 1
    recompute: str = "none"
    dcp: int = 1

    @property
    def dp(self) -> int:
        """Data-parallel degree: ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks over which dense model states are sharded: dp_shard x cp."""
        return self.dp_shard * self.cp

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def edp(self) -> int:
        """Data-parallel degree of the experts: what etp and ep leave of a stage's ranks."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @property
    def expert_shards(self) -> int:
        """Ranks over which the model states of experts are sharded, or with zero 0 copied: the
        part of edp that does not leave the replicas of sharded states."""
        return self.edp if self.zero == 0 else self.edp // self.dp_replicate

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Modules recomputed one by one; empty for "none" and "full"."""
        return tuple(self.recompute.partition(":")[2].split(",")) if ":" in self.recompute else ()

    @staticmethod
    def fill(world: int, **given: Any) -> "Layout":
        """A complete layout of `world` ranks from the fields that a person gave.

        Raises:
            UserError: an unknown field, a value out of its range, degrees that do not multiply
                to `world`: all of them at once.
        """
        findings: list[Finding] = []
        told = {key: value for key, value in given.items() if value is not None}
        told = check_fields(Layout, told, "layout", findings)
        findings += _check_ranges(world, told) + _check_words(told)
        told |= _schedule(told, findings)
        # A check of several fields together needs each of them to make sense by itself.
        wrong = {f.where.removeprefix("layout.") for f in findings}

        def sound(*names: str) -> bool:
            return wrong.isdisjoint(names)

        if sound("cp", "ulysses"):
            findings += _check_factor(told, "ulysses", "cp")
        if sound("tp", "cp", "dcp") and told.get("dcp", 1) not in _whole_context(told):
            findings += _check_factor(told, "dcp", "tp")
        if sound("pp", "vpp", "stages"):
            findings += _check_stages(told)
        derived = {"sequence_parallel": told.get("tp", 1) > 1}
        if sound("ranks", "tp", "cp", "pp"):
            model_ranks = prod(told.get(axis, 1) for axis in ("tp", "cp", "pp"))
            if world % model_ranks:
                findings.append(_undivided(world, told, model_ranks))
            elif sound("dp_replicate", "dp_shard", "zero"):
                derived |= _data_parallel(world // model_ranks, told)
                findings += _check_data_parallel(world, model_ranks, told, derived)
                if not findings and sound("etp", "ep"):
                    findings += _check_experts(told, derived)
        if findings:
            raise UserError(findings)
        if told.get("recompute") == "selective":
            told["recompute"] = "selective:norm,mlp"
        return Layout(**(derived | told))


#: Fields that count something: at least 1.
_COUNTS = tuple(f.name for f in fields(Layout) if f.type is int and f.name != "zero")


def _check_ranges(world: int, given: Mapping[str, Any]) -> list[Finding]:
    findings = []
    if isinstance(world, bool) or not isinstance(world, int):
        findings.append(error("ranks", world, f"{world!r} is not a whole number", 1))
    elif world < 1:
        findings.append(error("ranks", world, f"{world} ranks: at least one is needed", 1))
    elif world > LARGEST:
        findings.append(error("ranks", world, f"more than {LARGEST} ranks", LARGEST))
    for name in _COUNTS:
        value = given.get(name, 1)
        where = f"layout.{name}"
        if value < 1:
            findings.append(error(where, value, f"{name} {value} is below 1", 1))
        elif value > LARGEST:
            findings.append(error(where, value, f"{name} is above {LARGEST}", LARGEST))
    zero = given.get("zero", 1)
    if zero not in (0, 1, 2, 3):
        legal = min(max(zero, 0), 3)
        message = f"zero {zero} is none of the stages 0, 1, 2, 3"
        findings.append(error("layout.zero", zero, message, legal))
    return findings


def _check_words(given: Mapping[str, Any]) -> list[Finding]:
    """Fields that take one of a few words."""
    findings = []
    method = given.get("cp_method", "ring")
    if method not in CP_METHODS:
        message = f"cp_method {method!r} is none of {', '.join(CP_METHODS)}"
        findings.append(
            error("layout.cp_method", method, message, closest(method, CP_METHODS) or "ring")
        )
    return findings + _check_recompute(given.get("recompute", "none"))


def _schedule(given: Mapping[str, Any], findings: list[Finding]) -> dict[str, Any]:
    """`schedule` by its own name, and the `vpp` that it takes where none was given."""
    vpp, said = given.get("vpp"), given.get("schedule")
    if said is None:
        return {"schedule": "interleaved-1f1b" if (vpp or 1) > 1 else "1f1b"}
    if is_file(said):
        return {}
    where, (word, colon, group) = "layout.schedule", said.partition(":")
    name = canonical(word)
    if name is None:
        known = ", ".join(SCHEDULES)
        message = f"schedule {word!r} is none of {known}, nor a file *.csv"
        findings.append(error(where, said, message, closest(word, SCHEDULES) or "1f1b"))
        return {}
    counts = group.isdecimal() and len(group) <= len(str(LARGEST)) and int(group) > 0
    if colon and (name != "interleaved-1f1b" or not counts):
        message = f"only interleaved-1f1b takes a group of micro batches, as {_GROUPED}"
        findings.append(error(where, said, message, name))
        return {}
    low, high = SCHEDULES[name].vpp
    if vpp is None:
        vpp = low if given.get("pp", 1) > 1 else 1
    elif given.get("pp", 1) > 1 and not low <= vpp <= high:
        takes = str(low) if low == high else f"{low} or more"
        message = f"{name} takes {takes} chunks a rank, not {vpp}"
        findings.append(error("layout.vpp", vpp, message, min(max(vpp, low), high), "chunks"))
    return {"schedule": name + colon + group, "vpp": vpp}


_GROUPED = "interleaved-1f1b:8"


def sound_pipeline(given: Mapping[str, Any]) -> dict[str, Any]:
    """`schedule`, `vpp` and `stages` as given and filled in; where they do not go together, as if
    none had been given."""
    findings: list[Finding] = []
    told = {k: v for k, v in given.items() if v is not None}
    told |= _schedule(told, findings)
    findings += _check_stages(told)
    names = ("schedule", "vpp", "stages")
    return {} if findings else {name: told[name] for name in names if name in told}


def sound_words(given: Mapping[str, Any]) -> dict[str, Any]:
    """`cp_method` and `recompute` as given; what neither takes, as if it had not been given."""
    told = {name: given[name] for name in ("cp_method", "recompute") if name in given}
    wrong = {finding.where for finding in _check_words(told)}
    return {name: word for name, word in told.items() if f"layout.{name}" not in wrong}


def _check_recompute(recompute: str) -> list[Finding]:
    kind, colon, names = recompute.partition(":")
    where, kinds = "layout.recompute", ("none", "selective", "full")
    if kind not in kinds or (colon and kind != "selective"):
        message = f"recompute {recompute!r} is none of none, full, selective, selective:MODULE,..."
        return [error(where, recompute, message, closest(kind, kinds) or "none")]
    modules = names.split(",") if colon else []
    unknown = [n for n in modules if n not in RECOMPUTE_MODULES]
    if not unknown:
        return []
    known = ", ".join(RECOMPUTE_MODULES)
    message = f"{', '.join(map(repr, unknown))} cannot be recomputed alone; modules are {known}"
    likely = [closest(n, RECOMPUTE_MODULES) for n in modules]
    mended = ",".join(dict.fromkeys(n for n in likely if n)) or RECOMPUTE_MODULES[-1]
    return [error(where, recompute, message, f"selective:{mended}")]


def _check_factor(given: Mapping[str, Any], part: str, whole: str) -> list[Finding]:
    """One degree takes a factor out of another."""
    value, total = given.get(part, 1), given.get(whole, 1)
    if total % value == 0:
        return []
    message = f"{part} {value} does not divide {whole} {total}"
    legal = nearest(value, divisors(total))
    return [error(f"layout.{part}", value, message, legal, "degrees-divide")]


def _whole_context(given: Mapping[str, Any]) -> tuple[int, ...]:
    """With prefill context parallelism, decode may span its ranks, or all that tp and cp have."""
    tp, cp = given.get("tp", 1), given.get("cp", 1)
    return (cp, tp * cp) if cp > 1 else ()


def _check_stages(given: Mapping[str, Any]) -> list[Finding]:
    stages = given.get("stages")
    if stages is None:
        return []
    where, shown = "layout.stages", ",".join(map(str, stages))
    findings = []
    if any(n < 0 for n in stages) or sum(stages) < 1:
        findings.append(error(where, shown, "layers of a chunk cannot be negative or all none"))
    pp, vpp = given.get("pp", 1), given.get("vpp", 1)
    if len(stages) != pp * vpp:
        message = f"{len(stages)} numbers of layers for pp {pp} x vpp {vpp} = {pp * vpp} chunks"
        findings.append(Finding("error", "stages", message, where, shown))
    return findings


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending."""
    low = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def nearest(value: int, legal: list[int]) -> int:
    """The legal value closest to `value`, the smaller one of two equally close."""
    return min(legal, key=lambda d: (abs(d - value), d))


def _undivided(world: int, given: Mapping[str, Any], product: int) -> Finding:
    """The degrees do not divide the world: the one whose change mends it most cheaply, or, where no
    one alone does, one after the other."""
    told = {axis: given[axis] for axis in ("tp", "cp", "pp") if given.get(axis, 1) > 1}
    alone = {a: world // rest for a, d in told.items() if world % (rest := product // d) == 0}
    if alone:
        options = {a: nearest(told[a], divisors(room)) for a, room in alone.items()}
        where = min(options, key=lambda a: abs(log(options[a] / told[a])))
        changed = {where: options[where]}
    else:
        where, room, changed = next(iter(told)), world, {}
        for axis, degree in told.items():
            changed[axis] = nearest(degree, divisors(room))
            room //= changed[axis]
    suggest = {f"layout.{axis}": degree for axis, degree in changed.items()}
    message = f"{' x '.join(told)} = {product} does not divide {world} ranks"
    return Finding(
        "error", "degrees-divide-world", message, f"layout.{where}", told[where], suggest
    )


def _data_parallel(dp: int, given: Mapping[str, Any]) -> dict[str, int]:
    """dp_replicate, dp_shard and zero, as far as they were given, and the rest."""
    replicate, shard = given.get("dp_replicate"), given.get("dp_shard")
    zero = given.get("zero", 0 if shard == 1 < dp else 1)
    if replicate is None and shard is None:
        replicate, shard = (dp, 1) if zero == 0 else (1, dp)
    elif replicate is None:
        replicate = dp // shard
    elif shard is None:
        shard = dp // replicate
    return {"dp_replicate": replicate, "dp_shard": shard, "zero": zero}


def _check_data_parallel(
    world: int, model_ranks: int, given: Mapping[str, Any], derived: Mapping[str, int]
) -> list[Finding]:
    findings = []
    dp = world // model_ranks
    if derived["dp_replicate"] * derived["dp_shard"] != dp:
        findings.append(_uneven_dp(world, model_ranks, given))
    told = max(given.get("dp_shard", 1), 1 if findings else derived["dp_shard"])
    if derived["zero"] == 0 and told > 1:
        message = f"zero 0 shards no model state, so dp_shard must be 1, not {told}"
        # Either is the cure: nothing sharded after all, or states that are.
        suggest = {"layout.dp_shard": 1, "layout.zero": 1}
        if given.get("dp_replicate", dp) != dp:
            suggest["layout.dp_replicate"] = dp
        if "dp_shard" not in given:
            message = f"zero 0 shards no model state, so dp_replicate must be dp = {dp}"
            suggest = {"layout.dp_replicate": dp, "layout.zero": 1}
        where = next(iter(suggest))
        value = given[where.removeprefix("layout.")]
        findings.append(Finding("error", "zero-0-shards-nothing", message, where, value, suggest))
    return findings


def _uneven_dp(world: int, model_ranks: int, given: Mapping[str, Any]) -> Finding:
    dp = world // model_ranks
    told = {a: given[a] for a in ("dp_replicate", "dp_shard") if a in given}
    axis = next((a for a in told if dp % (prod(told.values()) // told[a]) == 0), "dp_shard")
    others = prod(told.values()) // told[axis]
    suggest = {}
    if dp % others:  # then both must change
        others = nearest(others, divisors(dp))
        suggest = {"layout.dp_replicate": others}
    legal = dp // others if len(told) == 2 else nearest(told[axis], divisors(dp))
    message = f"{' x '.join(told)} = {prod(told.values())} does not match "
    message += f"dp = {world} / {model_ranks} = {dp}"
    suggest = {f"layout.{axis}": legal} | suggest
    if given.get("zero") == 0:  # copies are all that there may be
        whole = {"layout.dp_replicate": dp, "layout.dp_shard": 1}
        suggest = {key: whole[key] for key in whole if key.removeprefix("layout.") in told}
    return Finding("error", "dp-product", message, f"layout.{axis}", told[axis], suggest)


def _check_experts(given: Mapping[str, Any], derived: Mapping[str, int]) -> list[Finding]:
    """The expert grid tiles a stage anew; it never crosses the replicas of sharded states."""
    etp, ep = given.get("etp", 1), given.get("ep", 1)
    inner = "dp_shard" if derived["zero"] else "dp"
    ranks = given.get("tp", 1) * given.get("cp", 1) * derived["dp_shard"]
    if derived["zero"] == 0:
        ranks *= derived["dp_replicate"]
    if ranks % (etp * ep) == 0:
        return []
    message = f"etp {etp} x ep {ep} does not divide tp x cp x {inner} = {ranks}"
    if ranks % etp == 0:
        axis, legal = "ep", nearest(ep, divisors(ranks // etp))
    elif ranks % ep == 0:
        axis, legal = "etp", nearest(etp, divisors(ranks // ep))
    else:
        axis, legal = "etp", 1
        suggest = {"layout.etp": 1, "layout.ep": nearest(ep, divisors(ranks))}
        return [Finding("error", "expert-grid", message, "layout.etp", etp, suggest)]
    return [error(f"layout.{axis}", given[axis], message, legal, "expert-grid")]
