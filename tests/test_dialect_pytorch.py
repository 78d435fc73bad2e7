"""PyTorch mesh scripts: what is read of them, what torch would say, what is written."""

import ast
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launches import commands_of
from plait.cli.main import main
from plait.dialects import pytorch
from plait.dialects.launch import Told
from plait.dialects.source import Source
from plait.rules import check
from plait.spec.findings import UserError
from plait.spec.jobfile import draft


@pytest.fixture
def explain(capsys, monkeypatch, tmp_path):
    """The exit code and the REPORT of a script."""
    monkeypatch.setenv("PLAIT_DEBUG", "1")

    def run(text, *more):
        file = tmp_path / "script.py"
        file.write_text(text)
        code = main(["explain", "--from", "pytorch", str(file), "--json", *map(str, more)])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else err

    return run


def found(report):
    return {f["rule"] for f in report["findings"]}


IMPORTS = """
import os
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import *
"""
#: Of the shape of the first seed's example: only the feed-forward maps are split.
HALF = """
mesh = init_device_mesh("cuda", (8, 8), mesh_dim_names=("dp", "tp"))
for block in model.layers:
    parallelize_module(block.feed_forward, mesh["tp"], {
        "w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel(),
    })
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
"""
WHOLE = HALF.replace(
    "    parallelize_module(block.feed",
    """    parallelize_module(block.attention, mesh["tp"], {
        "wq": ColwiseParallel(), "wk": ColwiseParallel(), "wv": ColwiseParallel(),
        "wo": RowwiseParallel(),
    })
    parallelize_module(block.feed""",
)


def test_attention_that_no_plan_names_stays_whole(explain):
    """Seed 1. Llama 3.1 8B: 32 x (2 x 4096 x 4096 + 2 x 4096 x 1024) parameters of attention."""
    code, report = explain(IMPORTS + HALF, "--model", "llama3.1-8b")
    assert code == 0
    assert report["world"] == 64
    layout = report["layout"]
    assert (layout["tp"], layout["dp_shard"], layout["zero"]) == (8, 8, 3)
    assert layout["sequence_parallel"] is False
    forgotten = next(f for f in report["findings"] if f["rule"] == "pytorch-attention-whole")
    assert forgotten["level"] == "warning"
    assert f"{32 * (2 * 4096 * 4096 + 2 * 4096 * 1024):,}" in forgotten["message"]
    assert "pytorch-ends-whole" in found(report)


def test_a_plan_of_both_parts(explain):
    _, report = explain(IMPORTS + WHOLE, "--model", "llama3.1-8b")
    assert "pytorch-attention-whole" not in found(report)


def test_no_model_is_asked_for(explain):
    code, report = explain(IMPORTS + WHOLE)
    assert code == 2
    assert "--model" in json.dumps(report)


