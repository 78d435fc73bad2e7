"""Each rule: where it speaks, what it suggests, and where it is silent."""

from dataclasses import replace

import pytest

from plait.rules import check
from plait.rules.legality import legal_tp
from plait.spec.jobfile import draft_job, read_job
from plait.spec.model import MLA, Model, MoE, RopeScaling
from plait.spec.presets import model, model_names

GPT = {"model": "gpt2"}


def found(purpose="train", rule=None, **said):
    """rule -> finding of a job, all levels."""
    said.setdefault("ranks", 8)
    job = read_job(purpose, **said)
    return {f.rule: f for f in check(job, purpose) if rule in (None, f.rule)}


def small(**changes):
    sizes = {"layers": 2, "hidden": 96, "heads": 12, "kv_heads": 4, "vocab": 256, "ffn": 96}
    return Model.of("small", **(sizes | changes))


def errors_of(spec, **layout):
    job = read_job("train", ranks=layout.pop("ranks", 1), overrides=layout)
    return {f.rule: f for f in check(replace(job, model=spec)) if f.level == "error"}


def test_nothing_to_say_about_the_main_job():
    assert check(read_job("train")) == []


def test_nothing_wrong_with_presets_alone():
    for name in model_names():
        job = read_job("plan", model=name, ranks=1)
        assert {f.rule for f in check(job, "plan")} <= {"not-built", "experts-unbalanced"}


# ------------------------------------------------------------------------------------------
# Legality


@pytest.mark.parametrize(
    ("tp", "ranks", "rules", "nearest"),
    [
        # 12 heads, 4 KV heads, 96 columns: 3, 6 leave KV heads uneven; 8 leaves heads.
        (3, 6, {"kv-heads-divide-tp"}, 2),
        (6, 6, {"kv-heads-divide-tp"}, 2),
        (8, 8, {"heads-divide-tp"}, 4),
        (5, 5, {"heads-divide-tp", "kv-heads-divide-tp", "ffn-divides-tp"}, 1),
        (4, 4, set(), None),
        (12, 12, set(), None),
    ],
)
def test_tensor_degrees(tp, ranks, rules, nearest):
    layout = {"tp": tp, "sequence_parallel": False, "train.global_batch": ranks}
    findings = errors_of(small(), ranks=ranks, **layout)
    assert findings.keys() == rules
    for finding in findings.values():
        assert finding.nearest == nearest
        assert finding.message.endswith("legal: 1, 2, 4, 12")


def test_legal_degrees_by_hand():
    assert legal_tp(small()) == [1, 2, 4, 12]
    assert legal_tp(small(kv_heads=1)) == [1, 2, 3, 4, 6, 12]
    assert legal_tp(model("llama3.1-8b")) == [1, 2, 4, 8, 16, 32]
    # 28 heads, 4 KV heads, 18944 = 2^9 x 37 columns: no 7 in the columns.
    assert legal_tp(model("qwen2.5-7b")) == [1, 2, 4]


def test_a_layer_norm_over_all_heads_is_not_cut():
    spec = small(qk_norm="full", norm="layer")
    assert "norm-over-ranks" in errors_of(spec, ranks=2, tp=2)
    assert "norm-over-ranks" not in errors_of(spec)
    assert "norm-over-ranks" not in errors_of(small(qk_norm="full"), ranks=2, tp=2)


def test_what_a_warning_suggests_is_legal():
    said = {"zero": 3, "micro_batch": 2, "accumulation": 2, "global_batch": 64}
    finding = found("plan", model="gpt2", ranks=16, overrides=said)["accumulation-traffic"]
    changed = {path: str(value) for path, value in finding.suggest.items()}
    told = {f"layout.{k}": v for k, v in said.items() if k in ("zero", "micro_batch")}
    job = read_job("plan", model="gpt2", ranks=16, overrides=said | told | changed)
    assert [f for f in check(job, "plan") if f.level == "error"] == []
    said = {"tp": 2, "sequence_parallel": False, "seq_len": 127}
    finding = found("plan", model="llama3.1-8b", ranks=2, overrides=said)
    assert finding["tp-without-sequence-parallel"].suggest == {}


