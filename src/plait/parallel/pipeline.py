"""Runs a pipeline schedule: one rank goes through its row of the table, whatever the schedule.

A rank's program (`schedules.transfers`) is a list of actions. Computing ones call a chunk of the
model; the others move the residual stream [rows, hidden] or its gradient from chunk to chunk,
while computing goes on. What is held follows from the list:

    receive buffer   from RECV_F to the end of the chunk's backward (it is the chunk's input),
                     from RECV_B to the end of the backward that it feeds (or W, if that needs it)
    sent message     until the second one after it to the same rank in the same direction, at most
    activations      from F to B or I, as autograd saves them
    for W            from I to W, input and output gradient of each linear map (`deferred.py`)

Without a pipeline the same program runs: F and B of micro batch after micro batch.
"""

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.models.heads import Documents, Held
from plait.parallel import deferred
from plait.parallel.check import CollectiveMismatch
from plait.parallel.collectives import Handle
from plait.parallel.data import Chunk
from plait.parallel.mesh import Mesh
from plait.schedules.table import Action
from plait.schedules.transfers import UNDER_WAY


@dataclass(frozen=True)
class MicroBatch:
    """tokens, targets: int64 [samples, seq] (target -1: not valid); index: int64 [samples], the
    samples' global numbers. documents: of each whole sample the lengths of its documents (one when
    None). held: which positions of the samples these are (all when None)."""

    tokens: Tensor
    targets: Tensor
    index: Tensor
    documents: Documents | None = None
    held: Held | None = None


class TransferLost(dist.DistError):
    """A message along the pipeline did not come, or could not be sent; says which."""


class Pipeline:
    """One rank's part of a pipeline.

    Args:
        chunks: chunk number -> the chunk, of all that this rank holds.
        last: number of the model's last chunk.
    """

    def __init__(
        self,
        chunks: Mapping[int, Chunk],
        last: int,
        mesh: Mesh,
        hidden: int,
        dtype: torch.dtype,
        device: str,
    ):
        self.chunks, self.last, self.mesh = chunks, last, mesh
        self.hidden, self.dtype, self.device = hidden, dtype, device
        self.pp, self.scope = mesh["pp"], mesh.scope

    def run(
        self,
        actions: Sequence[Action],
        place: Mapping[tuple[int, int], int],
        batches: Sequence[MicroBatch],
        valid: Tensor,
        loss_scale: float = 1.0,
    ) -> Tensor:
        """Goes through a rank's actions.

        Args:
            actions: with transfers; without any backward it is an evaluation.
            place: (chunk, micro batch) -> the stage where it is.
            batches: every micro batch of this data-parallel rank.
            valid: number of valid tokens of the global batch.

        Returns:
            This rank's part of the mean loss, float64; 0 on ranks without the last chunk.
        """
        with torch.set_grad_enabled(any(a.kind in "IB" for a in actions)):
            return _Run(self, actions, place, batches, valid, loss_scale).mean_loss()


