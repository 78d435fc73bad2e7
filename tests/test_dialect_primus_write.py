"""Primus: what is written, and that it comes back."""

import json
from dataclasses import replace
from math import isclose

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launches import differences, jobs
from plait.cli.main import main
from plait.dialects import primus
from plait.dialects.launch import Told
from plait.dialects.primus import schedules as primus_schedules
from plait.dialects.primus.writer import preset_of, titan_preset
from plait.rules import check as rules
from plait.spec.chunks import chunk_layers
from plait.spec.jobfile import draft
from primus_files import experiment, job_of, read_back

MODELS = {
    "dense": {"layers": 16, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 512, "vocab": 1024,
              "tied": False},
    "moe": {"layers": 16, "hidden": 256, "heads": 8, "kv_heads": 8, "ffn": 512, "vocab": 1024,
            "tied": False, "moe.experts": 8, "moe.topk": 2, "moe.ffn": 128, "moe.shared": 1,
            "moe.first_dense": 2, "moe.score": "sigmoid"},
    "mla": {"layers": 16, "hidden": 256, "heads": 8, "ffn": 512, "vocab": 1024, "head_dim": 48,
            "tied": False, "mla.kv_rank": 64, "mla.q_rank": 96, "mla.nope_dim": 32,
            "mla.rope_dim": 16, "mla.v_dim": 32},
}  # fmt: skip


@st.composite
def layouts(draw):
    """Layouts that the Megatron backend can say."""
    kind = draw(st.sampled_from(sorted(MODELS)))
    tp, cp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), 1
    said = {f"model.{k}": v for k, v in MODELS[kind].items()}
    pp = draw(st.sampled_from([1, 2, 4]))
    dp = draw(st.sampled_from([1, 2, 4]))
    said |= {"layout.tp": tp, "layout.cp": cp, "layout.pp": pp, "ranks": tp * cp * pp * dp}
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    said["layout.zero"] = zero
    if zero == 0 and dp > 1:
        said["layout.dp_shard"] = 1
    elif dp > 2 and kind != "moe":
        said["layout.dp_replicate"] = draw(st.sampled_from([1, 2]))
    if kind == "moe":
        ep = draw(st.sampled_from([e for e in (1, 2, 4, 8) if (tp * cp * dp) % e == 0]))
        said |= {"layout.ep": ep, "layout.etp": 1, "layout.sequence_parallel": tp > 1}
    if cp > 1:
        method = draw(st.sampled_from([("ring", 1), ("all-gather", 1), ("ring", cp)]))
        said |= {"layout.cp_method": method[0], "layout.ulysses": method[1]}
    recompute = draw(st.sampled_from(["none", "full"]))
    if pp > 1:
        name, vpp = draw(st.sampled_from([
            ("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zb-auto", 1), ("zbv", 2),
            ("v-half", 2), ("v-min", 2),
        ]))  # fmt: skip
        if name == "interleaved-1f1b" and pp == 2:
            name, vpp = "1f1b", 1
        if name in primus_schedules.SPLIT:
            recompute = "none"
        said |= {"layout.schedule": name, "layout.vpp": vpp}
    said["layout.recompute"] = recompute
    micro = draw(st.sampled_from([1, 2]))
    said |= {"layout.micro_batch": micro, "train.seq_len": 512, "model.seq": 512}
    said["train.global_batch"] = micro * dp * draw(st.sampled_from([8, 16]))
    return said


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(layouts())
def test_round_trip(said):
    made = draft("plan", None, said)
    assert not made.findings, made.findings
    job = made.job
    if any(f.level == "error" for f in rules(job, "plan")):
        return
    back, _ = read_back(job)
    same = {"stages": None}
    assert replace(back.layout, **same) == replace(job.layout, **same)
    assert chunk_layers(back.model, back.layout) == chunk_layers(job.model, job.layout)
    assert replace(back.model, name="", seq=0) == replace(job.model, name="", seq=0)
    assert back.batch == job.batch
    train = ("steps", "seq_len", "learning_rate", "warmup", "weight_decay", "beta1", "beta2",
             "clip", "seed", "dtype", "grad_dtype")  # fmt: skip
    assert {n: getattr(back.train, n) for n in train} == {n: getattr(job.train, n) for n in train}


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(jobs())
def test_whatever_is_legal_comes_back(job):
    """Read back by Primus' own rules without an error; and the same, where no note says more than
    that data and tokenizer are stand-ins."""
    back, written = read_back(job, Told(world=job.layout.world))
    assert back.batch.global_ == job.batch.global_
    if {note.rule for note in written.notes} <= {"megatron-write-data"}:
        assert not {
            path: pair
            for path, pair in differences(job, back).items()
            if not (all(isinstance(v, float) for v in pair) and isclose(*pair))
        }


