"""What a serving layout holds and sends, against numbers that were printed elsewhere; and the rules
that break."""

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

from plait.cli.main import main
from plait.cost.serving import Serving, limits, on, on_devices, stage_layers
from plait.cost.serving_memory import (
    kv_copies,
    kv_heads,
    pool_bytes,
    request_bytes,
    stage_weights,
    token_bytes,
    tokens_that_fit,
)
from plait.cost.serving_traffic import collectives
from plait.rules.serving import check
from plait.spec import presets
from plait.spec.jobfile import draft
from plait.spec.layout import Layout


def vllm(choices=None, **degrees):
    return on(Serving("vllm", **(choices or {})), Layout(**degrees))


@pytest.fixture
def explain(capsys):
    def run(name, command, *flags):
        code = main(["explain", "--from", name, command, "--json", *flags])
        return code, json.loads(capsys.readouterr().out)

    return run


def findings(model, serving, ranks, **layout):
    made = draft("plan", None, {"model": model, "ranks": ranks} | layout)
    return {f.rule: f for f in check(made.job, serving)}


# ------------------------------------------------------------------------------------------
# The cache


def test_latents_of_deepseek_are_on_every_rank_and_dcp_shares_them():
    """61 layers x (512 + 64) x 2 bytes; TensorRT-LLM's third blog has "about 200 MB" of 3,072
    tokens."""
    model = presets.model("deepseek-v3")
    assert token_bytes(model, vllm(tp=8)) == [70_272]
    assert token_bytes(model, vllm(tp=8, dcp=8)) == [8_784]
    assert kv_copies(model, vllm(tp=8)) == 8
    assert kv_copies(model, vllm(tp=8, dcp=8)) == 1
    assert request_bytes(model, vllm(tp=8), 3072) == [3072 * 70_272]


@pytest.mark.parametrize(
    ("tp", "kib", "heads", "copies"),
    [(1, 320, 8, 1), (2, 160, 4, 1), (4, 80, 2, 1), (8, 40, 1, 1), (16, 40, 1, 2)],
)
def test_kv_heads_divide_down_to_one(tp, kib, heads, copies):
    model = presets.model("llama3-70b")
    serving = vllm(tp=tp)
    assert token_bytes(model, serving) == [kib * 1024]
    assert (kv_heads(model, serving), kv_copies(model, serving)) == (heads, copies)


@pytest.mark.parametrize(
    ("prompt", "mib"),
    [(256, 38.25), (512, 74.25), (1024, 146.25), (8192, 1154.25), (16384, 2306.25)],
)
def test_what_a_prompt_transfers(prompt, mib):
    """Mooncake's table of Qwen3-8B (38 MB, 74 MB, 146 MB, 1.13 GB, 2.25 GB): the prompt and one
    block more."""
    model = presets.model("qwen3-8b")
    assert sum(request_bytes(model, vllm(), prompt + 16)) == mib * 2**20


def test_a_long_prompt_of_qwen3():
    assert sum(request_bytes(presets.model("qwen3-8b"), vllm(), 32768)) == 4.5 * 2**30


def test_stages_keep_their_own_layers_and_prefill_context_keeps_all():
    model = presets.model("llama3-70b")
    assert token_bytes(model, vllm(tp=8, pp=2)) == [20 * 1024, 20 * 1024]
    assert token_bytes(model, vllm(tp=8, cp=2)) == token_bytes(model, vllm(tp=8))
    assert kv_copies(model, vllm(tp=8, cp=2)) == 2
    assert kv_copies(model, vllm(tp=4, cp=2, dcp=2)) == 1


def test_sglang_cuts_kv_heads_over_tp_by_dcp():
    """configs/model_config.py get_num_kv_heads: max(1, G // (t / c))."""
    model = presets.model("llama3-70b")
    serving = on(Serving("sglang"), Layout(tp=8, dcp=2))
    assert kv_heads(model, serving) == 2
    assert token_bytes(model, serving) == [40 * 1024]
    assert kv_copies(model, serving) == 1


def test_windows_hold_no_more_than_they_see():
    model = presets.model("gpt-oss-20b")  # every other layer sees 128 positions
    each = 2 * model.kv_heads * model.head_dim * 2
    full, windowed = 12, 12
    needed = request_bytes(model, vllm(), 4096)
    assert needed == [each * (full * 4096 + windowed * 128)]


def test_quantised_caches_are_smaller():
    model = presets.model("llama3-70b")
    assert token_bytes(model, vllm({"kv_dtype": "fp8"}, tp=8)) == [20 * 1024]


# ------------------------------------------------------------------------------------------
# Weights


def test_weights_of_one_rank_are_the_model():
    model = presets.model("llama3.1-8b")
    whole = sum(stage_weights(model, vllm())[0].values())
    assert whole == 2 * 8_030_261_248


