"""Checkpoints that know no layout: boxes of whole parameters under their names.

Written and read through torch.distributed.checkpoint, whose protocol for sharded objects `Boxes`
speaks: a rank gives the boxes that it holds, and on reading any other set of boxes is filled from
them. So a run saved under one layout goes on under another.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from plait.spec.findings import Finding, UserError, error
from plait.spec.job import Job
from plait.spec.model import Model
from plait.spec.parameters import parameters
from plait.spec.saved import ABOUT, about, complete, job_tables, partial_folder, step_folder
from plait.train.program import Program


class Boxes:
    """The boxes of one whole tensor that this rank holds.

    A box may be there twice (a tied table whose first and last chunk are on one rank): one is
    saved or filled, the other follows (`settle`).
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        self.shape, self.dtype = torch.Size(shape), dtype
        self.boxes: dict[torch.Size, Tensor] = {}
        self.copies: list[tuple[Tensor, Tensor]] = []

    def add(self, offset: tuple[int, ...], values: Tensor) -> None:
        """values: the box at `offset`, a view of the memory that is saved or filled."""
        first = self.boxes.setdefault(torch.Size(offset), values)
        if first is not values:
            self.copies.append((values, first))

    def settle(self) -> None:
        """After reading: what is there twice is the same twice."""
        for copy, first in self.copies:
            copy.copy_(first)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offset, values.shape),
                    properties=TensorProperties(self.dtype),
                    size=self.shape,
                ),
            )
            for offset, values in self.boxes.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, v.shape) for offset, v in self.boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.boxes[index.offset]


# The default planners take only torch's own tensor classes where they prepare a state dict to be
# read into and where they look up a box by its offset.


class _Save(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class _Load(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator
        self.flatten_state_dict = False

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


def state_dict(program: Program) -> dict[str, Any]:
    """Weights and optimizer states in the master dtype, as boxes: "<slot>.<parameter>"."""
    engine, optimizer = program.engine, program.optimizer
    _make_states(optimizer)
    result: dict[str, Any] = {}
    for piece, i, s in engine.held():
        parameter = optimizer.param_groups[i]["params"][0]
        slots = {"weight": parameter} | optimizer.state[parameter]
        for slot in ("weight", "exp_avg", "exp_avg_sq"):
            values = slots[slot][s].view(piece.size)
            key = f"{slot}.{piece.parameter.name}"
            boxes = result.setdefault(key, Boxes(piece.parameter.shape, values.dtype))
            boxes.add(piece.offset, values)
    return result


def _make_states(optimizer: torch.optim.AdamW) -> None:
    """Adam's states before the first step, so that there is something to read into."""
    for group in optimizer.param_groups:
        p = group["params"][0]
        if not optimizer.state[p]:
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }


def save(program: Program, job: Job, step: int, folder: Path, extra: dict[str, Any]) -> Path:
    """Saves the state after `step` optimizer steps; all ranks call it. Returns the folder.

    Written beside its final place and renamed when it is whole: what is there is complete.
    extra: what else a resumed run needs (JSON), such as the loss scale.
    """
    final, partial = step_folder(folder, step), partial_folder(folder, step)
    first = program.mesh.rank == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier(program)
    writer = dcp.FileSystemWriter(partial, sync_files=True)
    alone = program.mesh.layout.world == 1
    try:
        with _quiet():
            dcp.save(state_dict(program), storage_writer=writer, planner=_Save(), no_dist=alone)
        if first:
            updates = max((int(s["step"]) for s in program.optimizer.state.values()), default=step)
            said = {"step": step, "updates": updates, **extra, "job": job_tables(job)}
            (partial / ABOUT).write_text(json.dumps(said, indent=1) + "\n")
            _put(partial, final)
            for old in complete(folder)[: -job.checkpoint.keep]:
                shutil.rmtree(old)
    except BaseException:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    _barrier(program)
    return final


def _put(partial: Path, final: Path) -> None:
    """Renames a whole checkpoint to its place; one of the same step gives way only then."""
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        os.replace(final, replaced)
    os.replace(partial, final)
    shutil.rmtree(replaced, ignore_errors=True)


def load(program: Program, folder: Path) -> dict[str, Any]:
    """Reads a checkpoint into this rank's pieces, whatever layout wrote it.

    Returns:
        What `save` was told: step, updates, extra.

    Raises:
        UserError: it is another model's, or cannot be read.
    """
    where = "checkpoint.resume"
    try:
        said = about(folder)
        program.engine.begin()  # nothing is under way in what is written over
        state = state_dict(program)
        metadata = dcp.FileSystemReader(folder).read_metadata()
        problems = _other_model(said, program.job, folder)
        problems += _mismatches(state, metadata, program.job.model, folder)
        if problems:
            raise UserError(problems)
        alone = program.mesh.layout.world == 1
        with _quiet():
            dcp.load(state, checkpoint_id=folder, planner=_Load(), no_dist=alone)
        with torch.no_grad():
            for boxes in state.values():
                boxes.settle()
    except UserError:
        raise
    except (Exception, CheckpointException) as e:
        # CheckpointException is no Exception, and carries those of the ranks that failed.
        cause = next(iter(e.failures.values()))[0] if isinstance(e, CheckpointException) else e
        message = (str(cause).strip().splitlines() or [""])[0]
        what = f"{folder}: cannot be read: {type(cause).__name__} {message}".strip()
        raise UserError([error(where, str(folder), what)]) from None
    for s in program.optimizer.state.values():
        s["step"].fill_(said["updates"])
    program.engine.publish(wait=True)
    return said


#: Choices of a model that a run may go on with changed.
_FREE = {"name", "seq", "dropout", "window", "rope_theta", "rope_scaling", "rope_local_theta"}


def _other_model(said: dict[str, Any], job: Job, folder: Path) -> list[Finding]:
    """What makes the same weights mean something else."""
    before, now = said["job"]["model"], job_tables(job)["model"]
    return [
        error(
            f"model.{key}",
            now[key],
            f"{folder} was saved with {key} {before[key]}, the job has {now[key]}",
            before[key],
        )
        for key in now
        if key not in _FREE and key in before and before[key] != now[key]
    ]


def _mismatches(
    state: dict[str, Boxes], metadata: Any, model: Model, folder: Path
) -> list[Finding]:
    saved = metadata.state_dict_metadata
    where, findings = "checkpoint.resume", []
    for key, boxes in state.items():
        have = tuple(saved[key].size) if key in saved else None
        if have != tuple(boxes.shape):
            what = f"holds it as {list(have)}" if have else "does not hold it"
            message = f"{folder} {what}, the model has {key} as {list(boxes.shape)}"
            findings.append(error(where, str(folder), message))
    known = {f"weight.{p.name}" for p in parameters(model)}
    for key in sorted(k for k in saved if k.startswith("weight.") and k not in known):
        message = f"{folder} holds {key}, which the model does not have"
        findings.append(error(where, str(folder), message))
    return findings[:5]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remark that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _barrier(program: Program) -> None:
    if program.mesh.layout.world > 1:
        dist.barrier()
