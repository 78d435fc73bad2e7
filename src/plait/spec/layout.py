"""How a model is split over ranks: the one object that every part of plait takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from plait.spec.findings import Finding, UserError, closest, error

#: Modules that `recompute selective:...` may name. Attention is fused and stores no scores, so
#: recomputing "attention" means its projections, rotary embedding and kernel as a whole.
RECOMPUTE_MODULES = ("norm", "attention", "mlp")


@dataclass(frozen=True)
class Layout:
    """A complete layout: every field has its value, nothing is left to be derived silently.

    Build it with `Layout.fill(world, ...)`, which derives the fields that were not given.

    Attributes:
        tp: tensor parallel degree.
        sequence_parallel: norm regions split along the sequence over the tp ranks.
        cp: context parallel degree; `ulysses` divides it, the rest is `cp_method`.
        pp: pipeline stages; `vpp` chunks a rank; `schedule`; `stages`: layers per chunk.
        ep: expert parallel degree; `etp`: tensor parallel degree inside experts.
        dp_replicate: copies of the sharded model states (HSDP's outer axis).
        dp_shard: data-parallel ranks over which model states are sharded.
        zero: 0 nothing sharded, 1 optimizer states, 2 gradients too, 3 parameters too.
        micro_batch: samples in one forward pass of one data-parallel rank.
        recompute: "none", "full" or "selective:<module>,...".
        dcp: decode context parallel degree (serving only).
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
    def recomputed(self) -> tuple[str, ...]:
        """Modules recomputed one by one; empty for "none" and "full"."""
        return tuple(self.recompute.partition(":")[2].split(",")) if ":" in self.recompute else ()

    @staticmethod
    def fill(world: int, **given: Any) -> "Layout":
        """A complete layout of `world` ranks from the fields that a person gave.

        Raises:
            UserError: the degrees do not multiply to `world`, or a field is out of its range.
        """
        given = {key: value for key, value in given.items() if value is not None}
        findings = _check_ranges(world, given)
        if findings:
            raise UserError(findings)

        model_ranks = prod(given.get(axis, 1) for axis in ("tp", "cp", "pp"))
        dp = world // model_ranks
        if world % model_ranks:
            names = " x ".join(a for a in ("tp", "cp", "pp") if given.get(a, 1) > 1)
            raise UserError([_undivided(world, given, names, model_ranks)])

        zero = given.get("zero", 0 if given.get("dp_shard") == 1 < dp else 1)
        replicate, shard = given.get("dp_replicate"), given.get("dp_shard")
        if replicate is None and shard is None:
            replicate, shard = (dp, 1) if zero == 0 else (1, dp)
        elif replicate is None:
            replicate = dp // shard
        elif shard is None:
            shard = dp // replicate
        if replicate * shard != dp:
            raise UserError([_uneven_dp(world, model_ranks, dp, given)])
        if zero == 0 and shard > 1:
            raise UserError(
                [
                    Finding(
                        "error",
                        "zero-0-shards-nothing",
                        f"zero 0 shards no model state, so dp_shard must be 1, not {shard}",
                        "layout.dp_shard",
                        shard,
                        {"layout.dp_shard": 1, "layout.zero": 1},
                    )
                ]
            )
        recompute = given.get("recompute", "none")
        derived = {
            "sequence_parallel": given.get("sequence_parallel", given.get("tp", 1) > 1),
            "schedule": given.get(
                "schedule", "interleaved-1f1b" if given.get("vpp", 1) > 1 else "1f1b"
            ),
            "recompute": "selective:norm,mlp" if recompute == "selective" else recompute,
            "dp_replicate": replicate,
            "dp_shard": shard,
            "zero": zero,
        }
        return Layout(**(given | derived))


_DEGREES = (
    "tp cp ulysses pp vpp ep etp dp_replicate dp_shard micro_batch dcp".split()
)  # fields that count something: at least 1


def _check_ranges(world: int, given: Mapping[str, Any]) -> list[Finding]:
    findings = []
    if world < 1:
        findings.append(error("ranks", world, f"{world} ranks: at least one is needed", 1))
    for name in _DEGREES:
        value = given.get(name, 1)
        if value < 1:
            findings.append(error(f"layout.{name}", value, f"{name} {value} is below 1", 1))
    zero = given.get("zero", 1)
    if zero not in (0, 1, 2, 3):
        nearest = min(max(zero, 0), 3)
        findings.append(
            error("layout.zero", zero, f"zero {zero} is none of the stages 0, 1, 2, 3", nearest)
        )
    findings += _check_recompute(given.get("recompute", "none"))
    return findings


def _check_recompute(recompute: str) -> list[Finding]:
    kind, colon, names = recompute.partition(":")
    where = "layout.recompute"
    if kind not in ("none", "selective", "full") or (colon and kind != "selective"):
        return [
            error(
                where,
                recompute,
                f"recompute {recompute!r} is none of none, full, selective, selective:MODULE,...",
                closest(kind, ("none", "selective", "full")) or "none",
            )
        ]
    unknown = [n for n in names.split(",") if n not in RECOMPUTE_MODULES] if colon else []
    return [
        error(
            where,
            recompute,
            f"{name!r} cannot be recomputed by itself; modules are {', '.join(RECOMPUTE_MODULES)}",
            f"selective:{RECOMPUTE_MODULES[-1]}",
        )
        for name in unknown
    ]


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def nearest(value: int, legal: list[int]) -> int:
    """The legal value closest to `value`, the smaller one of two equally close."""
    return min(legal, key=lambda d: (abs(d - value), d))


def _undivided(world: int, given: Mapping[str, Any], names: str, product: int) -> Finding:
    """The degrees do not divide the world: name the one whose change mends it most cheaply."""
    options = {}
    for axis in ("tp", "cp", "pp"):
        degree = given.get(axis, 1)
        rest = product // degree
        if degree > 1 and world % rest == 0:
            options[f"layout.{axis}"] = nearest(degree, divisors(world // rest))
    if not options:
        options["ranks"] = max(product, round(world / product) * product)
    where = next(iter(options))
    value = given.get(where.removeprefix("layout."), world)
    message = f"{names} = {product} does not divide {world} ranks"
    return Finding("error", "degrees-divide-world", message, where, value, options)


def _uneven_dp(world: int, model_ranks: int, dp: int, given: Mapping[str, Any]) -> Finding:
    axis = "dp_replicate" if "dp_replicate" in given else "dp_shard"
    names = " x ".join(a for a in ("dp_replicate", "dp_shard") if a in given)
    value = prod(given[a] for a in ("dp_replicate", "dp_shard") if a in given)
    return error(
        f"layout.{axis}",
        given[axis],
        f"{names} = {value} does not match dp = {world} / {model_ranks} = {dp}",
        nearest(given[axis], divisors(dp)),
        rule="dp-product",
    )
