"""Saved under one layout, gone on under another: the same curve as without the break."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cases
from harness import Case, Trace, compare, micro_batches, one_process
from plait.parallel.mesh import make_mesh
from plait.spec import saved
from plait.spec.findings import UserError
from plait.spec.job import Checkpoint, Job
from plait.spec.layout import Layout
from plait.train import checkpoint
from plait.train.program import Program
from ranks import run_ranks

MODEL = replace(cases.MODELS["qwen3"], kv_heads=2, vocab=61)

#: Layouts whose shards are cut differently: rows and columns, edges inside rows, KV copies,
#: a padded vocabulary, replicas, no sharding at all.
LAYOUTS = {
    "one rank": Layout.fill(1),
    "zero 3 over 4": Layout.fill(4, zero=3),
    "zero 1 over 3": Layout.fill(3, zero=1),
    "tp 4, two copies of each KV head": Layout.fill(4, tp=4),
    "tp 2 x zero 2": Layout.fill(4, tp=2, zero=2),
    "HSDP": Layout.fill(4, dp_replicate=2, zero=3),
}


def job_of(layout: Layout):
    """The same global batch of 12 samples in every layout."""
    micro = 12 // layout.dp
    return Case(MODEL, replace(layout, micro_batch=micro)).job


def save_after(rank: int, job, steps: int, folder: str) -> str:
    program = Program(job, make_mesh(job.layout, job.model, rank))
    program.initialize()
    for step in range(steps):
        program.step(micro_batches(job, program.mesh, step), step)
    return str(checkpoint.save(program, job, steps, Path(folder), {"loss_scale": 1.0}))


def go_on(rank: int, job, folder: str, steps: int):
    program = Program(job, make_mesh(job.layout, job.model, rank))
    about = checkpoint.load(program, saved.find(folder))
    losses, norms = [], []
    for step in range(about["step"], steps):
        result = program.step(micro_batches(job, program.mesh, step), step)
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    engine = program.engine
    weights = [
        (p.parameter.name, p.offset, p.size, engine.segments[i].weight[s].clone())
        for p, i, s in engine.held()
    ]
    return losses, norms, weights


@pytest.fixture(scope="module")
def oracle():
    return one_process(job_of(LAYOUTS["one rank"]))


@pytest.mark.parametrize(
    ("before", "after"),
    list(itertools.permutations(LAYOUTS, 2)),
    ids=lambda name: name.replace(" ", "_"),
)
def test_a_run_goes_on_under_another_layout(before, after, oracle, tmp_path):
    hold(job_of(LAYOUTS[before]), job_of(LAYOUTS[after]), oracle, str(tmp_path))


def hold(before: Job, after: Job, oracle: Trace, folder: str) -> None:
    """Saved after a step, gone on for two: as without the break."""
    run_ranks(before.layout.world, save_after, before, 1, folder)
    traces = []
    for losses, norms, weights in run_ranks(after.layout.world, go_on, after, folder, 3):
        trace = replace(oracle, losses=oracle.losses[:1] + losses, norms=oracle.norms[:1] + norms)
        trace.weights = weights
        trace.gradients = [(n, (0,) * g.dim(), g.shape, g) for n, g in oracle.gradients.items()]
        traces.append(trace)
    compare(traces, oracle)


#: Experts whole and cut, on all ranks and on some; their states sharded over what ep and etp leave.
EXPERTS = {
    "one rank": Layout.fill(1),
    "ep 2": Layout.fill(2, ep=2),
    "ep 4 x etp 2": Layout.fill(8, tp=2, ep=4, etp=2),
    "ep 2, cp 2, zero 3": Layout.fill(4, cp=2, ep=2, zero=3),
    "ep 2 in two stages": Layout.fill(4, pp=2, ep=2, vpp=1, zero=2),
    "etp 2, zero 0": Layout.fill(2, tp=2, etp=2, zero=0),
}


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ("deepseek", "ep 2", "ep 4 x etp 2"),
        ("deepseek", "ep 4 x etp 2", "one rank"),
        ("deepseek", "ep 2, cp 2, zero 3", "ep 2 in two stages"),
        ("gpt-oss", "ep 2 in two stages", "etp 2, zero 0"),
        ("gpt-oss", "etp 2, zero 0", "ep 2, cp 2, zero 3"),
        ("gpt-oss", "one rank", "ep 4 x etp 2"),
    ],
)
def test_a_mixture_goes_on_under_another_layout(model, before, after, tmp_path):
    def job(name):
        layout = EXPERTS[name]
        micro = 1 if layout.pp > 1 else 8 // layout.dp
        accumulation = 8 // layout.dp // micro
        return Case(cases.MIXTURES[model], replace(layout, micro_batch=micro), accumulation).job

    hold(job(before), job(after), one_process(job("one rank")), str(tmp_path))


def test_only_whole_checkpoints_are_found(tmp_path):
    (tmp_path / ".step-00000003.partial").mkdir()
    (tmp_path / ".step-00000003.partial" / "plait.json").write_text("{}")
    with pytest.raises(UserError, match="no complete checkpoint"):
        saved.find(str(tmp_path))
    with pytest.raises(UserError, match="no such folder"):
        saved.find(str(tmp_path / "nowhere"))


def test_the_newest_are_kept(tmp_path):
    job = replace(job_of(LAYOUTS["one rank"]), checkpoint=Checkpoint(keep=2))
    for steps in (1, 2, 3):
        run_ranks(1, save_after, job, steps, str(tmp_path))
    assert [p.name for p in saved.complete(tmp_path)] == ["step-00000002", "step-00000003"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def refused(rank: int, job, folder: str) -> list[str]:
    program = Program(job, make_mesh(job.layout, job.model, rank))
    try:
        checkpoint.load(program, saved.find(folder))
    except UserError as e:
        return [f.line() for f in e.findings]
    return []


def test_another_models_checkpoint_is_refused(tmp_path):
    job = job_of(LAYOUTS["one rank"])
    run_ranks(1, save_after, job, 1, str(tmp_path))
    other = replace(job, model=replace(job.model, ffn=56))
    (lines,) = run_ranks(1, refused, other, str(tmp_path))
    assert any("[48, 32]" in line and "[56, 32]" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 1}, "layers 2, the job has 1"),
        ({"mlp": "geglu"}, "mlp swiglu, the job has geglu"),
        ({"tied": True}, "tied False, the job has True"),
        ({"rope_theta": 77.0}, ""),
    ],
)
def test_the_same_shapes_may_mean_another_model(changes, said, tmp_path):
    job = job_of(LAYOUTS["one rank"])
    run_ranks(1, save_after, job, 1, str(tmp_path))
    other = replace(job, model=replace(job.model, **changes))
    (lines,) = run_ranks(1, refused, other, str(tmp_path))
    assert any(said in line for line in lines) if said else lines == []


def test_a_folder_is_one_runs(tmp_path):
    with saved.claimed(tmp_path / "kept"):
        with pytest.raises(UserError, match="another run"), saved.claimed(tmp_path / "kept"):
            pass
        (tmp_path / "kept" / ".step-00000003.partial").mkdir()
    assert not (tmp_path / "kept").exists(), "nothing half-written is left"


def test_the_newest_is_the_last_one_written(tmp_path):
    """A run that went back to an earlier step goes on from there, not from the later one."""
    job = job_of(LAYOUTS["one rank"])
    for steps in (3, 1, 2):
        run_ranks(1, save_after, job, steps, str(tmp_path))
    assert saved.find(tmp_path).name == "step-00000002"


@pytest.mark.parametrize("victim", ["data", "metadata", "about"])
def test_a_cut_checkpoint_is_one_line(victim, tmp_path):
    layout = LAYOUTS["zero 3 over 4"]
    run_ranks(layout.world, save_after, job_of(layout), 1, str(tmp_path))
    folder = saved.find(str(tmp_path))
    file = {
        "data": next(folder.glob("*.distcp")),
        "metadata": folder / ".metadata",
        "about": folder / "plait.json",
    }[victim]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    for lines in run_ranks(layout.world, refused, job_of(layout), str(tmp_path)):
        assert len(lines) == 1
        assert "cannot be read" in lines[0]
        assert "\n" not in lines[0]


def test_the_step_is_written_with_it(tmp_path):
    (where,) = run_ranks(1, save_after, job_of(LAYOUTS["one rank"]), 2, str(tmp_path))
    about = json.loads((Path(where) / "plait.json").read_text())
    assert about["step"] == about["updates"] == 2


def half_precision(rank: int, job, folder: str) -> float:
    """Largest difference between the weights before saving and after loading."""
    program = Program(job, make_mesh(job.layout, job.model, rank))
    program.initialize()
    program.step(micro_batches(job, program.mesh, 0), 0)
    before = [s.weight.clone() for s in program.engine.segments]
    checkpoint.save(program, job, 1, Path(folder), {"loss_scale": 1.0})
    fresh = Program(job, make_mesh(job.layout, job.model, rank))
    checkpoint.load(fresh, saved.find(folder))
    full = [
        torch.equal(a.full, b.full)
        for a, b in zip(program.engine.buckets, fresh.engine.buckets, strict=True)
    ]
    assert all(full)
    return max(
        (a - s.weight).abs().max().item()
        for a, s in zip(before, fresh.engine.segments, strict=True)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_master_weights_are_what_is_saved(dtype, tmp_path):
    job = job_of(Layout.fill(2, zero=1))
    job = replace(job, train=replace(job.train, dtype=dtype))
    assert max(run_ranks(2, half_precision, job, str(tmp_path))) == 0.0
