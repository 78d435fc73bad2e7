"""Where checkpoints lie, and the job that each was saved by."""

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plait.spec.findings import UserError, error
from plait.spec.job import Job
from plait.spec.schedule import is_file

#: Written last: a folder that has it is a whole checkpoint.
ABOUT = "plait.json"


def folder_of(job: Job) -> Path | None:
    """The folder in which a job keeps its checkpoints, None where it keeps none."""
    if job.checkpoint.folder == "none":
        return None
    return Path(job.checkpoint.folder or f"runs/{job.model.name}")


@contextlib.contextmanager
def claimed(folder: Path | None) -> Iterator[None]:
    """Keeps a folder for checkpoints to one run, and clean when the run is over.

    What a run that was stopped has left is removed: a half-written checkpoint, an empty folder.

    Raises:
        UserError: it cannot be made or written, or another run has it.
    """
    if folder is None:
        yield
        return
    where = "checkpoint.folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115  # held as long as the run lasts
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        message = f"another run keeps its checkpoints in {folder}"
        raise UserError([error(where, str(folder), message, f"{folder}-2")]) from None
    except OSError as e:
        message = f"checkpoints cannot go to {folder}: {e.strerror}"
        raise UserError([error(where, str(folder), message, "none")]) from None
    try:
        yield
    finally:
        for partial in folder.glob(".step-*.partial"):
            shutil.rmtree(partial, ignore_errors=True)
        (folder / ".lock").unlink(missing_ok=True)
        lock.close()
        with contextlib.suppress(OSError):  # it is not empty
            folder.rmdir()


def partial_folder(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it is whole."""
    return folder / f".{step_folder(folder, step).name}.partial"


def step_folder(folder: Path, step: int) -> Path:
    """Where the state after `step` optimizer steps is kept."""
    return folder / f"step-{step:08d}"


def complete(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, in the order in which they were written.

    Not in that of their steps: a run that starts anew in the folder of another is behind it.
    """
    found = folder.glob(f"step-*/{ABOUT}")
    return [p.parent for p in sorted(found, key=lambda p: (p.stat().st_mtime_ns, p))]


def find(path: str | Path) -> Path:
    """The checkpoint that a person means: a checkpoint, or the newest in a folder of them.

    Raises:
        UserError: there is none.
    """
    folder = Path(path)
    if (folder / ABOUT).is_file():
        return folder
    found = complete(folder) if folder.is_dir() else []
    if not found:
        kind = "no such folder" if not folder.exists() else "no complete checkpoint in it"
        raise UserError([error("checkpoint.resume", str(path), f"{path}: {kind}")])
    return found[-1]


def about(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself: step, updates, loss_scale, job.

    Raises:
        UserError: it cannot be read.
    """
    try:
        said = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        if not isinstance(said, dict) or not isinstance(said.get("step"), int):
            raise ValueError("it does not say its step")
    except (OSError, ValueError) as e:
        message = f"{folder / ABOUT}: cannot be read: {str(e).splitlines()[0]}"
        raise UserError([error("checkpoint.resume", str(folder), message)]) from None
    return said


def job_tables(job: Job) -> dict[str, Any]:
    """A job as the tables of a job file, every field said."""
    tables = {
        name: {k: _said(v) for k, v in asdict(getattr(job, name)).items()}
        for name in ("model", "layout", "train", "data", "checkpoint")
    }
    if is_file(job.layout.schedule):  # found again from wherever the run goes on
        tables["layout"]["schedule"] = str(Path(job.layout.schedule).absolute())
    return tables | {"ranks": job.layout.world, "metrics": job.metrics}


def _said(value: Any) -> Any:
    """A value as a job file would have it, which has no null."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return {k: _said(v) for k, v in value.items()}
    return value
