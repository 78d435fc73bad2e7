"""`plait train` as a person runs it: real launches, real text, what the metrics file says."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

#: A model small enough that a launch costs more than its steps.
SMALL = (
    "--model.layers 2 --model.hidden 64 --model.ffn 96 --model.heads 4 --model.kv-heads 2 "
    "--model.head-dim 16 --seq-len 32 --global-batch 8 --train.warmup 2"
).split()


def plait(*args: str, cwd: Path, command: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    command = (*(command or (sys.executable, "-m", "plait.cli")), "train", *args)
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )


def curve(path: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of each line of a metrics file."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def same(a: list[tuple], b: list[tuple]) -> bool:
    return len(a) == len(b) and all(
        x[0] == y[0] and x[1:] == pytest.approx(y[1:], rel=1e-9) for x, y in zip(a, b, strict=True)
    )


def test_loss_falls_and_metrics_say_so(tmp_path):
    done = plait(*SMALL, "--steps", "30", "--metrics", "m.jsonl", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(30))
    assert all({"loss", "grad_norm", "tokens_per_second"} <= line.keys() for line in lines)
    assert lines[-1]["loss"] == result["loss"] < lines[0]["loss"] - 1.0
    assert len(result["memory"]) == len(result["traffic"]) == 4
    assert result["differences"] == []
    assert (tmp_path / result["checkpoint"] / "plait.json").is_file()


def test_the_curve_does_not_depend_on_layout_or_breaks(tmp_path):
    """One process straight through; four ranks that stop, and go on under another layout."""
    common = [*SMALL, "--dtype", "float64"]
    one = plait(*common, "--ranks", "1", "--steps", "6", "--metrics", "a.jsonl", cwd=tmp_path)
    assert one.returncode == 0, one.stderr
    first = ["--ranks", "4", "--tp", "2", "--zero", "3", "--accumulation", "2"]
    kept = ["--checkpoint.folder", "kept", "--checkpoint.every", "3"]
    # The whole job is known from the start, so that the learning rate is the same.
    four = plait(*common, *first, *kept, "--steps", "6", "--metrics", "b.jsonl", cwd=tmp_path)
    assert four.returncode == 0, four.stderr
    other = ["--tp", "1", "--ranks", "2", "--zero", "2", "--metrics", "c.jsonl"]
    (tmp_path / "c.jsonl").write_text("".join((tmp_path / "b.jsonl").read_text().splitlines(True)))
    more = plait("kept/step-00000003", *other, cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert same(curve(tmp_path / "b.jsonl"), curve(tmp_path / "a.jsonl"))
    assert same(curve(tmp_path / "c.jsonl"), curve(tmp_path / "a.jsonl"))


def test_a_mixture_goes_on_with_its_experts_elsewhere(tmp_path):
    """Two experts' ranks that stop after two steps; four, cut in two, that go on."""
    model = ["--model", "tiny-moe", "--model.moe.ffn", "32", "--model.moe.aux-loss", "0.01"]
    common = [*SMALL, *model, "--dtype", "float64", "--checkpoint.every", "2", "--json"]
    first = ["--ranks", "2", "--ep", "2", "--steps", "4", "--metrics", "a.jsonl"]
    two = plait(*common, *first, "--checkpoint.folder", "kept", cwd=tmp_path)
    assert two.returncode == 0, two.stderr
    assert "imbalance" in two.stderr
    then = ["--ranks", "4", "--tp", "2", "--ep", "2", "--etp", "2", "--metrics", "b.jsonl"]
    four = plait("kept/step-00000002", *then, "--checkpoint.folder", "more", "--json", cwd=tmp_path)
    assert four.returncode == 0, four.stderr
    for run in (two, four):
        said = json.loads(run.stdout)
        assert said["differences"] == []
        chosen = [(sum(row["sent"]), row["sent"] == row["received"]) for row in said["experts"]]
        assert len(set(chosen)) == 1
        assert chosen[0][1]
    whole, rest = curve(tmp_path / "a.jsonl"), curve(tmp_path / "b.jsonl")
    assert len(whole) == 4
    assert same(whole[2:], rest[-2:])
    lines = [json.loads(text) for text in (tmp_path / "a.jsonl").read_text().splitlines()]
    for line in lines:
        # Shares add up to the number of experts: 1 for each that is used evenly, and more.
        assert line["aux_loss"] >= 0.01 * 0.9
        assert 1 <= line["imbalance"] <= 8
        assert line["z_loss"] == 0
        assert "dropped" not in line


