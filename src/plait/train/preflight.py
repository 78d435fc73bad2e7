"""What a run would only find out once its ranks are there: data, folders, the checkpoint."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from plait.spec import saved
from plait.spec.findings import Finding, UserError, error
from plait.spec.job import Job
from plait.train.data import Corpus


def problems(job: Job) -> list[Finding]:
    """Everything that keeps a legal job from running on this machine; imports no torch."""
    found: list[Finding] = []
    for check in (_corpus, _outputs, _resumed):
        found += check(job)
    return found


def _attempt(read: Callable[[], object]) -> Iterator[Finding]:
    try:
        read()
    except UserError as e:
        yield from e.findings


def _corpus(job: Job) -> Iterator[Finding]:
    yield from _attempt(lambda: Corpus.of(job))


def _outputs(job: Job) -> Iterator[Finding]:
    """The metrics file and the checkpoint folder can be written, as far as one can see."""
    if job.metrics and Path(job.metrics).is_dir():
        yield error("metrics", job.metrics, f"{job.metrics} is a folder")
    elif job.metrics and (why := _not_writable(Path(job.metrics).absolute().parent)):
        yield error("metrics", job.metrics, f"{job.metrics} cannot be written: {why}")
    folder = saved.folder_of(job)
    if folder and (why := _not_writable(folder.absolute())):
        message = f"checkpoints cannot go to {folder}: {why}"
        yield error("checkpoint.folder", str(folder), message, "none")


def _not_writable(folder: Path) -> str:
    """Why a folder can be neither used nor made; "" where it can."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is no folder"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} may not be written"


def _resumed(job: Job) -> Iterator[Finding]:
    if not job.checkpoint.resume:
        return
    try:
        folder = saved.find(job.checkpoint.resume)
        done = saved.about(folder)["step"]
    except UserError as e:
        yield from e.findings
        return
    if done >= job.train.steps:
        message = f"{folder} has done {done} steps already, the job has {job.train.steps}"
        yield error("train.steps", job.train.steps, message, 2 * done)