class _Run:
    """The state of one run through the actions."""

    def __init__(
        self,
        pipeline: Pipeline,
        actions: Sequence[Action],
        place: Mapping[tuple[int, int], int],
        batches: Sequence[MicroBatch],
        valid: Tensor,
        loss_scale: float,
    ):
        self.pipeline, self.actions, self.place, self.batches = pipeline, actions, place, batches
        self.chunks, self.pp, self.scope = pipeline.chunks, pipeline.pp, pipeline.scope
        self.valid, self.loss_scale = valid, loss_scale
        self.loss = torch.zeros((), dtype=torch.float64, device=pipeline.device)
        # By (chunk, micro batch):
        self.coming: dict[tuple, tuple[Handle, Tensor, Action]] = {}  # kind too: under way to us
        self.inputs: dict[tuple, Tensor] = {}
        self.outputs: dict[tuple, Tensor] = {}  # to be sent, or the next chunk's input
        self.roots: dict[tuple, object] = {}  # where backward starts: a loss, or a graph's edge
        self.gradients: dict[tuple, Tensor] = {}  # of inputs, to be sent or for the chunk before
        self.queues: dict[tuple, list[Callable[[], None]]] = {}  # what I left for W
        self.sent: dict[tuple[str, int], deque[tuple[Handle, Tensor, Action]]] = {}
        self.ends = {a.chunk: i for i, a in enumerate(actions) if a.kind in "WB"}

    def mean_loss(self) -> Tensor:
        handlers = {
            "F": self.forward,
            "B": self.backward,
            "I": self.input_gradient,
            "W": self.weight_gradient,
            "SEND_F": self.send,
            "SEND_B": self.send,
            "RECV_F": self.receive,
            "RECV_B": self.receive,
        }
        self.scope.in_head = False  # as a run that broke off may have left it
        for i, action in enumerate(self.actions):
            self.at = f"in {action}"
            self.scope.note(self.at)
            handlers[action.kind](action, self.ends.get(action.chunk) == i)
        for messages in self.sent.values():
            while messages:
                self._let_go(messages)
        self.scope.note("past its last action of the pipeline")
        left = (self.coming, self.inputs, self.outputs, self.roots, self.gradients, self.queues)
        assert not any(left), left
        return self.loss

    # -- what is computed

    def forward(self, action: Action, _: bool) -> None:
        chunk, micro = action.chunk, action.micro
        key, batch, head = (chunk, micro), self.batches[micro], chunk == self.pipeline.last
        x = None
        if chunk > 0:
            x = self._take("RECV_F", chunk, micro, self.outputs, (chunk - 1, micro))
            x = x.detach().requires_grad_(torch.is_grad_enabled())
        with self.scope.during("forward"):
            targets = batch.targets if head else None
            out = self.chunks[chunk].module(
                batch.tokens, targets, batch.index, x, batch.held, batch.documents
            )
            if head:
                # Divided once, by the valid tokens of the whole global batch: so each micro batch
                # and rank adds its share, whatever the layout.
                out = out / self.valid
                self.loss += out.detach()
            else:
                self.outputs[key] = out.detach()
        if out.requires_grad:
            if x is not None:
                self.inputs[key] = x
            # The edge keeps the graph and not the values, which may go once they are sent.
            self.roots[key] = out if head else torch.autograd.graph.get_gradient_edge(out)
        self.scope.in_head = False

    def backward(self, action: Action, last: bool) -> None:
        with self.scope.during("backward"), self.chunks[action.chunk].micro_batch(last):
            self._backward(action.chunk, action.micro)

    def input_gradient(self, action: Action, _: bool) -> None:
        queue = self.queues[action.chunk, action.micro] = []
        with self.scope.during("backward"), self.chunks[action.chunk].put_off(queue):
            self._backward(action.chunk, action.micro)

    def weight_gradient(self, action: Action, last: bool) -> None:
        queue = self.queues.pop((action.chunk, action.micro))
        with self.scope.during("backward"), self.chunks[action.chunk].micro_batch(last):
            deferred.finish(queue)

    def _backward(self, chunk: int, micro: int) -> None:
        key = (chunk, micro)
        if chunk == self.pipeline.last:
            self.scope.in_head = True
            (self.roots.pop(key) * self.loss_scale).backward()
            self.scope.in_head = False
        else:
            grad = self._take("RECV_B", chunk, micro, self.gradients, (chunk + 1, micro))
            torch.autograd.backward((self.roots.pop(key),), (grad,))
        if chunk > 0:
            self.gradients[key] = self.inputs.pop(key).grad

    # -- what moves

    def _take(
        self, kind: str, chunk: int, micro: int, local: dict[tuple, Tensor], key: tuple
    ) -> Tensor:
        """A message for a chunk: from a neighbour that is on this rank, or from another rank."""
        if key in local:
            return local.pop(key)
        handle, x, action = self.coming.pop((kind, chunk, micro))
        self._moving(action, handle.wait)
        self.scope.note(self.at)
        return x

    def receive(self, action: Action, _: bool) -> None:
        rows = self._rows(action.micro)
        pipeline = self.pipeline
        with self.scope.during("forward" if action.kind == "RECV_F" else "backward"):
            x = torch.empty(rows, pipeline.hidden, dtype=pipeline.dtype, device=pipeline.device)
            handle = self._moving(action, self.pp.receive, x, self._peer(action), _what(action))
        self.coming[action.kind, action.chunk, action.micro] = handle, x, action

    def send(self, action: Action, _: bool) -> None:
        peer = self._peer(action)
        messages = self.sent.setdefault((action.kind, peer), deque())
        if len(messages) == UNDER_WAY:
            self._let_go(messages)
        results = self.outputs if action.kind == "SEND_F" else self.gradients
        x = results.pop((action.chunk, action.micro)).contiguous()
        with self.scope.during("forward" if action.kind == "SEND_F" else "backward"):
            handle = self._moving(action, self.pp.send, x, peer, _what(action))
        messages.append((handle, x, action))

    def _let_go(self, messages: deque[tuple[Handle, Tensor, Action]]) -> None:
        handle, _, action = messages.popleft()
        self._moving(action, handle.wait)

    def _rows(self, micro: int) -> int:
        layout = self.pipeline.mesh.layout
        tokens = self.batches[micro].tokens.numel()
        return tokens // layout.tp if layout.sequence_parallel else tokens

    def _peer(self, action: Action) -> int:
        step = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}[action.kind]
        return self.place[action.chunk + step, action.micro]

    def _moving(self, action: Action, call: Callable[..., Any], *args: Any) -> Any:
        """Makes a call, and says of whatever goes wrong in it for which action it was."""
        doing = _doing(action, self._peer(action))
        self.scope.note(doing)
        try:
            return call(*args)
        except CollectiveMismatch:
            raise
        except RuntimeError as e:  # dist.DistError, and what gloo raises
            raise TransferLost(f"stage {self.pp.rank} {doing}: {_first_line(e)}") from e


# Every step says the same again: what is said of an action is kept.


@lru_cache(maxsize=2**14)
def _what(action: Action) -> str:
    """The message of an action, in the same words on both sides."""
    forward = action.kind.endswith("F")
    maker = action.chunk
    if action.kind.startswith("RECV"):
        maker += -1 if forward else 1
    what = "output" if forward else "input gradient"
    return f"{what} of chunk {maker}, micro batch {action.micro},"


@lru_cache(maxsize=2**14)
def _doing(action: Action, peer: int) -> str:
    verb, side = ("sends", "to") if action.kind.startswith("SEND") else ("waits for", "from")
    return f"{verb} the {_what(action)} {side} stage {peer} ({action})"


def _first_line(e: Exception) -> str:
    line = (str(e).strip().splitlines() or [""])[0]
    return re.sub(r"\[[^\]]*\.cc:\d+\] *", "", line)  # where in gloo
