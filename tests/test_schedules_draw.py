"""A schedule drawn: in the terminal, as SVG, as a trace. What is drawn is read back and held
against the table and its times."""

import json
import re
from collections import defaultdict
from dataclasses import replace
from io import StringIO
from xml.etree import ElementTree

import pytest
from rich.console import Console

from plait.schedules.build import build
from plait.schedules.draw import IDLE, MIXED, PARTLY, drawing
from plait.schedules.perfetto import trace
from plait.schedules.simulate import Times, simulate
from plait.schedules.svg import svg
from plait.schedules.table import Action, Table
from plait.schedules.transfers import with_transfers

SHAPES = [
    ("gpipe", 3, 5, 1),
    ("1f1b", 4, 8, 1),
    ("interleaved-1f1b", 4, 8, 3),
    ("looped-bfs", 2, 5, 2),
    ("zb-h1", 4, 12, 2),
    ("zb-h2", 3, 11, 1),
    ("zbv", 4, 6, 2),
    ("v-half", 5, 7, 2),
    ("v-min", 3, 9, 2),
    ("dualpipe", 4, 12, 1),
    ("dualpipev", 3, 6, 2),
    ("zb-auto", 3, 7, 1),
]
UNEVEN = {"f": 1.1, "b": 0.7, "w": 0.4, "comm": 0.3}


@pytest.fixture(params=SHAPES, ids=lambda shape: shape[0])
def table(request):
    name, pp, micro_batches, vpp = request.param
    return build(name, pp, micro_batches, vpp=vpp)


@pytest.fixture(params=[{}, UNEVEN], ids=["even", "uneven"])
def timeline(table, request):
    return simulate(table, Times.even(table, **request.param))


# ------------------------------------------------------------------------------------------
# The terminal

#: Two ranks, two micro batches, 1F1B: F takes 1, B takes 2.
SMALL = Table(
    "1f1b",
    (
        (Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)),
        (Action("F", 1, 0), Action("B", 1, 0), Action("F", 1, 1), Action("B", 1, 1)),
    ),
)


def drawn(timeline, width, colour=False):
    """(what is shown, whether anything has a colour) of each line."""
    out = StringIO()
    system = "truecolor" if colour else None
    console = Console(file=out, width=width, force_terminal=colour, color_system=system)
    console.print(drawing(timeline.table, timeline, width, colour), soft_wrap=True)
    escapes = re.compile(r"\x1b\[[\d;]*m")
    return [(escapes.sub("", line), "\x1b" in line) for line in out.getvalue().splitlines()]


def rows(timeline, width, colour=False):
    """What stands behind "rank N" in each row."""
    found = (re.match(r"  rank \d+ +(.*)$", line) for line, _ in drawn(timeline, width, colour))
    return [match[1] for match in found if match]


def test_a_small_one_by_hand():
    # Rank 0: F at 0 and 1, B at 4 to 6 and 7 to 9. Rank 1: F at 1 and 4, B at 2 to 4, 5 to 7.
    timeline = simulate(SMALL, Times.even(SMALL))
    assert rows(timeline, 80) == ["F0 F1 ······B0    ···B1    ", "···F0 B0    F1 B1    ······"]
    # Two columns a unit, one, and then there is room for no number.
    assert rows(timeline, 30) == ["F0F1····B0  ··B1  ", "··F0B0  F1B1  ····"]
    assert rows(timeline, 20) == ["FF··B0·B1", "·FB0FB1··"]
    assert rows(timeline, 20, colour=True) == ["01··B0·B1", "·0B01B1··"]


def test_without_colour_there_are_no_escapes():
    timeline = simulate(SMALL, Times.even(SMALL))
    assert not any(coloured for _, coloured in drawn(timeline, 80))
    assert any(coloured for _, coloured in drawn(timeline, 80, colour=True))


def test_actions_are_read_back(table):
    """Wide enough, every action stands there in its order; a further chunk in lower case."""
    timeline = simulate(table, Times.even(table))
    twice = table.name == "dualpipe"
    for rank, row in enumerate(rows(timeline, 10_000)):
        read = re.findall(r"([A-Za-z])(\d+)", row)
        assert [(k.upper(), int(n)) for k, n in read] == [
            (a.kind, a.micro) for a in table.ranks[rank]
        ]
        for action, (letter, _) in zip(table.ranks[rank], read, strict=True):
            # Of DualPipe's copies the second begins at the last rank.
            second = table.place[0, action.micro] != 0
            further = second if twice else action.chunk != table.held[rank][0]
            assert letter.islower() == further


