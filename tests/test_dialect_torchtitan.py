"""TorchTitan: what its recipes, TOML files and commands say, what it refuses, what is written."""

import ast
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launches import commands_of
from plait.cli.main import main
from plait.dialects import torchtitan
from plait.dialects.launch import Told
from plait.dialects.source import Source
from plait.dialects.torchtitan.config import split
from plait.dialects.torchtitan.files import RECIPE, TOML
from plait.dialects.torchtitan.models import flavors
from plait.rules import check
from plait.spec.findings import UserError
from plait.spec.jobfile import draft


@pytest.fixture
def plait(capsys, monkeypatch):
    """Runs a command line here, where nothing is caught but what a person did wrong."""
    monkeypatch.setenv("PLAIT_DEBUG", "1")

    def run(*argv):
        code = main([str(word) for word in argv])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def explain(plait, tmp_path):
    """The REPORT of a text that is read as a file of the given name."""

    def run(text, name="recipe.py", *more):
        file = tmp_path / name
        file.write_text(text)
        code, out, err = plait("explain", "--from", "torchtitan", file, "--json", *more)
        assert out, err
        return code, json.loads(out)

    return run


def rules(report, level="error"):
    return {f["rule"] for f in report["findings"] if f["level"] == level}


def recipe(*lines, flavor="8B", model="llama3"):
    """A recipe of the shape that public ones have."""
    body = "\n".join(f"    {line}" for line in lines)
    return f"""
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.{model} import model_registry
from torchtitan.trainer import Trainer


def base() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("{flavor}"),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=2 * 4096, max_context_length=4096, steps=100
        ),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
    )


def _turned(config, degree):
    config.parallelism.tensor_parallel_degree = degree


def job() -> Trainer.Config:
    config = base()
{body or "    pass"}
    return config
"""


def one(*lines, **model):
    """Of the two recipes, the second one."""
    text = recipe(*lines, **model)
    return text.replace("def base() -> Trainer.Config", "def _base() -> Trainer.Config").replace(
        "config = base()", "config = _base()"
    )


# -- what is read


def test_recipe_of_recipes(explain):
    code, report = explain(
        one(
            "_turned(config, 4)",
            "config.parallelism.context_parallel_degree = 2",
            "config.training.num_tokens_per_train_step = 64 * 4096",
            "config.activation_checkpoint = FullAC.Config()",
        ),
        "recipe.py", "--ranks", "32",
    )  # fmt: skip
    assert code == 0, report["findings"]
    layout = report["layout"]
    assert (layout["tp"], layout["cp"], layout["dp_shard"], layout["zero"]) == (4, 2, 4, 3)
    assert layout["cp_method"] == "all-gather"
    assert layout["recompute"] == "full"
    assert report["batch"]["micro"] == 2
    assert report["batch"]["global"] == 64
    assert report["model"]["name"] == "llama3.1-8b"
    assert report["source"]["unknown"] == []


def test_recipe_must_be_named_among_several(plait, tmp_path):
    file = tmp_path / "recipes.py"
    file.write_text(recipe())
    code, _, err = plait("explain", "--from", "torchtitan", file)
    assert code == 2
    assert "which of its recipes? base, job" in err
    code, out, _ = plait("explain", "--from", "torchtitan", f"{file} --config job", "--json")
    assert json.loads(out)["layout"]["tp"] == 2


def test_values_that_nothing_decides_are_asked_for(plait, tmp_path):
    file = tmp_path / "recipe.py"
    line = "config.model_spec = model_registry(os.environ['SIZE'])"
    file.write_text("import os\n" + one(line))
    code, _, err = plait("explain", "--from", "torchtitan", file)
    assert code == 2
    assert "SIZE" in err
    assert "--model" in err
    code, out, _ = plait(
        "explain", "--from", "torchtitan", file, "--model", "llama3.1-8b", "--json"
    )
    assert (code, json.loads(out)["model"]["layers"]) == (0, 32)


def test_what_another_file_does_is_said_to_be_unknown(explain):
    text = "from somewhere import made_over\n" + one("config = made_over(config, 3)")
    code, report = explain(text, "recipe.py", "--ranks", 8)
    assert code == 0
    assert "torchtitan-file" in rules(report, "warning")
    assert report["layout"]["tp"] == 2


