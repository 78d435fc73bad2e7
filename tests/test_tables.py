"""`plait tables`: published cells, closed forms, what the program does, and how it answers."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from math import isclose

import pytest

from plait.cli.arguments import FLAGS, job_parser, model_or_file, parse
from plait.cli.main import main
from plait.cli.tables import read
from plait.report.tables import table
from plait.report.tables_cost import PATHS, path_of, trials
from plait.report.tables_examples import EXAMPLES
from plait.report.tables_text import render
from plait.report.tables_vllm import cache_bytes, decode_context
from plait.spec import presets
from plait.spec.jobfile import draft_job
from plait.spec.layout import Layout
from plait.spec.model import Model

NAMES = ("comparison", "cost", "zero", "batch", "examples", "vllm")


def rows(*argv):
    question = read(argv)
    return table(question.name, question.given, question.base, question.option)["rows"]


def by(key, found):
    return {row[key]: row for row in found}


# ------------------------------------------------------------------------------------------
# ZeRO

#: ZeRO (1910.02054), Table 1: GB of a rank for stages 1, 2, 3, as printed.
PRINTED = {
    ("7.5B", 1): ("120", "120", "120"),
    ("7.5B", 4): ("52.5", "41.3", "30"),
    ("7.5B", 16): ("35.6", "21.6", "7.5"),
    ("7.5B", 64): ("31.4", "16.6", "1.88"),
    ("7.5B", 256): ("30.4", "15.4", "0.47"),
    ("7.5B", 1024): ("30.1", "15.1", "0.12"),
    ("128B", 1): ("2048", "2048", "2048"),
    ("128B", 4): ("896", "704", "512"),
    ("128B", 16): ("608", "368", "128"),
    ("128B", 64): ("536", "284", "32"),
    ("128B", 256): ("518", "263", "8"),
    ("128B", 1024): ("513", "257", "2"),
    ("1T", 1): ("16000", "16000", "16000"),
    ("1T", 4): ("7000", "5500", "4000"),
    ("1T", 16): ("4750", "2875", "1000"),
    ("1T", 64): ("4187", "2218", "250"),
    ("1T", 256): ("4046", "2054", "62.5"),
    ("1T", 1024): ("4011", "2013", "15.6"),
}


def test_every_cell_of_zeros_table():
    """Within one of the last printed digit: the paper rounds some cells and cuts others off."""
    cells = {(r["model"], r["dp"], r["stage"]): r["bytes"] / 1e9 for r in rows("zero")}
    assert len(cells) == 4 * len(PRINTED)
    for (model, dp), printed in PRINTED.items():
        assert cells[model, dp, 0] == pytest.approx(cells[model, 1, 3])
        for stage, text in enumerate(printed, 1):
            digit = 10.0 ** -len(text.partition(".")[2])
            assert abs(cells[model, dp, stage] - float(text)) < digit, (model, dp, stage)


def test_zero_of_a_model_and_of_what_this_program_holds():
    count = 8_030_261_248  # Llama 3.1 8B, as published
    found = by("stage", rows("zero", "--model", "llama3.1-8b", "--ranks", "64"))
    assert {s: r["bytes"] for s, r in found.items()} == {
        0: 16 * count,
        1: pytest.approx((4 + 12 / 64) * count),
        2: pytest.approx((2 + 14 / 64) * count),
        3: pytest.approx(16 / 64 * count),
    }
    ours = {0: 18, 1: 6 + 12 / 64, 2: 2 + 16 / 64, 3: 16 / 64}
    for stage, row in found.items():
        assert row["program_bytes"] == pytest.approx(ours[stage] * count, rel=1e-3)


@pytest.mark.parametrize(
    ("recipe", "total"), [("zero-fp16-adam", 16), ("megatron-bf16", 18), ("primus", 14)]
)
def test_recipes(recipe, total):
    found = rows("zero", "--recipe", recipe, "--ranks", "1")
    assert {r["bytes"] / r["parameters"] for r in found} == {total}


# ------------------------------------------------------------------------------------------
# Strategies

COST = by("strategy", rows("cost"))
P, N, M = 8_030_261_248, 8, 64  # parameters of Llama 3.1 8B; ranks; samples of a step


@pytest.mark.parametrize(
    ("strategy", "bytes"),
    [
        ("ddp", 18),
        ("zero-1", 6 + 12 / N),
        ("zero-2", 2 + 16 / N),
        ("zero-3", 16 / N),
        ("hsdp", 16 / (N / 2)),
        ("tp", 18 / N),
        ("tp-sp", 18 / N),
        ("cp-ring", 6 + 12 / N),
        ("ulysses", 6 + 12 / N),
    ],
)
def test_bytes_a_parameter(strategy, bytes):
    """Of bfloat16 weights, float32 gradients, masters and moments; norms are whole under TP."""
    assert COST[strategy]["bytes_per_parameter"] == pytest.approx(bytes, rel=2e-3)


def test_bytes_sent():
    """By the ring algorithm, of the closed forms that every text has."""
    share, width, tokens, layers = (N - 1) / N, 4096, 4096, 32
    stream = 2 * tokens * width
    sent = {name: row["sent_bytes"] for name, row in COST.items()}
    assert sent["ddp"] == pytest.approx(2 * share * 4 * P, rel=1e-3)
    assert sent["zero-1"] == pytest.approx(share * (4 + 2) * P, rel=1e-3)
    micro = M // N
    assert sent["zero-2"] == pytest.approx(share * (4 * micro + 2) * P, rel=1e-3)
    assert sent["zero-3"] == pytest.approx(share * (4 + 2 + 2) * micro * P, rel=1e-3)
    # A layer without sequence parallelism sends 8 rho of the stream, embedding and head 2 more.
    assert sent["tp"] == pytest.approx(M * share * stream * (8 * layers + 4), rel=3e-3)
    assert sent["pp"] == pytest.approx(2 * M * stream, rel=1e-3)
    assert sent["pp-interleaved"] == pytest.approx(4 * M * stream, rel=1e-3)


@pytest.mark.parametrize(
    ("strategy", "bubble"),
    [
        ("ddp", 0),
        ("pp", (N - 1) / M),  # 2104.04473 section 2.2.1
        ("pp-interleaved", (N - 1) / (2 * M)),  # section 2.2.2
        ("pp-zb-h1", (N - 1) / (3 * M)),  # 2401.10241 Table 2, F = I = W
    ],
)
def test_bubble_of_even_stages(strategy, bubble):
    found = COST[strategy]["bubble_even"]
    assert found["step_ideal"] == pytest.approx(bubble)
    assert found["step_total"] == pytest.approx(bubble / (1 + bubble))


def test_paths_add_up_and_all_is_there():
    for row in COST.values():
        assert row["legal"], row["why"]
        assert sum(row[f"{path}_bytes"] for path in PATHS) == row["sent_bytes"]
        assert 0 < row["state_bytes"] < row["peak_bytes"]
        assert 0 < row["activation_bytes"] < row["peak_bytes"]
    assert {COST[name]["model"] for name in ("ep", "etp")} == {"mixtral-8x7b"}


def test_a_strategy_that_the_rules_refuse_says_why():
    found = by("strategy", rows("cost", "--model", "tiny", "--ranks", "3"))
    assert not found["tp"]["legal"]
    assert "8 attention heads" in found["tp"]["why"]
    assert found["tp"]["state_bytes"] is None
    assert found["zero-3"]["legal"]
    whole = by("strategy", rows("comparison", "--model", "tiny", "--ranks", "3"))
    assert whole["tp"]["collectives"] is None
    assert whole["zero-3"]["collectives"]


def test_the_degree_is_a_fast_domain_and_the_rest_is_data_parallel():
    question = read(["cost", "--gpus", "h100:64"])
    jobs = {t.strategy.name: t.job for t in trials(question.given, question.base, 8)}
    assert (jobs["tp"].layout.tp, jobs["tp"].layout.dp) == (8, 8)
    assert (jobs["hsdp"].layout.dp_shard, jobs["hsdp"].layout.dp_replicate) == (8, 8)
    assert (jobs["zero-3"].layout.dp_shard, jobs["ep"].layout.edp) == (64, 8)
    assert {job.batch.global_ for job in jobs.values()} == {8 * 64}


def test_comparison_has_limits_in_numbers_and_no_empty_cell():
    found = by("strategy", rows("comparison", "--model", "mixtral-8x22b", "--seq-len", "8192"))
    for row in found.values():
        assert all(row[key] for key in ("split", "whole", "saves", "limit", "used"))
        assert row["frameworks"]["training"]
        assert bool(row["frameworks"]["serving"]) == (row["used"] == "both")
    assert "48 attention heads" in found["tp"]["limit"]
    assert "8 KV head" in found["tp"]["limit"]
    assert "56" in found["pp"]["limit"]
    assert "4096" in found["cp-ring"]["limit"]
    assert "48" in found["ulysses"]["limit"]
    assert found["ep"]["limit"] == "experts: 8"
    assert "16384" in found["etp"]["limit"]


def test_tensor_parallelism_has_two_all_reduces_a_layer():
    """2 forward and 2 backward (1909.08053 section 3); embedding and head make one more."""
    tp = by("strategy", rows("comparison"))["tp"]
    counts = {e["phase"]: e["count"] for e in tp["collectives"] if e["collective"] == "all-reduce"}
    assert counts["forward"] == counts["backward"] == M * (2 * 32 + 1)


LAYOUTS = [
    {"zero": 0},
    {"zero": 1},
    {"zero": 2},
    {"zero": 3},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": False},
    {"cp": 2, "cp_method": "all-gather"},
    {"cp": 2, "zero": 0},
    {"cp": 2, "ulysses": 2},
    {"ep": 2},
    {"etp": 2},
    {"model": "tiny-mla", "tp": 2},
    {"model": "tiny-mla", "tp": 2, "sequence_parallel": False},
    {"model": "tiny-moe", "tp": 2},
    {"model": "tiny-moe", "tp": 2, "sequence_parallel": False},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_hidden_is_what_the_program_does_not_wait_for(layout, monkeypatch):
    """Each collective of a dry step: whether it was issued to be waited for at once."""
    from plait.parallel.collectives import Axis
    from plait.trace.dryrun import measure

    waits = {}
    issue = Axis._issue

    def watched(axis, name, collective, wait, *args):
        waits.setdefault((axis.name, name, axis.scope.phase), set()).add(wait)
        return issue(axis, name, collective, wait, *args)

    monkeypatch.setattr(Axis, "_issue", watched)
    mixture = layout.keys() & {"ep", "etp"}
    given = {"model": "tiny-moe" if mixture else "tiny", "ranks": 4, "seq_len": 64}
    given |= {"accumulation": 2, "dtype": "float32"} | layout
    job, findings = draft_job("plan", None, given)
    assert not findings
    measure(job)
    said = {True: {"critical", "partly"}, False: {"hidden", "partly"}}
    assert waits
    for (axis, collective, phase), found in waits.items():
        path = path_of(job, axis, collective, phase)
        assert all(path in said[wait] for wait in found), (axis, collective, phase, found, path)
        if path == "partly":
            assert found == {True, False}, (axis, collective, phase)


# ------------------------------------------------------------------------------------------
# Batch


def test_batch_arithmetic():
    """Micro x dp x accumulation, and a larger micro batch idles and holds more."""
    found = rows("batch", "--global-batch", "64")
    assert [r["micro"] for r in found] == [1, 2, 4, 8, 16]
    for r in found:
        assert r["dp"] == 64 // (8 * 2)
        assert r["micro"] * r["dp"] * r["accumulation"] == r["global"] == 64
        assert r["tokens_per_step"] == 64 * 4096
    bubbles = [r["bubble"]["step_total"] for r in found]
    assert bubbles == sorted(bubbles)
    assert found[0]["peak_bytes"] < found[1]["peak_bytes"]


def test_batch_says_that_ep_does_not_divide_dp():
    question = read(["batch", "--model", "mixtral-8x7b", "--gpus", "h100:64", "--ep", "8"])
    answer = table(question.name, question.given, question.base)
    assert answer["rows"][0]["dp"] == 64
    assert any("do not divide dp" in note for note in answer["notes"])


def test_other_ranks_do_not_inherit_the_layout_of_the_default():
    found = rows("batch", "--model", "tiny", "--ranks", "4", "--global-batch", "8")
    assert [(r["micro"], r["dp"], r["accumulation"]) for r in found] == [(1, 4, 2), (2, 4, 1)]


def test_a_given_micro_batch_is_the_only_row():
    (row,) = rows("batch", "--micro-batch", "4", "--global-batch", "64")
    assert (row["micro"], row["accumulation"]) == (4, 4)


# ------------------------------------------------------------------------------------------
# Examples

FOUND = by("example", rows("examples"))


def test_layouts_in_print():
    assert {name for name, row in FOUND.items() if not row["legal"]} == {"megatron-flags"}
    assert "etp 8 x ep 8" in FOUND["megatron-flags"]["findings"][0]["line"]
    dense = {name: row["grids"]["dense"] for name, row in FOUND.items() if row["legal"]}
    expert = {name: row["grids"]["expert"] for name, row in FOUND.items() if row["legal"]}
    # By Megatron-LM's own arithmetic.
    assert dense["70b"] == {"tp": 8, "cp": 1, "dp_shard": 4, "dp_replicate": 1, "pp": 2}
    assert dense["671b"]["dp_shard"] == 8
    assert expert["671b"] == {"etp": 1, "ep": 8, "edp": 8, "pp": 4}
    assert dense["megatron-flags-etp-1"]["dp_shard"] == 2
    assert expert["megatron-flags-etp-1"]["edp"] == 4
    assert dense["gpt-1t"] == {"tp": 8, "cp": 1, "dp_shard": 1, "dp_replicate": 6, "pp": 64}
    assert expert["gshard-600b"] == {"etp": 1, "ep": 2048, "edp": 1, "pp": 1}
    assert {name: row["world"] for name, row in FOUND.items()} == {
        "7b-ddp": 8,
        "7b-fsdp": 8,
        "70b": 64,
        "671b": 256,
        "2d-fsdp-tp": 64,
        "megatron-flags": 128,
        "megatron-flags-etp-1": 128,
        "gpt-1t": 3072,
        "gshard-600b": 2048,
    }


def test_published_numbers_of_the_examples():
    assert FOUND["gpt-1t"]["parameters"] == pytest.approx(1008e9, rel=1e-3)
    assert FOUND["gshard-600b"]["parameters"] == pytest.approx(600e9, rel=0.05)
    # (p - 1) / m of ideal time, and a head that makes the last stage slower.
    assert FOUND["gpt-1t"]["bubble"]["step_ideal"] >= (64 - 1) / 512
    assert FOUND["7b-ddp"]["state_bytes"] == pytest.approx(18 * 6_738_415_616, rel=1e-3)
    for row in FOUND.values():
        if row["legal"]:
            batch, dense = row["batch"], row["grids"]["dense"]
            dp = dense["dp_shard"] * dense["dp_replicate"]
            assert batch["micro"] * dp * batch["accumulation"] == batch["global"]
            assert row["state_bytes"] + row["activation_bytes"] <= row["peak_bytes"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_commands_of_examples_ask_the_same(example):
    row = FOUND[example.name]
    program, command, *words = shlex.split(row["command"])
    assert (program, command) == ("plait", "explain")
    given, rest, findings = parse(words, job_parser("explain", "", ""), FLAGS)
    assert not findings
    given.pop("json")
    _, model, _ = model_or_file(rest)
    job, problems = draft_job("plan", None, given, model=model)
    assert bool(problems) != row["legal"]
    if row["legal"]:
        assert replace(job.layout, stages=None) == replace(Layout(**row["layout"]), stages=None)
        assert job.batch.global_ == row["batch"]["global"]


# ------------------------------------------------------------------------------------------
# Serving


@pytest.mark.parametrize(("tp", "kib"), [(1, 320), (2, 160), (4, 80), (8, 40), (16, 40)])
def test_cache_of_grouped_heads(tp, kib):
    """Llama 3 70B: a token's keys and values in bfloat16."""
    assert cache_bytes(presets.model("llama3-70b"), Layout(tp=tp)) == kib * 2**10