def test_sequence_pieces():
    said = {"tp": 8, "seq_len": 250, "micro_batch": 2}
    finding = found(rule="sequence-pieces", overrides=said)["sequence-pieces"]
    assert (finding.where, finding.value, finding.nearest) == ("train.seq_len", 250, 248)
    assert "sequence-pieces" not in found(overrides=said | {"sequence_parallel": False})
    assert "sequence-pieces" not in found(overrides=said | {"micro_batch": 4})


def test_learned_positions_end():
    finding = found(overrides=GPT | {"seq_len": 1025})["learned-positions"]
    assert finding.nearest == 1024
    assert "learned-positions" not in found(overrides=GPT | {"seq_len": 1024})
    assert "learned-positions" not in found(overrides={"seq_len": 1024})


def test_bytes_need_256_tokens():
    vocab = {"model.vocab": 255}
    assert found(overrides=vocab)["byte-vocabulary"].nearest == 256
    assert found("plan", model="tiny", overrides=vocab) == {}


@pytest.mark.parametrize(
    ("path", "value", "nearest"),
    [
        ("train.steps", 0, 1),
        ("train.clip", -1.0, 0),
        ("train.warmup", -1, 0),
        ("train.weight_decay", -0.1, 0),
        ("train.beta1", 1.0, 0.9),
        ("train.beta2", -0.5, 0),
        ("train.eps", 0.0, 1e-8),
        ("train.bucket_mib", 0.0, 25.0),
        ("train.timeout", 0.0, 1),
        ("model.logit_softcap", 0.0, None),
        ("model.attention_scale", -1.0, None),
        ("train.timeout", 1e300, 1_000_000),
        ("checkpoint.every", -1, 0),
        ("checkpoint.keep", 0, 1),
        ("model.dropout", 1.0, 0.0),
        ("model.dropout", -0.1, 0),
        ("train.schedule", "cosin", "cosine"),
        ("train.dtype", "bfloat", "bfloat16"),
        ("train.dtype", "int64", None),
        ("train.grad_dtype", "float23", "float32"),
        ("train.check_collectives", "alway", "always"),
        ("model.mlp", "swigl", "swiglu"),
        ("model.norm", "rmsnorm", "rms"),
        ("model.qk_norm", "heads", "head"),
        ("model.positions", "learnt", "learned"),
        ("train.min_learning_rate", 0.5, 3e-3),
        ("train.learning_rate", -1.0, 0),
    ],
)
def test_fields_by_themselves(path, value, nearest):
    job = read_job("train", overrides={path: value})
    errors = [f for f in check(job) if f.level == "error"]
    assert [f.where for f in errors] == [path]
    if nearest is not None:
        assert errors[0].nearest == nearest


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(value):
    job = read_job("train")
    job = replace(job, train=replace(job.train, clip=value))
    assert [f.rule for f in check(job)] == ["ranges"]


@pytest.mark.parametrize(
    ("spec", "rule", "nearest"),
    [
        (small(kv_heads=5), "head-counts", 4),
        (small(head_dim=7), "head-counts", 8),
        (small(rope_scaling=RopeScaling("dynamic", 2.0)), "words", None),
        (small(moe=MoE(4, 5, 32)), "experts-chosen", 4),
        (small(moe=MoE(8, 2, 32, groups=3)), "experts-chosen", 2),
        (small(moe=MoE(8, 2, 32, groups=4, topk_groups=5)), "experts-chosen", 4),
        (small(moe=MoE(8, 5, 32, groups=4, topk_groups=2)), "experts-chosen", 4),
        (small(moe=MoE(8, 2, 32, score="relu")), "words", None),
        (small(moe=MoE(8, 2, 32, capacity=0.0)), "ranges", None),
        (small(mla=MLA(8, 8, 4, 8)), None, None),
        (small(positions="alibi"), "not-built", None),
        (small(sinks=True), None, None),
        (small(attention_softcap=50.0), None, None),
        (small(moe=MoE(8, 2, 32)), None, None),
        (small(logit_softcap=30.0), None, None),
        (small(dropout=0.1), None, None),
    ],
)
def test_models(spec, rule, nearest):
    findings = errors_of(spec)
    if rule is None:
        assert findings == {}
        return
    assert rule in findings
    if nearest is not None:
        assert findings[rule].nearest == nearest


