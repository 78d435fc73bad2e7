"""vLLM's serve commands: read, checked, written.

Rules are those of its source, 0.33.0: config/parallel.py, config/model.py
verify_with_parallel_config, engine/arg_utils.py create_engine_config, config/compilation.py.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cli.main import main
from plait.dialects import vllm
from plait.dialects.launch import Told
from plait.dialects.source import read_file
from plait.spec import presets
from plait.spec.jobfile import draft
from serve_helpers import again, errors, job_of, read, same_layout

DENSE = {"qwen3-8b": (1, 2, 4, 8), "llama3.1-70b": (1, 2, 4, 8, 16), "qwen2.5-7b": (1, 2, 4)}
MIXED = {"qwen3-30b-a3b": (1, 2, 4), "deepseek-v3": (1, 2, 4, 8), "mixtral-8x7b": (1, 2, 4)}


@pytest.fixture
def explain(capsys):
    def run(command, *flags):
        code = main(["explain", "--from", "vllm", str(command), "--json", *flags])
        return code, json.loads(capsys.readouterr().out)

    return run


def found(report):
    return {f["rule"]: f for f in report["findings"]}


# ------------------------------------------------------------------------------------------
# Reading


@pytest.mark.parametrize(
    ("command", "model", "layout"),
    [
        ("vllm serve Qwen/Qwen3-8B -tp 2", "qwen3-8b", {"tp": 2}),
        ("vllm serve Qwen/Qwen3-8B -tp=2 -pp=2", "qwen3-8b", {"tp": 2, "pp": 2}),
        ("vllm serve --tensor_parallel_size 4 Qwen/Qwen3-8B", "qwen3-8b", {"tp": 4}),
        ("vllm serve Qwen/Qwen3-8B --tensor-par 4", "qwen3-8b", {"tp": 4}),
        ("vllm serve --model Qwen/Qwen3-8B --tensor-parallel-size=2", "qwen3-8b", {"tp": 2}),
        (
            "python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-8B -dp 4",
            "qwen3-8b",
            {"dp_replicate": 4, "dp_shard": 1},
        ),
        (
            "vllm serve Qwen/Qwen3-30B-A3B -dp 8 --enable-expert-parallel",
            "qwen3-30b-a3b",
            {"dp_shard": 8, "ep": 8, "etp": 1},
        ),
        ("vllm serve Qwen/Qwen3-30B-A3B -tp 2 -dp 2", "qwen3-30b-a3b", {"ep": 1, "etp": 4}),
        (
            "vllm serve deepseek-ai/DeepSeek-R1 -tp 8 -dcp 8 -ep",
            "deepseek-v3",
            {"tp": 8, "dcp": 8, "ep": 8},
        ),
        (
            "vllm serve deepseek-ai/DeepSeek-V3 -tp 4 -pcp 2 -dcp 8 -ep"
            " --no-enable-expert-parallel",
            "deepseek-v3",
            {"tp": 4, "cp": 2, "dcp": 8, "etp": 8},
        ),
        (
            "docker run --gpus all -e A=1 -p 80:80 --ipc=host vllm/vllm-openai:latest"
            " --model Qwen/Qwen3-8B --tensor-parallel-size 2",
            "qwen3-8b",
            {"tp": 2},
        ),
        (
            'ssh node1 "cd /x && CUDA_VISIBLE_DEVICES=0,1 nohup vllm serve Qwen/Qwen3-8B -tp 2 &"',
            "qwen3-8b",
            {"tp": 2},
        ),
        ("srun -N 2 uv run vllm serve Qwen/Qwen3-8B -tp 2 -pp 2", "qwen3-8b", {"pp": 2}),
    ],
)
def test_commands(command, model, layout):
    launch = read(vllm, command)
    job = job_of(launch)
    assert job.model.name == model
    assert {name: getattr(job.layout, name) for name in layout} == layout
    assert not launch.unknown()


def test_the_world_is_tp_pp_pcp_and_dp():
    assert (
        read(vllm, "vllm serve Qwen/Qwen3-30B-A3B -tp 2 -pp 3 -pcp 2 -dp 4").fields["ranks"] == 48
    )


def test_a_script_with_variables_and_a_partition():
    text = """\
