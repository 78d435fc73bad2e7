"""Starts the ranks of a run, or joins those that torchrun or SLURM started, and says how it ended.

Above everything else a run ends well: one line says which rank stopped, in which step and why, and
no process stays behind (`train.outcome`).

torch is imported late: the server from which ranks are forked imports it at the same time as the
launcher does, and both must find OMP_NUM_THREADS set.
"""

import faulthandler
import json
import logging
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.spec.findings import Finding, UserError, error
from plait.spec.job import Job
from plait.spec.saved import claimed, folder_of
from plait.train.outcome import (
    NOTE,
    PATIENCE,
    RunFailed,
    debugging,
    outcome_of,
    reap,
    shared,
    verdict,
    when,
)
from plait.train.place import Place, joined

if TYPE_CHECKING:
    import torch

    from plait.train.metrics import Metrics

#: What a rank does: (job, its world, its reporter) -> result of the run. Importable by name.
Work = Callable[[Job, "World", "Metrics"], Any]


@dataclass(frozen=True)
class World:
    """One rank's place among all ranks.

    Attributes:
        rank, world_size: over all machines.
        local_rank: on this machine.
        device: where it computes.
        backend: "nccl" or "gloo".
        steps: [world_size] int64, the step that each rank is in, shared with the launcher.
        doing: [world_size * NOTE] bytes, what each rank is at, shared with the launcher.
    """

    rank: int
    world_size: int
    local_rank: int
    device: "torch.device"
    backend: str
    steps: memoryview
    doing: memoryview

    def at_step(self, step: int) -> None:
        """Notes that this rank begins a step, for the case that it does not come out of it."""
        self.steps[self.rank] = step

    def note(self, doing: str) -> None:
        """Notes what this rank is at, or what it waits for, for the same case."""
        start = self.rank * NOTE
        self.doing[start : start + NOTE] = doing.encode()[:NOTE].ljust(NOTE)


def run(job: Job, as_json: bool = False, work: Work | None = None) -> int:
    """Runs a job over all its ranks, here or as one of ranks that were started elsewhere.

    Args:
        as_json: one JSON object on stdout, the result or {"errors": [...]}.
        work: what each rank does; `plait.train.trainer.train` if not given.

    Returns:
        the exit code: 0 done, 1 the run failed, 2 the question is wrong, 128 + n stopped by
        signal n (130 for Ctrl-C).
    """
    try:
        place = joined(os.environ)
        with (
            _signals_unwind() if place is None else nullcontext(),
            claimed(folder_of(job) if place is None or place.rank == 0 else None),
        ):
            result = _join(job, place, as_json, work) if place else _launch(job, as_json, work)
    except UserError as e:
        _complain(e.findings, as_json)
        return 2
    except RunFailed as e:
        _complain([error("run", None, str(e))] if as_json else [str(e)], as_json)
        return 1
    except KeyboardInterrupt:
        return 130
    except _Ended as e:
        return e.args[0]
    if as_json and result is not None:
        said = asdict(result) if is_dataclass(result) else result
        print(json.dumps({k: _finite(v) for k, v in said.items()}), flush=True)
    return 0


@contextmanager
def _signals_unwind() -> Iterator[None]:
    """Whoever ends the launcher while it starts finds nothing left behind: no lock, no folder, no
    server. Later torch's launcher has handlers of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: Any) -> None:
        raise _Ended(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, end) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class _Ended(Exception):
    """The run ends with this exit code, and there is nothing to say about it here."""


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _complain(problems: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"errors": [f.as_json() for f in problems]}), flush=True)
        return
    for problem in problems:
        print(problem.line() if isinstance(problem, Finding) else problem, file=sys.stderr)


# ------------------------------------------------------------------------------------------
# Starting ranks on this machine


def _launch(job: Job, as_json: bool, work: Work | None) -> Any:
    ranks = job.layout.world
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cores() // ranks))
    with (
        tempfile.TemporaryDirectory(prefix="plait-", ignore_cleanup_errors=True) as name,
        _environment(threads),
    ):
        folder = Path(name)
        steps, doing = shared(folder, ranks)
        _warm_server(work)
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=folder.name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
            shutdown_timeout=5,
        )
        stop_reaping = threading.Event()
        threading.Thread(target=reap, args=(folder, ranks, stop_reaping), daemon=True).start()
        try:
            with _alone_with_the_ranks():
                results = elastic_launch(config, _rank)(job, folder, threads, as_json, work)
        except SignalException as e:
            _end_server()
            raise _Ended(128 + int(e.sigval)) from None
        except (_Ended, KeyboardInterrupt):  # before torch's launcher heeds signals
            _end_server()
            raise
        except ChildFailedError as e:
            rank, failure = e.get_first_failure()
            raise verdict(folder, rank, failure.exitcode, steps, doing) from None
        finally:
            stop_reaping.set()
            _show_cursor()
        return results[0]


def cores() -> int:
    """Cores that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