@pytest.mark.parametrize("axis", ["dcp"])
def test_axes_of_later_versions_are_named(axis):
    findings = [f for f in check(read_job("train", ranks=8, overrides={axis: 2, "tp": 2}))]
    finding = next(f for f in findings if f.rule == "not-built")
    assert (finding.level, finding.where, finding.nearest) == ("error", f"layout.{axis}", 1)
    assert f"{axis} 2" in finding.message


def test_batch_of_a_job_made_by_hand():
    job = read_job("train")
    job = replace(job, train=replace(job.train, global_batch=17))
    assert [(f.rule, f.nearest) for f in check(job)] == [("batch-product", 16)]


# ------------------------------------------------------------------------------------------
# Pitfalls


def llama(**layout):
    said = {"model": "llama3.1-8b", "gpus": "h100:64", "ranks": 64}
    return found("plan", overrides={"seq_len": 8192} | layout, **said)


def test_tensor_beyond_the_fast_domain():
    finding = llama(tp=16)["tp-beyond-fast-domain"]
    assert (finding.level, finding.nearest) == ("warning", 8)
    # 8192 tokens x 4096 x 2 bytes = 64 MiB; 6 gathers and 4 scatters of 15/16 of it.
    assert "600 MiB" in finding.message
    # 4 all-reduces of twice 15/16.
    whole = llama(tp=16, sequence_parallel=False)["tp-beyond-fast-domain"]
    assert "480 MiB" in whole.message
    assert "tp-beyond-fast-domain" not in llama(tp=8)


def test_zero_3_over_slow_links():
    finding = llama(tp=2, zero=3)["zero-3-over-slow-links"]
    # 4 shards of tp 2 fill a domain of 8. 8 030 261 248 / 2 parameters, 2 bytes gathered twice and
    # 4 bytes of gradients, 31 / 32 of it to others: 29 GiB; gathered once 21.7; a 4th of the
    # gradients summed over 8 copies, twice 7 / 8 of it: 6.54.
    assert finding.suggest == {"layout.dp_shard": 4, "layout.dp_replicate": 8}
    for said in ("29 GiB a step", "zero 2 21.7 GiB", "dp_replicate 8) 6.54 GiB"):
        assert said in finding.message
    assert "zero-3-over-slow-links" not in llama(tp=2, zero=3, dp_shard=4)
    assert "zero-3-over-slow-links" not in llama(tp=2, zero=2)


def test_kv_heads_are_copied():
    finding = llama(tp=32, sequence_parallel=False)["kv-replication"]
    assert (finding.level, finding.nearest) == ("note", 8)
    assert "4 times" in finding.message
    assert "kv-replication" not in llama(tp=8)


def test_accumulation_with_zero_2_and_3():
    finding = llama(zero=3, accumulation=4)["accumulation-traffic"]
    assert "8 all-gathers and 4 reduce-scatters" in finding.message
    assert "4 reduce-scatters" in llama(zero=2, accumulation=4)["accumulation-traffic"].message
    assert "accumulation-traffic" not in llama(zero=1, accumulation=4)
    assert "accumulation-traffic" not in llama(zero=3)


def test_tensor_without_sequence_parallelism():
    finding = llama(tp=8, sequence_parallel=False)["tp-without-sequence-parallel"]
    assert finding.suggest == {"layout.sequence_parallel": True}
    assert "256 MiB" in finding.message  # 4 x 64 MiB
    assert "32 MiB" in finding.message
    assert "tp-without-sequence-parallel" not in llama(tp=8)


