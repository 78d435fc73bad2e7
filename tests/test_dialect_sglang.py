"""SGLang's serve commands: read, checked, written.

Rules are those of its source, 0.5.23: arg_groups/parallel_hook.py, arg_groups/validation_hook.py
check_server_args, arg_groups/overrides.py _a2a_ep_size, runtime_context.py.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cli.main import main
from plait.dialects import sglang
from plait.spec import presets
from plait.spec.jobfile import draft
from serve_helpers import again, errors, job_of, read, same_layout

START = "python3 -m sglang.launch_server --model-path"


@pytest.fixture
def explain(capsys):
    def run(command, *flags):
        code = main(["explain", "--from", "sglang", str(command), "--json", *flags])
        return code, json.loads(capsys.readouterr().out)

    return run


def found(report):
    return {f["rule"]: f for f in report["findings"]}


@pytest.mark.parametrize(
    ("command", "layout"),
    [
        (f"{START} deepseek-ai/DeepSeek-V3 --tp 8", {"tp": 8, "ep": 1, "etp": 8}),
        (f"{START}=deepseek-ai/DeepSeek-V3 --tensor-parallel-size 8 --ep 8", {"ep": 8, "etp": 1}),
        (
            "sglang serve --model deepseek-ai/DeepSeek-V3 --tp-size 16 --attn-dp-size 8 --nnodes 2",
            {"tp": 2, "dp_shard": 8, "etp": 16},
        ),
        (
            f"{START} deepseek-ai/DeepSeek-V3 --tp 16 --dp 8 --enable-dp-attention --nnodes 2",
            {"tp": 2, "dp_shard": 8, "dp_replicate": 1},
        ),
        (f"{START} Qwen/Qwen3-8B --tp 2 --dp 4", {"tp": 2, "dp_replicate": 4, "dp_shard": 1}),
        (
            f"{START} deepseek-ai/DeepSeek-V3 --tp 16 --moe-a2a-backend deepep --attn-dp-size 16",
            {"tp": 1, "dp_shard": 16, "ep": 16, "etp": 1},
        ),
        (
            f"{START} Qwen/Qwen3-235B-A22B --tp 8 --attn-cp-size 2 --enable-prefill-cp"
            " --cp-strategy zigzag --ep 4",
            {"tp": 4, "cp": 2, "ep": 4, "etp": 2},
        ),
        (f"{START} deepseek-ai/DeepSeek-V3 --tp 8 --dcp-size 4 --pp-size 2", {"dcp": 4, "pp": 2}),
    ],
)
def test_commands(command, layout):
    launch = read(sglang, command)
    job = job_of(launch)
    assert {name: getattr(job.layout, name) for name in layout} == layout
    assert not launch.unknown()


def test_tp_counts_all_devices_of_a_stage():
    launch = read(sglang, f"{START} deepseek-ai/DeepSeek-V3 --tp 16 --attn-dp-size 4 --pp-size 2")
    assert launch.fields["ranks"] == 32
    assert launch.serving.dense_tp == 16
    assert launch.serving.embed_tp == 1


def test_the_old_spelling_is_rewritten(explain):
    words = f"{START} deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 --enable-dp-attention"
    _, report = explain(words)
    assert "--attn-dp-size 8" in found(report)["sglang-dp-attention"]["message"]


def test_python_and_containers():
    program = 'import sglang as sgl\nengine = sgl.Engine(model_path="Qwen/Qwen3-8B", tp_size=4)\n'
    assert read(sglang, program, ".py").fields["layout.tp"] == 4
    words = f"docker run --gpus all lmsysorg/sglang:latest {START} Qwen/Qwen3-8B --tp 2"
    assert read(sglang, words).fields["layout.tp"] == 2


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("deepseek-ai/DeepSeek-V3 --tp 8 --attn-dp-size 3", "sglang-tp-size"),
        ("deepseek-ai/DeepSeek-V3 --tp 8 --attn-dp-size 4 --attn-cp-size 3", "sglang-tp-size"),
        ("deepseek-ai/DeepSeek-V3 --tp 8 --attn-dp-size 2 --dp-size 2", "sglang-replicas"),
        ("deepseek-ai/DeepSeek-V3 --tp 8 --ep 3", "sglang-experts"),
        ("deepseek-ai/DeepSeek-V3 --tp 8 --ep 4 --moe-dp-size 4", "sglang-experts"),
        ("deepseek-ai/DeepSeek-V3 --tp 8 --enable-eplb", "sglang-eplb"),
        (
            "deepseek-ai/DeepSeek-V3 --tp 8 --ep 8 --ep-num-redundant-experts 9",
            "sglang-redundant-experts",
        ),
        (
            "deepseek-ai/DeepSeek-V3 --tp 8 --ep 8 --enable-eplb --ep-dispatch-algorithm static",
            "sglang-dispatch",
        ),
        ("deepseek-ai/DeepSeek-V3 --tp 8 --enable-prefill-cp", "sglang-prefill-cp"),
        (
            "deepseek-ai/DeepSeek-V3 --tp 8 --dcp-size 2 --enable-prefill-cp --cp-strategy zigzag",
            "sglang-dcp",
        ),
        ("Qwen/Qwen3-8B --tp 2 --dp-size 2 --nnodes 2", "sglang-nodes"),
        ("Qwen/Qwen3-8B --tp 4 --nnodes 3", "sglang-nodes"),
        ("Qwen/Qwen3-30B-A3B --tp 4 --moe-dense-tp-size 2", "sglang-experts"),
        ("Qwen/Qwen3-8B --tp 2 --pp-size 2 --speculative-algorithm EAGLE", "sglang-speculation"),
        ("Qwen/Qwen3-8B --enable-ep-moe", "sglang-lost-option"),
        ("Qwen/Qwen3-8B --pp 2", "sglang-ambiguous-option"),
        ("Qwen/Qwen3-8B --tp 3", "heads-divide-tp"),
        ("Qwen/Qwen3-30B-A3B --tp 4 --ep 4 --mem-fraction-static 1.2", "sglang-memory-fraction"),
    ],
)
def test_what_it_refuses(words, rule, explain):
    code, report = explain(f"{START} {words}")
    assert code == 1
    assert found(report)[rule]["level"] == "error"
    legal = report["source"]["legal"]
    assert legal
    code, report = explain(next(iter(legal.values())).removeprefix("#!/bin/sh\n"))
    assert code == 0, (legal, report["findings"])


def test_exchanges_take_all_of_tp(explain):
    _, report = explain(f"{START} deepseek-ai/DeepSeek-V3 --tp 8 --ep 4 --moe-a2a-backend deepep")
    assert report["layout"]["ep"] == 8
    assert "sglang-a2a-ep" in found(report)


def test_limits_are_of_the_engine(explain):
    words = "--tp 8 --attn-dp-size 8 --max-running-requests 256 --chunked-prefill-size 8192"
    _, report = explain(f"{START} deepseek-ai/DeepSeek-V3 {words}")
    requests, tokens, _ = report["serving"]["limits"]
    assert (requests["of_rank"], requests["in_all"]) == (32, 256)
    assert (tokens["of_rank"], tokens["in_all"]) == (1024, 8192)


def test_a_command_for_each_node(explain):
    words = f"{START} deepseek-ai/DeepSeek-V3 --tp 16"
    code, report = explain(words, "--gpus", "h200:16")
    assert code == 1
    assert "sglang-one-node" in found(report)
    legal = report["source"]["legal"]
    assert list(legal) == ["serve-node0.sh", "serve-node1.sh"]
    assert "--node-rank 1" in legal["serve-node1.sh"]
    assert '--dist-init-addr "$MASTER_ADDR:20000"' in legal["serve-node1.sh"]


@st.composite
def jobs(draw):
    """A job that SGLang can express."""
    name = draw(st.sampled_from(("qwen3-8b", "llama3.1-70b", "qwen3-30b-a3b", "deepseek-v3")))
    model = presets.model(name)
    tp, pp = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2)))
    dp = draw(st.sampled_from((1, 2, 4))) if model.moe else 1
    cp = draw(st.sampled_from((1, 1, 2)))
    whole = tp * cp * dp
    ep = draw(st.sampled_from([n for n in (1, 2, 4, 8) if whole % n == 0])) if model.moe else 1
    dcp = draw(st.sampled_from([n for n in (1, 2, 4) if tp % n == 0])) if model.mla else 1
    replicas = draw(st.sampled_from((1, 2))) if dp == 1 else 1
    layout = {"tp": tp, "pp": pp, "cp": cp, "dcp": dcp if cp == 1 else 1, "dp_shard": dp}
    layout |= {"dp_replicate": replicas, "ep": ep, "etp": whole // ep if model.moe else 1}
    layout["sequence_parallel"] = False
    fields = {f"layout.{k}": v for k, v in layout.items()}
    return draft("plan", None, fields | {"model": name, "ranks": whole * pp * replicas}).job


@given(jobs())
@settings(max_examples=60, deadline=None)
def test_written_and_read_again(job):
    launch, back = again(sglang, job)
    different = [d for d in same_layout(job, back) if d[0] != "dp_replicate"]
    assert not different
    assert back.layout.dp_replicate in (1, job.layout.dp_replicate)
    assert not errors(sglang, launch, back)


def test_choices_survive():
    words = (
        f"{START} Qwen/Qwen3-30B-A3B --tp 8 --attn-dp-size 4 --ep 8 --enable-dp-lm-head "
        "--max-running-requests 128 --context-length 8192 --kv-cache-dtype fp8_e4m3 "
        "--mem-fraction-static 0.8 --page-size 64 --moe-dense-tp-size 1 --moe-a2a-backend deepep"
    )
    launch = read(sglang, words)
    other, _ = again(sglang, job_of(launch), launch.serving)
    assert other.serving == launch.serving


@pytest.mark.parametrize(
    "text",
    [
        "",
        "python -m sglang.launch_server",
        f"{START} Qwen/Qwen3-8B --tp 0 --pp-size -1 --dp nan",
        f"{START} Qwen/Qwen3-8B --tp " + "9" * 300,
        f"{START} Qwen/Qwen3-8B --ep-num-redundant-experts {'9' * 30} --page-size 0",
        f"{START} $(curl evil) --tp 8",
        f"SGLANG_PP_LAYER_PARTITION=x {START} Qwen/Qwen3-8B --pp-size 2",
        f"{START} Qwen/Qwen3-8B --config none.yaml",
    ],
)
def test_hostile_commands_end_in_lines(text, capsys, monkeypatch):
    monkeypatch.setenv("PLAIT_DEBUG", "1")
    code = main(["explain", "--from", "sglang", f"{text} "])
    _, err = capsys.readouterr()
    assert code in (0, 1, 2)
    assert (code == 2) == bool(err)


@pytest.mark.parametrize(
    ("more", "world"), [("", 8), ("--dp-size 2 --enable-dp-attention", 16), ("--pp-size 2", 16)]
)
def test_a_degree_in_a_variable_is_answered_by_its_flag(more, world, capsys):
    text = f"{START} deepseek-ai/DeepSeek-V3 --tp-size $TP {more}"
    assert main(["explain", "--from", "sglang", text, "--json"]) == 2
    assert "say --tp" in capsys.readouterr().out
    assert main(["explain", "--from", "sglang", text, "--tp", "8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["world"], report["layout"]["tp"]) == (world, 8)


def test_names_of_earlier_versions_are_known_and_refused(capsys):
    text = f"{START} deepseek-ai/DeepSeek-V3 --tp 8 --nsa-prefill-backend tilelang"
    assert main(["explain", "--from", "sglang", text, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["source"]["unknown"] == []
    assert "--dsa-prefill-backend" in json.dumps(report["findings"])