def test_cache_as_published():
    """4.5 GiB for 32,768 tokens of Qwen3-8B (Mooncake); 61 x 576 x 2 bytes of DeepSeek-V3."""
    assert cache_bytes(presets.model("qwen3-8b"), Layout()) * 32768 == 4.5 * 2**30
    deepseek = presets.model("deepseek-v3")
    assert cache_bytes(deepseek, Layout(tp=8)) == 70272
    assert cache_bytes(deepseek, Layout(tp=8, dcp=8)) == 70272 / 8


@pytest.mark.parametrize(("tp", "most"), [(2, 1), (4, 2), (6, 3), (8, 4), (12, 6)])
def test_decode_context_keeps_a_group_to_one_head(tp, most):
    """24 query heads, 2 KV heads: of tp 12 a group of 4 would hold two different heads."""
    model = Model.of("", layers=2, hidden=384, heads=24, vocab=64, kv_heads=2)
    found = decode_context(model, tp)
    assert found == most
    assert tp // 2 % found == 0


def test_vllm_copies_and_what_removes_them():
    found = by("strategy", rows("vllm"))
    tp, dcp = found["tensor parallel"], found["decode context parallel"]
    assert (tp["cache_copies"], dcp["cache_copies"]) == (8, 1)
    assert dcp["flag"] == "-tp 8 -dcp 8"
    assert tp["cache_bytes_per_token"] == 8 * dcp["cache_bytes_per_token"]
    # Whole attention on each rank, an eighth of the experts on both.
    assert found["data parallel"]["weight_bytes"] > tp["weight_bytes"]
    assert not found["ZeRO, FSDP, HSDP"]["supported"]
    assert not found["sequence parallel (norm regions)"]["supported"]