@pytest.mark.parametrize(
    ("code", "layout"),
    [
        # 2-D: the first dim keeps copies, the second one shards.
        (
            'm = init_device_mesh("cuda", (2, 4), mesh_dim_names=("a", "b"))\n'
            "fully_shard(model, mesh=m)",
            {"dp_replicate": 2, "dp_shard": 4, "zero": 3},
        ),
        (
            'm = init_device_mesh("cuda", (8,), mesh_dim_names=("dp",))\n'
            "for b in model.layers:\n    fully_shard(b, mesh=m, reshard_after_forward=False)\n"
            "fully_shard(model, mesh=m)",
            {"dp_shard": 8, "zero": 2},
        ),
        (
            'm = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))\n'
            'm["dp", "cp"]._flatten("fsdp")\nfully_shard(model, mesh=m["fsdp"])\n'
            'parallelize_module(model, m["tp"], {"output": ColwiseParallel()})\n'
            'with context_parallel(m["cp"], buffers=[x], buffer_seq_dims=[1]):\n    model(x)',
            {"dp_shard": 2, "cp": 2, "tp": 2, "zero": 3, "cp_method": "all-gather"},
        ),
        (
            'tp = 2\nworld = int(os.environ["WORLD_SIZE"])\n'
            'm = init_device_mesh("cuda", (world // tp, tp), mesh_dim_names=("data", "tensor"))\n'
            'parallelize_module(model, m["tensor"], {"norm": SequenceParallel()})\n'
            'model = FSDP(model, device_mesh=m["data"],'
            " sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)",
            {"tp": 2, "dp_shard": 4, "zero": 2, "sequence_parallel": True},
        ),
        (
            'm = init_device_mesh("cuda", (8,), mesh_dim_names=("dp",))\n'
            "model = DistributedDataParallel(model, device_mesh=m)",
            {"dp_replicate": 8, "zero": 0},
        ),
        (
            'm = init_device_mesh("cuda", (4, 2), mesh_dim_names=("pp", "dp"))\n'
            "stage = PipelineStage(model, dist.get_rank(), 4, 'cuda', group=m.get_group('pp'))\n"
            'fully_shard(model, mesh=m["dp"], reshard_after_forward=False)\n'
            "schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss)",
            {"pp": 4, "dp_shard": 2, "schedule": "1f1b", "vpp": 1, "zero": 2},
        ),
        (
            "stage = PipelineStage(model, rank, 4, device)\n"
            "schedule = ScheduleGPipe(stage, n_microbatches=8, loss_fn=f)\nmodel = DDP(model)",
            {"pp": 4, "schedule": "gpipe", "zero": 0, "dp_replicate": 2},
        ),
        (
            'model = AutoModel.from_pretrained(name, tp_plan="auto")\ndist.init_process_group()',
            {"tp": 8},
        ),
        (
            "config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2)",
            {"tp": 2, "dp_replicate": 4},
        ),
        (
            "from argparse import ArgumentParser\np = ArgumentParser()\n"
            'p.add_argument("--tp", type=int, default=4)\nargs = p.parse_args()\n'
            'm = init_device_mesh("cuda", (8 // args.tp, args.tp), mesh_dim_names=("dp", "tp"))\n'
            'parallelize_module(model, m["tp"], {"output": ColwiseParallel()})\n'
            'fully_shard(model, mesh=m["dp"])',
            {"tp": 4, "dp_shard": 2},
        ),
    ],
)
def test_layouts(explain, code, layout):
    done, report = explain(IMPORTS + code, "--model", "llama3.1-8b", "--ranks", 8)
    assert done in (0, 1), report
    assert {key: report["layout"][key] for key in layout} == layout, report["findings"]


