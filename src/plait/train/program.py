"""The program of one rank: a model under a layout, and its step.

`plait train` runs it, the parity harness compares it, `plait dryrun` runs it with fake tensors:
nothing in a step reads a value back from the device but each mixture the sizes of its messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.models.layers import Dropout
from plait.models.moe import mixtures
from plait.models.random import initial
from plait.models.transformer import Transformer
from plait.parallel.collectives import Scope
from plait.parallel.context import apply_context_parallel, own_positions
from plait.parallel.data import DataParallel
from plait.parallel.deferred import Later
from plait.parallel.expert import apply_expert_parallel
from plait.parallel.flat import Dtypes
from plait.parallel.mesh import Mesh
from plait.parallel.pipeline import MicroBatch, Pipeline
from plait.parallel.recompute import apply_recompute
from plait.parallel.tensor import apply_tensor_parallel
from plait.schedules.forward import forward_only
from plait.schedules.job import table_of
from plait.schedules.loop import one_f_one_b
from plait.schedules.transfers import with_transfers
from plait.spec.chunks import chunk_layers
from plait.spec.job import Job
from plait.train.optimizer import apply_update, make_optimizer, squared_norm
from plait.train.routing import taken
from plait.train.schedule import learning_rate


@dataclass(frozen=True)
class StepResult:
    """Scalars of one step, the same on every rank: mean loss over the global batch's valid
    tokens, gradient norm before clipping (both float64), number of valid tokens (int64); and
    what routers chose, as `train.routing.routing_of` reads it."""

    loss: Tensor
    grad_norm: Tensor
    tokens: Tensor
    routed: Tensor


def dtypes_of(job: Job) -> Dtypes:
    """The torch dtypes of a job; "auto" must have been resolved for the compute dtype."""
    compute = getattr(torch, job.train.dtype)
    master = torch.promote_types(compute, torch.float32)
    grad = master if job.train.grad_dtype == "auto" else getattr(torch, job.train.grad_dtype)
    return Dtypes(compute, master, grad)


class Program:
    """A model under a layout on one rank.

    Attributes:
        table: which rank computes what, in which order, for the accumulation of the job.
        modules: chunk number -> its slice of the model, rewritten; all that this rank holds.
        engine: their weights and gradients. optimizer: AdamW on this rank's pieces.
    """

    def __init__(self, job: Job, mesh: Mesh, device: str = "cpu"):
        self.job, self.mesh, self.device = job, mesh, device
        model, layout, dtypes = job.model, mesh.layout, dtypes_of(job)
        self.table = table_of(job) if layout.pp > 1 else one_f_one_b(1, job.train.accumulation)
        self.actions = with_transfers(self.table)[mesh["pp"].rank]
        self.modules: dict[int, Transformer] = {}
        later = {c: Later() for c in self.table.held[mesh["pp"].rank]}
        for c, put_off in later.items():
            module = self.modules[c] = self._slice(c)
            apply_tensor_parallel(module, model, mesh, put_off if self.table.split else None)
            apply_expert_parallel(module, mesh, put_off if self.table.split else None)
            apply_context_parallel(module, mesh, job.train.seq_len)
            apply_recompute(module, layout, mesh.scope)
        self.engine = DataParallel(
            self.modules,
            later,
            self.table,
            model,
            mesh,
            dtypes,
            job.train.bucket_mib * 2**20,
            device,
        )
        self.pipeline = Pipeline(
            self.engine.chunks,
            self.table.chunks - 1,
            mesh,
            model.hidden,
            dtypes.compute,
            device,
        )
        self.optimizer = make_optimizer(self.engine.segments, job.train)

    def _slice(self, chunk: int) -> Transformer:
        """A chunk of the model, without storage."""
        layers = chunk_layers(self.job.model, self.mesh.layout)
        with torch.device("meta"):
            module = Transformer(
                self.job.model,
                layers=layers[chunk],
                embed=chunk == 0,
                head=chunk == len(layers) - 1,
            )
        for child in module.modules():
            if isinstance(child, Dropout):
                child.seed = self.job.train.seed
        if module.head is not None:
            scope = self.mesh.scope
            module.head.register_forward_pre_hook(lambda _, args: _enter_head(scope, args[0]))
        return module

    def initialize(self) -> None:
        """Fills the weights: values depend on seed, name and global position, not on the layout."""
        seed = self.job.train.seed
        self.engine.initialize(lambda p: initial(p.parameter, seed, p.offset, p.size))

    def forward_backward(
        self, batches: Sequence[MicroBatch], loss_scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the mean loss of the global batch, summed over all ranks that share it.

        batches: this data-parallel rank's micro batches, whole samples; with a pipeline as many as
            the job says.

        Returns:
            This rank's part of the mean loss (over all ranks it sums to tp times the loss), and
            the number of valid tokens in the global batch.
        """
        table, actions = self.table, self.actions
        if self.mesh.layout.pp == 1 and len(batches) != table.micro_batches:
            table = one_f_one_b(1, len(batches))
            actions = table.ranks[0]
        assert len(batches) == table.micro_batches, (len(batches), table.micro_batches)
        batches = own_positions(batches, self.mesh)
        self.mesh.scope.note("counting the tokens of its micro batches")
        valid = self._count(batches)
        for module in self.modules.values():
            for moe in mixtures(module):
                moe.scale = loss_scale / valid.double()
        self.engine.begin()
        mean_loss = self.pipeline.run(actions, table.place, batches, valid, loss_scale)
        self.mesh.scope.note("waiting for the sums of gradients")
        with self.mesh.scope.during("backward"):
            self.engine.finish()
        return mean_loss, valid

    def evaluate(self, batches: Sequence[MicroBatch]) -> Tensor:
        """The mean loss over all ranks' batches (any number, the same on each data-parallel
        rank), float64, the same on every rank; weights and gradients are left as they are."""
        table = forward_only(self.table, len(batches))
        actions = with_transfers(table)[self.mesh["pp"].rank]
        batches = own_positions(batches, self.mesh)
        self.mesh.scope.note("beginning an evaluation")
        valid = self._count(batches)
        for module in self.modules.values():
            module.eval()
        try:
            loss = self.pipeline.run(actions, table.place, batches, valid)
        finally:
            for module in self.modules.values():
                module.train()
        loss = loss / self.mesh["tp"].size
        with self.mesh.scope.during("loss"):
            self.mesh["world"].all_reduce(loss)
        return loss

    def _count(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Valid tokens of the global batch: each counted by one of the ranks that see it."""
        valid = torch.zeros((), dtype=torch.int64, device=self.device)
        if self.mesh.coordinate["tp"] == 0 and self.mesh.coordinate["pp"] == 0:
            for batch in batches:
                valid += (batch.targets >= 0).sum()
        with self.mesh.scope.during("loss"):
            self.mesh["world"].all_reduce(valid)
        return valid

    def totals(self, mean_loss: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the gradient norm, and what routers chose since the last time, summed over
        all ranks in one message."""
        self.mesh.scope.note("waiting for the gradient norm")
        squares = squared_norm(self.engine.segments)
        both = torch.stack((mean_loss / self.mesh["tp"].size, squares))
        routed = taken(self.job.model, self.modules.values(), self.device)
        sums = torch.cat((both, routed))
        with self.mesh.scope.during("norm"):
            self.mesh["world"].all_reduce(sums)
        return sums[0], sums[1].sqrt(), sums[2:]

    def update(self, norm: Tensor, rate: float, loss_scale: float = 1.0) -> None:
        """The optimizer's step, for a norm of the scaled gradients."""
        moe, clip = self.job.model.moe, self.job.train.clip
        speed = moe.correction_speed if moe else 0.0
        segments = self.engine.segments
        apply_update(self.optimizer, segments, norm, clip, loss_scale, rate, speed)

    def step(
        self, batches: Sequence[MicroBatch], number: int, loss_scale: float = 1.0
    ) -> StepResult:
        """Optimizer step `number` (from 0) on this rank's micro batches of it.

        Where the gradient norm is not finite the weights are left as they are.
        """
        train = self.job.train
        mean_loss, valid = self.forward_backward(batches, loss_scale)
        loss, norm, routed = self.totals(mean_loss)
        rate = learning_rate(number, train)
        self.mesh.scope.note("in the optimizer, or gathering its weights")
        with self.mesh.scope.during("optimizer"):
            self.update(norm, rate, loss_scale)
            self.engine.publish()
        return StepResult(loss, norm / loss_scale, valid, routed)


def _enter_head(scope: Scope, stream: Tensor) -> None:
    """The head is at work: until its forward has ended, and again in backward until that is down
    at its input."""
    scope.in_head = True

    def leave(_: Tensor) -> None:
        scope.in_head = False

    if stream.requires_grad:
        stream.register_hook(leave)
