"""A schedule as an SVG: one file with nothing from elsewhere, on a light or dark ground as the
reader's system is."""

from collections.abc import Iterable, Sequence
from statistics import median
from xml.sax.saxutils import escape, quoteattr

from plait.schedules.draw import KINDS, shades
from plait.schedules.simulate import Timeline
from plait.schedules.table import Table

#: Kind -> its colours on any ground, from a rank's first chunk to further ones.
_FILLS = {
    "F": ("#3f78b5", "#93bbe3", "#c3daf0", "#264d78"),
    "B": ("#b36b12", "#f2c583", "#f8dfb6", "#7d4a0b"),
    "I": ("#23827b", "#8ccfc8", "#c0e6e1", "#155953"),
    "W": ("#587f2b", "#b9d48f", "#d9e8c2", "#3b581a"),
}
#: Text on those fills.
_INKS = ("#ffffff", "#1d2430", "#1d2430", "#ffffff")
#: Role -> colour on a light and on a dark ground.
_COLOURS = {
    "ground": ("#ffffff", "#15191f"),
    "ink": ("#1d2430", "#e6e9ee"),
    "faint": ("#64707f", "#9aa5b3"),
    "rest": ("#edf0f3", "#242a33"),
    "line": ("#b7c0cb", "#46505d"),
}
_ROW, _LEFT, _BESIDE, _TOP = 24, 62, 128, 68
#: Pixels: of the width of the timeline at most, where cells need not shrink below one of them;
#: of a character.
_WIDEST, _LEAST, _CHARACTER = 1100, 1.5, 6.2
#: Pixels of the width in any case, and how many times stand below it.
_LIMIT, _TICKS = 20_000, 200


def svg(table: Table, timeline: Timeline, title: str | None = None) -> str:
    """The timeline of a table: a row a rank with its idle share and its peak activations."""
    spans = [list(rank) for rank in timeline.spans]
    lengths = [end - start for rank in spans for _, start, end in rank if end > start]
    # A few actions that are very short do not make the page wide.
    shortest = max(min(lengths), median(lengths) / 4) if lengths else 1.0
    makespan = timeline.makespan or 1.0
    digits = len(str(table.micro_batches - 1))
    shade = shades(table)
    used = {
        (action.kind, shade(rank, action) % len(_INKS))
        for rank, actions in enumerate(table.ranks)
        for action in actions
    }
    legend, legend_right = _legend(table, sorted(used, key=_order))
    # Wide enough for the number of a micro batch, unless the page gets too wide.
    scale = max(
        min((digits * _CHARACTER + 7) / shortest, _WIDEST / makespan),
        _LEAST / shortest,
        (legend_right - _LEFT - _BESIDE) / makespan,
    )
    scale = min(scale, _LIMIT / makespan)
    title = title or f"{table.name}, {len(spans)} ranks, {table.micro_batches} micro batches"
    parts = []
    for rank, row in enumerate(spans):
        y = _TOP + _ROW * rank
        rest = f'<rect class="rest" x="{_LEFT}" y="{y + 1}" width="{makespan * scale:.2f}" '
        parts += [f'{rest}height="{_ROW - 2}"/>', _text(_LEFT - 8, y + 16, f"rank {rank}", "end")]
        for action, start, end in row:
            tone = shade(rank, action) % len(_INKS)
            x, w = _LEFT + start * scale, (end - start) * scale
            gap = 0.6 if w > 3 else 0
            parts.append(
                f'<rect class="{action.kind}{tone}" x="{x:.2f}" y="{y + 1}" '
                f'width="{w - gap:.2f}" height="{_ROW - 2}"><title>{action}: {start:.6g} to '
                f"{end:.6g}</title></rect>"
            )
            if digits * _CHARACTER <= w:  # where the largest number fits: all or none
                middle = x + (w - gap) / 2
                parts.append(_text(middle, y + 16, str(action.micro), "middle", f"t{tone}"))
    right = _LEFT + makespan * scale
    bottom = _TOP + _ROW * len(spans)
    parts += _columns(table, timeline, right)
    parts += _axis(makespan, scale, bottom)
    width = round(max(right + _BESIDE, _LEFT + 8 * len(title)))
    return _page(width, bottom + 30, title, [*legend, *parts], used)


