"""Holds a layout against one process."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.models.layers import Dropout
from plait.models.moe import correct, mixtures
from plait.models.random import initial
from plait.models.transformer import Transformer
from plait.parallel.check import make_check
from plait.parallel.mesh import Mesh, make_mesh
from plait.spec.job import Batch, Data, Job, Train
from plait.spec.layout import Layout
from plait.spec.model import Model
from plait.spec.parameters import parameters
from plait.train.program import MicroBatch, Program
from plait.train.schedule import learning_rate


@dataclass(frozen=True)
class Case:
    """A layout to hold against one process: model, layout, batch."""

    model: Model
    layout: Layout
    accumulation: int = 1
    seq_len: int = 16
    train: Train = field(default_factory=Train)
    document_mask: bool = False

    @property
    def job(self) -> Job:
        batch = Batch.fill(self.layout.dp, self.layout.micro_batch, None, self.accumulation)
        train = replace(
            self.train,
            dtype="float64",
            seq_len=self.seq_len,
            global_batch=batch.global_,
            accumulation=batch.accumulation,
            steps=3,
            warmup=1,
            clip=0.5,
        )
        return Job(self.model, self.layout, train, Data(document_mask=self.document_mask))


def global_batch(job: Job, step: int) -> MicroBatch:
    """Random tokens of the whole global batch of a step, a few targets not valid; with a mask for
    documents, samples of one to four of random lengths."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (job.train.global_batch, job.train.seq_len)
    tokens = torch.randint(job.model.vocab, shape, generator=generator)
    targets = torch.randint(job.model.vocab, shape, generator=generator)
    ignored = torch.rand(shape, generator=generator) < 0.1
    index = torch.arange(shape[0]) + step * shape[0]
    documents = None
    if job.data.document_mask:
        rng = random.Random(step)
        cuts = (rng.sample(range(1, shape[1]), rng.randrange(4)) for _ in range(shape[0]))
        ends = ([0, *sorted(some), shape[1]] for some in cuts)
        documents = [tuple(b - a for a, b in pairwise(some)) for some in ends]
    return MicroBatch(tokens, targets.masked_fill(ignored, -1), index, documents)


def micro_batches(job: Job, mesh: Mesh, step: int) -> list[MicroBatch]:
    """This rank's micro batches: position (a * dp + r) * micro + j is sample j of rank r's a-th."""
    whole, layout = global_batch(job, step), job.layout
    dp_rank = mesh.coordinate["dp_replicate"] * layout.dp_shard + mesh.coordinate["dp_shard"]
    result = []
    for a in range(job.train.accumulation):
        start = (a * layout.dp + dp_rank) * layout.micro_batch
        s = slice(start, start + layout.micro_batch)
        documents = whole.documents and whole.documents[s]
        result.append(MicroBatch(whole.tokens[s], whole.targets[s], whole.index[s], documents))
    return result


@dataclass
class Trace:
    """What is compared: losses and norms of three steps, gradients of the first, weights at the
    end. For a rank, gradients and weights are lists of (name, offset, size, values)."""

    losses: list[float]
    norms: list[float]
    gradients: Any
    weights: Any