def test_the_ledger_is_shown_as_it_runs(tmp_path):
    """The report, then each step's ledger: whole while it changes (states are made in the first
    step), and in a line once it is the same."""
    flags = ["--explain", "--ranks", "4", "--tp", "2", "--zero", "3", "--steps", "4", "--json"]
    done = plait(*SMALL, *flags, "--dtype", "float32", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = done.stderr
    assert text.index("Memory of a rank") < text.index("sent by rank 0 in step 0")
    assert "held by rank 0 in step 1" in text
    assert "sent by rank 0 in step 2" not in text
    assert len(re.findall(r"step [23]: sent .* as before, as predicted; held", text)) == 2
    sent = [row for row in json.loads(done.stdout)["traffic"][0] if row["axis"] == "tp"]
    table = text[text.index("sent by rank 0 in step 1") :]
    for row in sent:
        pattern = rf"tp +{row['collective']} +{row['phase']} +{row['dtype']} +{row['count']} +(.+)"
        bytes_, predicted = re.split(r" {2,}", re.search(pattern, table)[1].strip())
        assert bytes_ == predicted


def test_documents_are_kept_apart_whatever_the_layout(tmp_path):
    """The loss is that of one process, and is not that without the mask; the ring says how even
    its work was."""
    rng = random.Random(0)
    (tmp_path / "texts").mkdir()
    for i in range(40):
        text = bytes(rng.randrange(97, 123) for _ in range(rng.choice((3, 20, 60, 200))))
        (tmp_path / "texts" / f"{i}.txt").write_bytes(text)
    common = [*SMALL, "--dtype", "float64", "--steps", "2", "--data.path", "texts"]
    masked = ["--data.document-mask", "true"]

    def run(name: str, *flags: str) -> list[tuple]:
        done = plait(*common, *flags, "--metrics", name, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["differences"] == []
        return curve(tmp_path / name)

    one = run("one.jsonl", "--ranks", "1", *masked)
    ring = run("ring.jsonl", "--ranks", "4", "--tp", "1", "--cp", "4", "--zero", "3", *masked)
    mix = ["--ranks", "4", "--tp", "1", "--cp", "4", "--ulysses", "2"]
    assert same(one, ring)
    assert same(one, run("mix.jsonl", *mix, "--recompute", "full", *masked))
    assert not same(one, run("joined.jsonl", "--ranks", "1"))
    for line in map(json.loads, (tmp_path / "ring.jsonl").read_text().splitlines()):
        assert 1 <= line["attention_imbalance"] < 1.5


def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    wild = ["--train.learning-rate", "1e30", "--train.clip", "0", "--steps", "20"]
    done = plait(*SMALL, *wild, "--ranks", "2", "--metrics", "m.jsonl", cwd=tmp_path)
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if "nan" in line or "inf" in line]
    assert len(told) == 1
    assert told[0].startswith("step ")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("runs/*")), "nothing is left of a run without a checkpoint"
    for line in (tmp_path / "m.jsonl").read_text().splitlines():
        json.loads(line)


def test_float16_skips_steps_that_overflow(tmp_path):
    half = ["--dtype", "float16", "--train.loss-scale", "1e9", "--steps", "16"]
    done = plait(*SMALL, *half, "--ranks", "2", "--metrics", "m.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    skipped = [line["skipped"] for line in lines]
    assert skipped[0], "a loss of 5 times 1e9 must overflow float16"
    assert not skipped[-1]
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_torchrun_is_joined(tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    command = (*torchrun, "-m", "plait.cli")
    done = plait(*SMALL, "--tp", "2", "--steps", "2", "--json", cwd=tmp_path, command=command)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2


def test_nothing_to_do_is_said(tmp_path):
    done = plait(*SMALL, "--ranks", "1", "--steps", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = plait("runs/tiny", cwd=tmp_path)
    assert again.returncode == 2
    assert "has done 1 steps already" in again.stderr


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--checkpoint.folder", "m.txt/x"], "checkpoints cannot go to m.txt/x"),
        (["--data.path", "nope.txt"], "nope.txt does not exist"),
        (["--data.path", "empty.txt"], "empty.txt is empty"),
        (["--metrics", "m.txt/x"], "m.txt/x cannot be written"),
        (["--checkpoint.resume", "m.txt"], "no complete checkpoint"),
        (["--ranks", "6"], "global batch 8 is no multiple of dp 6"),
    ],
)
def test_a_wrong_question_is_one_line_and_leaves_nothing(flags, line, tmp_path):
    (tmp_path / "m.txt").write_text("some text")
    (tmp_path / "empty.txt").write_text("")
    done = plait(*SMALL, *flags, cwd=tmp_path)
    assert done.returncode == 2
    told = [told for told in done.stderr.splitlines() if not told.startswith("4 ranks on")]
    assert len(told) == 1, done.stderr
    assert line in told[0]
    assert sorted(p.name for p in tmp_path.rglob("*") if p.name != "runs") == ["empty.txt", "m.txt"]
