"""The program of one rank: a model under a layout, and its step.

`plait train` runs it, the parity harness compares it, `plait dryrun` runs it with fake tensors:
nothing in a step reads a value back from the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.models.layers import Dropout
from plait.models.random import initial
from plait.models.transformer import Transformer
from plait.parallel.data import DataParallel, Dtypes
from plait.parallel.mesh import Mesh
from plait.parallel.recompute import apply_recompute
from plait.parallel.tensor import apply_tensor_parallel
from plait.spec.job import Job
from plait.train.optimizer import apply_update, make_optimizer, squared_norm
from plait.train.schedule import learning_rate


@dataclass(frozen=True)
class MicroBatch:
    """tokens, targets: int64 [samples, seq] (target -1: not valid); index: int64 [samples], the
    samples' global numbers."""

    tokens: Tensor
    targets: Tensor
    index: Tensor


@dataclass(frozen=True)
class StepResult:
    """Scalars of one step, the same on every rank: mean loss over the global batch's valid
    tokens, gradient norm before clipping (both float64), number of valid tokens (int64)."""

    loss: Tensor
    grad_norm: Tensor
    tokens: Tensor


def dtypes_of(job: Job) -> Dtypes:
    """The torch dtypes of a job; "auto" must have been resolved for the compute dtype."""
    compute = getattr(torch, job.train.dtype)
    master = torch.promote_types(compute, torch.float32)
    grad = master if job.train.grad_dtype == "auto" else getattr(torch, job.train.grad_dtype)
    return Dtypes(compute, master, grad)


class Program:
    """A model under a layout on one rank.

    Attributes:
        module: the rewritten Transformer. engine: its weights and gradients.
        optimizer: AdamW on this rank's pieces.
    """

    def __init__(self, job: Job, mesh: Mesh, device: str = "cpu"):
        self.job, self.mesh, self.device = job, mesh, device
        with torch.device("meta"):
            self.module = Transformer(job.model)
        for module in self.module.modules():
            if isinstance(module, Dropout):
                module.seed = job.train.seed
        apply_tensor_parallel(self.module, job.model, mesh)
        apply_recompute(self.module, mesh.layout, mesh.scope)
        self.engine = DataParallel(
            self.module, job.model, mesh, dtypes_of(job), job.train.bucket_mib * 2**20, device
        )
        self.optimizer = make_optimizer(self.engine.segments, job.train)

    def initialize(self) -> None:
        """Fills the weights: values depend on seed, name and global position, not on the layout."""
        seed = self.job.train.seed
        self.engine.initialize(lambda p: initial(p.parameter, seed, p.offset, p.size))

    def forward_backward(
        self, batches: Sequence[MicroBatch], loss_scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the mean loss of the global batch, summed over all ranks that share it.

        Returns:
            This rank's part of the mean loss (over all ranks it sums to tp times the loss), and
            the number of valid tokens in the global batch.
        """
        engine, scope = self.engine, self.mesh.scope
        valid = self._count(batches)
        mean_loss = torch.zeros((), dtype=torch.float64, device=self.device)
        engine.begin()
        for i, batch in enumerate(batches):
            engine.begin_micro_batch(last=i == len(batches) - 1)
            with scope.during("forward"):
                # Divided once, by the valid tokens of the whole global batch: so each micro
                # batch and rank adds its share, whatever the layout.
                loss = self.module(batch.tokens, batch.targets, batch.index) / valid
            mean_loss += loss.detach()
            with scope.during("backward"):
                (loss * loss_scale).backward()
                del loss
                engine.end_micro_batch()
        with scope.during("backward"):
            engine.finish()
        return mean_loss, valid

    def _count(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Valid tokens of the global batch: each counted by one of the ranks that see it."""
        valid = torch.zeros((), dtype=torch.int64, device=self.device)
        if self.mesh.coordinate["tp"] == 0:
            for batch in batches:
                valid += (batch.targets >= 0).sum()
        with self.mesh.scope.during("loss"):
            self.mesh["world"].all_reduce(valid)
        return valid

    def totals(self, mean_loss: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the gradient norm, summed over all ranks in one message."""
        squares = squared_norm(self.engine.segments)
        both = torch.stack((mean_loss / self.mesh["tp"].size, squares))
        with self.mesh.scope.during("norm"):
            self.mesh["world"].all_reduce(both)
        return both[0], both[1].sqrt()

    def step(
        self, batches: Sequence[MicroBatch], number: int, loss_scale: float = 1.0
    ) -> StepResult:
        """Optimizer step `number` (from 0) on this rank's micro batches of it.

        Where the gradient norm is not finite the weights are left as they are.
        """
        train = self.job.train
        mean_loss, valid = self.forward_backward(batches, loss_scale)
        loss, norm = self.totals(mean_loss)
        rate = learning_rate(number, train)
        with self.mesh.scope.during("optimizer"):
            apply_update(self.optimizer, self.engine.segments, norm, train.clip, loss_scale, rate)
            self.engine.publish()
        return StepResult(loss, norm / loss_scale, valid)