def one_process(job: Job, pieces: int = 1) -> Trace:
    """The oracle: plain autograd, torch's own clipping and AdamW, no code of plait.parallel.

    pieces: the global batch passes in so many equal parts, one after the other.
    """
    module = Transformer(job.model).to(torch.float64)
    for child in module.modules():
        if isinstance(child, Dropout):
            child.seed = job.train.seed
    table = {p.name: p for p in parameters(job.model)}
    named = dict(module.named_parameters())
    with torch.no_grad():
        for name, p in named.items():
            spec = table[name]
            p.copy_(initial(spec, job.train.seed, (0,) * len(spec.shape), spec.shape))
    t = job.train
    learned = {name: p for name, p in named.items() if not table[name].by_load}
    decay = [p for name, p in learned.items() if table[name].decay]
    plain = [p for name, p in learned.items() if not table[name].decay]
    groups = [
        {"params": decay, "weight_decay": t.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=t.learning_rate, betas=(t.beta1, t.beta2), eps=t.eps, foreach=False
    )
    losses, norms, gradients = [], [], {}
    for step in range(t.steps):
        batch = global_batch(job, step)
        whole = batch.tokens, batch.targets, batch.index
        assert pieces == 1 or batch.documents is None
        valid = (batch.targets >= 0).sum()
        for moe in mixtures(module):
            moe.scale = 1 / valid.double()
            moe.take()
        loss = torch.zeros((), dtype=torch.float64)
        for part in zip(*(t.chunk(pieces) for t in whole), strict=True):
            partial = module(*part, documents=batch.documents) / valid
            partial.backward()
            loss += partial.detach()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in named.items()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(learned.values(), t.clip)))
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, t)
        optimizer.step()
        for name, p in named.items():
            if table[name].by_load:
                correct(p, p.grad, job.model.moe.correction_speed)
        module.zero_grad()
    return Trace(losses, norms, gradients, {n: p.detach().clone() for n, p in named.items()})


def on_rank(rank: int, job: Job, check: bool = False) -> Trace:
    """The same three steps by one rank of the layout."""
    mesh = make_mesh(job.layout, job.model, rank)
    if check:
        mesh.scope.check = make_check(dist.distributed_c10d._get_default_store(), rank)
    program = Program(job, mesh)
    program.initialize()
    engine = program.engine
    # The first step by hand: the optimizer overwrites the gradients.
    mean_loss, _ = program.forward_backward(micro_batches(job, mesh, 0))
    totals = [program.totals(mean_loss)[:2]]
    gradients = [
        (p.parameter.name, p.offset, p.size, engine.segments[i].grad[s].clone())
        for p, i, s in engine.held()
    ]
    with mesh.scope.during("optimizer"):
        program.update(totals[0][1], learning_rate(0, job.train))
        engine.publish()
    for step in range(1, job.train.steps):
        result = program.step(micro_batches(job, mesh, step), step)
        totals.append((result.loss, result.grad_norm))
    losses, norms = ([x.item() for x in column] for column in zip(*totals, strict=True))
    return Trace(losses, norms, gradients, held_weights(program))


def held_weights(program: Program) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
    """A rank's weights in the master dtype, copied: (name, offset, size, values) of each box."""
    engine = program.engine
    return [
        (p.parameter.name, p.offset, p.size, engine.segments[i].weight[s].clone())
        for p, i, s in engine.held()
    ]


def compare(ranks: Sequence[Trace], oracle: Trace) -> None:
    """Asserts |a - b| <= 1e-9 max|b| + 1e-12 max|g|, for every rank and every parameter."""
    largest = max(g.abs().max().item() for g in oracle.gradients.values())
    for rank, trace in enumerate(ranks):
        for a, b in zip(trace.losses + trace.norms, oracle.losses + oracle.norms, strict=True):
            assert abs(a - b) <= 1e-9 * abs(b), f"rank {rank}: loss or norm {a} for {b}"
    for kind in ("gradients", "weights"):
        whole: dict[str, Tensor] = getattr(oracle, kind)
        seen = {name: torch.zeros(t.shape, dtype=torch.bool) for name, t in whole.items()}
        for rank, trace in enumerate(ranks):
            for name, offset, size, values in getattr(trace, kind):
                box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
                seen[name][box] = True
                expected = whole[name]
                bound = 1e-9 * expected.abs().max().item() + 1e-12 * largest
                error = (values.view(size) - expected[box]).abs().max().item()
                assert error <= bound, f"rank {rank}: {kind} of {name} off by {error} > {bound}"
        missing = [name for name, mask in seen.items() if not mask.all()]
        assert not missing, f"{kind} that no rank holds: {missing}"