@contextmanager
def _environment(threads: int) -> Iterator[None]:
    """What must be in the environment before torch is imported here and in the ranks."""
    wanted = {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    added = {k: v for k, v in wanted.items() if k not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


def _warm_server(work: Work | None) -> None:
    """Starts the process that ranks are forked from, if there is none yet.

    Of the three ways to start ranks, spawn imports torch once a rank; fork copies the threads'
    locks and the signal handlers of the launcher, and a GPU runtime does not survive it. A fork
    server has imported everything, has one thread and has run nothing.
    """
    from multiprocessing import forkserver, resource_tracker

    program = "plait.train.trainer" if work is None else work.__module__
    # The last is what the first optimizer imports, which takes each rank half a second and more.
    forkserver.set_forkserver_preload(
        [
            "torch.distributed.elastic.multiprocessing.api",
            program,
            "plait.train.metrics",
            "torch._dynamo",
        ]
    )
    # Ctrl-C reaches the whole group; the server and its ranks are ended by the launcher, and say
    # nothing of it. They inherit that the signal is blocked.
    # The resource tracker, which starting the server would start, unblocks what is blocked.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_server() -> None:
    """Ends the fork server and what it has just forked: a rank that comes up after the launcher
    has gone would only complain that it is not there."""
    from multiprocessing.forkserver import _forkserver

    server = _forkserver._forkserver_pid
    if server is None:
        return
    children = Path(f"/proc/{server}/task/{server}/children")
    pids = children.read_text().split() if children.exists() else []
    for pid in (server, *map(int, pids)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def _alone_with_the_ranks() -> Iterator[None]:
    """Silences torch's own account of how ranks end, and keeps the signal handlers it replaces."""
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {name: signal.getsignal(name) for name in names}
    loud = logging.root.manager.disable
    if not debugging():
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(loud)
        if threading.current_thread() is threading.main_thread():
            for name, handler in before.items():
                signal.signal(name, handler)


def _show_cursor() -> None:
    """A rank that was killed may have left a terminal without a cursor."""
    if sys.stderr.isatty():
        print("\x1b[?25h", end="", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------
# A rank


def _rank(job: Job, folder: Path, threads: int, as_json: bool, work: Work | None) -> Any:
    """One rank of a launched run; the entry point of its process."""
    import torch

    faulthandler.disable()  # how a rank died is said once, by the launcher
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback, also while waiting in gloo
    # A rank is a child of the fork server, and that lives as long as its children do.
    threading.Thread(target=_end_with_the_launcher, args=(folder,), daemon=True).start()
    torch.set_num_threads(threads)
    place = joined(os.environ)
    steps, doing = shared(folder, place.world_size, create=False)
    (folder / f"rank{place.rank}.pid").write_text(str(os.getpid()))
    try:
        return _work(job, place, steps, doing, as_json, work)
    except BaseException as e:
        outcome = outcome_of(e, place.rank, steps[place.rank])
        draft = folder / f"rank{place.rank}.draft"
        draft.write_bytes(pickle.dumps(outcome))
        draft.rename(folder / f"rank{place.rank}.outcome")
        if outcome.kind == "lost":
            time.sleep(PATIENCE)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _end_with_the_launcher(folder: Path) -> None:
    multiprocessing.parent_process().join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _join(job: Job, place: Place, as_json: bool, work: Work | None) -> Any:
    """One rank of ranks that somebody else started."""
    if place.world_size != job.layout.world:
        message = (
            f"{place.world_size} ranks were started, the layout needs {job.layout.world} "
            f"(tp {job.layout.tp} x cp {job.layout.cp} x pp {job.layout.pp} x dp {job.layout.dp})"
        )
        if place.rank:
            raise _Ended(2)
        raise UserError([error("ranks", place.world_size, message, job.layout.world)])
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    steps = memoryview(bytearray(b"\xff" * 8 * place.world_size)).cast("q")
    doing = memoryview(bytearray(NOTE * place.world_size))
    try:
        return _work(job, place, steps, doing, as_json, work)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:
        outcome = outcome_of(e, place.rank, steps[place.rank])
        if not _first_to_speak(place):
            if outcome.kind == "lost" and job.layout.pp > 1:
                print(f"rank {place.rank}: {outcome.message}", file=sys.stderr, flush=True)
            raise _Ended(2 if outcome.kind == "question" else 1) from None
        if isinstance(e, UserError | RunFailed):
            raise
        why = f"rank {place.rank} stopped {when(outcome.step)}: {outcome.message}"
        raise RunFailed(why) from None


def _work(
    job: Job,
    place: Place,
    steps: memoryview,
    doing: memoryview,
    as_json: bool,
    work: Work | None,
) -> Any:
    """Meets the other ranks, does the work, parts. The result on rank 0, None on others."""
    import torch.distributed as dist

    from plait.train.metrics import Metrics

    if work is None:
        from plait.train.trainer import train as work
    device, backend = _device(place)
    job = resolve_dtype(job, device)
    world = World(place.rank, place.world_size, place.local_rank, device, backend, steps, doing)
    if place.rank == 0:
        ranks = "1 rank" if place.world_size == 1 else f"{place.world_size} ranks"
        kind = "CPU" if device.type == "cpu" else "GPU"
        print(f"{ranks} on {kind}: {backend}, {job.train.dtype}", file=sys.stderr, flush=True)
    _meet(place, device, backend, job.train.timeout)
    with Metrics(job, place.rank, as_json) as report:
        result = work(job, world, report)
    dist.destroy_process_group()
    return result if place.rank == 0 else None


def _device(place: Place) -> tuple["torch.device", str]:
    """The rank's own GPU and nccl if there is one for each rank of the machine, else CPU, gloo."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    alone = gpus == 1 and "SLURM_GPUS_PER_TASK" in os.environ  # each rank sees only its own
    if gpus < place.local_size and not alone:
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", 0 if alone else place.local_rank)
    torch.cuda.set_device(device)
    return device, "nccl"


def resolve_dtype(job: Job, device: "torch.device") -> Job:
    """The job with `train.dtype` "auto" decided: bfloat16 on a GPU that has it, else float32."""
    import torch

    if job.train.dtype != "auto":
        return job
    has = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return replace(job, train=replace(job.train, dtype="bfloat16" if has else "float32"))


def _meet(place: Place, device: "torch.device", backend: str, timeout: float) -> None:
    """Makes the default process group.

    The store is put under a prefix of its own for each attempt: torch does not, and ranks that
    are started again would read the addresses of the dead.
    """
    import torch.distributed as dist

    wait = timedelta(seconds=timeout)
    store = dist.TCPStore(
        place.address, place.port, is_master=place.hosts, wait_for_workers=False, timeout=wait
    )
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"plait/{place.attempt}", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=wait,
        device_id=device if device.type == "cuda" else None,
    )


def _first_to_speak(place: Place) -> bool:
    """Whether no other rank has said yet why the run ends.

    The rank that hosts the store stays until the others have asked, or would have by now. When
    it is gone nobody can be asked, and rank 1 speaks for those that lost it.
    """
    import torch.distributed as dist

    try:
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=2))
        first = store.add("ended", 1) == 1
        patience = time.monotonic() + 2
        while place.hosts and store.add("ended", 0) < place.world_size:
            if time.monotonic() > patience:
                break
            time.sleep(0.05)
        return first
    except Exception:
        return place.rank <= 1
