"""The drawings of the text report: ranks, memory, traffic, pipeline."""

import re

import pytest

from plait.report.build import report
from plait.report.html import page
from plait.report.numbers import amount, repeats, spans
from plait.report.text import render
from plait.report.timeline import for_text
from plait.rules import check
from plait.spec.jobfile import read_job


def asked(model="llama3.1-8b", gpus="h100:16", **given):
    job = read_job("plan", model=model, gpus=gpus, overrides={"seq_len": 2048} | given)
    said = report(job, check(job, "plan"))
    assert all(f["level"] != "error" for f in said["findings"])
    return job, said


def part(text, title):
    """The lines below a heading, up to the next."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    end = next(i for i in range(start, len(lines)) if lines[i] == "")
    return lines[start + 1 : end]


@pytest.mark.parametrize("width", [80, 100, 140])
def test_ranks_of_experts_lie_on_their_own_grid(width):
    _, said = asked("mixtral-8x7b", "h100:64", tp=2, pp=4, ep=8)
    text = render(said, width)
    # etp 1, ep 8, edp 2, pp 4, the first the fastest: 8 ranks of ep side by side.
    rows = [line.split() for line in part(text, "Ranks of experts")]
    assert rows[0] == ["ep", *map(str, range(8))]
    assert rows[4] == ["pp", "1", "edp", "1", *map(str, range(24, 32))]
    # tp 2, dp_shard 8, pp 4: a stage in a row, so that there are few.
    rows = [line.split() for line in part(text, "Ranks")]
    assert rows[0] == ["dp_shard", *(str(i // 2) for i in range(16))]
    assert rows[1] == ["tp", *(str(i % 2) for i in range(16))]
    assert rows[2:] == [
        ["pp", str(stage), *map(str, range(16 * stage, 16 * stage + 16))] for stage in range(4)
    ]
    assert max(map(len, text.splitlines())) <= width


def test_a_dense_model_has_one_grid():
    _, said = asked(tp=2)
    assert "Ranks of experts" not in render(said, 100)


def test_axes_of_both_grids_where_the_world_is_large():
    _, said = asked("mixtral-8x7b", "h100:512", tp=2, pp=2, ep=8)
    text = render(said, 100)
    lines = [line.split() for line in part(text, "Ranks of experts")]
    assert ["ep", "8", "ranks", "0-7", "stride", "1"] in lines
    assert ["edp", "32", "ranks", "0,", "8,", "16", "...", "248", "stride", "8"] in lines


def bars(text):
    """(stage, moment, bar, total) of each line with a bar of memory."""
    found, stage = [], ""
    for line in part(text, "Memory of a rank"):
        match = re.match(r" +(?:stage (\S+) +)?(\w+) +([█▓▒#=+~:%·]+) +(\S+ \S+)$", line)
        if match:
            stage = match[1] or stage
            found.append((stage, *match.groups()[1:]))
    return found


@pytest.mark.parametrize("width", [80, 140])
def test_a_memory_bar_for_each_stage_and_moment(width):
    _, said = asked(gpus="h100:8", pp=2, tp=2, accumulation=4, recompute="full")
    held = said["memory"]
    rows = {(str(row["stage"]), row["moment"]): row for row in held["by_stage"]}
    shown = bars(render(said, width))
    assert [(stage, moment) for stage, moment, *_ in shown] == list(rows)
    extra = held["reserved_bytes"] + held["context_bytes"]
    device = held["device_bytes"]
    for stage, moment, bar, total in shown:
        row = rows[stage, moment]
        assert total == amount(row["total"] + extra)
        # The bar is as wide as the device, of which each class has its share.
        for mark, name in (("█", "parameters"), ("▓", "gradients"), ("▒", "optimizer")):
            assert bar.count(mark) == pytest.approx(len(bar) * row[name] / device, abs=1)
        free = device - row["total"] - extra
        assert bar.count("·") == pytest.approx(len(bar) * free / device, abs=1)


def test_the_recipe_of_model_states():
    """ZeRO (Rajbhandari and others, 2020): 2 + 2 + 12 bytes; gradients are float32 here."""
    _, said = asked("mixtral-8x7b", "h100:8", tp=1, ep=4, zero=1)
    lines = [line.strip() for line in part(render(said, 80), "Memory of a rank")]
    whole = "2 weights + 4 gradients + 12 optimizer = 18 bytes a parameter,"
    own = "on a rank 6 + 12/N, N = 8; of experts 6 + 12/N, N = 2"
    assert lines[lines.index(f"states: {whole}") + 1] == own
    assert f"States: {whole} {own}." in page(said)


def test_of_many_stages_the_fullest_moment_of_each():
    _, said = asked("llama3.1-70b", "h100:64", pp=8, accumulation=16)
    text = render(said, 100)
    shown = bars(text)
    assert [stage for stage, *_ in shown] == [str(stage) for stage in range(8)]
    for stage, moment, _, _ in shown:
        own = [row for row in said["memory"]["by_stage"] if row["stage"] == int(stage)]
        assert moment == max(own, key=lambda row: row["total"])["moment"]
    assert "in numbers the stages that hold most" in text


def test_a_bar_for_each_axis_of_the_stage_that_sends_most():
    _, said = asked(tp=4, pp=2, accumulation=2)
    text = render(said, 100)
    sent = {}
    for row in said["traffic"]:
        key = row["stage"], row["axis"]
        sent[key] = sent.get(key, 0) + row["wire_bytes"]
    stage = max((0, 1), key=lambda s: sum(n for (at, _), n in sent.items() if at == s))
    wanted = {axis: n for (at, axis), n in sent.items() if at == stage}
    lines = {}
    for line in part(text, "Traffic of a rank"):
        match = re.match(r"  (\w+) +([█+▒=:#]*) +(\S+ [KMGT]?i?B) (slow|fast)$", line)
        if match:
            lines[match[1]] = match.groups()[1:]
    assert {axis: size for axis, (_, size, _) in lines.items()} == {
        axis: amount(n) for axis, n in wanted.items()
    }
    most = max(wanted, key=wanted.get)
    full = len(lines[most][0])
    for axis, (bar, _, link) in lines.items():
        assert len(bar) == pytest.approx(full * wanted[axis] / wanted[most], abs=1)
        slow = any(row["inter_node"] for row in said["traffic"] if row["axis"] == axis)
        assert link == ("slow" if slow else "fast")


@pytest.mark.parametrize("accumulation", [8, 400])
def test_the_pipeline_is_drawn(accumulation):
    job, said = asked(gpus="h100:4", pp=4, accumulation=accumulation)
    text = render(said, 100, for_text(job))
    lines = part(text, "Pipeline")
    rows = [line.split(maxsplit=2)[2] for line in lines if line.startswith("  rank ")]
    assert len(rows) == 4
    # 1F1B: a rank starts with as many forwards as there are ranks from it to the end.
    for rank, row in enumerate(rows):
        assert re.match(r"·*(F[\d ]*)+", row)
        assert row.split("B")[0].count("F") == 4 - rank
    assert ("of its 400 micro batches" in text) == (accumulation == 400)
    assert max(map(len, text.splitlines())) <= 100


def test_a_deep_pipeline_is_left_to_plait_schedule():
    job, said = asked("llama3.1-70b", "h100:40", pp=20, accumulation=20)
    text = render(said, 100, for_text(job))
    assert not [line for line in text.splitlines() if line.startswith("  rank ")]


def test_numbers_in_few_words():
    assert spans([5, 0, 1, 2]) == "0-2, 5"
    assert repeats([3, 4, 4, 4]) == "3, 4 x 3"