def test_options_of_the_command(capsys, tmp_path):
    (tmp_path / "train.py").write_text(
        IMPORTS + "import argparse\np = argparse.ArgumentParser()\n"
        'p.add_argument("--tp-size", type=int, default=1)\nargs = p.parse_args()\n'
        'mesh = init_device_mesh("cuda", (dist.get_world_size() // args.tp_size, args.tp_size),'
        ' mesh_dim_names=("dp", "tp"))\n'
        'parallelize_module(model, mesh["tp"], {"norm": SequenceParallel()})\n'
        'fully_shard(model, mesh=mesh["dp"])\n'
        "model = AutoModelForCausalLM.from_pretrained('meta-llama/Llama-3.1-8B')\n"
    )
    command = f"torchrun --nnodes 2 --nproc-per-node 8 {tmp_path}/train.py --tp-size 4"
    code = main(["explain", "--from", "pytorch", command, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (report["world"], report["layout"]["tp"], report["layout"]["dp_shard"]) == (16, 4, 4)
    assert report["model"]["name"] == "llama3.1-8b"


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        # device_mesh.py: more ranks than there are; names that the mesh lacks; order of names.
        ('m = init_device_mesh("cuda", (4, 8), mesh_dim_names=("dp", "tp"))', "pytorch-mesh-world"),
        (
            'm = init_device_mesh("cuda", (8,), mesh_dim_names=("dp",))\n'
            'fully_shard(x, mesh=m["tp"])',
            "pytorch-mesh-dim",
        ),
        (
            'm = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))\nm["tp", "dp"]',
            "pytorch-mesh-dim",
        ),
        ('m = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp",))', "pytorch-mesh"),
        # distribute_tensor: a parameter that is already a DTensor of another mesh.
        (
            'm = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))\n'
            'for b in model.layers:\n    fully_shard(b, mesh=m["dp"])\n'
            '    parallelize_module(b, m["tp"], {"attention.wq": ColwiseParallel()})',
            "pytorch-order",
        ),
        (
            'm = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))\n'
            'parallelize_module(block.feed_forward, m["tp"], {"w2": RowwiseParallel()})',
            "pytorch-plan",
        ),
        (
            'm = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))\n'
            'parallelize_module(block.attention, m["tp"], {"wq": ColwiseParallel()})',
            "pytorch-plan",
        ),
        # schedules.py, PipelineScheduleSingle: at least one micro batch a stage.
        (
            'm = init_device_mesh("cuda", (8,), mesh_dim_names=("pp",))\n'
            "s = PipelineStage(model, 0, 8, 'cuda', group=m.get_group())\n"
            "Schedule1F1B(s, n_microbatches=4, loss_fn=f)",
            "pytorch-micro-batches",
        ),
    ],
)
def test_refusals(explain, code, rule):
    done, report = explain(
        IMPORTS + code + "\nfully_shard(y)", "--model", "llama3.1-8b", "--ranks", 8
    )
    assert done == 1, report
    assert rule in {f["rule"] for f in report["findings"] if f["level"] == "error"}, report[
        "findings"
    ]


def test_heads_that_do_not_divide(explain):
    text = IMPORTS + WHOLE.replace("(8, 8)", "(4, 16)")
    code, report = explain(text, "--model", "llama3.1-8b")
    assert code == 1
    assert "pytorch-heads" in found(report)
    legal = report["source"]["legal"]["mesh_script.py"]
    again = pytorch.read(Source(legal, "mesh_script.py", Path("mesh_script.py")), Told())
    assert again.fields["layout.tp"] == 8
    assert again.findings == []


# -- what is written

JOBS = st.fixed_dictionaries(
    {
        "layout.tp": st.sampled_from([1, 2, 4]),
        "layout.cp": st.sampled_from([1, 2]),
        "layout.pp": st.sampled_from([1, 2]),
        "layout.dp_replicate": st.sampled_from([1, 2]),
        "layout.dp_shard": st.sampled_from([1, 2, 4]),
        "layout.zero": st.sampled_from([0, 2, 3]),
        "layout.cp_method": st.sampled_from(["ring", "all-gather"]),
        "layout.recompute": st.sampled_from(["none", "full"]),
        "layout.micro_batch": st.sampled_from([1, 2]),
        "train.accumulation": st.sampled_from([4, 8]),
        "layout.sequence_parallel": st.booleans(),
        "schedule": st.sampled_from(["1f1b", "gpipe", "zbv", "interleaved-1f1b"]),
    }
)
FIELDS = (
    "tp", "cp", "pp", "vpp", "dp_replicate", "dp_shard", "zero", "micro_batch", "recompute",
)  # fmt: skip


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(JOBS, st.sampled_from(["tiny", "llama2-7b", "llama3.1-8b"]))
def test_round_trip(drawn, model):
    fields = {k: v for k, v in drawn.items() if k != "schedule"}
    if fields["layout.dp_shard"] * fields["layout.cp"] == 1:
        fields["layout.zero"] = 0
    elif fields["layout.zero"] == 0:
        fields["layout.dp_shard"] = 1
    if fields["layout.tp"] == 1:
        fields["layout.sequence_parallel"] = False
    if fields["layout.pp"] > 1:
        fields["layout.schedule"] = drawn["schedule"]
    world = 1
    for axis in ("tp", "cp", "pp", "dp_replicate", "dp_shard"):
        world *= fields[f"layout.{axis}"]
    made = draft("plan", None, fields | {"model": model, "ranks": world, "train.seq_len": 128})
    if made.findings or any(f.level == "error" for f in check(made.job, "plan")):
        return
    job = made.job
    (name, text), *_ = pytorch.write(job).files.items()
    compile(text, name, "exec")
    launch = pytorch.read(Source(text, name, Path(name)), Told())
    assert launch.findings == []
    assert launch.unknown() == []
    again = draft("plan", None, launch.fields)
    assert again.findings == []
    for field in FIELDS:
        assert getattr(again.job.layout, field) == getattr(job.layout, field), (field, text)
    assert again.job.layout.world == world
    assert again.job.layout.sequence_parallel == job.layout.sequence_parallel
    if job.layout.pp > 1:
        assert again.job.layout.schedule == job.layout.schedule
    if job.layout.cp > 1:
        assert again.job.layout.cp_method == job.layout.cp_method
    assert again.job.batch == job.batch
    assert again.job.train.dtype == job.train.dtype
    for size in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "head_dim"):
        assert getattr(again.job.model, size) == getattr(job.model, size)
    assert [f for f in pytorch.check(launch, again.job) if f.level == "error"] == []


