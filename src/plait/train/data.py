"""The corpus: files as one long row of bytes, cut into samples.

Nothing is held in memory. A sample is read from the files that it touches when it is asked for,
so a corpus may be of any size, starting costs one `stat` a file, and the ranks of a machine share
the system's page cache. Documents are joined by a zero byte.

Which sample comes when depends on the seed alone, never on the layout.
"""

import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from plait.spec.findings import Finding, UserError, closest, error
from plait.spec.job import Data, Job

if TYPE_CHECKING:
    from torch import Tensor

#: Of each sample of a micro batch the lengths of its documents; None: it is taken as one text.
Documents = list[tuple[int, ...]] | None

#: Folders of the standard library that differ from one installation to the next.
_UNSTABLE = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}


@dataclass(frozen=True, eq=False)
class Corpus:
    """Byte tokens of some files, as an endless row of samples.

    A sample is a window of seq_len + 1 bytes: tokens are its first seq_len, targets its last.
    Windows start seq_len bytes apart, so each byte is a target once. One epoch visits each
    window once, in an order that depends on (seed, epoch).

    Attributes:
        files: the documents, in order.
        starts: [len(files) + 1], position of each document's first byte in the whole row; the
            last one is the length of the row plus one, for no zero byte follows the last document.
        seq_len: tokens of a sample.
        seed: decides the order of the windows.
        held: samples at the end that are kept for evaluation.
    """

    files: tuple[Path, ...]
    starts: np.ndarray
    seq_len: int
    seed: int
    held: int = 0

    @cached_property
    def _opened(self) -> Callable[[Path], IO[bytes]]:
        # A few files stay open: reading from one big file costs no `open` a sample.
        return lru_cache(maxsize=64)(_open)

    @staticmethod
    def of(job: Job) -> "Corpus":
        """The corpus that a job names; the source of Python's own library if it names none.

        Raises:
            UserError: a path is missing, unreadable or empty, a folder has no file of the
                suffixes, or all of it is shorter than one sample.
        """
        findings: list[Finding] = []
        if job.data.path:
            files = [f for path in job.data.path for f in _named(Path(path), job.data, findings)]
        else:
            root = Path(sysconfig.get_path("stdlib"))
            files = list(_walk(root, (".py",), findings, without=_UNSTABLE))
        if findings:
            raise UserError(findings)
        sizes = np.array([size for _, size in files], dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(sizes + 1)])
        seq_len = job.train.seq_len
        assert seq_len is not None, "a job that is run is complete"
        train = job.train
        held = train.eval_batches * train.global_batch if train.eval_every else 0
        corpus = Corpus(tuple(path for path, _ in files), starts, seq_len, train.seed, held)
        if corpus.windows < 1 and corpus.windows + held >= 1:
            total = corpus.windows + held
            message = (
                f"{held} samples are kept for evaluation and the corpus has {total}: "
                "none is left to train on"
            )
            most = (total - 1) // train.global_batch
            field, legal = ("batches", most) if most else ("every", 0)
            value = getattr(train, f"eval_{field}")
            raise UserError([error(f"train.eval_{field}", value, message, legal)])
        if corpus.windows < 1:
            message = (
                f"the corpus has {corpus.bytes} bytes, a sample of seq_len {seq_len} needs "
                f"{seq_len + 1}; the longest legal seq_len is {corpus.bytes - 1}"
            )
            longest = corpus.bytes - 1 if corpus.bytes > 1 else None
            raise UserError([error("train.seq_len", seq_len, message, longest)])
        return corpus

    @property
    def bytes(self) -> int:
        """Length of the row, zero bytes between documents included."""
        return int(self.starts[-1]) - 1

    @property
    def windows(self) -> int:
        """Samples of one epoch."""
        return (self.bytes - 1) // self.seq_len - self.held

    def sample(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Sample i >= 0, without end: (tokens, targets), each int64 [seq_len]."""
        return self._window(self._place(i))

    def _place(self, i: int) -> int:
        """The window that sample i is."""
        epoch, position = divmod(i, self.windows)
        return permuted(position, self.windows, self.seed, epoch)

    def documents(self, i: int) -> tuple[int, ...]:
        """Lengths of the documents, or parts of documents, that window i's tokens are of; a zero
        byte is the end of its document."""
        start, stop = i * self.seq_len, (i + 1) * self.seq_len
        first, last = np.searchsorted(self.starts, (start, stop), side="right")
        inner = self.starts[first:last]
        ends = [start, *(int(e) for e in inner if e < stop), stop]
        return tuple(b - a for a, b in pairwise(ends))

    def _window(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        start = i * self.seq_len
        window = self.read(start, start + self.seq_len + 1).astype(np.int64)
        return window[:-1], window[1:]

    def batch(
        self, step: int, job: Job, dp_rank: int, accumulation_index: int
    ) -> "tuple[Tensor, Tensor, Tensor, Documents]":
        """One micro batch of one data-parallel rank.

        Step t is made of samples t * global_batch to (t + 1) * global_batch - 1. Micro step a of
        rank r takes those from (a * dp + r) * micro on, so a step's samples, and their order, are
        the same however many ranks and micro steps share them.

        Returns:
            tokens, targets: int64 [micro, seq_len]; index: int64 [micro], the samples' numbers;
            and, where attention keeps to them, the lengths of each sample's documents.
        """
        first = step * job.train.global_batch
        return self._batch(first, job, dp_rank, accumulation_index, self._place)

    def evaluation(
        self, job: Job, dp_rank: int, accumulation_index: int
    ) -> "tuple[Tensor, Tensor, Tensor, Documents]":
        """As `batch`, of the samples that are kept for evaluation."""
        return self._batch(self.windows, job, dp_rank, accumulation_index, int)

    def _batch(
        self,
        first: int,
        job: Job,
        dp_rank: int,
        accumulation_index: int,
        place: Callable[[int], int],
    ) -> "tuple[Tensor, Tensor, Tensor, Documents]":
        micro = job.layout.micro_batch
        first += (accumulation_index * job.layout.dp + dp_rank) * micro
        places = [place(i) for i in range(first, first + micro)]
        tokens, targets = zip(*map(self._window, places), strict=True)
        documents = [self.documents(i) for i in places] if job.data.document_mask else None
        import torch  # here: whether a corpus is usable is found out without it

        return (
            torch.from_numpy(np.stack(tokens)),
            torch.from_numpy(np.stack(targets)),
            torch.arange(first, first + micro),
            documents,
        )

    def read(self, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) of the row, uint8 [stop - start].

        Raises:
            UserError: a file has gone, or become shorter, since the corpus was opened.
        """
        row = np.zeros(stop - start, dtype=np.uint8)  # so zero bytes between documents are there
        k = int(np.searchsorted(self.starts, start, side="right")) - 1
        while k < len(self.files) and self.starts[k] < stop:
            first = max(start, int(self.starts[k]))
            last = min(stop, int(self.starts[k + 1]) - 1)
            if first < last:
                self._fill(row[first - start : last - start], k, first - int(self.starts[k]))
            k += 1
        return row

    def _fill(self, place: np.ndarray, k: int, offset: int) -> None:
        path = self.files[k]
        try:
            got = os.preadv(self._opened(path).fileno(), [memoryview(place)], offset)
        except OSError as e:
            raise UserError([_unreadable(path, e)]) from None
        if got < len(place):
            message = "the file became shorter while it was being read"
            raise UserError([error("data.path", str(path), f"{path}: {message}")])


def _open(path: Path) -> IO[bytes]:
    return open(path, "rb", buffering=0)


# ------------------------------------------------------------------------------------------
# Which files


def _named(path: Path, data: Data, findings: list[Finding]) -> list[tuple[Path, int]]:
    """The files (with their sizes) that one path of a job stands for."""
    try:
        if path.is_dir():
            before = len(findings)
            files = list(_walk(path, data.suffixes, findings))
            if not files and len(findings) == before:
                wanted = ", ".join(data.suffixes)
                message = f"no file with text that ends in one of {wanted} in folder {path}"
                findings.append(error("data.path", str(path), message))
            return files
        size = path.stat().st_size
    except FileNotFoundError:
        findings.append(error("data.path", str(path), f"{path} does not exist", _similar(path)))
        return []
    except OSError as e:
        findings.append(_unreadable(path, e))
        return []
    if not os.access(path, os.R_OK):
        findings.append(_unreadable(path, PermissionError(13, "Permission denied")))
    elif not path.is_file():
        message = f"{path} is neither a file nor a folder"
        findings.append(error("data.path", str(path), message))
    elif size == 0:
        findings.append(error("data.path", str(path), f"{path} is empty"))
    return [(path, size)]


def _walk(
    root: Path,
    suffixes: Sequence[str],
    findings: list[Finding],
    without: frozenset[str] | set[str] = frozenset(),
) -> Iterator[tuple[Path, int]]:
    """The files below a folder that are not empty, sorted by their path in it.

    Hidden folders and files are left out.
    """
    failed: list[OSError] = []
    found = []
    for folder, folders, names in os.walk(root, onerror=failed.append):
        folders[:] = [f for f in folders if f not in without and not f.startswith(".")]
        here = Path(folder)
        found += [here / n for n in names if n.endswith(tuple(suffixes)) and not n.startswith(".")]
    findings += [_unreadable(Path(e.filename), e) for e in failed]
    for path in sorted(found, key=lambda p: p.relative_to(root).as_posix()):
        if not os.access(path, os.R_OK):
            findings.append(_unreadable(path, PermissionError(13, "Permission denied")))
        elif path.is_file() and (size := path.stat().st_size):
            yield path, size


def _unreadable(path: Path, e: OSError) -> Finding:
    return error("data.path", str(path), f"{path} cannot be read: {e.strerror}")


def _similar(path: Path) -> str | None:
    """What else in the same folder has nearly that name."""
    try:
        match = closest(path.name, os.listdir(path.parent))
    except OSError:
        return None
    return str(path.parent / match) if match else None


# ------------------------------------------------------------------------------------------
# Their order


def permuted(i: int, n: int, seed: int, epoch: int) -> int:
    """Where a permutation of range(n), chosen by (seed, epoch), sends i.

    A Feistel network permutes a range of 4^h numbers; what falls outside range(n) goes through
    again (cycle walking, Black & Rogaway 2002), 4 times at the most on average. So any position
    is found by itself: no table of n numbers is made, which for a corpus of a terabyte would take
    gigabytes in every rank and minutes at every start.
    """
    assert 0 <= i < n
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = _mix(_mix(seed) ^ epoch)
    while True:
        left, right = i >> half, i & mask
        for turn in range(6):
            left, right = right, left ^ (_mix(key + (turn << half) + right) & mask)
        i = left << half | right
        if i < n:
            return i


def _mix(x: int) -> int:
    """64 bits that all depend on all bits of x (the finalizer of splitmix64)."""
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ x >> 31
