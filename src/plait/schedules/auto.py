"""The best table that can be found for given times and a memory cap."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import inf

from plait.schedules.bound import lower_bound
from plait.schedules.greedy import greedy_tables
from plait.schedules.search import HASTE, Filler, Order, improve, periodic
from plait.schedules.simulate import Times, peak_activations, simulate
from plait.schedules.table import Table
from plait.spec.findings import UserError, error
from plait.spec.schedule import SCHEDULES

#: How many actions are simulated for one question, about: a second or two, more for large tables.
EFFORT = 2_000_000

#: Chunks a rank that are tried where their number is open: in a search, and of named ones only.
SEARCHED, NAMED = (1, 2), (3, 4)


def auto(
    pp: int,
    micro_batches: int,
    vpp: int | None = None,
    times: Times | Callable[[int], Times] | None = None,
    cap: float | None = None,
    effort: int = EFFORT,
) -> Table:
    """A table that is never slower than any named schedule with as many chunks a rank which keeps
    the cap, and often faster. Where the number of chunks is open, that is one to four.

    Tried are all named schedules as they are; all of them (also those over the cap) with their
    weight gradients put where these times and this cap want them; the greedy ones; periodic ones.
    The best few are improved by local search. The same question has the same answer: what limits
    the search is a number of actions, not a time.

    Args:
        vpp: chunks on each rank, one copy of the model; None: one and two are searched, DualPipe's
            two copies of the weights too, and named schedules are tried with up to four.
        times: of each of the pp * vpp chunks; or, for a number of chunks, their times; None: F, I
            and W of a rank's share take 1 each and messages no time.
        cap: the most that a rank may hold, in units of its share of a micro batch; None: no limit.
        effort: how many actions may be simulated, about.

    Raises:
        UserError: the cap is below 1, which nothing can keep.
    """
    if cap is not None and cap < 1:
        message = f"no schedule holds at most {cap:g} micro batches on a rank"
        raise UserError([error("cap", cap, message, 1)])
    cap = inf if cap is None else cap
    if isinstance(times, Times):
        assert vpp in (None, len(times.forward) // pp), "times are a number a chunk"
        vpp, of = len(times.forward) // pp, lambda chunks: times
    else:
        of = times or (lambda chunks: Times.even((chunks, pp)))
    searched = SEARCHED if vpp is None else (vpp,)
    found = [
        _best(pp, micro_batches, v, of(pp * v), cap, effort, both=vpp is None) for v in searched
    ]
    for v in NAMED if vpp is None else ():
        for table in _named(pp, micro_batches, v, of(pp * v), cap, both=True):
            peak = max(peak_activations(table))
            if peak <= cap + 1e-9:
                found.append(((simulate(table, of(pp * v)).makespan, peak), table))
    _, table = min(found, key=lambda candidate: candidate[0])
    return Table("auto", table.ranks)


def _best(
    pp: int, micro_batches: int, vpp: int, times: Times, cap: float, effort: int, both: bool
) -> tuple[tuple[float, float], Table]:
    """The best table with so many chunks, and its (makespan, peak)."""
    chunks, size = pp * vpp, 3 * pp * vpp * micro_batches
    placements = _placements(pp, vpp)
    goal = min(lower_bound({homes: micro_batches}, times, cap) for homes in placements)
    filler = Filler(chunks, micro_batches, pp, times, cap)
    best: tuple[tuple[float, float], Table] | None = None
    pool = []  # (merit, number, order, filled, haste)

    def consider(table: Table) -> None:
        nonlocal best
        peak = max(peak_activations(table))
        merit = simulate(table, times).makespan, peak
        if peak <= cap + 1e-9 and (best is None or merit < best[0]):
            best = merit, table

    def refill(order: Order) -> None:
        fillings = ((filler.fill(order, haste), haste) for haste in HASTE)
        ways = [(filled, haste) for filled, haste in fillings if filled is not None]
        if ways:
            filled, haste = min(ways, key=lambda way: way[0].merit)
            pool.append((filled.merit, len(pool), order, filled, haste))

    def done() -> bool:
        return best is not None and best[0][0] <= goal * (1 + 1e-9)

    for table in _named(pp, micro_batches, vpp, times, cap, both):
        consider(table)
        refill(filler.order(table))
    for homes in placements:
        tables = greedy_tables("auto", homes, micro_batches, times, cap)
        for table in islice(tables, max(1, effort // 16 // size)):
            if done():
                break
            consider(table)
            refill(filler.order(table))
        if not done():
            for order in periodic(filler, homes, effort // 8):
                refill(order)
    pool.sort(key=lambda entry: entry[:2])
    few = pool[:4]
    for _, _, order, filled, haste in few:
        if done():
            break
        if filled.makespan > goal:
            order = [list(slots) for slots in order]
            filled = improve(filler, order, filled, haste, effort // 2 // len(few), goal)
        consider(filler.table("auto", filled))
    assert best is not None, "the greedy ones keep any cap"
    return best


def _named(
    pp: int, micro_batches: int, vpp: int, times: Times, cap: float, both: bool
) -> Iterator[Table]:
    """Every named schedule that has so many chunks on a rank and can be built."""
    from plait.schedules.build import build

    for name, schedule in SCHEDULES.items():
        least, most = schedule.vpp
        if name == "auto" or not least <= vpp <= most:
            continue
        if schedule.placement == "both" and not both:
            continue
        try:
            yield build(name, pp, micro_batches, vpp, times=times, cap=cap)
        except UserError:  # this one has no table for these numbers
            continue


def _placements(pp: int, vpp: int) -> list[Sequence[int]]:
    """The rank of each chunk: in a loop, and there and back."""
    loop = tuple(range(pp)) * vpp
    back = tuple(range(pp)) + tuple(reversed(range(pp)))
    return [loop, back] if vpp == 2 and pp > 1 else [loop]