def test_idle_columns_are_idle_time(table):
    timeline = simulate(table, Times.even(table))
    for rank, row in enumerate(rows(timeline, 10_000)):
        idle = 1 - timeline.busy[rank] / timeline.makespan
        assert row.count(IDLE) == pytest.approx(idle * len(row))


@pytest.mark.parametrize("width", [20, 37, 60, 100, 250])
def test_it_fits_the_terminal(timeline, width):
    lines = drawn(timeline, width)
    made = [line for line, _ in lines if line.startswith("  rank ")]
    assert len({len(line) for line in made}) == 1
    assert max(map(len, made)) <= width
    # The legend too, but for single entries that are longer.
    longest = len("  lower case: the second copy of the model")
    assert max(len(line) for line, _ in lines) <= max(width, longest)


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "v-min", "dualpipe"])
@pytest.mark.parametrize("width", [60, 120])
def test_a_large_one_is_scaled_down(name, width):
    table = build(name, 16, 128)
    timeline = simulate(table, Times.even(table))
    shown = rows(timeline, width)
    assert len(shown) == 16
    for rank, row in enumerate(shown):
        assert set(row) <= set("FBIWfbiw" + IDLE + MIXED + PARTLY)
        column = timeline.makespan / len(row)
        for i, letter in enumerate(row):
            used = defaultdict(float)
            for span in timeline.spans[rank]:
                both = min(span.end, (i + 1) * column) - max(span.start, i * column)
                used[span.action.kind] += max(both, 0) / column
            if letter == IDLE:
                assert sum(used.values()) <= 0.5 + 1e-9
            else:
                assert sum(used.values()) >= 0.5 - 1e-9
            if letter in (MIXED, PARTLY):
                assert (sum(used.values()) > 0.85) == (letter == MIXED)
            elif letter != IDLE:
                assert used[letter.upper()] == max(used.values())


def test_a_rank_is_idle_where_nothing_is_drawn(timeline):
    """With times that are no multiples of each other too, to a column."""
    for rank, row in enumerate(rows(timeline, 400)):
        column = timeline.makespan / len(row)
        for i, shown in enumerate(row):
            middle = (i + 0.5) * column
            spans = timeline.spans[rank]
            distance = min(max(s.start - middle, middle - s.end, 0) for s in spans)
            if shown == IDLE:
                inside = [s for s in spans if s.start + column < middle < s.end - column]
                assert inside == []
            else:
                assert distance <= column


# ------------------------------------------------------------------------------------------
# SVG


def cells(text):
    """The boxes that have a title: (title, x, y, width)."""
    root = ElementTree.fromstring(text)
    name = "{http://www.w3.org/2000/svg}"
    for box in root.iter(f"{name}rect"):
        title = box.find(f"{name}title")
        if title is not None:
            x, y, width = (float(box.get(key)) for key in ("x", "y", "width"))
            yield title.text, box.get("class"), x, y, width


def test_svg_has_every_action_at_its_time(table, timeline):
    found = list(cells(svg(table, timeline)))
    spans = [span for row in timeline.spans for span in row]
    assert len(found) == len(spans)
    first, *_, last = sorted({x for _, _, x, _, _ in found})
    scale = (last - first) / (max(s.start for s in spans) - min(s.start for s in spans))
    for (title, kind, x, _, width), span in zip(found, spans, strict=True):
        assert title.split(":")[0] == str(span.action)
        assert kind[0] == span.action.kind
        assert x - first == pytest.approx(span.start * scale, abs=0.02)
        assert width == pytest.approx((span.end - span.start) * scale, abs=0.7)
    by_rank = defaultdict(set)
    for (_, _, _, y, _), rank in zip(
        found, (r for r, row in enumerate(timeline.spans) for _ in row), strict=True
    ):
        by_rank[rank].add(y)
    assert [len(ys) for ys in by_rank.values()] == [1] * len(table.ranks)
    assert len({y for ys in by_rank.values() for y in ys}) == len(table.ranks)


#: Times that have little to do with each other: of F, of I, of W, of a message.
UNEQUAL = [
    (1e6, 1, 1, 0),
    (1, 1e9, 1, 0),
    (1e12, 1e-12, 1e-12, 0),
    (1e-12, 1, 1e12, 1e12),
    (1, 1, 1, 1000),
    (1e-12, 0, 0, 1e12),
    (0, 0, 1e-12, 0),
]