MODEL=deepseek-ai/DeepSeek-V3
GPUS=8
export VLLM_PP_LAYER_PARTITION=30,31
args=(--tensor-parallel-size $GPUS --max-model-len 32K)
vllm serve $MODEL "${args[@]}" --pipeline-parallel-size 2 \\
  --distributed-executor-backend ray --gpu-memory-utilization 0.85
"""
    launch = read(vllm, text, ".sh")
    assert launch.fields["layout.stages"] == (30, 31)
    assert launch.fields["train.seq_len"] == 32768
    assert launch.serving.fraction == 0.85
    assert launch.environment == {"VLLM_PP_LAYER_PARTITION": "30,31"}


@pytest.mark.parametrize(
    ("said", "tokens"), [("32k", 32000), ("32K", 32768), ("1.5k", 1500), ("4096", 4096)]
)
def test_numbers_with_units(said, tokens):
    launch = read(vllm, f"vllm serve Qwen/Qwen3-8B --max-model-len {said}")
    assert launch.fields["train.seq_len"] == tokens


def test_a_file_of_options_is_weaker_than_flags(tmp_path):
    (tmp_path / "options.yaml").write_text(
        "model: Qwen/Qwen3-8B\ntensor_parallel_size: 2\npipeline-parallel-size: 2\n"
    )
    script = tmp_path / "run.sh"
    script.write_text("vllm serve --config options.yaml -tp 4\n")
    launch = vllm.read(read_file(script), Told())
    assert (launch.fields["model"], launch.fields["layout.tp"]) == ("qwen3-8b", 4)
    assert launch.fields["layout.pp"] == 2


def test_containers_and_python():
    manifest = """\
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      containers:
      - image: vllm/vllm-openai:v0.33.0
        command: ["/bin/sh", "-c"]
        args: ["vllm serve Qwen/Qwen3-8B --tensor-parallel-size $(GPUS)"]
        env: [{name: GPUS, value: "4"}]
---
kind: Service
"""
    assert read(vllm, manifest, ".yaml").fields["layout.tp"] == 4
    compose = """\
services:
  engine:
    image: vllm/vllm-openai:latest
    command: --model Qwen/Qwen3-8B --tensor-parallel-size 2
  other: {image: postgres}
"""
    assert read(vllm, compose, ".yml").fields["layout.tp"] == 2
    options = "model: Qwen/Qwen3-30B-A3B\nenable-expert-parallel: true\ntensor-parallel-size: 4\n"
    assert read(vllm, options, ".yaml").fields["layout.ep"] == 4
    program = """\
from vllm import LLM
N = 2
def main():
    llm = LLM("Qwen/Qwen3-8B", tensor_parallel_size=N * 2, max_model_len=4096)
    llm.generate("x")
main()
"""
    launch = read(vllm, program, ".py")
    assert (launch.fields["layout.tp"], launch.fields["train.seq_len"]) == (4, 4096)
    assert not launch.unknown()


def test_workers_of_a_leader_and_their_variables():
    manifest = """\
kind: LeaderWorkerSet
spec:
  leaderWorkerTemplate:
    workerTemplate:
      spec:
        containers:
        - image: registry/engine:v1
          command: ["/bin/bash", "-c"]
          args:
          - |
            FIRST=$(( ${INDEX:-0} * LOCAL ))
            exec vllm serve deepseek-ai/DeepSeek-R1 \\
              --enable-expert-parallel --enable-eplb \\
              --data-parallel-size $((GROUP * LOCAL)) --data-parallel-size-local $LOCAL \\
              --data-parallel-start-rank $FIRST --data-parallel-address $LEADER \\
              --eplb-config '{"num_redundant_experts": "32"}' --max-model-len $LENGTH
          env:
          - {name: LOCAL, value: "8"}
          - {name: GROUP, value: "2"}
