"""What a pipeline's ranks hold, measured, is what the table says that they hold."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cases
from harness import Case, micro_batches
from plait.parallel.collectives import Axis
from plait.parallel.mesh import make_mesh
from plait.schedules.job import table_of
from plait.schedules.simulate import Times, simulate
from plait.schedules.table import Action
from plait.schedules.transfers import UNDER_WAY
from plait.spec.job import Job
from plait.spec.layout import Layout
from plait.spec.schedule import SCHEDULES
from plait.trace.memory import MemoryTracker
from plait.train.program import Program
from ranks import run_ranks

#: Layers of which only the MLP counts: of each token it keeps three rows of this width (gate, up
#: and their product), and from I to W, for its three maps, three others. A message, the head,
#: attention are a hundredth of it or less.
MODEL = replace(cases.MODELS["llama"], hidden=8, heads=1, head_dim=8, kv_heads=1, ffn=4096, vocab=8)
CHUNK = 3 * 4096 * cases.SEQ * 8  # bytes of a chunk with one layer, for one micro batch


def job_of(schedule: str, pp: int, micro: int, **layout: Any) -> Job:
    layout = Layout.fill(pp, pp=pp, schedule=schedule, **layout)
    model = replace(MODEL, layers=pp * layout.vpp)
    return Case(model, layout, micro).job


@dataclass
class Held:
    """One rank's row of the program with, after each action, what it holds.

    Attributes:
        bytes: of activations. buffers: receive buffers, those of F and those of B or I.
    """

    actions: tuple[Action, ...]
    bytes: list[int]
    buffers: list[tuple[int, int]]


class Watch:
    """Follows a step; receives are seen as they are posted."""

    def __init__(self, program: Program, tracker: MemoryTracker, patch: pytest.MonkeyPatch):
        self.program, self.tracker = program, tracker
        self.received: dict[str, dict[int, Tensor]] = {"output": {}, "input gradient": {}}
        self.bytes: list[int] = []
        self.buffers: list[tuple[int, int]] = []
        self.now = ""
        program.mesh.scope.note = self.note
        patch.setattr(Axis, "receive", self._receiving(Axis.receive))

    def _receiving(self, receive: Callable) -> Callable:
        def watched(axis: Axis, out: Tensor, source: int, what: str) -> Any:
            self.received[what.partition(" of")[0]][out.untyped_storage()._cdata] = out.shape
            return receive(axis, out, source, what)

        return watched

    def note(self, doing: str) -> None:
        # What was waited for comes in the middle of an action, which is then noted again.
        if doing.startswith("in ") and doing != self.now:
            self.now = doing
            self.sample()

    def sample(self) -> None:
        """What is held before the next action. Storages that are gone may be numbered anew, so
        they are struck off."""
        self.bytes.append(self.tracker.current["activations"] + self.tracker.current["logits"])
        for numbers in self.received.values():
            for gone in numbers.keys() - self.tracker.known.keys():
                del numbers[gone]
        self.buffers.append(tuple(map(len, self.received.values())))


def watched(rank: int, job: Job) -> Held:
    program = Program(job, make_mesh(job.layout, job.model, rank))
    program.initialize()
    batches = micro_batches(job, program.mesh, 0)
    valid = torch.ones((), dtype=torch.int64)
    program.engine.begin()
    with MemoryTracker(program) as tracker, pytest.MonkeyPatch.context() as patch:
        watch = Watch(program, tracker, patch)
        program.pipeline.run(program.actions, program.table.place, batches, valid)
        watch.sample()
    return Held(program.actions, watch.bytes[1:], watch.buffers[1:])


def computed(held: Held, opens: str, closes: str) -> list[int]:
    """After each action of a rank: how many micro batches of chunks are between two kinds."""
    count, counts = 0, []
    for a in held.actions:
        count += (a.kind in opens.split()) - (a.kind in closes.split())
        counts.append(count)
    return counts


def check_bytes(held: Held, counts: list[int]) -> None:
    """At every moment so many chunks' activations, but for a hundredth of one for each that is
    open, for each message that has come and for those that are under way from here."""
    opened = computed(held, "F", "W B")
    rows = zip(held.actions, held.bytes, counts, opened, held.buffers, strict=True)
    for action, measured, count, chunks, buffers in rows:
        far = measured / CHUNK - count
        assert 0 <= far < 0.01 * (chunks + sum(buffers) + 2 * UNDER_WAY), (
            f"after {action}: off by {far}"
        )


def check_buffers(held: Held) -> None:
    """A chunk's input until its backward has ended, its output gradient until the weights have
    theirs: no buffer more, after any action."""
    forward, backward = set(), set()
    for action, buffers in zip(held.actions, held.buffers, strict=True):
        kind, *which = action
        if kind in ("RECV_F", "RECV_B"):
            (forward if kind == "RECV_F" else backward).add(tuple(which))
        if kind in "IB":
            forward.discard(tuple(which))
        if kind in "WB":
            backward.discard(tuple(which))
        assert buffers == (len(forward), len(backward)), action


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activations_and_buffers_are_those_of_the_table(schedule):
    job = job_of(schedule, 4, 8)
    table = table_of(job)
    peaks = simulate(table, Times.even(table)).peak_activations
    for held, peak in zip(run_ranks(4, watched, job), peaks, strict=True):
        check_bytes(held, computed(held, "F", "W B"))
        check_buffers(held)
        assert peak <= max(held.bytes) / CHUNK * table.share < 1.01 * peak + 0.05


@pytest.mark.parametrize("schedule", ["zb-h1", "v-min", "dualpipev"])
def test_with_recompute_only_what_w_needs_counts(schedule):
    """F keeps the layer's input, a hundredth; I computes the rest again and leaves it for W."""
    for held in run_ranks(4, watched, job_of(schedule, 4, 8, recompute="full")):
        check_bytes(held, computed(held, "I", "W"))


def test_v_half_and_v_min_hold_a_half_and_a_third():
    """Of 1F1B's pp micro batches (pp + 2) / 2 and (pp + 4) / 3 (Qi et al. 2405.15362, section 3);
    and that on every rank."""
    pp = 6
    most = {
        name: [max(held.bytes) / CHUNK for held in run_ranks(pp, watched, job_of(name, pp, pp))]
        for name in ("1f1b", "v-half", "v-min")
    }
    assert max(most["1f1b"]) > pp
    for name, bound in (("v-half", (pp + 2) / 2), ("v-min", (pp + 4) / 3)):
        assert max(most[name]) / 2 < 1.01 * bound
