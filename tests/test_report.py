"""The REPORT: its keys and numbers, and the page that people read."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from plait.cost.ledger import MEMORY_CLASSES
from plait.cost.traffic import traffic
from plait.report.build import report
from plait.report.numbers import amount, count
from plait.report.text import render
from plait.rules import check
from plait.spec.findings import error
from plait.spec.jobfile import read_job

KEYS = {
    "": "model world layout grids batch findings fits memory traffic bubble time serving",
    "model": "name parameters active_parameters layers hidden",
    "layout": "tp sequence_parallel cp ulysses cp_method pp vpp schedule stages ep etp "
    "dp_replicate dp_shard zero micro_batch recompute dcp",
    "grids": "dense expert",
    "batch": "micro global accumulation tokens_per_step",
    "memory": "device_bytes peak_bytes reserved_bytes context_bytes by_stage",
    "bubble": "step_total step_ideal span_total span_ideal",
    "time": "step_seconds low high compute_seconds exposed_communication_seconds "
    "tokens_per_second_per_gpu model_tflops_per_gpu mfu",
}
ROW_KEYS = {
    "memory": "stage moment parameters gradients optimizer activations logits gathered buffers "
    "total",
    "traffic": "stage axis collective phase dtype count bytes wire_bytes inter_node",
}


def plan(model="llama3.1-8b", gpus="h100:16", **given):
    return read_job("plan", model=model, gpus=gpus, overrides={"seq_len": 4096} | given)


def answer(**given):
    job = plan(**given)
    return report(job, check(job, "plan"))


@pytest.mark.parametrize("given", [{"tp": 8}, {"zero": 3}, {"pp": 2}, {"model": "mixtral-8x7b"}])
def test_every_key_is_there_and_json(given):
    said = json.loads(json.dumps(answer(**given)))
    for where, names in KEYS.items():
        table = said[where] if where else said
        assert set(names.split()) <= set(table), where
    for row in said["memory"]["by_stage"] or ():
        assert set(row) == set(ROW_KEYS["memory"].split())
        assert row["total"] == sum(row[name] for name in MEMORY_CLASSES)
    for row in said["traffic"] or ():
        assert set(row) == set(ROW_KEYS["traffic"].split())


def test_numbers_of_a_report():
    job = plan(tp=8)
    said = report(job, [])
    assert said["world"] == 16
    assert said["model"]["parameters"] == 8_030_261_248  # as Meta published it
    dense = {"tp": 8, "cp": 1, "dp_shard": 2, "dp_replicate": 1, "pp": 1}
    assert said["grids"]["dense"] == dense
    assert said["grids"]["expert"] == {"etp": 1, "ep": 1, "edp": 16, "pp": 1}
    assert said["batch"]["global"] == 2
    assert said["batch"]["tokens_per_step"] == 2 * 4096
    memory = said["memory"]
    assert memory["device_bytes"] == 80 * 10**9
    assert memory["peak_bytes"] == max(row["total"] for row in memory["by_stage"])
    used = memory["peak_bytes"] + memory["reserved_bytes"] + memory["context_bytes"]
    assert said["fits"] == (used <= memory["device_bytes"])
    assert len(said["traffic"]) == len(traffic(job).entries)
    assert set(said["bubble"].values()) == {0.0}


def test_gradients_have_a_dtype_where_the_job_leaves_it_open():
    """As jobs of `plait train` do, which shows their report, too."""
    job = plan(tp=8)
    left = replace(job, train=replace(job.train, grad_dtype="auto"))
    assert report(left, []) == report(job, [])


def test_links_are_slow_where_a_group_leaves_its_node():
    far = {row["axis"]: row["inter_node"] for row in answer(tp=8)["traffic"]}
    assert far == {"tp": False, "fsdp": True, "world": True}
    far = {row["axis"]: row["inter_node"] for row in answer(gpus="h100:8", tp=4)["traffic"]}
    assert not any(far.values())


def test_too_little_memory_does_not_fit():
    said = answer(model="llama3.1-405b", gpus="h100:8", tp=8)
    assert said["fits"] is False
    assert said["memory"]["margin_bytes"] < 0
    assert said["memory"]["peak_bytes"] > said["memory"]["device_bytes"]


def test_an_illegal_layout_is_described_and_not_computed():
    said = report(plan(), [error("layout.tp", 3, "does not divide", 2)])
    assert said["fits"] is False
    assert said["traffic"] is None
    assert said["memory"]["peak_bytes"] is None
    assert said["memory"]["device_bytes"] == 80 * 10**9
    assert set(said["bubble"].values()) == {None}
    assert "Illegal" in render(said, 80)


@pytest.mark.parametrize(
    "given",
    [{"tp": 2, "dcp": 2}, {"model": "bloom-176b"}],
)
def test_what_is_not_built_yet_is_a_finding(given):
    said = answer(**given)
    assert any(f["level"] == "error" for f in said["findings"])
    assert said["fits"] is False
    render(said, 80)


def test_without_a_cluster_nobody_knows_whether_it_fits():
    job = read_job("plan", model="llama3.1-8b", ranks=4, overrides={"seq_len": 512})
    said = report(job, [])
    assert said["fits"] is None
    assert said["memory"]["device_bytes"] is None
    assert said["memory"]["peak_bytes"] > 0
    assert "Name a device" in render(said, 80)


def test_no_torch():
    code = "import sys, plait.report.build, plait.report.text; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------------
# The page


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "given",
    [
        {"tp": 8},
        {"gpus": "h100:1024", "tp": 8, "zero": 3},
        {"model": "llama3.1-405b", "gpus": "h100:16384", "tp": 8, "zero": 3, "recompute": "full"},
        {"gpus": "h100:1"},
        {"gpus": "h100:64", "tp": 4, "zero": 2, "dp_replicate": 4},
        {"tp": 2, "sequence_parallel": False},
    ],
)
def test_the_page_fits_its_width_and_has_no_colour_in_a_pipe(given, width):
    said = answer(**given)
    page = render(said, width)
    assert max(map(len, page.splitlines())) <= width
    assert "\x1b" not in page
    assert said["model"]["name"] in page
    for row in said["traffic"]:
        assert row["collective"] in page
    assert ("Fits." in page) == said["fits"]


def test_large_worlds_are_drawn_by_axis():
    page = render(answer(gpus="h100:1024", tp=8), 100)
    assert "tp        8    ranks 0-7" in page
    assert "stride 8" in page


def test_small_worlds_are_drawn_rank_by_rank():
    rows = [line.split() for line in render(answer(tp=4), 80).splitlines()]
    assert ["dp_shard", "3", "12", "13", "14", "15"] in rows


def test_a_dry_run_shows_measured_beside_predicted():
    said = answer(tp=8)
    memory = [dict(row) for row in said["memory"]["by_stage"]]
    memory[0]["total"] = memory[0]["total"] * 100 // 101
    said |= {
        "measured": {"traffic": said["traffic"], "memory": memory},
        "agree": False,
        "differences": ["stage 0: all-reduce over tp in loss (float32): predicted ..."],
    }
    page = render(said, 80)
    assert "+1.00%" in page
    assert "differs stage 0" in page
    assert "traffic agrees" not in page
    assert "traffic agrees" in render(said | {"agree": True, "differences": []}, 80)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0"),
        (8, "8 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (10**6, "977 KiB"),
        (9.996 * 2**20, "10.0 MiB"),
        (1023 * 2**20, "1023 MiB"),
        (80e9, "74.5 GiB"),
        (5 * 2**40, "5.00 TiB"),
        (5 * 2**50, "5120 TiB"),
    ],
)
def test_bytes_in_words(n, text):
    assert amount(n) == text


def test_counts_in_words():
    assert count(70_553_706_496) == "70.6 B"
    assert count(65_536) == "65,536"