def test_other_files_are_followed(plait, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "__init__.py").write_text(
        "LENGTH = 1024\n\ndef short(config):\n    config.training.max_context_length = LENGTH\n"
    )
    (tmp_path / "recipe.py").write_text("from shared import short\n" + one("short(config)"))
    code, out, _ = plait(
        "explain", "--from", "torchtitan", tmp_path / "recipe.py", "--ranks", 2, "--json"
    )
    report = json.loads(out)
    assert (code, report["batch"]["micro"]) == (0, 8)


def test_hub_models_and_names_of_the_first_releases(explain):
    text = """
[model]
name = "transformers_modeling_backend"
flavor = "full"
[hf_transformers]
model = "Qwen/Qwen3-8B"
[training]
batch_size = 4
compile = true
[experimental]
pipeline_parallel_degree = 2
[checkpoint]
enable_checkpoint = false
"""
    _, report = explain(text, "job.toml", "--ranks", "8")
    assert report["model"]["name"] == "qwen3-8b", report
    assert report["layout"]["pp"] == 2
    assert report["batch"]["accumulation"] == 4
    assert report["source"]["unknown"] == []


TOML_FILE = """
[model]
name = "llama3"
flavor = "70B"
[optimizer]
name = "AdamW"
lr = 1.5e-4
[training]
local_batch_size = 8
seq_len = 8192
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "full"
"""


def test_toml_counts_samples_before_the_pipeline_splits_them(explain):
    """Trap 2: local_batch_size is of a rank and step; micro batches are of 1 by default
    (job_config.py, pipeline_parallel_microbatch_size)."""
    code, report = explain(TOML_FILE, "job.toml", "--ranks", "64")
    assert code == 0
    assert report["batch"]["micro"] == 1
    assert report["batch"]["accumulation"] == 8
    assert report["layout"]["dp_shard"] == 4
    assert report["layout"]["vpp"] == 2
    # pipeline_parallel.py: with a pipeline parameters stay gathered after the forward pass.
    assert report["layout"]["zero"] == 2
    assert report["source"]["unknown"] == []


def test_command_with_overrides(plait, tmp_path):
    (tmp_path / "job.toml").write_text(TOML_FILE)
    script = tmp_path / "run.sh"
    script.write_text(
        "#!/bin/bash\nNGPU=${NGPU:-8}\n"
        "torchrun --nproc_per_node=$NGPU --nnodes 4 -m torchtitan.train \\\n"
        f"  --job.config_file {tmp_path}/job.toml --parallelism.tensor_parallel_degree 4 \\\n"
        "  --compile.enable --activation_checkpoint.mode=selective $@\n"
    )
    code, out, err = plait("explain", "--from", "torchtitan", script, "--json")
    report = json.loads(out)
    assert code == 0, err
    assert report["world"] == 32
    assert report["layout"]["tp"] == 4
    assert report["layout"]["recompute"] == "selective:norm,mlp"


def test_own_recipes_by_command(plait):
    words = "NGPU=16 MODULE=deepseek_v3 CONFIG=deepseek_v3_16b ./run_train.sh"
    code, out, _ = plait("explain", "--from", "torchtitan", words, "--json")
    report = json.loads(out)
    assert code == 0, report["findings"]
    assert (report["world"], report["layout"]["ep"]) == (16, 8)
    assert report["model"]["name"] == "deepseek-v2-lite"


def test_unknown_option_with_the_nearest(plait):
    words = "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b"
    more = "--parallelism.tensor_paralel_degree 2"
    _, out, _ = plait("explain", "--from", "torchtitan", f"{words} {more}", "--json")
    unknown = json.loads(out)["source"]["unknown"]
    assert [u["nearest"] for u in unknown] == ["parallelism.tensor_parallel_degree"]


# -- its rules


@pytest.mark.parametrize(
    ("stages", "layers", "expected"),
    [
        # pipeline_parallel.py, _generate_llm_fqn_per_model_part: the embedding and the head count
        # as one layer each, what is left over goes to the first stages.
        (2, 3, [2, 1]),
        (4, 32, [8, 9, 8, 7]),
        (8, 6, [0, 1, 1, 1, 1, 1, 1, 0]),
        (4, 6, [1, 2, 2, 1]),
    ],
)
def test_layers_of_stages(stages, layers, expected):
    assert split(stages, layers) == expected