def _order(use: tuple[str, int]) -> tuple[int, int]:
    return list(KINDS).index(use[0]), use[1]


def _text(x: float, y: float, text: str, at: str = "start", role: str = "ink") -> str:
    return f'<text class="{role}" x="{x:.2f}" y="{y:g}" text-anchor="{at}">{escape(text)}</text>'


def _columns(table: Table, timeline: Timeline, right: float) -> Iterable[str]:
    """Beside each rank: how long it idles, and how much it holds."""
    yield _text(right + 60, _TOP - 6, "idle", "end", "faint")
    yield _text(right + 114, _TOP - 6, "peak", "end", "faint")
    for rank in range(len(table.ranks)):
        y = _TOP + _ROW * rank + 16
        idle = 1 - timeline.busy[rank] / timeline.makespan if timeline.makespan else 0.0
        yield _text(right + 60, y, f"{idle:.1%}", "end")
        yield _text(right + 114, y, f"{timeline.peak_activations[rank]:.4g}", "end")


def _axis(makespan: float, scale: float, bottom: float) -> Iterable[str]:
    """Ticks at round times, some 80 pixels apart or more."""
    wanted = makespan / min(max(makespan * scale / 80, 1), _TICKS)
    magnitude = 10.0 ** _exponent(wanted)
    step = next(s * magnitude for s in (1, 2, 5, 10) if s * magnitude >= wanted * 0.999)
    for i in range(int(makespan / step * 1.000001) + 1):
        x = _LEFT + i * step * scale
        yield f'<path class="axis" d="M{x:.2f} {bottom + 1}v4"/>'
        yield _text(x, bottom + 18, f"{i * step:.6g}", "middle", "faint")


def _exponent(value: float) -> int:
    """The power of ten at or below a value."""
    return int(f"{value:e}".partition("e")[2])


def _legend(table: Table, used: Sequence[tuple[str, int]]) -> tuple[list[str], float]:
    """Boxes with their kinds; where its right end is."""
    parts, x = [], float(_LEFT)
    for kind in dict.fromkeys(kind for kind, _ in used):
        for tone in (tone for k, tone in used if k == kind):
            parts.append(
                f'<rect class="{kind}{tone}" x="{x:.2f}" y="34" width="14" height="12" rx="2"/>'
            )
            x += 16
        words = KINDS[kind][0]
        parts.append(_text(x + 4, 44, words, role="faint"))
        x += 20 + _CHARACTER * len(words)
    if tones := sorted({tone for _, tone in used})[1:]:
        copies = len({rank for (chunk, _), rank in table.place.items() if chunk == 0}) > 1
        kind = "the other copy of the model" if copies else "a rank's further chunks"
        words = f"paler: {kind}" if len(tones) < 3 else f"other tones: {kind}"
        parts.append(_text(x + 4, 44, words, role="faint"))
        x += 20 + _CHARACTER * len(words)
    return parts, x


def _page(
    width: int, height: float, title: str, parts: Iterable[str], used: Iterable[tuple[str, int]]
) -> str:
    def ground(dark: int) -> str:
        fills = "".join(f".{role}{{fill:{pair[dark]}}}" for role, pair in _COLOURS.items())
        return f"{fills}.axis{{stroke:{_COLOURS['line'][dark]}}}"

    uses = sorted(used)
    cells = "".join(f".{kind}{tone}{{fill:{_FILLS[kind][tone]}}}" for kind, tone in uses)
    inks = "".join(f".t{tone}{{fill:{_INKS[tone]}}}" for tone in sorted({t for _, t in uses}))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" '
        f'width="{width}" height="{height:g}" role="img" aria-label={quoteattr(title)}>',
        f"<title>{escape(title)}</title>",
        f"<style>text{{font:11px system-ui,sans-serif}}.head{{font-size:13px;font-weight:600}}"
        f"{ground(0)}{cells}{inks}@media(prefers-color-scheme:dark){{{ground(1)}}}</style>",
        f'<rect class="ground" width="{width}" height="{height:g}" rx="8"/>',
        f'<text class="ink head" x="{_LEFT}" y="22">{escape(title)}</text>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