def test_deepseek_is_as_large_as_its_checkpoints():
    """TensorRT-LLM's third blog: about 640 GB in FP8 (of 2^30) and 400 GB in FP4."""
    model = presets.model("deepseek-v3")
    fp8 = sum(stage_weights(model, vllm({"weights": "fp8-block"}))[0].values())
    fp4 = sum(stage_weights(model, vllm({"weights": "nvfp4-experts"}))[0].values())
    assert fp8 / 2**30 == pytest.approx(640, rel=0.03)
    assert fp4 / 1e9 == pytest.approx(400, rel=0.01)


def test_what_attention_dp_copies():
    model = presets.model("deepseek-v3")
    whole = stage_weights(model, vllm())[0]
    spread = stage_weights(model, vllm(dp_shard=8, ep=8))[0]
    assert spread["experts"] == whole["experts"] / 8
    for copied in ("attention", "embedding", "head", "norms", "router", "mlp", "shared experts"):
        assert spread[copied] == whole[copied]


def test_latent_down_projections_are_copied():
    model = presets.model("deepseek-v3")
    mla = model.mla
    one, eight = (stage_weights(model, vllm(tp=t))[0]["attention"] for t in (1, 8))
    down = 61 * 2 * ((mla.q_rank + mla.kv_rank + mla.rope_dim) * model.hidden
                     + mla.q_rank + mla.kv_rank)  # fmt: skip
    assert eight - down == (one - down) / 8


def test_redundant_experts_take_room():
    model = presets.model("deepseek-v3")
    plain = stage_weights(model, vllm(dp_shard=8, ep=8))[0]["experts"]
    more = stage_weights(model, vllm({"redundant": 32}, dp_shard=8, ep=8))[0]["experts"]
    assert more * 256 == plain * 288


def test_experts_are_cut_without_expert_parallelism():
    model = presets.model("qwen3-30b-a3b")
    whole = stage_weights(model, vllm())[0]["experts"]
    assert stage_weights(model, vllm(tp=2, dp_shard=2, etp=4))[0]["experts"] == whole / 4


def test_the_last_stage_of_a_tied_model_has_the_table_too():
    model = presets.model("qwen3-0.6b")
    first, last = stage_weights(model, vllm(pp=2))
    assert first["embedding"] == 2 * model.vocab * model.hidden
    assert last["head"] > first["embedding"]


@pytest.mark.parametrize(
    ("engine", "pp", "layers"),
    [
        # vLLM distributed/utils.py get_pp_indices: backwards from the last but one.
        ("vllm", 2, (31, 30)),
        ("vllm", 4, (15, 15, 16, 15)),
        # SGLang distributed/utils.py get_pp_indices: the last ones.
        ("sglang", 4, (15, 15, 15, 16)),
        # TensorRT-LLM mapping.py pp_layers: torch.tensor_split, the first ones.
        ("trtllm", 4, (16, 15, 15, 15)),
    ],
)
def test_layers_that_do_not_divide(engine, pp, layers):
    model = presets.model("deepseek-v3")
    assert stage_layers(on(Serving(engine), Layout(pp=pp)), model) == layers


# ------------------------------------------------------------------------------------------
# What fits, limits, collectives


def test_tokens_that_fit_are_whole_blocks_of_what_is_left():
    model, cluster = presets.model("llama3-70b"), presets.cluster("h100:8")
    serving = on_devices(vllm(tp=8), cluster)
    (pool,) = pool_bytes(model, serving, cluster.memory)
    (tokens,) = tokens_that_fit(model, serving, [pool], 8192)
    assert tokens % 16 == 0
    assert tokens * 40 * 1024 <= pool < (tokens + 16) * 40 * 1024
    shared = on_devices(vllm({"block": 64}, tp=16, dcp=2), cluster)
    (tokens,) = tokens_that_fit(model, shared, [pool], 8192)
    assert tokens % 128 == 0


def test_what_limits_count():
    two = on(Serving("vllm", max_requests=256), Layout(dp_shard=8, ep=8))
    assert (limits(two)[0].of_rank, limits(two)[0].in_all) == (256, 2048)
    shared = on(Serving("sglang", max_requests=256), Layout(dp_shard=8, ep=8))
    assert (limits(shared)[0].of_rank, limits(shared)[0].in_all) == (32, 256)
    each = on(Serving("trtllm", max_requests=128), Layout(dp_shard=8, ep=8))
    assert (limits(each)[0].of_rank, limits(each)[0].in_all) == (128, 1024)


