"""Files that a command writes beside its answer: whether it may, and all of them or none."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from stat import S_IMODE, S_ISREG
from typing import Any

from plait.spec.findings import Finding, UserError, error


def outputs(given: Mapping[str, Any], flags: Iterable[str]) -> Iterator[Finding]:
    """Files that cannot be written, before anything is done.

    Args:
        given: as `parse` returns it. flags: those that name a file.
    """
    seen: dict[Path, str] = {}
    for key in (key for key in flags if key in given):
        said = Path(given[key])
        try:
            why = _obstacle(said) if given[key] else "a file must be named"
            path = said.resolve()
        except (OSError, ValueError) as problem:  # a loop of links, a name that is too long
            why, path = getattr(problem, "strerror", None) or str(problem), said
        if why is None and path in seen:
            why = f"is the file of --{seen[path]} too"
        if why is not None:
            yield error(key, given[key], why)
        seen.setdefault(path, key)


def _obstacle(said: Path) -> str | None:
    """Why a file cannot be written, if there is a reason."""
    try:
        there = said.stat()
    except FileNotFoundError:
        there = None
    path = said.resolve()
    if there is not None:
        if not S_ISREG(there.st_mode):
            return "is there, and no file"
        if any(os.path.samestat(there, stream) for stream in _streams()):
            return "is where the answer goes"
        # Some users may write to what is marked as not to be written to.
        if not there.st_mode & 0o222 or not os.access(path, os.W_OK):
            return "is there, and must not be written to"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if not os.access(path.parent, os.W_OK):
        return f"the folder {path.parent} cannot be written to"
    return None


def _streams() -> Iterator[os.stat_result]:
    """What stdout and stderr are, where they are open."""
    for descriptor in (1, 2):
        try:
            yield os.fstat(descriptor)
        except OSError:
            continue


def write(given: Mapping[str, Any], writers: Mapping[str, Callable[[Path], Any]]) -> None:
    """Writes the files that were asked for: all of them, or none.

    Args:
        writers: flag -> what writes its file to a path.

    Raises:
        UserError: one cannot be written.
    """
    ready: list[tuple[Path, Path]] = []
    key = ""
    try:
        for key in (key for key in writers if key in given):
            path = Path(given[key]).resolve()
            part = path.with_name(f".{key}.{os.getpid()}.part")
            ready.append((part, path))
            writers[key](part)
            if path.exists():
                part.chmod(S_IMODE(path.stat().st_mode))
        for part, path in ready:
            part.replace(path)
    except OSError as problem:
        raise UserError([error(key, given[key], problem.strerror or str(problem))]) from None
    except UserError as problem:
        said = (error(key, given[key], f.message) for f in problem.findings)
        raise UserError(said) from None
    finally:
        for part, _ in ready:
            part.unlink(missing_ok=True)