@pytest.mark.parametrize("times", UNEQUAL)
def test_a_drawing_has_a_size_whatever_the_times(table, times):
    even = Times.even(table, *times)
    uneven = replace(even, forward=(*even.forward[:-1], max(times)))
    for timeline in (simulate(table, even), simulate(table, uneven)):
        text = svg(table, timeline)
        root = ElementTree.fromstring(text)
        assert float(root.get("width")) < 20_500
        assert text.count('class="axis"') <= 201
        assert len(text) < 300 * sum(map(len, table.ranks)) + 100_000
        made = [shown for shown, _ in drawn(timeline, 80) if shown.startswith("  rank ")]
        assert max(map(len, made)) <= 80


def test_svg_says_what_is_idle_and_held(timeline):
    root = ElementTree.fromstring(svg(timeline.table, timeline))
    texts = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    for rank, peak in enumerate(timeline.peak_activations):
        assert f"rank {rank}" in texts
        assert f"{peak:.4g}" in texts
        assert f"{1 - timeline.busy[rank] / timeline.makespan:.1%}" in texts


def test_svg_stands_by_itself(timeline):
    text = svg(timeline.table, timeline)
    assert text == svg(timeline.table, timeline)
    assert text.count("http") == 1  # the namespace
    assert not re.search(r"href|url\(|<script|<image|font-face", text)
    # Every box within the page, and every class that is used has its colour.
    root = ElementTree.fromstring(text)
    width, height = float(root.get("width")), float(root.get("height"))
    for _, kind, x, y, w in cells(text):
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= height
        assert f".{kind}{{fill:" in text


def test_svg_of_a_table_with_a_strange_name():
    table = Table('<a> & "b".csv', SMALL.ranks)
    root = ElementTree.fromstring(svg(table, simulate(table, Times.even(table))))
    title = root.find("{http://www.w3.org/2000/svg}title").text
    assert title.startswith('<a> & "b".csv')
    assert root.get("aria-label") == title


# ------------------------------------------------------------------------------------------
# Trace


def events(timeline):
    answer = json.loads(trace(timeline.table, timeline))
    by_phase = defaultdict(list)
    for event in answer["traceEvents"]:
        by_phase[event["ph"]].append(event)
    return by_phase


def test_trace_has_every_action_on_its_rank(timeline):
    found = events(timeline)
    names = {e["tid"]: e["args"]["name"] for e in found["M"] if e["name"] == "thread_name"}
    assert names == {r: f"rank {r}" for r in range(len(timeline.spans))}
    slices = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in found["X"]]
    assert slices == [
        (rank, str(s.action), s.start * 1000, pytest.approx((s.end - s.start) * 1000))
        for rank, row in enumerate(timeline.spans)
        for s in row
    ]


def test_trace_has_an_arrow_for_each_message(timeline):
    """As many as there are sends, from inside the sender's slice to the receiver's start."""
    table, found = timeline.table, events(timeline)
    sends = {str(a) for row in with_transfers(table) for a in row if a.kind.startswith("SEND")}
    starts = {e["id"]: e for e in found["s"]}
    ends = {e["id"]: e for e in found["f"]}
    assert {e["name"] for e in found["s"]} == sends
    assert len(found["s"]) == len(found["f"]) == len(sends) == len(starts)
    assert starts.keys() == ends.keys()
    at = {(e["tid"], e["ts"]): e for e in found["X"]}
    for number, start in starts.items():
        end = ends[number]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert start["tid"] != end["tid"]
        assert start["ts"] + timeline.times.transfer * 1000 <= end["ts"] + 2
        assert (end["tid"], end["ts"]) in at
        inside = [
            e
            for e in found["X"]
            if e["tid"] == start["tid"] and e["ts"] <= start["ts"] < e["ts"] + e["dur"]
        ]
        chunk, kind, micro = re.match(r"(\d+)SEND_(.)(\d+)", start["name"]).groups()
        (made_by,) = inside
        assert made_by["args"] == {"chunk": int(chunk), "micro batch": int(micro)}
        assert made_by["name"].strip("0123456789") in {"F": "F", "B": "IB"}[kind]


def test_trace_counts_what_is_held(timeline):
    held = defaultdict(list)
    for event in events(timeline)["C"]:
        held[event["name"]].append((event["ts"], event["args"]["held"]))
    peaks = [max(h for _, h in row) for row in held.values()]
    assert peaks == pytest.approx(timeline.peak_activations)
    for row in held.values():
        assert [t for t, _ in row] == sorted(t for t, _ in row)
        assert row[-1][1] == 0