def test_collectives_of_a_dense_layer():
    model, cluster = presets.model("llama3-70b"), presets.cluster("h100:16")
    sent = collectives(model, vllm(tp=8, pp=2), cluster)
    stream = 8192 * 2
    layer = [c for c in sent if c.layer == "every layer"]
    assert [(c.collective, c.size, c.bytes_per_token) for c in layer] == [
        ("all-reduce", 8, stream)
    ] * 2
    assert all(c.inter_node is False for c in layer)
    (send,) = [c for c in sent if c.collective == "send"]
    assert (send.bytes_per_token, send.ranks, send.inter_node) == (2 * stream, (0, 8), True)


def test_decode_context_sends_three_messages_or_two():
    model = presets.model("deepseek-v3")
    gathered = [c for c in collectives(model, vllm(tp=8, dcp=8)) if c.phase == "decode"]
    assert [c.collective for c in gathered] == ["all-gather", "all-gather", "reduce-scatter"]
    heads, width = 128, 576
    assert gathered[0].bytes_per_token == heads * width * 2
    exchanged = collectives(model, vllm({"kv_exchange": "a2a"}, tp=8, dcp=8))
    assert [c.collective for c in exchanged if c.phase == "decode"] == ["all-gather", "all-to-all"]


def test_experts_of_data_parallel_attention():
    model = presets.model("deepseek-v3")
    stream = 7168 * 2
    gathered = collectives(model, vllm(dp_shard=8, ep=8))
    assert [(c.collective, c.bytes_per_token) for c in gathered if c.layer == "mixture layer"] == [
        ("all-gather", 8 * stream),
        ("reduce-scatter", 8 * stream),
    ]
    sent = collectives(model, vllm({"backend": "deepep_low_latency"}, dp_shard=8, ep=8))
    assert [(c.collective, c.bytes_per_token) for c in sent if c.layer == "mixture layer"] == [
        ("all-to-all", 8 * stream)
    ] * 2  # eight experts of a token


def test_ranks_of_vllm_have_stages_inside_of_data_parallelism():
    grid = vllm(tp=2, pp=2, dp_shard=2).grid()
    assert grid.group(0, "pp") == (0, 2)
    assert grid.group(0, "dp") == (0, 4)
    other = on(Serving("sglang"), Layout(tp=2, pp=2, dp_shard=2)).grid()
    assert other.group(0, "dp") == (0, 2)
    assert other.group(0, "pp") == (0, 4)


# ------------------------------------------------------------------------------------------
# Rules


