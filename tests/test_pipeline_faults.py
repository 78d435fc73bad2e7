"""A pipeline in which a rank is gone, stands still, or follows another table: everyone who waits
for it ends within the timeout and says what it was waiting for."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed as dist

import cases
from harness import Case, micro_batches
from plait.parallel.check import make_check
from plait.parallel.mesh import make_mesh
from plait.schedules.build import build
from plait.schedules.transfers import with_transfers
from plait.spec.job import Checkpoint, Data, Job, Train
from plait.spec.layout import Layout
from plait.spec.model import Model
from plait.train.launch import World, run
from plait.train.metrics import Metrics
from plait.train.program import Program
from plait.train.trainer import Result, train
from ranks import RankFailed, run_ranks

#: Seconds that a rank waits for another.
PATIENCE = 8.0


def job_of(schedule: str, pp: int) -> Job:
    model = replace(cases.MODELS["llama"], layers=8)
    return Case(model, Layout.fill(pp, pp=pp, schedule=schedule), 8).job


# ------------------------------------------------------------------------------------------
# What happens to a rank


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stopped, and woken when all others have ended."""
    if os.fork() == 0:
        time.sleep(1.5 * PATIENCE)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    time.sleep(1.5 * PATIENCE)


def at_action(action: str, happens: Callable[[], None]) -> Callable[[str], None]:
    """For `Scope.note`."""
    return lambda doing: happens() if doing == f"in {action}" else None


def broken(rank: int, job: Job, action: str, happens: Callable, folder: str) -> None:
    """A step in which that happens to the last rank; what the others raise is written down."""
    program = Program(job, make_mesh(job.layout, job.model, rank))
    program.initialize()
    if rank == job.layout.pp - 1:
        program.mesh.scope.note = at_action(action, happens)
    start = time.monotonic()
    try:
        program.step(micro_batches(job, program.mesh, 0), 0)
    except dist.DistError as e:
        said = [type(e).__name__, str(e), time.monotonic() - start]
        Path(folder, f"{rank}.json").write_text(json.dumps(said))


WAITS = re.compile(
    r"stage (\d+) (?:waits for|sends) the (?:output|input gradient) of chunk (\d+), "
    r"micro batch (\d+), (?:from|to) stage (\d+) \((\d+)((?:SEND|RECV)_[FB])(\d+)\): (.+)"
)


@pytest.mark.parametrize(
    ("schedule", "action", "happens"),
    [("zbv", "4F1", die), ("1f1b", "3B2", stop), ("dualpipe", "0F5", sleep)],
)
def test_ranks_that_wait_in_vain_say_for_what(schedule, action, happens, tmp_path):
    job = job_of(schedule, 4)
    try:
        run_ranks(4, broken, job, action, happens, str(tmp_path), timeout=2 * PATIENCE)
    except RankFailed:
        assert happens is die
    programs = with_transfers(build(schedule, 4, 8))
    peers = set()
    for rank in range(3):
        name, message, seconds = json.loads((tmp_path / f"{rank}.json").read_text())
        assert name == "TransferLost"
        assert seconds < 1.5 * PATIENCE
        said = WAITS.fullmatch(message)
        assert said, message
        stage, _, micro, peer, chunk, kind, again, _ = said.groups()
        assert int(stage) == rank
        assert micro == again
        assert (kind, int(chunk), int(micro)) in programs[rank]
        peers.add(int(peer))
    assert 3 in peers


# ------------------------------------------------------------------------------------------
# Another table


def differing(rank: int, job: Job) -> str:
    """Rank 1 goes through its row of another table than rank 0."""
    mesh = make_mesh(job.layout, job.model, rank)
    mesh.scope.check = make_check(dist.distributed_c10d._get_default_store(), rank)
    program = Program(job, mesh)
    program.initialize()
    if rank == 1:
        program.actions = with_transfers(build("gpipe", 2, 8))[1]
    with pytest.raises(RuntimeError) as e:
        program.step(micro_batches(job, mesh, 0), 0)
    return f"{e.type.__name__}: {e.value}"


def test_tables_that_differ_are_found_before_anything_is_sent():
    for said in run_ranks(2, differing, job_of("1f1b", 2)):
        assert said.startswith("CollectiveMismatch: the ranks of axis pp differ: rank 0: ")
        assert re.search(r"(output|input gradient) of chunk \d, micro batch \d,.*; rank 1: ", said)


# ------------------------------------------------------------------------------------------
# A whole run


FATES = {"died": die, "no longer answered": lambda: time.sleep(600)}


@dataclass(frozen=True)
class Doomed(World):
    """The world of a rank to which something happens in step 2 of a run."""

    fate: Callable[[], None]

    def note(self, doing: str) -> None:
        super().note(doing)
        if self.rank == 1 and self.steps[1] == 2 and doing == "in 1F1":
            self.fate()


def doomed(job: Job, world: World, report: Metrics) -> Result:
    fate = Path(*job.data.path, "fate").read_text()
    return train(job, Doomed(**vars(world), fate=FATES[fate]), report)


@pytest.mark.parametrize("fate", FATES)
def test_a_run_that_loses_a_stage_says_what_each_was_at(fate, tmp_path, capsys):
    (tmp_path / "fate").write_text(fate)
    (tmp_path / "text.txt").write_text("what is read is of no consequence\n" * 100)
    model = Model.of("small", layers=2, hidden=8, heads=1, vocab=256)
    job = Job(
        model,
        Layout.fill(2, pp=2),
        Train(steps=4, seq_len=8, global_batch=4, accumulation=4, timeout=5.0),
        Data(path=(str(tmp_path),), suffixes=(".txt",)),
        Checkpoint(folder="none"),
    )
    start = time.monotonic()
    assert run(job, work=doomed) == 1
    assert time.monotonic() - start < 60
    lines = [x for x in capsys.readouterr().err.splitlines() if not x.startswith("step ")]
    first, *rest = lines[-3:]
    assert first.startswith(f"rank 1 {fate} in step 2: ")
    waits = (
        r"  rank 0: (waits for|sends) the .* of chunk [01], micro batch [0-3], (from|to) stage 1 .*"
    )
    assert re.fullmatch(waits, rest[0])
    assert rest[1] == "  rank 1: in 1F1"
