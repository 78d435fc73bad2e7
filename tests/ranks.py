"""Runs functions on several ranks over gloo, forked from a parent that has imported everything.

A run of four ranks costs a tenth of a second and not the six that a launch takes.
`OMP_NUM_THREADS=1` must be set before torch is imported: a fork after a multi-threaded operation
would deadlock. Tests and benchmarks both start their ranks here.
"""

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# Torch's first optimizer imports it, which takes more than a second: here once, not on each rank.
import torch._dynamo  # noqa: F401
import torch.distributed as dist

FORK = multiprocessing.get_context("fork")
TIMEOUT = 60.0


class RankFailed(AssertionError):
    """A rank raised; carries its traceback."""


def _rank_main(
    rank: int,
    world: int,
    listener: socket.socket,
    pipe: Any,
    done: Any,
    timeout: float,
    function: Callable,
    args: tuple,
) -> None:
    patience = timedelta(seconds=timeout / 2)
    try:
        # Rank 0 serves the store on the socket that the parent has bound: the parent itself must
        # have no thread of torch's, a fork would copy its locks and not the thread.
        store = dist.TCPStore(
            "127.0.0.1",
            listener.getsockname()[1],
            world,
            is_master=rank == 0,
            wait_for_workers=False,
            timeout=patience,
            master_listen_fd=listener.fileno() if rank == 0 else None,
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
        # Plain pickle: multiprocessing's own would hand tensors over as open files, and these die
        # with the rank.
        pipe.send_bytes(pickle.dumps((True, function(rank, *args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()
        done.wait(timeout)  # rank 0 serves the store that others may still ask
        # Not a normal exit: the parent's objects are not this process's to tear down.
        os._exit(0)


def run_ranks(world: int, function: Callable, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """function(rank, *args) on each of `world` ranks of a gloo group; their results in order.

    Raises:
        RankFailed: with the traceback of the first rank that raised or never answered.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    ranks, done = [], FORK.Event()
    for rank in range(world):
        here, there = FORK.Pipe(duplex=False)
        process = FORK.Process(
            target=_rank_main,
            args=(rank, world, listener, there, done, timeout, function, args),
            daemon=True,
        )
        process.start()
        there.close()
        ranks.append((process, here))
    listener.close()
    results, failures = [], []
    for rank, (_, pipe) in enumerate(ranks):
        try:
            assert pipe.poll(timeout), f"rank {rank} gave no answer in {timeout} s"
            good, value = pickle.loads(pipe.recv_bytes())
        except (EOFError, AssertionError) as e:
            good, value = False, f"rank {rank} died: {e!r}"
        (results if good else failures).append(value)
        if not good:
            break
    done.set()
    for process, _ in ranks:
        if failures:
            process.kill()
        process.join()
    if failures:
        raise RankFailed(failures[0])
    return results