@pytest.mark.parametrize(
    ("lines", "ranks", "rule"),
    [
        # trainer.py: CUDA graphs are on by default and refuse pipelines.
        (["config.parallelism.pipeline_parallel_degree = 2"], 8, "torchtitan-cuda-graphs"),
        # models/common/decoder.py: 8 KV heads.
        (["config.parallelism.tensor_parallel_degree = 16"], 16, "torchtitan-heads"),
        # trainer.py: tokens of a step.
        (["config.training.num_tokens_per_train_step = 100000"], 8, "torchtitan-batch"),
        # configs.py: an option of JobConfig.
        (["config.parallelism.enable_async_tensor_parallel = True"], 8, "torchtitan-lost"),
        # configs.py, CompileConfig.
        (["config.compile.enable_async_tensor_parallel = True"], 8, "torchtitan-async-tp"),
        # context_parallel/api.py.
        (
            ["config.parallelism.context_parallel_degree = 2",
             "config.parallelism.spmd_backend = 'partial_dtensor'"],
            8, "torchtitan-cp-backend",
        ),
        # models/common/decoder.py: only FlexAttention.
        (
            ["config.parallelism.context_parallel_degree = 2",
             "config.model_spec = model_registry('8B', attn_backend='varlen')"],
            8, "torchtitan-cp-attention",
        ),
        # torch: a name that its schedules do not have.
        (
            ["config.parallelism.pipeline_parallel_degree = 2",
             "config.training.disable_cuda_graphs = True",
             "config.parallelism.pipeline_parallel_schedule = 'ZB2P'"],
            8, "torchtitan-schedule",
        ),
        # components/checkpointer/base.py.
        (
            ["config.checkpoint.enable = True", "config.checkpoint.keep_latest_k = 1"],
            8, "torchtitan-keep",
        ),
        # pipeline_parallel.py: 34 / 10 is 4 stages, which a single-stage schedule has not on 2.
        (
            ["config.parallelism.pipeline_parallel_degree = 2",
             "config.training.disable_cuda_graphs = True",
             "config.parallelism.num_pp_microbatches = 8",
             "config.parallelism.pipeline_parallel_layers_per_stage = 10"],
            8, "torchtitan-stages",
        ),
    ],
)  # fmt: skip
def test_refusals(explain, lines, ranks, rule):
    code, report = explain(one(*lines), "recipe.py", "--ranks", ranks)
    assert code == 1
    assert rule in rules(report), report["findings"]


def test_tied_weights_are_refused_in_a_pipeline(explain):
    lines = [
        "config.parallelism.pipeline_parallel_degree = 2",
        "config.training.disable_cuda_graphs = True",
        "config.parallelism.num_pp_microbatches = 4",
    ]
    code, report = explain(one(*lines, flavor="1B"), "recipe.py", "--ranks", 8)
    assert code == 1
    assert "torchtitan-tied" in rules(report)


def test_experts_divide_what_fsdp_and_tp_have(explain):
    """parallel_dims.py: EP divides dp_shard x cp x tp and never crosses dp_replicate."""
    lines = [
        "config.parallelism.expert_parallel_degree = 16",
        "config.parallelism.data_parallel_replicate_degree = 2",
        "config.training.disable_cuda_graphs = True",
    ]
    code, report = explain(one(*lines, flavor="16B", model="deepseek_v3"), "r.py", "--ranks", 16)
    assert code == 1
    assert "torchtitan-expert-grid" in rules(report) or "expert-grid" in rules(report)
    assert "expert_parallel_degree=8" in report["source"]["legal"][RECIPE]


def test_grid_of_the_reference():
    """World 16, dp_shard 4, cp 2, tp 2, ep 8: efsdp 2 (training.md 3.0)."""
    made = draft(
        "plan", None,
        {"model": "deepseek-v3", "ranks": 16, "layout.dp_shard": 4, "layout.cp": 2, "layout.tp": 2,
         "layout.ep": 8, "layout.zero": 3},
    )  # fmt: skip
    assert made.job is not None
    assert made.job.layout.edp == 2
    assert made.job.layout.fsdp == 8


