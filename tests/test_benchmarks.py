"""The benchmarks run; how fast they find anything is no test's business."""

import json
import subprocess
import sys
from pathlib import Path

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


def test_unknown_comparison_is_one_line_with_the_known_ones():
    command = [sys.executable, BENCHMARKS / "train.py", "--only", "nothing"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 2
    assert "one-256" in run.stderr
    assert "Traceback" not in run.stderr
