"""Batch arithmetic of a layout: global = micro x dp x accumulation, and what each choice costs."""

from collections.abc import Mapping
from typing import Any

from plait.report.build import report
from plait.rules import check
from plait.spec.findings import UserError
from plait.spec.job import Job
from plait.spec.jobfile import draft_job
from plait.spec.layout import divisors

#: Micro batches that are tried, at most so many.
_MOST = 8


def batch(given: Mapping[str, Any], base: Job) -> list[dict[str, Any]]:
    """A row for each micro batch that divides a rank's share of the global batch, or for the one
    that is given."""
    share = base.train.global_batch // base.layout.dp
    fixed = {"layout.micro_batch", "train.accumulation"} & given.keys()
    micros = [base.layout.micro_batch] if fixed else divisors(share)[:_MOST]
    told = {k: v for k, v in given.items() if k not in fixed}
    told["train.global_batch"] = base.train.global_batch
    return [_row({**told, "layout.micro_batch": micro}) for micro in micros]


def _row(given: Mapping[str, Any]) -> dict[str, Any]:
    job, problems = draft_job("plan", None, given)
    if job is None or problems:
        raise UserError(problems)
    found = check(job, "plan")
    answer = report(job, found)
    why = next((f.line() for f in found if f.level == "error"), None)
    return {
        "micro": job.batch.micro,
        "dp": job.layout.dp,
        "accumulation": job.batch.accumulation,
        "global": job.batch.global_,
        "tokens_per_step": job.batch.global_ * job.train.seq_len,
        "bubble": {key: answer["bubble"][key] for key in ("step_total", "step_ideal")},
        "peak_bytes": answer["memory"]["peak_bytes"],
        "fits": answer["fits"],
        "legal": why is None,
        "why": why,
    }


def equations(job: Job) -> list[str]:
    """The arithmetic of a job with its numbers, and the form in which it is often misprinted."""
    a, b = job.layout, job.batch
    lines = [
        f"dp = world / (tp x cp x pp) = {a.world} / ({a.tp} x {a.cp} x {a.pp}) = {a.dp}",
        f"global = micro x dp x accumulation = {b.micro} x {a.dp} x {b.accumulation} = {b.global_}",
        f"accumulation = global / (micro x dp) = {b.accumulation}"
        + (", the micro batches of the pipeline" if a.pp > 1 else ""),
    ]
    if a.ep * a.etp > 1:
        lines.append(
            f"ep and etp re-tile the same ranks (edp {a.edp}) and do not divide dp; "
            f"world / (tp x cp x pp x ep) would be {a.world / (a.tp * a.cp * a.pp * a.ep):g}"
        )
    return lines