def test_old_context_parallelism_is_of_sdpa(explain):
    """0.2.2, models/deepseek_v3/model/args.py: 671B runs FlexAttention, cp wants SDPA."""
    text = """
[model]
name = "deepseek_v3"
flavor = "671B"
[parallelism]
context_parallel_degree = 2
"""
    code, report = explain(text, "job.toml", "--ranks", "16")
    assert code == 1
    assert "torchtitan-cp-attention" in rules(report)


# -- what is written


MOE = ["deepseek-v2-lite", "qwen3-30b-a3b", "mixtral-8x7b"]


def _jobs():
    dense = st.sampled_from(["llama3.1-8b", "llama2-7b", "qwen3-8b", "tiny"])
    return st.fixed_dictionaries(
        {
            "model": st.one_of(dense, st.sampled_from(MOE)),
            "tp": st.sampled_from([1, 2, 4]),
            "cp": st.sampled_from([1, 2]),
            "pp": st.sampled_from([1, 2]),
            "vpp": st.sampled_from([1, 2]),
            "schedule": st.sampled_from(["1f1b", "gpipe", "interleaved-1f1b", "zbv", "looped-bfs"]),
            "replicate": st.sampled_from([1, 2]),
            "shard": st.sampled_from([1, 2, 4]),
            "zero": st.sampled_from([0, 2, 3]),
            "ep": st.sampled_from([1, 2]),
            "micro": st.sampled_from([1, 2]),
            "batches": st.sampled_from([4, 8]),
            "recompute": st.sampled_from(["none", "full", "selective:norm,mlp"]),
        }
    )


def _job(drawn):
    """A legal job of what was drawn that TorchTitan can say; None where there is none."""
    pp, vpp = drawn["pp"], drawn["vpp"]
    single = drawn["schedule"] in ("1f1b", "gpipe")
    zero, shard, replicate = drawn["zero"], drawn["shard"], drawn["replicate"]
    if shard * drawn["cp"] == 1:
        zero = 0
    elif zero == 0:
        zero = 3
    if (pp > 1 and (single != (vpp == 1))) or (pp == 1 and vpp > 1):
        return None
    moe = drawn["model"] in MOE
    ep = drawn["ep"] if moe else 1
    if zero == 0 and (drawn["tp"] * drawn["cp"]) % ep:
        return None  # experts are never spread over replicas
    fields = {
        "model": drawn["model"], "ranks": drawn["tp"] * drawn["cp"] * pp * replicate * shard,
        "layout.tp": drawn["tp"], "layout.cp": drawn["cp"], "layout.pp": pp, "layout.ep": ep,
        "layout.etp": drawn["tp"] if moe and ep == 1 else 1, "layout.cp_method": "all-gather",
        "layout.dp_replicate": replicate, "layout.dp_shard": shard, "layout.zero": zero,
        "layout.micro_batch": drawn["micro"], "train.accumulation": drawn["batches"],
        "layout.recompute": drawn["recompute"], "train.seq_len": 256,
    }  # fmt: skip
    if pp > 1:
        fields |= {"layout.schedule": drawn["schedule"], "layout.vpp": vpp}
    made = draft("plan", None, fields)
    if made.findings or any(f.level == "error" for f in check(made.job, "plan")):
        return None
    return made.job


