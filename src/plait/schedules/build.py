"""A schedule by its name: whether it can be built, and its table."""

from math import isqrt

from plait.schedules import dualpipe, loop, vshape
from plait.schedules.simulate import Times
from plait.schedules.table import Table
from plait.spec.findings import Finding, UserError, closest, error
from plait.spec.schedule import SCHEDULES, canonical

#: A table has at most this many forwards; it is held in memory as a whole.
MOST_FORWARDS = 1_000_000

#: Micro batches come from both ends.
_TWO_ENDED = ("dualpipe", "dualpipev")


def build(
    name: str,
    pp: int,
    micro_batches: int,
    vpp: int | None = None,
    group: int | None = None,
    times: Times | None = None,
    cap: float | None = None,
) -> Table:
    """The table of a schedule.

    Args:
        name: a schedule of `spec.schedule`, or what else it is called.
        pp: ranks.
        micro_batches: at least 1.
        vpp: chunks on each rank; None: the schedule's default.
        group: interleaved-1f1b: micro batches that a chunk does before the next chunk; None: pp.
        times: `simulate.Times` for which "auto" and "zb-auto" look; the others are the same for all
            times.
        cap: the most that a rank may hold, in units of its whole share of a micro batch, for
            "auto" and "zb-auto"; what the others hold is theirs.

    Raises:
        UserError: see `problems`.
    """
    found = problems(name, pp, micro_batches, vpp, group)
    if found:
        raise UserError(found)
    name = canonical(name)
    chunks = SCHEDULES[name].vpp[0] if vpp is None else vpp
    match name:
        case "gpipe":
            return loop.gpipe(pp, micro_batches)
        case "1f1b":
            return loop.one_f_one_b(pp, micro_batches)
        case "interleaved-1f1b":
            return loop.interleaved(pp, micro_batches, chunks, group or pp)
        case "looped-bfs":
            return loop.looped_bfs(pp, micro_batches, chunks)
        case "zb-h1":
            return loop.zb_h1(pp, micro_batches, chunks)
        case "zb-h2":
            return loop.zb_h2(pp, micro_batches)
        case "zbv":
            return vshape.zbv(pp, micro_batches)
        case "v-half":
            return vshape.v_half(pp, micro_batches)
        case "v-min":
            return vshape.v_min(pp, micro_batches)
        case "dualpipe":
            return dualpipe.dualpipe(pp, micro_batches)
        case "dualpipev":
            return dualpipe.dualpipe_v(pp, micro_batches)
        case "zb-auto":
            from plait.schedules.greedy import zb_auto

            return zb_auto(pp, micro_batches, times, cap)
        case "auto":
            from plait.schedules.auto import auto

            return auto(pp, micro_batches, vpp, times, cap)
    raise AssertionError(f"{name} has a name and no builder")


def problems(
    name: str, pp: int, micro_batches: int, vpp: int | None = None, group: int | None = None
) -> list[Finding]:
    """Everything for which a schedule cannot be built, with the nearest that can.

    `where` of a finding is "schedule", "pp", "vpp", "microbatches" or "group".
    """
    known = canonical(name)
    if known is None:
        message = f"schedule {name!r} is none of {', '.join(SCHEDULES)}"
        return [error("schedule", name, message, closest(name, SCHEDULES) or "1f1b")]
    name = known
    found = _vpp_problems(name, vpp)
    # What is wrong with one is said for the legal values of those before it.
    vpp = _legal(found, "vpp", SCHEDULES[name].vpp[0] if vpp is None else vpp)
    found = _pp_problems(name, pp, vpp) + found
    pp = _legal(found, "pp", pp)
    if group is not None:
        found += _group_problems(name, pp, group)
    return found + _micro_batch_problems(name, pp, micro_batches, vpp)


def _legal(found: list[Finding], where: str, value: int) -> int:
    """The value, or the legal one that is nearest to it."""
    return next((f.nearest for f in found if f.where == where), value)


def _pp_problems(name: str, pp: int, vpp: int) -> list[Finding]:
    # DualPipe's two need 2 pp micro batches, and a table has only so many forwards.
    both = name == "dualpipe"
    least, most = (2 if both else 1), MOST_FORWARDS // vpp
    if name in _TWO_ENDED:
        most = isqrt(most // 2)
        most -= both and most % 2
    if pp < least:
        return [error("pp", pp, f"must be at least {least}, not {pp}", least)]
    if pp > most:
        message = f"more than {most} ranks do not go into a table of {MOST_FORWARDS} forwards"
        return [error("pp", pp, message, most)]
    if both and pp % 2:
        message = f"dualpipe sends micro batches from both ends and needs an even pp, not {pp}"
        return [error("pp", pp, message, pp + 1)]
    return []


def _vpp_problems(name: str, vpp: int | None) -> list[Finding]:
    least, most = SCHEDULES[name].vpp
    if vpp is None or least <= vpp <= most:
        return []
    many = str(least) if least == most else f"{least} to {most}"
    noun = "chunk" if many == "1" else "chunks"
    message = f"{name} has {many} {noun} on a rank, not {vpp}"
    return [error("vpp", vpp, message, min(max(vpp, least), most))]


def _group_problems(name: str, pp: int, group: int) -> list[Finding]:
    if name != "interleaved-1f1b":
        message = f"only interleaved-1f1b takes a group of micro batches, {name} takes none"
        return [error("group", group, message)]
    if group < pp:
        message = (
            f"a group of {group} micro batches cannot come round {pp} ranks before a chunk's next "
            f"group is due: it must be at least pp = {pp}"
        )
        return [error("group", group, message, pp)]
    return []


def _micro_batch_problems(name: str, pp: int, micro_batches: int, vpp: int) -> list[Finding]:
    least, most = (2 * pp if name in _TWO_ENDED else 1), MOST_FORWARDS // (pp * vpp)
    even = name == "dualpipe"
    odd = even and micro_batches % 2
    nearest = min(max(least, micro_batches + odd), most - (even and most % 2))
    if micro_batches > most:
        message = (
            f"{micro_batches} micro batches through {pp * vpp} chunks are more than a table holds "
            f"({MOST_FORWARDS} forwards)"
        )
    elif micro_batches < least or odd:
        twice = f"2 pp = {least}" if name in _TWO_ENDED else least
        among = f"an even number, at least {twice}" if even else f"at least {twice}"
        message = f"{name} on {pp} ranks needs {among} micro batches, not {micro_batches}"
    else:
        return []
    return [error("microbatches", micro_batches, message, nearest)]