"""
    launch = read(vllm, manifest, ".yaml")
    job = job_of(launch)
    assert (job.layout.dp_shard, job.layout.ep, launch.serving.redundant) == (16, 16, 32)
    assert not errors(vllm, launch, job)
    assert {f.rule for f in launch.settings.findings} == {"open-limit"}


@pytest.mark.parametrize(
    "words",
    ["--node-rank $RANK --nnodes 2", "--max-num-seqs $SEQS", "--max-model-len ${LEN}",
     "-dpr $FIRST", "--port $PORT", "--gpu-memory-utilization $SHARE"],
)  # fmt: skip
def test_what_decides_no_degree_may_be_open(words, explain):
    code, report = explain(f"vllm serve Qwen/Qwen3-30B-A3B -tp 2 -dp 2 {words}")
    assert (code, report["world"]) == (0, 4)
    code, answer = explain(f"vllm serve Qwen/Qwen3-30B-A3B -tp $TP {words}")
    assert code == 2
    assert "--tp" in answer["errors"][0]["message"]
    code, report = explain(f"vllm serve Qwen/Qwen3-30B-A3B -tp $TP {words}", "--tp", "4")
    assert (code, report["world"], report["layout"]["etp"]) == (0, 4, 4)


def test_a_model_in_a_variable_is_asked_for(explain):
    code, answer = explain("vllm serve $MODEL -tp 8 -pp 2")
    assert code == 2
    assert "--model" in answer["errors"][0]["message"]
    code, report = explain("vllm serve $MODEL -tp 8 -pp 2", "--model", "llama3.1-70b")
    assert (code, report["layout"]["pp"]) == (0, 2)


def test_a_name_that_is_not_known_is_asked_for(explain):
    code, answer = explain("vllm serve someone/Else-9000B -tp 8")
    assert code == 2
    assert "Else-9000B" in answer["errors"][0]["message"]


def test_later_releases_allow_longer_requests(explain):
    words = "vllm serve Qwen/Qwen3-30B-A3B{} -tp 2 --max-model-len 131072"
    assert explain(words.format(""))[0] == 1
    assert explain(words.format("-Instruct-2507-FP8") + " -ep")[0] == 0
    _, report = explain("vllm serve deepseek-ai/DeepSeek-R1-0528 -tp 8")
    assert report["serving"]["max_len"] == 163840


def test_unknown_options_have_a_nearest(explain):
    _, report = explain("vllm serve Qwen/Qwen3-8B --tensor-paralel-size 2")
    assert report["source"]["unknown"][0]["nearest"] == "--tensor-parallel-size"


# ------------------------------------------------------------------------------------------
# The commands that people copy


def test_tp_inside_a_node_and_pp_across(explain):
    words = "vllm serve $MODEL -tp 8 -pp 2 --distributed-executor-backend ray"
    code, report = explain(words, "--model", "llama3.1-70b", "--gpus", "h100:16")
    assert code == 0
    sent = {c["where"]: c["inter_node"] for c in report["serving"]["collectives"]}
    assert sent["attention output"] is False
    assert sent["hidden and residual"] is True
    assert "stages-idle" in found(report)


def test_attention_dp_and_experts(explain):
    words = "vllm serve $MODEL -dp 8 --enable-expert-parallel"
    code, report = explain(words, "--model", "deepseek-v3", "--gpus", "h200:8")
    assert report["serving"]["roles"]["attn_dp"] == report["serving"]["roles"]["moe_ep"] == 8
    assert report["serving"]["limits"][0]["in_all"] == 8 * 1024
    code, report = explain(words, "--model", "qwen3-8b", "--gpus", "h200:8")
    assert code == 1
    assert "vllm-expert-parallel-dense" in found(report)
    (legal,) = report["source"]["legal"].values()
    assert "--data-parallel-size 8" in legal
    assert "--enable-expert-parallel" not in legal
    code, _ = explain(legal.removeprefix("#!/bin/sh\n"), "--gpus", "h200:8")
    assert code == 0


def test_dcp_removes_the_copies(explain):
    flags = ("--gpus", "h200:8")
    _, before = explain("vllm serve deepseek-ai/DeepSeek-R1 -tp 8", *flags)
    _, after = explain("vllm serve deepseek-ai/DeepSeek-R1 -tp 8 -dcp 8", *flags)
    assert before["serving"]["kv_bytes_per_token"] == 70_272
    assert after["serving"]["kv_bytes_per_token"] == 8_784
    assert after["serving"]["tokens"] > 7 * before["serving"]["tokens"]
    assert "kv-cache-copied" in found(before)
    assert "kv-cache-copied" not in found(after)


# ------------------------------------------------------------------------------------------
# Its rules


@pytest.mark.parametrize(
    ("command", "rule", "suggest"),
    [
        ("Qwen/Qwen3-8B -tp 3", "heads-divide-tp", {"layout.tp": 2}),
        ("Qwen/Qwen3-8B -dcp 2 -tp 8", "vllm-dcp", {"layout.dcp": 1}),
        ("meta-llama/Llama-3.1-70B -tp 16 -dcp 4", "vllm-dcp", {"layout.dcp": 2}),
        ("deepseek-ai/DeepSeek-R1 -tp 8 -dcp 3", "degrees-divide", {"layout.dcp": 2}),
        ("deepseek-ai/DeepSeek-R1 -tp 4 -pcp 4 -dcp 2 -ep", "vllm-dcp", {"layout.dcp": 1}),
        ("Qwen/Qwen3-8B -ep", "vllm-expert-parallel-dense", {"layout.ep": 1}),
        ("Qwen/Qwen3-30B-A3B -tp 4 --enable-eplb", "vllm-eplb", {"layout.ep": 4, "layout.etp": 1}),
        (
            "Qwen/Qwen3-30B-A3B -tp 4 -ep --enable-eplb --eplb-config.num_redundant_experts 3",
            "vllm-eplb",
            {"--eplb-config.num_redundant_experts": 4},
        ),
        (
            """Qwen/Qwen3-30B-A3B -tp 4 -ep --eplb-config '{"num_redundant_experts": 4}'""",
            "vllm-eplb",
            {},
        ),
        ("Qwen/Qwen3-8B --max-model-len 131072", "vllm-max-model-len", {"train.seq_len": 40960}),
        ("Qwen/Qwen3-8B --max-num-seqs 512 --max-num-batched-tokens 256", "vllm-batched-tokens",
         {}),
        ("Qwen/Qwen3-8B --gpu-memory-utilization 1.5", "vllm-memory-fraction", {}),
        ("Qwen/Qwen3-8B -dp 4 -dpl 8", "vllm-data-parallel", {}),
        ("Qwen/Qwen3-8B -dp 4 -dpe -dpn 1", "vllm-data-parallel", {}),
        ("Qwen/Qwen3-30B-A3B -dp 4 -dpe -dph -dpl 2", "vllm-data-parallel", {}),
        ("Qwen/Qwen3-8B -tp 2 --nnodes 3", "vllm-nodes", {}),
        ("Qwen/Qwen3-8B -tp 2 --nnodes 2 --distributed-executor-backend ray", "vllm-nodes", {}),
        ("Qwen/Qwen3-30B-A3B -tp 2 --all2all-backend deeepep", "vllm-all2all", {}),
        ("Qwen/Qwen3-8B --disable-log-requests", "vllm-lost-option", {}),
        ("Qwen/Qwen3-8B --num-scheduler-steps 8", "vllm-lost-option", {}),
        (
            "deepseek-ai/DeepSeek-R1 -tp 8 -dcp 8 --cp-kv-cache-interleave-size 48",
            "vllm-interleave",
            {},
        ),
    ],
)  # fmt: skip
def test_what_it_refuses(command, rule, suggest, explain):
    code, report = explain(f"vllm serve {command}")
    assert code == 1
    assert report["fits"] is False
    finding = found(report)[rule]
    assert finding["level"] == "error"
    assert suggest.items() <= finding["suggest"].items()
    legal = report["source"]["legal"]
    assert legal
    text = next(iter(legal.values())).removeprefix("#!/bin/sh\n")
    code, report = explain(text)
    assert code == 0, (text, report["findings"])


@pytest.mark.parametrize(
    "words",
    [
        """--compilation-config '{"pass_config": {"enable_sequence_parallelism": true}}'""",
        """-cc '{"pass_config": {"enable_sp": true, "fuse_gemm_comms": true}}'""",
        "--compilation-config.pass_config.enable_async_tp true",
        "-cc.pass_config.enable_sp=true -O2",
    ],
)
def test_passes_that_are_gone(words, explain):
    code, report = explain(f"vllm serve Qwen/Qwen3-8B -tp 2 {words}")
    assert code == 1
    assert "gone since 0.32" in found(report)["vllm-lost-pass"]["message"]
    assert "compilation" not in next(iter(report["source"]["legal"].values()))


@pytest.mark.parametrize("backend", ["pplx", "naive"])
def test_backends_that_become_another(backend, explain):
    words = f"vllm serve Qwen/Qwen3-30B-A3B -dp 2 -ep --all2all-backend {backend}"
    code, report = explain(words)
    assert code == 0
    assert "allgather_reducescatter" in found(report)["vllm-all2all"]["message"]


def test_one_node_is_not_enough(explain):
    code, report = explain("vllm serve meta-llama/Llama-3.1-70B -tp 8 -pp 2", "--gpus", "h100:16")
    assert code == 1
    assert "vllm-one-node" in found(report)
    legal = report["source"]["legal"]
    assert list(legal) == ["serve-node0.sh", "serve-node1.sh"]
    assert "--nnodes 2" in legal["serve-node1.sh"]
    assert "--headless" in legal["serve-node1.sh"]


def test_data_parallel_means_two_things(explain):
    _, dense = explain("vllm serve Qwen/Qwen3-8B -dp 4")
    assert (dense["layout"]["dp_replicate"], dense["layout"]["dp_shard"]) == (4, 1)
    _, mixed = explain("vllm serve Qwen/Qwen3-30B-A3B -dp 4")
    assert (mixed["layout"]["dp_replicate"], mixed["layout"]["dp_shard"]) == (1, 4)
    for report in (dense, mixed):
        assert "vllm-data-parallel-means" in found(report)


def test_tokens_are_cut_between_attention_and_experts(explain):
    _, report = explain("vllm serve deepseek-ai/DeepSeek-V3 -tp 2 -dp 4 -ep")
    assert "vllm-moe-tokens-cut" in found(report)
    assert report["serving"]["roles"]["shared_tp"] == 1


def test_more_devices_are_more_servers(explain):
    _, report = explain("vllm serve Qwen/Qwen3-8B -tp 2", "--gpus", "h100:8")
    assert report["layout"]["dp_replicate"] == 4
    assert "replicas-assumed" in found(report)


# ------------------------------------------------------------------------------------------
# Round trips


@st.composite
def jobs(draw):
    """A job that vLLM can express."""
    mixed = draw(st.booleans())
    name, degrees = draw(st.sampled_from(sorted((MIXED if mixed else DENSE).items())))
    model, tp = presets.model(name), draw(st.sampled_from(degrees))
    pp, dp = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2, 4)))
    cp = draw(st.sampled_from((1, 1, 2)))
    copies = tp if model.mla else tp // model.kv_heads
    dcp = draw(st.sampled_from([c for c in (1, 2, 4, 8) if copies and copies % c == 0] or [1]))
    dcp = dcp if cp == 1 and (model.heads // model.kv_heads % dcp == 0 or model.mla) else 1
    group = tp * cp * dp
    whole = draw(st.booleans())
    layout = {"tp": tp, "pp": pp, "cp": cp, "dcp": dcp, "sequence_parallel": False}
    layout |= {"dp_shard": dp if mixed else 1, "dp_replicate": 1 if mixed else dp}
    layout |= {"ep": group if mixed and whole else 1, "etp": group if mixed and not whole else 1}
    if mixed and (model.moe.ffn % layout["etp"] or model.moe.experts < layout["ep"]):
        layout |= {"ep": group if group <= model.moe.experts else 1}
        layout["etp"] = 1 if layout["ep"] > 1 else layout["etp"]
    fields = {f"layout.{k}": v for k, v in layout.items()} | {"model": name, "ranks": group * pp}
    made = draft("plan", None, fields)
    return made.job


@given(jobs().filter(bool))
@settings(max_examples=60, deadline=None)
def test_written_and_read_again(job):
    launch, back = again(vllm, job)
    if job.layout.ep == 1 < job.layout.etp or job.layout.ep > 1 or job.model.moe is None:
        assert not same_layout(job, back)
    assert back.model == job.model
    refused = [f for f in errors(vllm, launch, back) if f.rule != "vllm-vocabulary"]
    assert not refused


def test_choices_survive():
    words = (
        "vllm serve Qwen/Qwen3-30B-A3B-Instruct-2507 -dp 2 -ep --max-model-len 8192 "
        "--max-num-seqs 64 --kv-cache-dtype fp8 --gpu-memory-utilization 0.8 --enable-eplb "
        "--eplb-config.num_redundant_experts 2 --all2all-backend deepep_low_latency"
    )
    launch = read(vllm, words)
    job = job_of(launch)
    other, _ = again(vllm, job, launch.serving)
    assert other.serving == launch.serving


def test_what_it_cannot_express():
    fields = {"model": "qwen3-30b-a3b", "ranks": 8, "layout.tp": 4, "layout.ep": 2}
    fields |= {"layout.etp": 2, "layout.recompute": "full", "layout.dp_shard": 2}
    written = vllm.write(draft("plan", None, fields).job)
    rules = {f.rule for f in written.notes}
    assert {"vllm-expert-degrees", "training-only"} <= rules
    text = next(iter(written.files.values()))
    assert "--enable-expert-parallel" in text


# ------------------------------------------------------------------------------------------
# Hostile input


@pytest.mark.parametrize(
    "text",
    [
        "",
        "vllm",
        "vllm serve",
        "vllm serve $(rm -rf /) -tp 8",
        "vllm serve Qwen/Qwen3-8B -tp " + "9" * 400,
        "vllm serve Qwen/Qwen3-8B -tp -3",
        "vllm serve Qwen/Qwen3-8B -tp two -pp 1.5",
        "vllm serve Qwen/Qwen3-8B --gpu-memory-utilization nan",
        "vllm serve Qwen/Qwen3-8B --compilation-config '{'",
        "vllm serve Qwen/Qwen3-8B --eplb-config '[1, 2]'",
        "vllm serve Qwen/Qwen3-8B --eplb-config.num_redundant_experts " + "9" * 50,
        "vllm serve Qwen/Qwen3-8B --block-size 0 --max-num-seqs -1 --max-model-len 0",
        "vllm serve Qwen/Qwen3-8B --config nowhere.yaml",
        "VLLM_PP_LAYER_PARTITION=a,b vllm serve Qwen/Qwen3-8B -pp 2",
        "vllm serve " + "x" * 5000,
        "vllm serve 'unclosed",
        "vllm serve Qwen/Qwen3-8B -dp 0 -dcp 0 -pcp 0",
    ],
)
def test_hostile_commands_end_in_lines(text, capsys, monkeypatch):
    monkeypatch.setenv("PLAIT_DEBUG", "1")
    code = main(["explain", "--from", "vllm", f"{text} "])
    _, err = capsys.readouterr()
    assert code in (0, 1, 2)
    assert "Traceback" not in err
    assert (code == 2) == bool(err)
