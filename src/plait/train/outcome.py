"""How a rank ended, in its own words, and what that says about the run.

A rank writes down what ended it before it goes. A rank that was killed cannot, and is known by
that. What step it was in and what it was at lies in memory that it shares with the launcher, so
that is known of a rank that was killed, too.

torch is imported late, see `train.launch`.
"""

import contextlib
import mmap
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from plait.spec.findings import Finding, UserError

#: Bytes that a rank has to say what it is at.
NOTE = 160

#: Seconds that a rank which lost a peer waits, so that the peer is found to have died first.
PATIENCE = 5.0


class RunFailed(Exception):
    """The run cannot go on (a loss that is no number, say); the message is one line."""


@dataclass(frozen=True)
class Outcome:
    """How a rank ended, in its own words.

    Attributes:
        seconds: when, on a clock that all ranks of a machine share.
        step: in which step, -1 before the first.
        kind: "question" (a UserError, findings), "failed" (RunFailed), "lost" (a peer went away)
            or "raised" (anything else).
    """

    rank: int
    seconds: float
    step: int
    kind: str
    message: str = ""
    findings: tuple[Finding, ...] = ()


def outcome_of(e: BaseException, rank: int, step: int) -> Outcome:
    """What a rank says of the exception that ends it."""
    now = time.monotonic()
    if isinstance(e, UserError):
        return Outcome(rank, now, step, "question", findings=e.findings)
    if isinstance(e, RunFailed):
        return Outcome(rank, now, step, "failed", str(e))
    import torch.distributed as dist

    text = (str(e).strip().splitlines() or [""])[0]
    lost = isinstance(e, dist.DistError) or "gloo" in text or "NCCL" in text
    if lost:
        text = re.sub(r"^\[[^\]]*\] *", "", text).partition(". ")[
            0
        ]  # "[pair.cc:538] Connection ..."
        return Outcome(rank, now, step, "lost", f"rank {rank} lost the others ({text})")
    if debugging():
        traceback.print_exception(e)
    frames = traceback.extract_tb(e.__traceback__)
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return Outcome(rank, now, step, "raised", f"{type(e).__name__}: {text}{at}")


def debugging() -> bool:
    return os.environ.get("PLAIT_DEBUG") == "1"


def shared(folder: Path, ranks: int, create: bool = True) -> tuple[memoryview, memoryview]:
    """The ranks' current steps, int64 [ranks], and what they are at, bytes [ranks * NOTE], in a
    file that all of them map."""
    path = folder / "steps"
    if create:
        steps = (-1).to_bytes(8, sys.byteorder, signed=True) * ranks
        path.write_bytes(steps + b" " * NOTE * ranks)
    with open(path, "r+b") as file:
        whole = memoryview(mmap.mmap(file.fileno(), (8 + NOTE) * ranks))
    return whole[: 8 * ranks].cast("q"), whole[8 * ranks :]


def _at(doing: memoryview) -> dict[int, str]:
    """What each rank last said it is at; ranks that said nothing are left out."""
    notes = (bytes(doing[i : i + NOTE]) for i in range(0, len(doing), NOTE))
    said = (note.decode(errors="ignore").strip() for note in notes)
    return {rank: note for rank, note in enumerate(said) if note}


def verdict(
    folder: Path, rank: int, exitcode: int, steps: memoryview, doing: memoryview
) -> Exception:
    """What ended a run: `rank` was found dead first, and the ranks' own words lie in a folder.

    A rank that went without a word was killed, which explains all that the others say. Otherwise
    the first to speak is the cause, for the others lost it. In a pipeline, where ranks wait for
    each other in many places, it is moreover said what each of them was at.
    """
    said = [pickle.loads(p.read_bytes()) for p in sorted(folder.glob("rank*.outcome"))]
    asked = [o for o in said if o.kind == "question"]
    if asked:
        return UserError(min(asked, key=lambda o: o.rank).findings)
    failed = [o for o in said if o.kind == "failed"]
    if failed:
        return RunFailed(min(failed, key=lambda o: o.rank).message)
    if rank not in {o.rank for o in said} and not _stopped(folder):
        why = f"rank {rank} died {when(steps[rank])}: {_exit_reason(exitcode)}"
        return RunFailed(why + _positions(doing))
    first = min(said, key=lambda o: (o.kind == "lost", o.seconds))
    silent = _stopped(folder) or sorted(set(range(len(steps))) - {o.rank for o in said})
    if first.kind == "lost" and silent:
        names = ", ".join(map(str, silent))
        who = f"rank {names}" if len(silent) == 1 else f"ranks {names}"
        step = when(min(steps[r] for r in silent))
        why = f"{who} no longer answered {step}: {first.message}"
        return RunFailed(why + _positions(doing))
    why = f"rank {first.rank} died {when(first.step)}: {first.message}"
    return RunFailed(why + (_positions(doing) if first.kind == "lost" else ""))


def reap(folder: Path, ranks: int, done: threading.Event) -> None:
    """Ends ranks that were stopped (SIGSTOP, a debugger), once another has lost them: they heed
    no other signal, and torch's launcher would wait half a minute for them. Notes who it was."""
    while not any(folder.glob("rank*.outcome")):
        if done.wait(0.2):
            return
    done.wait(PATIENCE)
    for rank in range(ranks):
        with contextlib.suppress(OSError, ValueError):
            pid = int((folder / f"rank{rank}.pid").read_text())
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state in "Tt":
                (folder / f"rank{rank}.stopped").touch()
                os.kill(pid, signal.SIGKILL)


def _stopped(folder: Path) -> list[int]:
    """Ranks that were found stopped."""
    names = (path.stem.removeprefix("rank") for path in folder.glob("rank*.stopped"))
    return sorted(map(int, names))


#: Ranks whose position is said when a run broke off; the rest is counted.
_SHOWN = 16


def _positions(doing: memoryview) -> str:
    """A line for each rank of a pipeline: what it was at."""
    at = _at(doing)
    lines = [f"\n  rank {rank}: {note}" for rank, note in list(at.items())[:_SHOWN]]
    more = len(at) - len(lines)
    return "".join(lines) + (f"\n  and {more} more ranks" if more > 0 else "")


def when(step: int) -> str:
    return "before its first step" if step < 0 else f"in step {step}"


def _exit_reason(exitcode: int) -> str:
    if exitcode >= 0:
        return f"it exited with code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = " (as the system does when memory runs out)" if -exitcode == signal.SIGKILL else ""
    return f"killed by {name}{hint}"