def test_vllm_weights_of_one_rank_are_all_of_them():
    for row in rows("vllm", "--model", "mixtral-8x7b", "--ranks", "1"):
        if row["weight_bytes"] is not None:
            assert row["weight_bytes"] == 2 * 46_702_792_704


def test_vllm_names_what_does_not_divide():
    found = by("strategy", rows("vllm", "--model", "llama3.1-8b", "--ranks", "6"))
    assert "32 attention heads" in found["tensor parallel"]["why"]
    assert found["tensor parallel"]["weight_bytes"] is None
    assert found["pipeline parallel"]["why"] is None
    assert not any("expert" in name for name in found)


# ------------------------------------------------------------------------------------------
# The command


@pytest.mark.parametrize("name", NAMES)
def test_json_and_text(name, capsys):
    assert main(["tables", name, "--json"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert (answer["table"], err) == (name, "")
    assert answer["rows"]
    assert len({tuple(row) for row in answer["rows"]}) == 1  # the same keys in each row
    text = render(answer, width=60)
    assert "…" not in text  # no number is cut off
    for row in answer["rows"]:
        title = row.get("title") or row.get("example") or row.get("strategy")
        assert title is None or title in text


def test_text_on_stdout(capsys):
    assert main(["tables", "zero"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert re.search(r"^7\.5B +64 +120 +31\.41 +16\.64 +1\.875$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("argv", "nearest"),
    [
        (["csot"], "cost"),
        (["zero", "--recipe", "megatron-bf61"], "megatron-bf16"),
        (["cost", "--ranks", "12", "--degree", "5"], 4),
        (["cost", "--model", "lama3.1-8b"], "llama3.1-8b"),
        (["batch", "--gpu", "h100:8"], "--gpus"),
    ],
)
def test_errors_are_one_line_with_the_nearest(argv, nearest, capsys):
    assert main(["tables", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert f"(nearest: {nearest})" in err


def test_all_errors_at_once(capsys):
    assert main(["tables", "vllm", "more", "--tp", "2", "--gpus", "h1000:8", "--json"]) == 2
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert {e["where"] for e in errors} == {"more", "--tp", "gpus"}


def test_no_name_is_an_error(capsys):
    assert main(["tables"]) == 2
    err = capsys.readouterr().err
    assert all(name in err for name in NAMES)


def test_it_needs_no_torch():
    code = (
        "import sys\nfrom plait.cli.main import main\n"
        f"for name in {NAMES[1:4]}: main(['tables', name, '--json'])\n"
        "heavy = {'torch', 'rich', 'numpy'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_model_by_its_sizes():
    flags = "--model.layers 4 --model.hidden 64 --model.heads 4 --model.vocab 100 --ranks 4"
    (first, *_) = rows("zero", *shlex.split(flags))
    assert isclose(first["bytes"], 16 * first["parameters"])
    assert rows("cost", *shlex.split(flags))[0]["model"] == "custom"


def test_a_table_asks_for_no_more_positions_than_the_model_has(capsys):
    assert main(["tables", "cost", "--model", "gpt2", "--gpus", "h100:2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"]
