"""The training loop of one rank: data in, steps, checkpoints, and at the end what was measured."""

import math
import resource
import shlex
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from plait.cost.ledger import MEMORY_CLASSES, TrafficLedger, differences
from plait.cost.memory import memory as predicted_memory
from plait.cost.traffic import traffic
from plait.parallel.check import make_check
from plait.parallel.mesh import Mesh, make_mesh
from plait.report.numbers import amount
from plait.spec.job import Job
from plait.spec.saved import find, folder_of
from plait.trace.memory import MemoryTracker
from plait.trace.recorder import Recorder
from plait.trace.routed import RoutedRecorder
from plait.train import checkpoint
from plait.train.data import Corpus
from plait.train.launch import World
from plait.train.metrics import Metrics, Share
from plait.train.outcome import RunFailed
from plait.train.program import MicroBatch, Program
from plait.train.routing import routing_of
from plait.train.schedule import learning_rate

#: float16: good steps after which the loss scale doubles (torch.amp.GradScaler's default).
GROWTH_INTERVAL = 2000


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        steps: optimizer steps done in all, those before a resume included.
        loss, grad_norm: of the last step.
        checkpoint: the last one's folder, "" without.
        tokens_per_second: of all ranks, median over this run's steps.
        memory, traffic: of each rank, by memory class and by ledger entry, in a step of this run.
        predicted_bytes: a rank's memory at the peak, by the formulas.
        differences: where a rank did not send what the formulas say; a line each.
        experts: of each mixture in the last step {"layer", "sent", "received"}: tokens that chose
            each expert, and that it took. None without mixtures.
    """

    steps: int
    loss: float
    grad_norm: float
    tokens_per_second: float
    checkpoint: str
    memory: list[dict[str, int]]
    traffic: list[list[dict[str, Any]]]
    predicted_bytes: int
    differences: list[str]
    experts: list[dict[str, Any]] | None = None


class LossScale:
    """The scale of the loss under float16: halved when gradients overflow, doubled when long
    nothing did. Without float16 it is 1 and stays so.

    Args:
        saved: what `state` said when a checkpoint was saved; of a run without float16, nothing.
    """

    def __init__(self, job: Job, saved: Mapping[str, Any]):
        self.on = job.train.dtype == "float16"
        self.value = (saved.get("loss_scale") or job.train.loss_scale) if self.on else 1.0
        self.good = saved.get("good_steps", 0)

    @property
    def state(self) -> dict[str, Any]:
        """What a resumed run needs to know."""
        return {"loss_scale": self.value if self.on else None, "good_steps": self.good}

    def update(self, overflow: bool) -> None:
        if not self.on:
            return
        if overflow:
            self.value, self.good = self.value / 2, 0
            return
        self.good += 1
        if self.good == GROWTH_INTERVAL:
            self.value, self.good = self.value * 2, 0


def train(job: Job, world: World, report: Metrics) -> Result:
    """Trains to `job.train.steps` on this rank; every rank of the world calls it.

    A job that resumes has steps left to do (see `preflight`).

    Raises:
        UserError: the data or the checkpoint to resume from is not usable.
        RunFailed: the loss is no longer a number.
    """
    corpus, folder = Corpus.of(job), folder_of(job)
    resumed = find(job.checkpoint.resume) if job.checkpoint.resume else None
    mesh = make_mesh(job.layout, job.model, world.rank, world.device.type)
    if job.layout.pp > 1:
        mesh.scope.note = world.note
    program = Program(job, mesh, str(world.device))
    about = {"step": 0}
    if resumed:
        about = checkpoint.load(program, resumed)
    else:
        program.initialize()
    start, scale = about["step"], LossScale(job, about)
    report.start(start)
    watch = _Watch(program, world, start)
    seconds, saved = [], resumed
    for step in range(start, job.train.steps):
        world.at_step(step)
        began = time.perf_counter()
        batches = [_on(world.device, batch) for batch in _batches(corpus, job, mesh, step)]
        with watch.step(step):
            result = program.step(batches, step, scale.value)
        loss, norm = result.loss.item(), result.grad_norm.item()
        seconds.append(time.perf_counter() - began)
        overflow = not math.isfinite(norm)
        if overflow and not (scale.on and math.isfinite(loss) and scale.value > 1):
            raise RunFailed(
                f"step {step}: the loss is {loss:g} and the gradient norm {norm:g}; "
                "the weights were left as they were before it"
                + (f", the last checkpoint is {saved}" if saved else "")
            )
        scale.update(overflow)
        done, every = step + 1, job.train.eval_every
        evaluated = bool(every) and (done % every == 0 or done == job.train.steps)
        routing = routing_of(job.model, result.routed, int(result.tokens))
        report.step(
            step=step,
            loss=loss,
            grad_norm=norm,
            learning_rate=learning_rate(step, job.train),
            seconds=seconds[-1],
            memory_bytes=_memory_bytes(world.device),
            skipped=overflow,
            eval_loss=_evaluate(program, corpus, world) if evaluated else None,
            routing=routing,
            documents=[batch.documents for batch in batches],
        )
        if job.explain:
            held = [row for row in predicted_memory(job) if row.stage == mesh.coordinate["pp"]]
            report.ledger(step, watch.predicted, watch.recorder.ledger, held, watch.tracker.rows())
        every = job.checkpoint.every
        if folder and (done == job.train.steps or (every and done % every == 0)):
            mesh.scope.note("saving a checkpoint")
            saved = checkpoint.save(program, job, done, folder, scale.state)
    shares = watch.gather()
    result = Result(
        steps=job.train.steps,
        loss=loss,
        grad_norm=norm,
        tokens_per_second=job.train.global_batch * job.train.seq_len / median(seconds),
        checkpoint=str(saved) if folder else "",
        memory=[memory for memory, _, _ in shares],
        traffic=[sent for _, sent, _ in shares],
        predicted_bytes=max(m.total for m in predicted_memory(job)),
        differences=[f"rank {r}: {d}" for r, (_, _, ds) in enumerate(shares) for d in ds],
        experts=routing.rows() if routing else None,
    )
    report.summary(
        [Share(r, m, _by_kind(t)) for r, (m, t, _) in enumerate(shares)],
        predicted=_against_prediction(result),
        checkpoint=result.checkpoint,
        command=_continue_command(job, result.checkpoint) if folder else "",
    )
    return result


def _against_prediction(result: Result) -> str:
    """One line: what the formulas said, and what was so."""
    held = max(sum(m.values()) for m in result.memory)
    memory = f"{amount(result.predicted_bytes)} held (measured {amount(held)})"
    if result.differences:
        return f"{memory}; sent not as predicted: {result.differences[0]}"
    return f"{memory}; every rank sent what the formulas say, byte for byte"


def _evaluate(program: Program, corpus: Corpus, world: World) -> float:
    """The mean loss on the samples that are kept for it."""
    job, rank = program.job, program.mesh.dp_rank
    micro_batches = range(job.train.eval_batches * job.train.accumulation)
    batches = [_on(world.device, corpus.evaluation(job, rank, i)) for i in micro_batches]
    return program.evaluate(batches).item()


def _on(device: torch.device, batch: tuple) -> MicroBatch:
    *tensors, documents = batch
    return MicroBatch(*(t.to(device, non_blocking=True) for t in tensors), documents)


def _batches(corpus: Corpus, job: Job, mesh: Mesh, step: int) -> list[tuple]:
    return [corpus.batch(step, job, mesh.dp_rank, a) for a in range(job.train.accumulation)]


class _Watch:
    """Looks over a run's shoulder: compares collectives before they are issued, and records what
    one step holds and sends (the second, when nothing is allocated for the first time; every one
    where the job is to be explained)."""

    def __init__(self, program: Program, world: World, start: int):
        self.program, self.world, self.start = program, world, start
        steps = program.job.train.steps
        self.recorded = start + 1 if start + 1 < steps else start
        self.when, self.check = program.job.train.check_collectives, None
        if world.backend == "gloo" and world.world_size > 1:
            self.check = make_check(dist.distributed_c10d._get_default_store(), world.rank)

    def step(self, step: int) -> ExitStack:
        """What to be in while a step runs."""
        stack = ExitStack()
        first = step == self.start and self.when == "first-step"
        self.program.mesh.scope.check = self.check if first or self.when == "always" else None
        if step == self.recorded or self.program.job.explain:
            program = self.program
            self.recorder, self.tracker = Recorder(program.mesh), MemoryTracker(program)
            self.routed = RoutedRecorder(program)
            stack.enter_context(self.recorder)
            stack.enter_context(self.tracker)
            stack.enter_context(self.routed)
        return stack

    @property
    def predicted(self) -> TrafficLedger:
        """What the formulas say that this rank sent in the step recorded last."""
        ledger = traffic(self.program.job, self.routed.rows)
        return ledger.of_stage(self.program.mesh.coordinate["pp"])

    def gather(self) -> list[tuple[dict[str, int], list[dict[str, Any]], list[str]]]:
        """Of every rank: memory by class, traffic entries, and where they were not predicted."""
        peak = max(self.tracker.rows(), key=lambda row: row["total"])
        ledger = self.recorder.ledger
        mine = (
            {name: peak[name] for name in MEMORY_CLASSES if peak[name]},
            [asdict(row) for row in ledger.rows()],
            differences(self.predicted, ledger),
        )
        everyone: list[Any] = [mine] * self.world.world_size
        if self.world.world_size > 1:
            dist.all_gather_object(everyone, mine)
        return everyone


def _by_kind(traffic: list[dict[str, Any]]) -> dict[str, int]:
    kinds: dict[str, int] = {}
    for row in traffic:
        kind = f"{row['axis']} {row['collective']}"
        kinds[kind] = kinds.get(kind, 0) + row["bytes"]
    return kinds


def _memory_bytes(device: torch.device) -> int:
    """The most that this process has held: of the device, or of the machine on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _continue_command(job: Job, where: str) -> str:
    """What a person types to train twice as long from the last checkpoint."""
    return shlex.join(["plait", "train", where, "--steps", str(2 * job.train.steps)])
