"""The benchmarks run; how fast they find anything is no test's business."""

import json
import subprocess
import sys
from pathlib import Path

from plait.spec.schedule import SCHEDULES

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_every_comparison_runs_and_says_its_numbers():
    command = [sys.executable, BENCHMARKS / "train.py", "--quick", "--pairs", "1", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    results = json.loads(run.stdout)["results"]
    assert {r["name"].partition("-")[0] for r in results} == {"one", "dp", "block", "tp", "zero3"}
    for r in results:
        assert r["low"] <= r["ratio"] <= r["high"]
        assert min(r["ours_tokens_s"], r["theirs_tokens_s"], r["ours_mib"], r["theirs_mib"]) > 0


def quick(script: str, *arguments: str) -> list[dict]:
    command = [sys.executable, BENCHMARKS / script, "--quick", "--json", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)["results"]


def test_pipelines_beside_torchs_give_times_and_memory_of_both():
    results = quick("pipeline.py", "--pairs", "2", "--only", "zb")
    assert [r["name"] for r in results] == ["zb-h1-2", "zbv-2"]
    for r in results:
        assert r["low"] <= r["ratio"] <= r["high"]
        assert min(r["ours_us"], r["theirs_us"], r["ours_mib"], r["theirs_mib"]) > 0


def test_mixtures_give_times_of_both_sides():
    results = quick("moe.py", "--pairs", "2")
    assert {r["name"].partition("-")[0] for r in results} == {"grouped", "ep", "etp"}
    for r in results:
        assert r["low"] <= r["ratio"] <= r["high"]
        assert min(r["ours_tokens_s"], r["theirs_tokens_s"]) > 0


def test_every_schedule_runs_in_real_time_and_never_faster_than_simulated():
    results = quick("timeline.py", "--repeats", "1")
    assert {r["name"] for r in results} == {
        f"{name}-{times}" for name in SCHEDULES for times in ("even", "uneven", "slow")
    }
    for r in results:
        # Sleeping takes at least the time asked for; sums of floats differ in their last digits.
        assert r["ratio"] > 1 - 1e-9
        assert r["replayed"] > 1 - 1e-9


def test_unknown_comparison_is_one_line_with_the_known_ones():
    command = [sys.executable, BENCHMARKS / "train.py", "--only", "nothing"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 2
    assert "one-256" in run.stderr
    assert "Traceback" not in run.stderr
