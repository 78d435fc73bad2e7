"""What rules suggest, on random layouts: legal for a person who types it in, and better.

The oracles are the command line's own reading of a job, and the ledger.
"""

import random

import pytest

from plait.cost.device import context_bytes, fullest, reserved_bytes
from plait.cost.links import far_axes
from plait.cost.memory import memory
from plait.cost.traffic import traffic
from plait.rules import check
from plait.rules.neighbour import neighbour
from plait.schedules.job import timeline
from plait.spec import presets
from plait.spec.findings import UserError
from plait.spec.grid import Grid
from plait.spec.job import Job, Train
from plait.spec.jobfile import draft_job, read_job
from plait.spec.layout import Layout
from plait.spec.model import Model

MODELS = ("llama3.1-8b", "qwen3-0.6b", "mixtral-8x7b", "deepseek-v2-lite", "gpt2", "qwen2.5-7b")
CHOICES = {
    "gpus": ("h100:16", "h100:64", "gb200:144", "mi300x:32", "l40s:8", "a100:256", "tpu-v5p:64"),
    "tp": (1, 1, 2, 4, 8, 16, 32),
    "cp": (1, 1, 1, 2, 4, 16),
    "ulysses": (1, 1, 2, 8, 16),
    "cp_method": ("ring", "ring", "all-gather"),
    "pp": (1, 1, 1, 2, 4),
    "vpp": (1, 1, 2),
    "schedule": (None, None, None, "gpipe", "zb-h1", "dualpipe"),
    "ep": (1, 2, 8, 16),
    "etp": (1, 1, 1, 2),
    "dp_replicate": (None, None, 2, 4),
    "dp_shard": (None, None, None, 2, 4),
    "zero": (0, 1, 1, 2, 3, 3),
    "sequence_parallel": (None, None, False, True),
    "micro_batch": (1, 1, 2, 4),
    "accumulation": (1, 1, 2, 4, 8, 16),
    "recompute": ("none", "none", "selective", "full", "selective:norm"),
    "seq_len": (1024, 4096, 32768),
}


def drawn(rng: random.Random) -> dict:
    said = {name: rng.choice(values) for name, values in CHOICES.items()}
    said["model"] = rng.choice(MODELS)
    if said["model"] == "gpt2":
        said["seq_len"] = 1024
    if rng.random() < 0.5:  # the same batch by its other name
        said["global_batch"] = 64 * said.pop("accumulation")
    return {name: value for name, value in said.items() if value is not None}


def typed(said: dict, suggest: dict) -> dict:
    """The flags of a person who follows a suggestion."""
    changed = {path.rpartition(".")[2]: value for path, value in suggest.items()}
    result = said | changed
    if "global_batch" in changed and "accumulation" not in changed:
        result.pop("accumulation", None)
    if "accumulation" in changed and "global_batch" not in changed:
        result.pop("global_batch", None)
    return result


def read(said: dict):
    flags = dict(said)
    gpus, model = flags.pop("gpus"), flags.pop("model")
    return read_job("plan", gpus=gpus, model=model, overrides={"dtype": "bfloat16"} | flags)


def samples(count: int, seed: int):
    """`count` layouts that are legal, or with errors that are found by rules; what was said too."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        said = drawn(rng)
        try:
            job = read(said)
        except UserError:
            continue
        found.append((said, job))
    return found


def wire(job, *axes, far=False) -> int:
    """Bytes of the stage that sends most; over slow links alone with `far`."""
    rows = traffic(job).rows()
    slow = far_axes(job.layout, job.cluster, {row.axis for row in rows})
    stages = dict.fromkeys((row.stage for row in rows), 0)
    for row in rows:
        if (not axes or row.axis in axes) and (not far or row.axis in slow):
            stages[row.stage] += row.wire_bytes
    return max(stages.values(), default=0)


def link_seconds(job) -> float:
    rows, stages = traffic(job).rows(), {}
    slow = far_axes(job.layout, job.cluster, {row.axis for row in rows})
    for row in rows:
        speed = (job.cluster.nic or job.cluster.link) if row.axis in slow else job.cluster.link
        stages[row.stage] = stages.get(row.stage, 0) + row.wire_bytes / speed
    return max(stages.values(), default=0)


def room(job) -> int:
    peak = fullest(memory(job))
    return peak.total + reserved_bytes(peak) + context_bytes(job.layout)


def forward(job) -> int:
    """The most that is alive in the forward; a step's fullest moment may be the update."""
    return max(row.total for row in memory(job) if row.moment == "forward")


