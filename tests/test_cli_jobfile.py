"""Reading a job: defaults, precedence, every field, and everything that a person can get wrong."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from plait.spec import saved
from plait.spec.findings import UserError
from plait.spec.job import Job, Train
from plait.spec.jobfile import MOST_LAYERS, SHORT, job_paths, read_job


def problems(purpose="train", **said):
    with pytest.raises(UserError) as caught:
        read_job(purpose, **said)
    return {f.where: f for f in caught.value.findings}


def write(tmp_path, text):
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


# ------------------------------------------------------------------------------------------
# Defaults


def test_training_with_nothing_said():
    job = read_job("train")
    layout, train = job.layout, job.train
    assert (job.model.name, layout.world) == ("tiny", 4)
    assert (layout.tp, layout.dp_shard, layout.zero) == (2, 2, 1)
    assert layout.sequence_parallel
    assert (train.global_batch, layout.micro_batch, train.accumulation) == (16, 8, 1)
    assert (train.seq_len, train.dtype) == (256, "auto")


@pytest.mark.parametrize(
    ("said", "tp", "dp"),
    [
        ({"ranks": 8}, 1, 8),
        ({"world": 2}, 1, 2),
        ({"ranks": 8, "overrides": {"tp": 4}}, 4, 2),
        ({"overrides": {"tp": 1}}, 1, 4),
        ({"overrides": {"dp_replicate": 2}}, 1, 4),
        ({"overrides": {"zero": 3}}, 2, 2),
        ({"gpus": "h100:8"}, 1, 8),
    ],
)
def test_dp_fills_up_the_ranks(said, tp, dp):
    job = read_job("train", **said)
    assert (job.layout.tp, job.layout.dp) == (tp, dp)
    assert job.train.global_batch == 16


def test_training_takes_at_most_2048_tokens():
    assert read_job("train", model="llama3.1-8b").train.seq_len == 2048


def test_planning_takes_the_model_as_published():
    job = read_job("plan", model="llama3.1-8b", gpus="h100:64", overrides={"tp": "8"})
    assert (job.layout.world, job.layout.dp_shard, job.layout.zero) == (64, 8, 1)
    assert (job.batch.micro, job.batch.global_, job.batch.accumulation) == (1, 8, 1)
    assert (job.train.seq_len, job.train.dtype) == (131072, "bfloat16")
    assert job.train.grad_dtype == "float32"
    assert job.cluster.devices == 64


@pytest.mark.parametrize(
    ("purpose", "batch", "expected"),
    [
        ("train", {"micro_batch": 2}, (2, 16, 2)),
        ("train", {"accumulation": 2}, (2, 16, 2)),
        ("train", {"micro_batch": 3, "accumulation": 2}, (3, 24, 2)),
        ("train", {"global_batch": 64}, (16, 64, 1)),
        ("plan", {"global_batch": 64}, (1, 64, 16)),
        ("plan", {"accumulation": 8}, (1, 32, 8)),
        ("plan", {"global_batch": 64, "accumulation": 2}, (8, 64, 2)),
    ],
)
def test_the_batch_from_what_is_said(purpose, batch, expected):
    job = read_job(purpose, model="tiny", ranks=4, overrides=batch)
    assert (job.batch.micro, job.batch.global_, job.batch.accumulation) == expected


# ------------------------------------------------------------------------------------------
# Precedence and completeness

FILE = """
ranks = 8
metrics = "m.jsonl"
[model]
name = "tiny"
layers = 6
[layout]
tp = 4
sequence-parallel = false
[train]
steps = 7
learning-rate = 1e-3
[data]
path = ["a", "b"]
[checkpoint]
every = 10
"""


def test_flags_over_file_over_defaults(tmp_path):
    file = write(tmp_path, FILE)
    job = read_job("train", file)
    assert (job.model.layers, job.model.hidden) == (6, 256)
    assert (job.layout.tp, job.layout.dp, job.layout.sequence_parallel) == (4, 2, False)
    assert (job.train.steps, job.train.learning_rate, job.train.warmup) == (7, 1e-3, 10)
    assert (job.data.path, job.checkpoint.every, job.metrics) == (("a", "b"), 10, "m.jsonl")

    flags = {"tp": "2", "train.learning-rate": "1e-2", "data.path": "c,d", "metrics": ""}
    job = read_job("train", file, flags)
    assert (job.layout.tp, job.layout.dp, job.layout.sequence_parallel) == (2, 4, False)
    assert (job.train.steps, job.train.learning_rate) == (7, 1e-2)
    assert (job.data.path, job.metrics) == (("c", "d"), "")


def test_a_model_on_the_command_line_replaces_the_table(tmp_path):
    file = write(tmp_path, FILE)
    assert read_job("train", file, {"model": "qwen3-0.6b"}).model.layers == 28
    both = {"model.layers": "5", "model": "qwen3-0.6b"}
    assert read_job("train", file, both).model.layers == 5


def test_a_model_may_be_a_text(tmp_path):
    job = read_job("plan", write(tmp_path, 'model = "gpt2"\ngpus = "a100:8"'))
    assert (job.model.name, job.layout.world) == ("gpt2", 8)


def test_a_model_from_its_sizes():
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 300}
    model = read_job("train", overrides={f"model.{k}": v for k, v in sizes.items()}).model
    assert (model.kv_heads, model.head_dim, model.ffn) == (4, 16, 256)


def test_training_fields_of_the_default_model():
    model = read_job("train", overrides={"model.layers": "8"}).model
    assert (model.name, model.layers, model.hidden) == ("tiny", 8, 256)


def test_tables_inside_the_model():
    moe = {"model.moe.experts": "4", "model.moe.topk": 2, "model.moe.ffn": 32}
    model = read_job("train", overrides=moe).model
    assert (model.moe.experts, model.moe.topk, model.moe.shared) == (4, 2, 0)
    fewer = read_job("plan", model="mixtral-8x7b", ranks=8, overrides={"model.moe.topk": 1}).model
    assert (fewer.moe.experts, fewer.moe.topk) == (8, 1)
    dense = {"model": "tiny-moe", "model.moe": "none", "model.qk_norm": "none"}
    assert read_job("train", overrides=dense).model.moe is None


OTHER = {bool: True, int: 3, float: 0.5, str: "word", tuple[float, ...]: (0.5, 2.0)}


@pytest.mark.parametrize("field", [f.name for f in fields(Train)])
def test_every_training_field_can_be_overridden(field):
    kind = job_paths()[f"train.{field}"]
    value = next(v for k, v in OTHER.items() if k in (kind, *getattr(kind, "__args__", ())))
    extra = {"ranks": 3} if field == "global_batch" else {"ranks": 1}
    if field == "accumulation":
        extra["overrides"] = {"global_batch": 9}
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    overrides = extra.pop("overrides", {}) | {f"train.{field}": text}
    assert getattr(read_job("train", overrides=overrides, **extra).train, field) == value


def test_every_field_has_a_path():
    for table, cls in Job.__annotations__.items():
        for f in fields(cls) if table in ("model", "layout", "train", "data") else ():
            assert f"{table}.{f.name}" in job_paths()
    assert {"layout.tp", "model.moe.topk", "model.rope_scaling.factor"} <= job_paths().keys()
    assert set(SHORT.values()) <= job_paths().keys()


# ------------------------------------------------------------------------------------------
# What can be wrong


def test_unreadable_files(tmp_path):
    missing = tmp_path / "jib.toml"
    write(tmp_path, "")
    found = problems(file=missing)[str(missing)]
    assert found.message == "no such file"
    assert found.nearest == str(tmp_path / "job.toml")
    assert "no complete checkpoint" in problems(file=tmp_path)["checkpoint.resume"].message

    broken = write(tmp_path, "[layout\ntp = 2")
    message = problems(file=broken)[str(broken)].message
    assert message.startswith("not valid TOML")
    assert "line 1" in message
    broken.write_bytes(b"\xff\xfe\x00")
    assert "text" in problems(file=broken)[str(broken)].message
    broken.write_text("a = " + "[" * 100_000)
    assert "TOML" in problems(file=broken)[str(broken)].message


@pytest.mark.parametrize(
    ("text", "where", "nearest"),
    [
        ("[layout]\ntpp = 2", "layout.tpp", "layout.tp"),
        ("[train]\nlearning_rat = 1", "train.learning_rat", "train.learning_rate"),
        ("[model]\nname = 'tiny'\nlayer = 1", "model.layer", "model.layers"),
        ("[trian]\nsteps = 1", "trian", "train"),
        ("rank = 4", "rank", "ranks"),
        ("global-batch = 4", "global_batch", "train.global_batch"),
        ("model = 'tinny'", "model", "tiny"),
        ("gpus = 'h10:64'", "gpus", "h100:64"),
        ("[layout]\ntp = 3", "layout.tp", 2),
        ("[train]\nsteps = 'many'", "train.steps", None),
        ("[train]\nsteps = 1.5", "train.steps", None),
        ("[train]\nsteps = true", "train.steps", None),
        ("[layout]\nsequence_parallel = 'maybe'", "layout.sequence_parallel", None),
        ("layout = 4", "layout", None),
        ("[model]\nname = 3", "model.name", None),
        ("[model]\nname = 'tiny'\nmoe = 3", "model.moe", None),
        ("[model]\nname = 'tiny'\nmoe.experts = 3", "model.moe", None),
        (
            "[model]\nname = 'tiny'\nmoe.experts = 'x'\nmoe.topk=1\nmoe.ffn=1",
            "model.moe.experts",
            None,
        ),
        ("[model]\nname = 'tiny'\nheads = 0", "model.heads", 1),
        ("[model]\nname = 'tiny-moe'\nmoe.groups = 0", "model.moe.groups", 1),
        ("[model]\nname = 'tiny-moe'\nmoe.topk_groups = -1", "model.moe.topk_groups", 1),
        ("[model]\nname = 'tiny-moe'\nmoe.shared = -1", "model.moe.shared", 0),
        ("[model]\nname = 'tiny-moe'\nmoe.first_dense = -1", "model.moe.first_dense", 0),
        ("[model]\nname = 'tiny'\nlayers = 1000000000", "model.layers", MOST_LAYERS),
        ("[model]\nlayers = 2\nhidden = 65\nheads = 4\nvocab = 256", "model.hidden", 64),
        ("ranks = 0", "ranks", 1),
        ("ranks = -3", "ranks", 1),
        ("ranks = 'four'", "ranks", None),
        ("ranks = 3", "train.global_batch", 15),
        ("gpus = 'h100:8'\nranks = 4", "ranks", 8),
        ("[train]\nglobal_batch = 0", "train.global_batch", 1),
        ("[train]\nseq_len = -5", "train.seq_len", 1),
        ("[train]\naccumulation = 3", "train.accumulation", 2),
        ("[layout]\nmicro_batch = 0", "layout.micro_batch", 1),
        ("[layout]\nzero = 5", "layout.zero", 3),
    ],
)
def test_one_problem(tmp_path, text, where, nearest):
    found = problems(file=write(tmp_path, text))
    assert list(found) == [where]
    assert found[where].nearest == nearest
    assert "\n" not in found[where].line()


def test_world_size_must_match():
    found = problems(world=8, ranks=4)["ranks"]
    assert (found.nearest, found.rule) == (8, "world-size")


def test_planning_needs_a_model_and_devices():
    assert problems("plan").keys() == {"model", "gpus"}
    overrides = {"model.layers": 2, "model.hidden": 64}
    found = problems("plan", ranks=1, overrides=overrides)["model"]
    assert "model.heads, model.vocab missing" in found.message


def test_everything_at_once(tmp_path):
    file = write(tmp_path, "[layout]\ntpp = 2\n[train]\nsteps = 'x'\n[nonsense]\na = 1")
    overrides = {"model": "tinny", "train.sede": "3", "layout.tp": "3", "dtype": "float32"}
    found = problems(file=file, overrides=overrides)
    wheres = {"layout.tpp", "train.steps", "nonsense", "model", "train.sede"}
    assert wheres <= found.keys()


def test_unknown_paths_in_overrides():
    assert problems(overrides={"trian.steps": 1})["trian.steps"].nearest == "train.steps"
    assert problems(overrides={"model.moe.exprts": 1}).keys() >= {"model.moe.exprts"}


def saved_by(folder: Path, **overrides: str) -> Path:
    """A checkpoint's own account of itself, in a folder of checkpoints."""
    job = read_job("train", overrides=overrides)
    where = saved.step_folder(folder, 3)
    where.mkdir(parents=True)
    about = {"step": 3, "updates": 3, "loss_scale": 1.0, "job": saved.job_tables(job)}
    (where / saved.ABOUT).write_text(json.dumps(about))
    return where


