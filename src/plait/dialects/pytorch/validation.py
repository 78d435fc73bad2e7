"""What torch refuses of a mesh script, and what the script does otherwise than its author means."""

from collections.abc import Iterator, Mapping
from typing import Any

from plait.dialects.launch import AT_START, FIRST_STEP, changed, refused
from plait.dialects.python.values import Made
from plait.dialects.pytorch.plan import Plan, unmatched
from plait.spec.findings import Finding
from plait.spec.job import Job
from plait.spec.layout import divisors, nearest
from plait.spec.parameters import parameters

_TARGET = "PyTorch"


def plain_rules(script: Any) -> Iterator[Finding]:
    """What the script alone shows."""
    yield from _order(script.calls)
    if script.roles.get("tp"):
        yield from unmatched(script.plan)
    unwrapped = script.facts.get("unwrapped")
    if unwrapped and unwrapped > 1:
        message = f"the mesh has {unwrapped} data-parallel ranks, but nothing averages gradients"
        yield changed(_TARGET, "pytorch-unwrapped", f"{message}: no fully_shard, FSDP or DDP")
    ranks = script.facts.get("reshard_ranks")
    if ranks:
        message = f"after the forward pass parameters stay sharded over {ranks} ranks of a node;"
        yield changed(
            _TARGET, "pytorch-reshard", f"{message} plait counts them as sharded over all"
        )


def _order(calls: list[Made]) -> Iterator[Finding]:
    """Tensor parallelism first: a plan cannot split what is already a DTensor of another mesh
    (torch/distributed/tensor/_api.py, distribute_tensor)."""
    sharded: dict[str, int] = {}
    for call in calls:
        first = call.args[0] if call.args else None
        name = first.name if isinstance(first, Made) else None
        if name is None:
            continue
        if call.word == "fully_shard":
            sharded.setdefault(name, call.line)
        elif call.word == "parallelize_module":
            before = [n for n in sharded if name == n or name.startswith(f"{n}.")]
            if before and sharded[before[0]] < call.line:
                message = (
                    f"{name} is split by a plan (line {call.line}) after fully_shard"
                    f" (line {sharded[before[0]]}): parallelize_module must come first"
                )
                yield refused(_TARGET, "pytorch-order", AT_START, message)
                return


def rules(facts: Mapping[str, Any], job: Job) -> list[Finding]:
    """What torch says to the whole job."""
    return [*_world(facts), *_heads(facts, job), *_forgotten(facts, job), *_schedule(job)]


def _world(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """torch/distributed/device_mesh.py."""
    mesh, world = facts.get("mesh"), facts.get("world")
    if not mesh or not world or mesh == world:
        return
    if mesh > world:
        message = f"the mesh holds {mesh} ranks, more than the {world} that are started"
        yield refused(_TARGET, "pytorch-mesh-world", AT_START, message, mesh, ranks=mesh)
    else:
        message = f"the mesh holds {mesh} of the {world} ranks that are started; the others are in"
        yield refused(
            _TARGET, "pytorch-mesh-world", FIRST_STEP, f"{message} no part of it", mesh, ranks=mesh
        )


def _heads(facts: Mapping[str, Any], job: Job) -> Iterator[Finding]:
    """Each rank needs whole heads: a view into heads fails in the first step."""
    plan: Plan | None = facts.get("plan")
    tp, model = job.layout.tp, job.model
    if plan is None or tp <= 1 or "attention in" not in plan.roles():
        return
    kinds = {"heads": model.heads}
    if model.mla is None:
        kinds["KV heads"] = model.kv_heads
    for name, heads in kinds.items():
        if heads % tp:
            legal = max(d for d in divisors(tp) if all(h % d == 0 for h in kinds.values()))
            message = f"{heads} {name} do not divide by tp {tp}"
            yield refused(_TARGET, "pytorch-heads", FIRST_STEP, message, tp, layout__tp=legal)
            return


def _forgotten(facts: Mapping[str, Any], job: Job) -> Iterator[Finding]:
    """Parts that no plan names stay whole on every tp rank, and every tp rank computes them."""
    plan: Plan | None = facts.get("plan")
    tp = job.layout.tp
    if plan is None or tp <= 1 or not plan.styles or plan.open:
        return
    roles = plan.roles()
    counts = _counts(job)
    if "mlp in" in roles and "attention in" not in roles and counts["attention"]:
        total = counts["attention"]
        message = (
            f"no plan names attention: each of the {tp} tp ranks holds all {total:,} of its"
            f" parameters instead of {total // tp:,}, and computes all {job.model.heads} heads"
            f" instead of {job.model.heads // tp}; split wq, wk, wv by columns and wo by rows"
            " (convert --to pytorch writes the whole plan)"
        )
        yield changed(_TARGET, "pytorch-attention-whole", message, tp)
    if "attention in" in roles and not roles & {"mlp in", "mlp out"} and counts["mlp"]:
        total = counts["mlp"]
        message = (
            f"no plan names the feed-forward maps: each of the {tp} tp ranks holds all {total:,}"
            f" of their parameters instead of {total // tp:,}"
        )
        yield changed(_TARGET, "pytorch-mlp-whole", message, tp)
    if roles and not roles & {"embedding", "head"} and counts["ends"]:
        message = (
            f"no plan names the embedding or the head: each tp rank holds all {counts['ends']:,}"
            f" of their parameters, and logits of all {job.model.vocab} words"
        )
        yield changed(_TARGET, "pytorch-ends-whole", message, tp)


def _counts(job: Job) -> dict[str, int]:
    """Parameters of attention, of the feed-forward maps, and of both ends."""
    counts = {"attention": 0, "mlp": 0, "ends": 0}
    for parameter in parameters(job.model):
        size = parameter.numel
        if parameter.unit in ("embed", "head"):
            counts["ends"] += size
        elif ".attention." in f".{parameter.name}.":
            counts["attention"] += size
        elif ".mlp." in f".{parameter.name}.":
            counts["mlp"] += size
    return counts


def _schedule(job: Job) -> Iterator[Finding]:
    """torch/distributed/pipelining/schedules.py."""
    layout = job.layout
    if layout.pp <= 1:
        return
    many, stages = job.batch.accumulation or 1, layout.pp * layout.vpp
    name = layout.schedule.partition(":")[0]
    rounds = max(1, many // layout.pp)
    message, legal = None, stages
    if name in ("gpipe", "1f1b") and many < stages:
        message = f"{name} needs at least as many micro batches as stages: {many} for {stages}"
    elif name in ("interleaved-1f1b", "zb-h1") and many % rounds:
        message = f"{name} does {many} micro batches in {rounds} rounds of as many each"
        legal = nearest(many, [rounds * layout.pp, (rounds + 1) * layout.pp])
    elif name == "dualpipev" and many < stages:
        message = f"dualpipev needs at least {stages} micro batches, not {many}"
    if message:
        total = layout.micro_batch * layout.dp * legal
        yield refused(
            _TARGET, "pytorch-micro-batches", AT_START, message, many,
            train__accumulation=legal, train__global_batch=total,
        )  # fmt: skip