def idle(job) -> float:
    return timeline(job).bubble["step_total"] if job.layout.pp > 1 else 0.0


STATES = ("fsdp", "dp_replicate", "edp")

#: Rule -> what its suggestion makes less, as a function of a job.
LESS = {
    "tp-beyond-fast-domain": link_seconds,
    "zero-3-over-slow-links": lambda job: wire(job, far=True),
    "ep-beyond-fast-domain": link_seconds,
    "accumulation-traffic": lambda job: wire(job, *STATES),
    "cp-without-need": lambda job: wire(job, "cp", "ulysses"),
    "memory-over-device": room,
    "tp-without-sequence-parallel": forward,
    "pipeline-bubble": idle,
    "two-copies": room,
    "kv-replication": lambda job: wire(job, "tp") * job.layout.tp,
}
#: Rules whose suggestion has to fit where the layout itself does.
FITTING = {
    "tp-beyond-fast-domain",
    "zero-3-over-slow-links",
    "ep-beyond-fast-domain",
    "accumulation-traffic",
    "cp-without-need",
    "recompute-without-need",
    "kv-replication",
}


def hold(said, job) -> set[str]:
    """Checks every suggestion of a job; returns the rules that made one."""
    spoke = set()
    findings = check(job, "plan")
    legal = all(f.level != "error" for f in findings)
    for finding in findings:
        if not finding.suggest or finding.where.startswith("model."):
            continue
        told = typed(said, finding.suggest)
        where = f"{finding.rule}: {said} -> {finding.suggest}"
        if not legal:  # errors are mended one by one; each of them must be gone
            if finding.level == "error":
                other, problems = draft_job(
                    "plan",
                    gpus=told["gpus"],
                    model=told["model"],
                    overrides={k: v for k, v in told.items() if k not in ("gpus", "model")},
                )
                again = problems + check(other, "plan")
                assert finding.message not in {f.message for f in again}, where
            continue
        try:
            other = read(told)
        except UserError as problem:
            raise AssertionError(f"{where}: {problem}") from None
        spoke.add(finding.rule)
        assert [f.line() for f in check(other, "plan") if f.level == "error"] == [], where
        if finding.rule in LESS:
            less = LESS[finding.rule]
            assert less(other) < less(job), where
        if finding.rule in FITTING and room(job) <= job.cluster.memory:
            assert room(other) <= other.cluster.memory, where
    return spoke


def test_suggestions_are_legal_and_better():
    spoke = set()
    for said, job in samples(25, seed=5):
        spoke |= hold(said, job)
    assert len(spoke) > 6


@pytest.mark.sweep
def test_suggestions_are_legal_and_better_many_times():
    spoke = set()
    for said, job in samples(1500, seed=7):
        spoke |= hold(said, job)
    assert spoke >= LESS.keys()


def test_the_ranks_of_a_group_are_not_listed(monkeypatch):
    """Groups have up to 16,384 ranks, and are asked about for every layout that is weighed."""
    layout, far = Layout.fill(16384, tp=2, cp=8, zero=3), {"cp", "fsdp", "world"}
    monkeypatch.setattr(Grid, "group", lambda *_: pytest.fail("a group is listed"))
    assert far_axes(layout, presets.cluster("h100:16384"), {"tp", *far}) == far


def test_a_neighbour_of_a_schedule_that_is_searched_for_is_not_searched_for():
    layout = Layout.fill(8, pp=4, schedule="auto", micro_batch=1)
    train = Train(seq_len=64, dtype="float32", accumulation=8, global_batch=8 * layout.dp)
    job = Job(Model.of("small", layers=8, hidden=64, heads=4, vocab=64), layout, train)
    other, _ = neighbour(job, {"layout.recompute": "full"})
    assert other.layout.schedule == "1f1b"