@pytest.mark.parametrize(
    ("tp", "dcp", "breaks"),
    [(12, 4, True), (6, 2, True), (12, 2, False), (12, 3, False), (12, 6, False), (8, 4, False)],
)
def test_the_rule_that_vllm_does_not_check(tp, dcp, breaks):
    """H = 24 and G = 2, accepted by vLLM's own config object; (tp / G) % dcp must be 0."""
    sizes = {"layers": 2, "hidden": 768, "heads": 24, "kv_heads": 2, "ffn": 3072, "vocab": 1536}
    fields = {f"model.{k}": v for k, v in sizes.items()} | {"model.head_dim": 32, "ranks": tp}
    made = draft("plan", None, fields | {"layout.tp": tp, "layout.dcp": dcp})
    found = {f.rule: f for f in check(made.job, vllm(tp=tp, dcp=dcp))}
    assert ("dcp-splits-kv-heads" in found) is breaks
    if breaks:
        finding = found["dcp-splits-kv-heads"]
        assert finding.level == "error"
        assert (tp // 2) % finding.suggest["layout.dcp"] == 0


def test_blocks_of_scales_must_be_whole():
    """18432 / 32 = 576 is no multiple of 128 (DeepSeek-V3's dense layers)."""
    fields = {"model": "deepseek-v3", "ranks": 32, "layout.tp": 32, "layout.ep": 32}
    serving = vllm({"weights": "fp8-block"}, tp=32, ep=32)
    found = check(draft("plan", None, fields).job, serving)
    wrong = [f for f in found if f.rule == "quantisation-blocks"]
    assert any("18432" in f.message and "576" in f.message for f in wrong)
    assert {f.suggest["layout.tp"] for f in wrong} == {16}


def test_copies_of_the_cache_are_named_with_what_removes_them():
    found = findings("deepseek-v3", vllm(tp=8, etp=8), 8, **{"layout.tp": 8, "layout.etp": 8})
    assert "8 times" in found["kv-cache-copied"].message
    assert found["kv-cache-copied"].suggest == {"layout.dcp": 8}


def test_fewer_requests_than_stages_leave_stages_idle():
    found = findings("llama3-70b", vllm({"max_requests": 2}, pp=4), 4, **{"layout.pp": 4})[
        "stages-idle"
    ]
    assert found.level == "warning"
    assert found.suggest == {"layout.pp": 2}


ROOT = Path(__file__).parent.parent
_ROW = re.compile(r"^\| `([\w-]+)` \| (\w+) \| [^|]+ \| `([^`]+)` \| `([^`]+)` \|$", re.M)
ROWS = _ROW.findall((ROOT / "docs/serving.md").read_text("utf-8"))


@pytest.mark.parametrize(("rule", "level", "speaks", "silent"), ROWS)
def test_a_rule_speaks_and_is_silent(rule, level, speaks, silent, capsys):
    levels = []
    for command in (speaks, silent):
        assert main(["explain", *shlex.split(command), "--json"]) in (0, 1)
        report = json.loads(capsys.readouterr().out)
        levels.append([f["level"] for f in report["findings"] if f["rule"] == rule])
    assert level in levels[0]
    assert not levels[1]


def test_every_rule_of_serving_has_a_row():
    tree = ast.parse((ROOT / "src/plait/rules/serving.py").read_text("utf-8"))
    words = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    rules = {w for w in words if isinstance(w, str) and re.fullmatch(r"[a-z]+(-[a-z]+)+", w)}
    assert {row[0] for row in ROWS} - {"stages"} == rules


# ------------------------------------------------------------------------------------------
# The REPORT


def test_the_report_of_deepseek(explain):
    code, report = explain("vllm", "vllm serve deepseek-ai/DeepSeek-R1 -tp 8", "--gpus", "h200:8")
    served = report["serving"]
    assert code == 0
    assert report["fits"] is True
    assert (served["kv_heads"], served["kv_bytes_per_token"], served["kv_copies"]) == (1, 70272, 8)
    assert served["tokens"] > 0
    assert report["traffic"] is None
    assert {row["stage"] for row in report["memory"]["by_stage"]} == {0}
    rules = {f["rule"] for f in report["findings"]}
    assert "kv-cache-copied" in rules
    assert not rules & {"zero-3-over-slow-links", "batch-product", "not-built"}


def test_weights_that_do_not_fit(explain):
    code, report = explain("vllm", "vllm serve deepseek-ai/DeepSeek-V3 -tp 8", "--gpus", "h100:8")
    assert code == 1
    assert report["fits"] is False
    assert "weights-do-not-fit" in {f["rule"] for f in report["findings"]}


def test_without_a_device_nothing_fits_or_does_not(explain):
    code, report = explain("vllm", "vllm serve Qwen/Qwen3-8B")
    assert (code, report["fits"], report["serving"]["tokens"]) == (0, None, None)
    assert report["serving"]["weight_bytes"] > 0


@pytest.mark.parametrize("html", [True, False])
@pytest.mark.parametrize(
    "command",
    [
        "vllm serve deepseek-ai/DeepSeek-R1 -tp 8 -dcp 8",
        "vllm serve Qwen/Qwen3-30B-A3B -tp 2 -pp 2 -dp 2",
        "vllm serve Qwen/Qwen3-8B -tp 3",
        "vllm serve Qwen/Qwen3-8B -tp 16 -pp 5",
    ],
)
def test_pages_of_serving(command, html, tmp_path, capsys):
    more = ["--html", str(tmp_path / "page.html")] if html else []
    assert main(["explain", "--from", "vllm", command, "--gpus", "h200:8", *more]) in (0, 1)
    text = capsys.readouterr().out
    assert "Serving" in text
    assert "Limits" in text
    if html:
        page = (tmp_path / "page.html").read_text("utf-8")
        assert "--max-num-seqs" in page


def test_a_page_of_degrees_that_do_not_multiply(tmp_path, capsys):
    page = tmp_path / "page.html"
    words = "explain qwen3-0.6b --gpus h100:48 --tp 24 --cp 16 --html".split()
    assert main([*words, str(page)]) == 1
    assert "Illegal" in page.read_text("utf-8")


def test_a_dry_run_is_of_training(capsys):
    command = "vllm serve Qwen/Qwen3-0.6B -tp 2"
    assert main(["dryrun", "--from", "vllm", command]) == 2
    assert "plait explain" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize(
    ("source", "command"),
    [
        ("vllm", "vllm serve Qwen/Qwen3-30B-A3B -tp 2 -dp 2 -ep --max-num-seqs 64"),
        ("sglang", "sglang serve --model Qwen/Qwen3-8B --tp 4 --max-running-requests 64"),
        ("trtllm", "trtllm-serve deepseek-ai/DeepSeek-R1 --tp_size 8 --max_batch_size 64"),
    ],
)
def test_from_one_engine_to_another(source, command, target, capsys):
    assert main(["convert", "--from", source, "--to", target, command, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    text = answer["files"]["serve.sh"].removeprefix("#!/bin/sh\n")
    assert main(["explain", "--from", target, text, "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    before = answer["report"]
    assert after["world"] == before["world"]
    assert after["model"] == before["model"]
    assert after["serving"]["limits"][0]["in_all"] in (64, 128, 256)