#: Layout fields that come back; `cp_method` and `schedule` only where they are used.
FIELDS = (
    "tp", "sequence_parallel", "cp", "pp", "vpp", "ep", "etp", "dp_replicate", "dp_shard", "zero",
    "micro_batch", "recompute",
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(_jobs())
def test_round_trip(drawn):
    job = _job(drawn)
    if job is None:
        return
    files = torchtitan.write(job).files
    ast.parse(files[RECIPE])
    for name in (RECIPE, TOML):
        if name not in files:
            continue
        source = Source(files[name], name, Path(name))
        launch = torchtitan.read(source, Told())
        assert not launch.settings.findings or all(
            f.level != "error" for f in launch.settings.findings
        )
        assert launch.unknown() == []
        again = draft("plan", None, launch.fields | {"ranks": job.layout.world})
        assert again.findings == [], again.findings
        same = {f: getattr(again.job.layout, f) for f in FIELDS}
        want = {f: getattr(job.layout, f) for f in FIELDS}
        assert same == want, name
        assert again.job.batch == job.batch
        assert again.job.train.seq_len == job.train.seq_len
        if job.layout.pp > 1:
            assert again.job.layout.schedule == job.layout.schedule
        assert again.job.model.layers == job.model.layers
        assert again.job.model.vocab == job.model.vocab
        experts = [m.moe and (m.moe.experts, m.moe.topk) for m in (again.job.model, job.model)]
        assert experts[0] == experts[1]
        assert not [f for f in torchtitan.check(launch, again.job) if f.level == "error"] or (
            job.model.tied and job.layout.pp > 1
        )


def test_what_it_cannot_say_is_noted(plait):
    words = ("llama3.1-8b", "--ranks", 32, "--pp", 4, "--schedule", "zb-h2", "--zero", 1)
    code, out, err = plait("convert", *words, "--global-batch", 64, "--to", "torchtitan", "--json")
    answer = json.loads(out)
    said = {n["rule"] for n in answer["notes"]}
    assert {"torchtitan-schedule", "torchtitan-zero"} <= said, (code, err)


def test_models_without_a_flavor(plait):
    """Of llama3's blocks, of qwen3's where there are experts; what they lack is said."""
    for model, lacks in (("gpt2", "positions"), ("mixtral-8x7b", "qk_norm")):
        code, out, _ = plait("convert", model, "--ranks", 8, "--to", "torchtitan", "--json")
        answer = json.loads(out)
        assert code == 0
        said = next(n["message"] for n in answer["notes"] if n["rule"] == "torchtitan-model")
        assert lacks in said
    code, out, _ = plait("convert", "tiny-mla", "--ranks", 2, "--to", "torchtitan", "--json")
    assert code == 1


def test_every_flavor_is_a_model():
    for name, known in flavors().items():
        for flavor, fields in known.items():
            if fields:
                assert draft("plan", None, fields | {"ranks": 1}).findings == [], (name, flavor)


# -- hostile


@pytest.mark.parametrize(
    ("text", "suffix"),
    [
        ("def f(", ".py"),
        ("(" * 5000, ".py"),
        ("x = 10 ** 400 ** 400\ndef f() -> Trainer.Config:\n    return f()\n", ".py"),
        ("def f() -> T.Config:\n    while True:\n        x = 'a' * 10**12\n    return x\n", ".py"),
        ("x = [list(range(10**5)) for i in range(10**5)]\ny = [*x, *x] * 1000\n", ".py"),
        ("def f() -> T.Config:\n    return T.Config(optimizer=a(lr=float('nan')))\n", ".py"),
        ("[model\nname = 3", ".toml"),
        ("[training]\nlocal_batch_size = nan\nseq_len = inf\n", ".toml"),
        ("[parallelism]\ntensor_parallel_degree = [1, 2]\n", ".toml"),
        ("a = " + "[" * 3000 + "]" * 3000, ".toml"),
        ("torchrun -m torchtitan.train --training.steps $(rm -rf /)", ".sh"),
    ],
)
def test_hostile(text, suffix, tmp_path):
    file = tmp_path / f"launch{suffix}"
    try:
        launch = torchtitan.read(Source(text, file.name, file), Told())
    except UserError as problem:
        lines = [finding.line() for finding in problem.findings]
    else:
        lines = [finding.line() for finding in launch.settings.findings]
    assert not any("\n" in line for line in lines)


def test_names_of_2024_are_those_of_today(explain):
    text = """
[model]
name = "llama3"
flavor = "8B"
[training]
batch_size = 2
seq_len = 4096
data_parallel_degree = 4
tensor_parallel_degree = 2
pipeline_parallel_degree = 1
enable_float8_linear = false
[checkpoint]
interval_type = "steps"
interval = 50
"""
    code, report = explain(text, "llama3_8b.toml")
    assert code == 0
    assert report["source"]["unknown"] == []
    assert (report["world"], report["layout"]["dp_shard"], report["layout"]["tp"]) == (8, 4, 2)


def test_commands_of_the_page(capsys):
    for words in commands_of("torchtitan"):
        assert main(words) == 0, words
    capsys.readouterr()
