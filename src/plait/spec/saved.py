"""Where checkpoints lie, and the job that each was saved by."""

import contextlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plait.spec.findings import UserError, error
from plait.spec.job import Job

#: Written last: a folder that has it is a whole checkpoint.
ABOUT = "plait.json"


def folder_of(job: Job) -> Path | None:
    """The folder in which a job keeps its checkpoints, None where it keeps none."""
    if job.checkpoint.folder == "none":
        return None
    return Path(job.checkpoint.folder or f"runs/{job.model.name}")


def make_folder(folder: Path) -> None:
    """Makes the folder for checkpoints before a run, so that it is not found out after it.

    Raises:
        UserError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as e:
        message = f"checkpoints cannot go to {folder}: {e.strerror}"
        raise UserError([error("checkpoint.folder", str(folder), message, "none")]) from None


def partial_folder(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it is whole."""
    return folder / f".{step_folder(folder, step).name}.partial"


def sweep(folder: Path) -> None:
    """Removes what a run that was stopped has left: a half-written checkpoint, an empty folder."""
    for partial in folder.glob(".step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)
    with contextlib.suppress(OSError):  # it is not empty, or not there
        folder.rmdir()


def step_folder(folder: Path, step: int) -> Path:
    """Where the state after `step` optimizer steps is kept."""
    return folder / f"step-{step:08d}"


def complete(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, oldest first."""
    return sorted(p.parent for p in folder.glob(f"step-*/{ABOUT}"))


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
    return tables | {"ranks": job.layout.world, "metrics": job.metrics}


def _said(value: Any) -> Any:
    """A value as a job file would have it, which has no null."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return {k: _said(v) for k, v in value.items()}
    return value