@pytest.mark.parametrize(
    ("layout", "where"),
    [
        ({"sequence_parallel": True, "tp": 1}, "layout.sequence_parallel"),
        ({"cp_method": "all-gather"}, "layout.cp_method"),
        ({"vpp": 2}, "layout.vpp"),
        ({"zero": 3, "dp_replicate": 8}, "layout.zero"),
    ],
)
def test_options_without_their_axis_are_named_and_kept(layout, where):
    job = read_job("train", ranks=8, overrides=layout)
    findings = [f for f in check(job) if f.rule == "option-without-axis"]
    assert where in [f.where for f in findings]
    assert {f.level for f in findings} == {"warning"}
    for name, value in layout.items():
        assert getattr(job.layout, name) == value


def test_a_draft_that_is_no_layout_is_asked_for_errors_alone():
    """etp 8 x ep 8 are more than the 32 ranks of a stage: no ledger can be written."""
    said = {"tp": 8, "pp": 4, "cp": 2, "ep": 8, "etp": 8}
    job, problems = draft_job("plan", gpus="h100:128", model="mixtral-8x7b", overrides=said)
    assert [f.rule for f in problems] == ["expert-grid"]
    assert all(f.rule != "ep-beyond-fast-domain" for f in check(job, "plan"))


def test_errors_come_first():
    job = read_job("train", ranks=8, overrides={"zero": 3, "dp_replicate": 8, "steps": 0})
    assert [f.level for f in check(job)] == ["error", "warning"]


# ------------------------------------------------------------------------------------------
# Pipelines

LLAMA = {"model": "llama3.1-8b", "seq_len": 4096}


def pipeline(rule, ranks=8, **said):
    """The findings of one rule of a pipelined job, and the job."""
    said = LLAMA | {"pp": 4, "accumulation": 16} | said
    job = read_job("plan", ranks=ranks, overrides=said)
    return job, [f for f in check(job, "plan") if f.rule == rule]


def mended(job, finding, **said):
    """The errors of the job that a finding suggests."""
    said = LLAMA | {"pp": 4, "accumulation": 16} | said
    if "train.global_batch" in finding.suggest and "train.accumulation" not in finding.suggest:
        said.pop("accumulation")
    for path, value in finding.suggest.items():
        said.pop(path.rpartition(".")[2], None)
        said[path] = value
    job = read_job("plan", ranks=job.layout.world, overrides=said)
    return [f for f in check(job, "plan") if f.level == "error"]


@pytest.mark.parametrize(
    ("rule", "ranks", "said", "where", "nearest"),
    [
        # 32 layers, embedding and head: 34 chunks at most; of 64 ranks pp 32.
        ("chunks", 64, {"pp": 64}, "layout.pp", 32),
        ("chunks", 64, {"pp": 16, "vpp": 4}, "layout.vpp", 2),
        ("chunks", 64, {"pp": 32, "schedule": "zbv"}, "layout.pp", 16),
        ("stages", 8, {"stages": "8,8,8,9"}, "layout.stages", "8,8,8,8"),
        ("stages", 8, {"stages": "16,0,8,8"}, "layout.stages", "8,8,8,8"),
        # DualPipe wants an even pp, and at least 2 pp micro batches, an even number of them.
        ("schedule", 24, {"pp": 3, "schedule": "dualpipe"}, "layout.pp", 2),
        ("schedule", 3, {"pp": 3, "schedule": "dualpipe"}, "layout.schedule", "1f1b"),
        ("schedule", 8, {"schedule": "dualpipe", "accumulation": 9}, "train.accumulation", 10),
        (
            "schedule",
            8,
            {"schedule": "interleaved-1f1b:3"},
            "layout.schedule",
            "interleaved-1f1b:4",
        ),
    ],
)
def test_pipelines_that_cannot_be(rule, ranks, said, where, nearest):
    job, (finding,) = pipeline(rule, ranks, **said)
    assert (finding.level, finding.where, finding.nearest) == ("error", where, nearest)
    assert mended(job, finding, **said) == []


@pytest.mark.parametrize("stages", ["0,11,11,10", "10,11,11,0", "8,8,8,8", "cost", "balanced"])
def test_the_ends_may_have_no_layer(stages):
    assert pipeline("stages", stages=stages)[1] == []