@pytest.mark.parametrize("model", ["llama3.1-8b", "mixtral-8x7b", "deepseek-v3", "qwen3-8b"])
def test_published_models_come_back(model):
    job = job_of(model=model, ranks=16, layout__tp=2, train__global_batch=32, train__seq_len=4096)
    back, written = read_back(job)
    assert back.layout == job.layout
    ours, theirs = (replace(m, name="", seq=0) for m in (job.model, back.model))
    assert (ours.layers, ours.hidden, ours.heads, ours.kv_heads, ours.ffn, ours.vocab) == (
        theirs.layers, theirs.hidden, theirs.heads, theirs.kv_heads, theirs.ffn, theirs.vocab,
    )  # fmt: skip
    assert f"model: {preset_of(model)}.yaml" in next(iter(written.files.values()))


def test_a_preset_says_what_the_file_need_not():
    job = job_of(model="llama3.1-8b", ranks=8, layout__tp=2)
    text = next(iter(primus.write(job).files.values()))
    assert "model: llama3.1_8B.yaml" in text
    assert "num_layers" not in text
    assert "tensor_model_parallel_size: 2" in text


def test_what_stands_in_the_way_of_a_preset_is_written():
    """pre_trainer.yaml turns the distributed optimizer on: zero 0 must say that it is off."""
    job = job_of(model="llama3.1-8b", ranks=8, layout__zero=0)
    assert "use_distributed_optimizer: false" in next(iter(primus.write(job).files.values()))


def test_torchtitan_where_only_it_has_the_schedule():
    job = job_of(model="llama3.1-8b", ranks=8, layout__pp=4, layout__schedule="gpipe",
               layout__zero=2, train__global_batch=32)  # fmt: skip
    back, written = read_back(job, Told(world=8))
    assert "framework: torchtitan" in next(iter(written.files.values()))
    assert any(n.rule == "primus-torchtitan" for n in written.notes)
    assert back.layout.schedule == "gpipe"
    assert back.batch == job.batch


@pytest.mark.parametrize(
    ("schedule", "vpp", "runs"),
    [("zb-h2", 1, "zb-auto"), ("dualpipe", 1, "zbv"), ("gpipe", 1, "1f1b"),
     ("looped-bfs", 2, "interleaved-1f1b"), ("dualpipev", 2, "zbv")],
)  # fmt: skip
def test_schedules_that_it_lacks(schedule, vpp, runs):
    """With a model that TorchTitan has no flavor of, so that Megatron's backend is written."""
    said = {f"model.{k}": v for k, v in MODELS["dense"].items()}
    made = draft("plan", None, {**said, "ranks": 8, "layout.pp": 4, "layout.vpp": vpp,
                                "layout.schedule": schedule, "train.global_batch": 32})  # fmt: skip
    assert not made.findings, made.findings
    back, written = read_back(made.job)
    assert back.layout.schedule == runs
    assert any(schedule in n.message and runs in n.message for n in written.notes)


def test_recompute_is_left_out_where_it_frees_nothing():
    job = job_of(model="llama3.1-8b", ranks=8, layout__pp=4, layout__schedule="zb-h1",
               layout__recompute="full", train__global_batch=32)  # fmt: skip
    back, written = read_back(job)
    assert back.layout.recompute == "none"
    assert any(n.rule == "primus-recompute-split" for n in written.notes)


def test_titan_presets():
    assert titan_preset({"name": "llama3", "flavor": "8B"}) in ("llama3_8B", "llama3.1_8B")
    assert titan_preset({"name": "llama3", "flavor": "none"}) is None


def test_nearest_legal_is_legal(tmp_path, capsys):
    """A file that Primus refuses, and the nearest that it takes, which reads back clean."""
    file = tmp_path / "exp.yaml"
    file.write_text(experiment(
        "patch_primus_pipeline: true\npp_algorithm: v-half\npipeline_model_parallel_size: 4\n"
        "global_batch_size: 64\nmicro_batch_size: 1"
    ))  # fmt: skip
    assert main(["explain", "--from", "primus", str(file), "--ranks", "8", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert any(f["rule"] == "primus-chunks" for f in report["findings"])
    name, text = next(iter(report["source"]["legal"].items()))
    (tmp_path / name).write_text(text)
    main(["explain", "--from", "primus", str(tmp_path / name), "--ranks", "8", "--json"])
    again = json.loads(capsys.readouterr().out)
    assert not [f for f in again["findings"] if f["level"] == "error"]
    assert again["layout"]["schedule"] == "v-half"
    assert again["layout"]["vpp"] == 2
