"""What is wrong in a table: everything that would make it compute something else, or never end."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from plait.schedules.table import Action, Table
from plait.spec.findings import Finding, error

COMPUTE = ("F", "I", "W", "B")

#: What sends a message -> what receives it, and the step from one chunk to the other.
MESSAGES = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}
#: How many of one sort are said, and how many things one of them lists.
_MOST_FINDINGS, _MOST_LISTED = 1000, 8
TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")


def check(
    table: Table,
    cap: float | None = None,
    micro_batches: int | None = None,
    chunks: int | None = None,
) -> list[Finding]:
    """Everything wrong with a table, with or without transfers; empty if it is right.

    Every chunk does F and B, or F, I and W, of every micro batch once, on one rank, in that order;
    nothing waits in a circle. Where there are transfers, each message that crosses ranks is sent
    once and received once, between what makes and what needs it, and nothing waits in a circle
    even if a send and its receive wait for each other. Of a great many of one sort the first are
    said.

    Args:
        cap: the most activations that a rank may hold (see `Timeline.peak_activations`).
        micro_batches, chunks: how many there must be; None: as many as the table names.
    """
    if not any(table.ranks):
        return [error("schedule", table.name, "has no actions")]
    unknown = _some(_unknown(table, micro_batches, chunks))
    if unknown:
        return unknown
    chunks = chunks or 1 + max((a.chunk for _, a in _computed(table)), default=0)
    micro_batches = micro_batches or 1 + max((a.micro for _, a in _computed(table)), default=0)
    # Out of all proportion to what is there, what is missing is not gone through one by one.
    there = len({(a.chunk, a.micro) for _, a in _computed(table)})
    if chunks * micro_batches > 8 * there + 1000:
        needed = f"{chunks} chunks and {micro_batches} micro batches"
        message = f"{needed} need {chunks * micro_batches} forwards; the table has {there} at most"
        return [error("schedule", there, message)]
    found = _some(_once(table, chunks, micro_batches)) or _some(_order(table))
    if not found and any(a.kind in TRANSFERS for actions in table.ranks for a in actions):
        found = _some(_messages(table)) or list(_circle(table, rendezvous=True))
    elif not found:
        found = list(_circle(table, rendezvous=False))
    return found + list(_cap(table, cap, len(table.ranks) / chunks))


def _some(found: Iterator[Finding]) -> list[Finding]:
    return list(islice(found, _MOST_FINDINGS))


def _unknown(table: Table, micro_batches: int | None, chunks: int | None) -> Iterator[Finding]:
    """Actions of no kind, no chunk, no micro batch."""
    for rank, actions in enumerate(table.ranks):
        for a in actions:
            if a.kind not in COMPUTE + TRANSFERS:
                yield _wrong(rank, a, f"{a}: no kind of action")
            elif a.chunk < 0 or (chunks is not None and a.chunk >= chunks):
                yield _wrong(rank, a, f"{a}: there is no chunk {a.chunk}")
            elif a.micro < 0 or (micro_batches is not None and a.micro >= micro_batches):
                yield _wrong(rank, a, f"{a}: there is no micro batch {a.micro}")


def _once(table: Table, chunks: int, micro_batches: int) -> Iterator[Finding]:
    """Each F, I and W (or F and B) once, all of one chunk and micro batch on one rank."""
    where: dict[tuple[int, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, a in _computed(table):
        where[a.chunk, a.micro][a.kind].append(rank)
    missing = defaultdict(list)
    for chunk in range(chunks):
        for micro in range(micro_batches):
            kinds = where.get((chunk, micro), {})
            for kind, ranks in kinds.items():
                if len(ranks) > 1:
                    on = _listed([str(rank) for rank in dict.fromkeys(ranks)])
                    a = Action(kind, chunk, micro)
                    yield _wrong(ranks[1], a, f"{a} is there {len(ranks)} times (ranks {on})")
            if "B" in kinds and ("I" in kinds or "W" in kinds):
                parts = " and ".join(k for k in "IW" if k in kinds)
                a = Action("B", chunk, micro)
                yield _wrong(kinds["B"][0], a, f"{a} is there and so is its {parts}")
            for kind in _lacking(kinds):
                missing[kind, chunk].append(micro)
            homes = {ranks[0]: kind for kind, ranks in kinds.items()}
            if "F" in kinds and len(homes) > 1:
                home = kinds["F"][0]
                for rank, kind in homes.items():
                    if rank != home:
                        a = Action(kind, chunk, micro)
                        yield _wrong(rank, a, f"{a} is on rank {rank}, its F on rank {home}")
    for (kind, chunk), micros in missing.items():
        what = {"F": "F", "I": "backward (B, or I and W)", "W": "W"}[kind]
        yield error(f"chunk {chunk}", None, f"no {what} of micro batch {_ranges(micros)}")


def _lacking(kinds: Iterable[str]) -> Iterator[str]:
    if "F" not in kinds:
        yield "F"
    if "I" not in kinds and "B" not in kinds:
        yield "I"
    elif "W" not in kinds and "B" not in kinds:
        yield "W"


def _order(table: Table) -> Iterator[Finding]:
    """F before I or B, I before W."""
    for rank, actions in enumerate(table.ranks):
        done = set()
        for a in actions:
            before = {"I": "F", "B": "F", "W": "I"}.get(a.kind)
            if before and (before, a.chunk, a.micro) not in done:
                yield _wrong(rank, a, f"{a} stands before {a._replace(kind=before)}")
            done.add(a)


def _messages(table: Table) -> Iterator[Finding]:
    """Each send and each receive that is needed once, where it is needed, and no others."""
    place = {(a.chunk, a.micro): rank for rank, a in _computed(table)}
    index: dict[Action, list[tuple[int, int]]] = defaultdict(list)
    for rank, actions in enumerate(table.ranks):
        for i, a in enumerate(actions):
            kind = "I" if a.kind == "B" else a.kind
            index[a._replace(kind=kind)].append((rank, i))
    for send, (receive, step) in MESSAGES.items():
        kind = "F" if send == "SEND_F" else "I"
        for (chunk, micro), rank in place.items():
            to = place.get((chunk + step, micro))
            made, needed = Action(kind, chunk, micro), Action(kind, chunk + step, micro)
            crosses = to is not None and to != rank
            sent, received = Action(send, chunk, micro), Action(receive, chunk + step, micro)
            for a, home in ((sent, rank), (received, to)):
                found = index.pop(a, [])
                if not crosses and found:
                    yield _wrong(found[0][0], a, f"{a}: nothing crosses from one rank to another")
                if not crosses:
                    continue
                if not found:
                    yield _wrong(home, a, f"{a} is missing")
                elif len(found) > 1:
                    yield _wrong(found[1][0], a, f"{a} is there {len(found)} times")
                elif found[0][0] != home:
                    yield _wrong(found[0][0], a, f"{a} should be on rank {home}")
                elif a is sent and found < index[made]:
                    yield _wrong(home, a, f"{a} stands before {made}, which makes the message")
                elif a is received and found > index[needed]:
                    yield _wrong(home, a, f"{a} stands after {needed}, which needs the message")
    for a, found in index.items():
        if a.kind in TRANSFERS:
            yield _wrong(found[0][0], a, f"{a}: no such message")


def _circle(table: Table, rendezvous: bool) -> Iterator[Finding]:
    """The ranks that wait for each other for ever, if there are any."""
    place = {(a.chunk, a.micro): rank for rank, a in _computed(table)}
    last = table.chunks - 1
    done: set[Action] = set()
    at = [0] * len(table.ranks)

    def front(rank: int) -> Action | None:
        actions = table.ranks[rank]
        return actions[at[rank]] if at[rank] < len(actions) else None

    def awaited(a: Action) -> Action | None:
        """What must be done, or in rendezvous be at the front too, before `a` can be."""
        if rendezvous:
            return _partner(a) if a.kind in TRANSFERS else None
        if a.kind == "F":
            return a._replace(chunk=a.chunk - 1) if a.chunk else None
        if a.kind in ("I", "B"):
            after = a._replace(chunk=a.chunk + 1, kind="I")
            return a._replace(kind="F") if a.chunk == last else after
        return a._replace(kind="I")

    waiting: dict[Action, int] = {}
    ready = list(range(len(table.ranks)))
    while ready:
        rank = ready.pop()
        while (a := front(rank)) is not None:
            need = awaited(a)
            if need is not None and need not in done:
                other = waiting.get(need) if rendezvous else None
                if other is None or front(other) != need:
                    waiting[a if rendezvous else need] = rank
                    break
                at[other] += 1
                done.update((a, need))
                ready.append(other)
            at[rank] += 1
            a = a._replace(kind="I") if a.kind == "B" else a
            done.add(a)
            if not rendezvous and a in waiting:
                ready.append(waiting.pop(a))
    rank = next((r for r in range(len(at)) if front(r) is not None), None)
    if rank is None:
        return
    seen: dict[int, int] = {}  # rank -> which of those gone through it is
    while rank not in seen:
        seen[rank] = len(seen)
        need = awaited(front(rank))
        rank = place[need.chunk, need.micro]
    circle = list(seen)[seen[rank] :]
    parts = [f"rank {r} at {front(r)} waits for {awaited(front(r))}" for r in circle]
    yield _wrong(circle[0], front(circle[0]), f"a circle: {_listed(parts)}")


def _partner(a: Action) -> Action:
    """The receive of a send, the send of a receive."""
    for send, (receive, step) in MESSAGES.items():
        if a.kind == send:
            return Action(receive, a.chunk + step, a.micro)
        if a.kind == receive:
            return Action(send, a.chunk - step, a.micro)
    raise AssertionError(a)


def _cap(table: Table, cap: float | None, share: float) -> Iterator[Finding]:
    """Ranks that hold more than `cap`."""
    if cap is None:
        return
    for rank, actions in enumerate(table.ranks):
        held = most = 0
        peak = None
        for a in actions:
            held += {"F": 1, "W": -1, "B": -1}.get(a.kind, 0)
            if held > most:
                most, peak = held, a
        if most * share > cap + 1e-9:
            message = f"holds {most * share:g} micro batches at {peak}, more than {cap:g}"
            yield error(f"rank {rank}", most * share, message, rule="activation-cap")


def _computed(table: Table) -> Iterator[tuple[int, Action]]:
    for rank, actions in enumerate(table.ranks):
        for a in actions:
            if a.kind in COMPUTE:
                yield rank, a


def _wrong(rank: int, action: Action, message: str) -> Finding:
    return error(f"rank {rank}", str(action), message, rule="schedule")


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return _listed([str(a) if a == b else f"{a}-{b}" for a, b in parts])


def _listed(parts: Sequence[str]) -> str:
    """The parts, of a great many the first."""
    more = len(parts) - _MOST_LISTED
    return ", ".join(parts[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