def test_a_table_in_a_file_must_suit(tmp_path):
    path = tmp_path / "mine.csv"
    said = {"schedule": str(path), "pp": 2, "accumulation": 2}
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert pipeline("schedule", **said)[1] == []
    for wrong, where, nearest in (
        ({"pp": 4}, "layout.pp", 2),
        ({"vpp": 2}, "layout.vpp", 1),
        ({"accumulation": 4}, "train.accumulation", 2),
    ):
        _, (finding,) = pipeline("schedule", **(said | wrong))
        assert (finding.where, finding.nearest) == (where, nearest)
    path.write_text("0F0,0B0,0F1,0B1\n1B0,1F0,1F1,1B1\n")
    _, found = pipeline("schedule", **said)
    assert found
    assert {f.where for f in found} == {"layout.schedule"}
    path.unlink()
    _, (finding,) = pipeline("unreadable", **said)
    assert "cannot be read" in finding.message


def test_recompute_has_to_free_something():
    """A norm's output is the next map's input: kept for its weight gradient, made again or not."""
    split = {"schedule": "zb-h1"}
    _, (finding,) = pipeline("recompute-frees-nothing", recompute="selective:norm", **split)
    assert (finding.level, finding.where, finding.nearest) == ("error", "layout.recompute", "none")
    assert "GiB with it and" in finding.message
    for legal in (
        {"recompute": "full"} | split,
        {"recompute": "selective:mlp"} | split,
        {"recompute": "selective", "schedule": "1f1b"},
    ):
        assert pipeline("recompute-frees-nothing", **legal)[1] == []
    # What is kept for the weight gradient anyway frees nothing under any schedule.
    _, (finding,) = pipeline("recompute-frees-nothing", recompute="selective:norm")
    assert (finding.level, finding.nearest) == ("warning", "none")


def test_few_micro_batches_leave_a_bubble():
    """1F1B with equal stages: (p - 1) / (m + p - 1) of a step is idle (2104.04473, section 2.2)."""
    job, (finding,) = pipeline("pipeline-bubble", accumulation=4)
    assert finding.suggest == {"train.accumulation": 16, "train.global_batch": 32}
    assert mended(job, finding, accumulation=4) == []
    # A deep model: the head is nothing beside a stage.
    said = {"model.layers": 4000, "model.vocab": 256, "accumulation": 4}
    _, (finding,) = pipeline("pipeline-bubble", **said)
    assert "idles 43% of a step, with 16 16%" in finding.message
    assert pipeline("pipeline-bubble", accumulation=16)[1] == []


def test_smaller_pieces_of_the_same_batch_fill_a_pipeline():
    job, (finding,) = pipeline("pipeline-bubble", accumulation=4, micro_batch=4)
    assert finding.suggest == {"layout.micro_batch": 1, "train.accumulation": 16}
    assert mended(job, finding, accumulation=4, micro_batch=4) == []


def test_the_head_makes_stages_uneven():
    """A vocabulary of 152 thousand beside layers of 3 x 1024 x 3072 and less."""
    said = {"model": "qwen3-0.6b", "pp": 2, "seq_len": 2048}
    job, (finding,) = pipeline("uneven-stages", **said)
    assert finding.level == "note"
    assert mended(job, finding, **said) == []
    assert pipeline("uneven-stages", stages=finding.suggest["layout.stages"], **said)[1] == []


def test_dualpipe_holds_everything_twice():
    """8 billion parameters over 4 stages, in bfloat16: 3.7 GiB, and twice that."""
    said = {"schedule": "dualpipe", "dtype": "bfloat16"}
    job, (finding,) = pipeline("two-copies", **said)
    assert "7.48 GiB of weights on a rank instead of 3.74 GiB" in finding.message
    assert mended(job, finding, **said) == []
    assert pipeline("two-copies", schedule="dualpipev")[1] == []


def test_sharded_gradients_are_sent_for_each_micro_batch():
    """ZeRO-2: 16 reduce-scatters of 2 billion parameters, instead of one and a gather."""
    job, (finding,) = pipeline("accumulation-traffic", zero=2)
    assert finding.suggest == {"layout.zero": 1}
    assert "16 reduce-scatters" in finding.message
    assert mended(job, finding, zero=2) == []
