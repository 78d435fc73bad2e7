"""Hugging Face folders: `config.json` and safetensors files, read and written.

The format of a safetensors file: 8 bytes, little endian, the length of a JSON header; the header,
name -> dtype, shape, and where its bytes begin and end behind the header; the bytes.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.models.hf import from_hf, to_hf
from plait.spec import presets
from plait.spec.findings import Finding, UserError, error
from plait.spec.model import Model
from plait.spec.to_huggingface import to_config

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
#: Longest header that is believed, bytes; that of the format's own library.
LONGEST_HEADER = 100_000_000
INDEX = "model.safetensors.index.json"


def read_folder(folder: str | Path) -> tuple[Model, dict[str, Tensor]]:
    """A model and its parameters, by our names, in the dtypes that they are stored in.

    Files are mapped into memory: nothing is read before it is used.

    Raises:
        UserError: no or an unknown config; files that are missing or no safetensors; tensors that
            are missing, left over or of a wrong shape.
    """
    folder = Path(folder)
    model = presets.model(str(folder / "config.json"))
    state: dict[str, Tensor] = {}
    for file in _files(folder):
        state |= read_file(file)
    return model, from_hf(state, model)


def write_folder(
    folder: str | Path, model: Model, state: Mapping[str, Tensor], largest: int = 5 * 10**9
) -> None:
    """The inverse of `read_folder`: config and weights, in files of at most `largest` bytes (a
    tensor that is larger has one to itself).

    Args:
        state: our parameters by name, whole; dtypes are kept.

    Raises:
        UserError: the model cannot be said in a Hugging Face config.
    """
    folder = Path(folder)
    config = to_config(model)
    theirs = to_hf(state, model)
    dtypes = {x.dtype for x in theirs.values()}
    if len(dtypes) == 1:
        config["dtype"] = str(dtypes.pop()).removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, x in theirs.items():
        if shards[-1] and size + x.nbytes > largest:
            shards.append({})
            size = 0
        shards[-1][name] = x
        size += x.nbytes
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        where = {n: file for file, shard in zip(names, shards, strict=True) for n in shard}
        total = {"total_size": sum(x.nbytes for x in theirs.values())}
        index = {"metadata": total, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _files(folder: Path) -> list[Path]:
    """The weight files of a folder: those that its index names, or the one."""
    index = folder / INDEX
    if not index.exists():
        return [folder / "model.safetensors"]
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        assert all(isinstance(n, str) and n == Path(n).name for n in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError):
        message = f"{index} is no index of files in its folder"
        raise UserError([error("model", str(index), message, rule="weights")]) from None
    return [folder / name for name in names]


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped into memory; changing one leaves the file alone.

    Raises:
        UserError: the file cannot be read or is no safetensors; every tensor that is wrong.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, LONGEST_HEADER):
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
    except FileNotFoundError:
        raise _unreadable(path, f"there is no file {path}") from None
    except OSError as failure:
        reason = (failure.strerror or "unknown reason").lower()
        raise _unreadable(path, f"{path} cannot be read: {reason}") from None
    except (ValueError, RecursionError, struct.error) as failure:
        reason = str(failure).splitlines()[0]
        raise _unreadable(path, f"{path} is no safetensors file: {reason}") from None
    header.pop("__metadata__", None)
    start = 8 + length
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[start:]
    result: dict[str, Tensor] = {}
    problems: list[Finding] = []
    for name, entry in header.items():
        value = _tensor(data, entry)
        if value is None:
            message = f"the header of {path} does not say what it is or where"
            problems.append(error(name, str(entry), message, rule="weights"))
        else:
            result[name] = value
    if problems:
        raise UserError(problems)
    return result


def _unreadable(path: Path, message: str) -> UserError:
    return UserError([error("model", str(path), message, rule="unreadable-file")])


def _tensor(data: Tensor, entry: Any) -> Tensor | None:
    """A tensor of a file's bytes; None for an entry that makes no sense."""
    try:
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        begin, end = entry["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (begin, end, *shape))
    except (KeyError, TypeError, ValueError):
        return None
    if not whole or begin > end or end > len(data) or end - begin != prod(shape) * dtype.itemsize:
        return None
    part = data[begin:end]
    if part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(shape)


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file of some tensors; it appears under its name once it is whole."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, x in tensors.items():
        header[name] = {
            "dtype": names[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [place, place + x.nbytes],
        }
        place += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    unfinished = path.with_name(path.name + ".part")
    with unfinished.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(_bytes(tensors.values()))
    unfinished.replace(path)


def _bytes(tensors: Iterable[Tensor]) -> Iterable[memoryview]:
    for x in tensors:
        yield memoryview(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