def test_what_it_cannot_say(capsys):
    code = main(["convert", "mixtral-8x7b", "--ranks", "8", "--to", "pytorch", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert code == 1
    assert "torchtitan" in answer["notes"][0]["message"]


def test_nothing_is_run(tmp_path):
    target = tmp_path / "touched"
    text = f"{IMPORTS}\nopen({str(target)!r}, 'w')\nos.system('touch {target}')\n__import__('os')\n"
    pytorch.read(Source(text + HALF, "s.py", tmp_path / "s.py"), Told())
    assert not target.exists()


@pytest.mark.parametrize(
    "text",
    [
        "def f(:",
        "init_device_mesh(" * 3000,
        "x = 'a' * 10**12\ninit_device_mesh('cuda', (x, x))",
        "init_device_mesh('cuda', (10**400, -5, 0, 1.5, None, 'a', [1]), mesh_dim_names=7)",
        "def f():\n    return f() + f()\nf()\ninit_device_mesh('cuda', f())",
        "while True:\n    fully_shard(x)",
        "m = init_device_mesh('cuda', (2,), mesh_dim_names=('a', 'a', None))\nm[None][1:2]['a', 3]",
        "init_device_mesh(*a, **b)\nparallelize_module(1, 2, 3)\nfully_shard()\nFSDP()\nDDP(7)",
        "class A(A):\n    b: int = A()\n    c = [A for A in A]\nfully_shard(A(A).b.c[0])",
        "for i in range(10**9):\n    fully_shard(i)",
        "ＤＤＰ = 1\nfully_shard(ＤＤＰ)\nprint(f'{x!r:>{y}}')",
    ],
)
def test_hostile(text):
    try:
        launch = pytorch.read(Source(text, "s.py", Path("s.py")), Told())
    except UserError as problem:
        lines = [finding.line() for finding in problem.findings]
    else:
        lines = [finding.line() for finding in launch.findings]
    assert not any("\n" in line for line in lines)


def test_the_template_is_python():
    made = draft("plan", None, {"model": "tiny", "ranks": 2, "layout.tp": 2})
    ast.parse(next(iter(pytorch.write(made.job).files.values())))


def test_commands_of_the_page(capsys):
    for words in commands_of("pytorch"):
        assert main(words) == 0, words
    capsys.readouterr()


def test_no_launch_is_suggested_where_a_script_cannot_say_it(explain):
    """A mixture's plan is written by hand: there is no nearest text to be read back."""
    code, report = explain(IMPORTS + WHOLE, "--model", "qwen3-30b-a3b", "--ranks", "16")
    assert code == 1
    assert report["source"]["legal"] is None