def test_a_checkpoint_is_a_job(tmp_path):
    told = {"ranks": "8", "tp": "2", "zero": "3", "global_batch": "32", "recompute": "full"}
    where = saved_by(tmp_path, **told, **{"train.clip": "0.5", "model": "llama3.1-8b"})
    job = read_job("train", file=tmp_path)
    assert job.checkpoint.resume == str(where)
    first = read_job("train", overrides=told | {"train.clip": "0.5", "model": "llama3.1-8b"})
    assert replace(job, checkpoint=first.checkpoint) == first


def test_a_checkpoint_goes_on_over_other_ranks(tmp_path):
    saved_by(tmp_path, ranks="8", tp="2", dp_replicate="2", zero="3", global_batch="32")
    job = read_job("train", file=tmp_path, overrides={"ranks": "1", "steps": "9"})
    assert (job.layout.tp, job.layout.dp, job.layout.zero) == (1, 1, 3)
    assert (job.train.global_batch, job.layout.micro_batch, job.train.steps) == (32, 32, 9)
    job = read_job("train", file=tmp_path, overrides={"tp": "4"})
    assert (job.layout.world, job.layout.tp, job.layout.dp) == (8, 4, 2)


def test_a_checkpoint_goes_on_with_another_batch(tmp_path):
    saved_by(tmp_path, ranks="4", tp="2", accumulation="2", global_batch="16")
    job = read_job("train", file=tmp_path, overrides={"global_batch": "20"})
    assert (job.layout.tp, job.layout.micro_batch, job.train.accumulation) == (2, 10, 1)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": "three"}', '{"step": 3}'])
def test_a_checkpoint_that_says_nothing_is_one_line(text, tmp_path):
    where = saved_by(tmp_path)
    (where / saved.ABOUT).write_text(text)
    with pytest.raises(UserError) as e:
        read_job("train", file=where)
    assert len(e.value.findings) == 1
