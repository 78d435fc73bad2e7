"""Tables in files, in the CSV form of torch.distributed.pipelining: a row a rank, a cell an action.

Only what is computed is read and written. What torch also writes (messages, gathering of weights,
reduction of gradients) follows from the table, and is passed over; an overlapped pair is read as
its two actions, one after the other.
"""

import csv
import re
from pathlib import Path
from stat import S_ISREG

from plait.schedules.build import MOST_FORWARDS
from plait.schedules.table import Action, Table
from plait.spec.findings import Finding, UserError, error

#: A file may have this many bytes, and an error this many lines.
_MOST_BYTES, _MOST_LINES = 64 * 2**20, 20

_ACTION = re.compile(r"(\d{1,9})([FIWB])(\d{1,9})")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_PASSED_OVER = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")


def read_table(path: str | Path) -> Table:
    """The table in a file; its name is the file's. What it means is for `schedules.check`.

    Empty cells are times of waiting.

    Raises:
        UserError: it cannot be read, is too large, is not of this form; a line a cell.
    """
    path = Path(path)
    found: list[Finding] = []
    ranks, bad = [], 0
    for number, row in enumerate(_rows(path), start=1):
        actions: list[Action] = []
        for column, cell in enumerate(row, start=1):
            read = _cell(cell.strip())
            if read is not None:
                actions += read
            elif (bad := bad + 1) <= _MOST_LINES:
                message = f"row {number}, cell {column}: {cell.strip()[:40]!r} is no action"
                found.append(error(str(path), cell[:40], f"{message} as 2F0, 3I1, 3W1 or 2B0 are"))
        if not actions and not found:
            message = f"row {number}: rank {number - 1} has nothing to do"
            found.append(error(str(path), "", message))
        ranks.append(tuple(actions))
    if bad > _MOST_LINES:
        more = bad - _MOST_LINES
        found.append(error(str(path), more, f"and {more} more such cells"))
    if not ranks:
        found.append(error(str(path), "", "no rows: a row is needed for each rank"))
    forwards = sum(a.kind == "F" for actions in ranks for a in actions)
    if not found and forwards > MOST_FORWARDS:
        message = f"a table may have {MOST_FORWARDS} forwards, and this one has {forwards}"
        found.append(error(str(path), forwards, message))
    # A number that is out of all proportion would make a table out of all proportion.
    most = sum(map(len, ranks))
    for rank, actions in enumerate(ranks):
        beyond = (a for a in actions if max(a.chunk, a.micro) >= most)
        if not found and (action := next(beyond, None)):
            message = f"row {rank + 1}: {action} is numbered beyond the {most} actions there"
            found.append(error(str(path), str(action), message))
    if found:
        raise UserError(found)
    return Table(path.name, tuple(ranks))


def _rows(path: Path) -> list[list[str]]:
    """The file's rows without the blank lines behind the last one."""
    try:
        # What is no file (a pipe, a device) may never end, or never begin.
        if not S_ISREG(path.stat().st_mode):
            raise ValueError("it is no regular file")
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as e:
        message = f"the schedule cannot be read: {getattr(e, 'strerror', e)}"
        raise UserError([error(str(path), str(path), message)]) from None
    if len(data) > _MOST_BYTES:
        message = f"a schedule may have {_MOST_BYTES // 2**20} MiB, and this file is larger"
        raise UserError([error(str(path), str(path), message)])
    try:
        rows = list(csv.reader(data.decode("utf-8-sig").splitlines(), strict=True))
    except (UnicodeDecodeError, csv.Error) as e:
        message = f"the schedule is no CSV text: {e}"
        raise UserError([error(str(path), str(path), message)]) from None
    while rows and not any(map(str.strip, rows[-1])):
        rows.pop()
    return rows


def _cell(cell: str) -> list[Action] | None:
    """The actions in a cell, None where it is none."""
    if not cell:
        return []
    if pair := _PAIR.fullmatch(cell):
        parts = [_ACTION.fullmatch(part.strip()) for part in pair[1].split(";")]
        return [_action(part) for part in parts] if all(parts) else None
    if one := _ACTION.fullmatch(cell):
        return [_action(one)]
    return [] if _PASSED_OVER.fullmatch(cell) else None


def _action(match: re.Match[str]) -> Action:
    return Action(match[2], int(match[1]), int(match[3]))


def write_table(table: Table, path: str | Path) -> None:
    """Writes a table as torch reads it.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows(table.ranks)
    except OSError as e:
        message = f"the schedule cannot be written: {e.strerror}"
        raise UserError([error(str(path), str(path), message)]) from None
