"""plait convert, as its user has it: what is said in one language comes back from the next."""

import json
from dataclasses import replace
from itertools import product
from math import isclose
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from launches import differences, jobs
from plait.cli.main import main
from plait.dialects import DIALECTS, dialect
from plait.dialects.launch import Told
from plait.dialects.source import Source
from plait.spec.job import Job
from plait.spec.jobfile import Draft, draft

SERVING = ("vllm", "sglang", "trtllm")
TRAINING = tuple(name for name in DIALECTS if name not in SERVING)

#: Field -> words of which a note must have one, where a target leaves the field out.
LOST = {
    "layout.tp": ("tp", "tensor"),
    "layout.sequence_parallel": ("norm", "sequence"),
    "layout.cp": ("cp", "context", "ulysses", "sequence"),
    "layout.ulysses": ("ulysses", "ring", "gather", "cp"),
    "layout.cp_method": ("ulysses", "ring", "gather", "cp"),
    "layout.pp": ("pp", "pipeline", "stage"),
    "layout.vpp": ("chunk", "interleav", "virtual"),
    "layout.schedule": ("chunk", "interleav", "schedule", "1f1b"),
    "layout.stages": ("chunk", "stage", "layers"),
    "layout.ep": ("expert", "ep is"),
    "layout.etp": ("expert", "etp", "ep is"),
    "layout.dp_replicate": ("replica", "hsdp", "copies", "zero", "shard"),
    "layout.dp_shard": ("replica", "hsdp", "copies", "zero", "shard"),
    "layout.zero": ("zero", "shard", "fsdp"),
    "layout.micro_batch": ("micro",),
    "layout.recompute": ("recompute", "checkpoint"),
    "train.accumulation": ("micro", "accumul", "batch"),
    "train.seq_len": ("sequence", "length", "data", "tokens"),
    "train.global_batch": ("batch", "data"),
    "train.dtype": ("dtype", "bf16", "precision"),
    "train.grad_dtype": ("gradient", "grad"),
}


@pytest.fixture
def convert(capsys, monkeypatch):
    """Runs `plait convert` here, where nothing is caught but what a person did wrong."""
    monkeypatch.setenv("PLAIT_DEBUG", "1")

    def run(*words):
        code = main(["convert", *map(str, words)])
        done = capsys.readouterr()
        return code, done.out, done.err

    return run


def read_back(name: str, files: dict[str, str], job: Job) -> Draft:
    """What a dialect makes of what it has written; the model where it cannot say one."""
    first, text = next(iter(files.items()))
    told = Told({}, job.layout.world)
    launch = dialect(name).read(Source(text, first, Path(first), files), told)
    said = {"ranks": job.layout.world} | launch.fields
    if "model" not in said:
        said = {"model.seq": said.get("train.seq_len", job.model.seq)} | said
    if said.keys() & {"model", "model.layers"}:
        return draft("plan", None, said)
    sizes = ("layers", "hidden", "heads", "vocab")
    made = draft("plan", None, said | {f"model.{n}": getattr(job.model, n) for n in sizes})
    return replace(made, job=replace(made.job, model=job.model)) if made.job else made


def lost(one: Job, other: Job) -> set[str]:
    """Fields that differ, but for the last digit of a number, padding of the vocabulary, and
    how what is not sharded is not sharded."""
    found = differences(one, other)
    found = {
        path
        for path, (a, b) in found.items()
        if not (isinstance(a, float) and isinstance(b, float) and isclose(a, b, rel_tol=1e-9))
    }
    if one.layout.dp_shard == other.layout.dp_shard == 1:
        found.discard("layout.zero")
    if one.layout.cp == other.layout.cp == 1:
        found -= {"layout.cp_method", "layout.ulysses"}
    return found - {"model.vocab"}


def unnamed(paths: set[str], notes: list[dict[str, str]]) -> set[str]:
    """Of what was lost, that which no note names."""
    said = " ".join(f"{n['rule']} {n['message']}" for n in notes).lower()
    return {
        path
        for path in paths
        if not any(word in said for word in LOST.get(path, ("model", "counted", "sizes")))
    }


@pytest.mark.parametrize(("one", "other"), list(product(TRAINING, TRAINING)))
def test_there_is_in_the_next_dialect(one, other, tmp_path_factory, capsys):
    """Written in one, converted, read back from the other: what both can say is the same, and
    what was lost is named. What is written, its own check does not refuse."""
    source, target = dialect(one), dialect(other)
    folder = tmp_path_factory.mktemp("launch")

    @settings(max_examples=2, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
    @given(jobs())
    def there(job: Job) -> None:
        written = source.write(job)
        assume(written.files and not any(n.level == "error" for n in written.notes))
        first = read_back(one, written.files, job)
        assert first.job is not None, first.findings
        assert first.findings == []
        for name, text in written.files.items():
            (folder / name).write_text(text)
        model = ["--model", job.model.name] if not _says_model(source, written, job) else []
        start = folder / next(iter(written.files))
        capsys.readouterr()
        words = ["--from", one, "--to", other, "--json", str(start), *model]
        code = main(["convert", *words, "--ranks", str(job.layout.world)])
        answer = json.loads(capsys.readouterr().out)
        assert code in (0, 1), answer
        if code == 1:
            # It is said who refuses what.
            assert answer["files"] is None
            found = [*answer["notes"], *answer["report"]["findings"]]
            assert any(f["level"] == "error" for f in found)
            return
        assert not [n for n in answer["notes"] if n["level"] == "error"]
        second = read_back(other, answer["files"], first.job)
        assert second.job is not None, second.findings
        assert second.findings == []
        assert unnamed(lost(first.job, second.job), answer["notes"]) == set()
        first_file = next(iter(answer["files"]))
        again = Source(answer["files"][first_file], first_file, Path(first_file), answer["files"])
        launch = target.read(again, Told({}, job.layout.world, second.job.model))
        refused = [f for f in target.check(launch, second.job) if f.level == "error"]
        assert not refused

    there()


def _says_model(source, written, job: Job) -> bool:
    first, text = next(iter(written.files.items()))
    launch = source.read(Source(text, first, Path(first), written.files), Told({}, None))
    return any(path.partition(".")[0] == "model" for path in launch.fields)


# --- serving ---------------------------------------------------------------------------------

SERVED = {
    "vllm": "vllm serve meta-llama/Llama-3.1-70B-Instruct --tensor-parallel-size {tp} "
    "--pipeline-parallel-size {pp}",
    "sglang": "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-70B-Instruct "
    "--tp-size {tp} --pp-size {pp}",
    "trtllm": "trtllm-serve meta-llama/Llama-3.1-70B-Instruct --tp_size {tp} --pp_size {pp}",
}


@pytest.mark.parametrize(("one", "other"), list(product(SERVING, SERVING)))
@settings(max_examples=2, suppress_health_check=list(HealthCheck))
@given(tp=st.sampled_from((1, 2, 4, 8)), pp=st.sampled_from((1, 2)))
def test_serve_commands_are_said_in_the_next_engine(one, other, tp, pp, capsys):
    capsys.readouterr()
    words = SERVED[one].format(tp=tp, pp=pp)
    code = main(["convert", "--from", one, "--to", other, "--json", words])
    answer = json.loads(capsys.readouterr().out)
    assert code == 0, answer
    first, text = next(iter(answer["files"].items()))
    launch = dialect(other).read(Source(text, first, Path(first), answer["files"]), Told())
    assert launch.fields.get("layout.tp", 1) == tp
    assert launch.fields.get("layout.pp", 1) == pp
    assert launch.fields["model"] == "llama3.1-70b"


# --- the command -----------------------------------------------------------------------------

FLAGS = ("llama3-8b", "--gpus", "h100:16", "--tp", "4", "--pp", "2", "--global-batch", "16")


@pytest.mark.parametrize("name", DIALECTS)
def test_flags_become_a_launch(name, convert):
    code, out, err = convert(*FLAGS, "--to", name)
    assert code == 0, err
    assert out.strip()
    code, shown, _ = convert(*FLAGS, "--to", name, "--json")
    answer = json.loads(shown)
    assert answer["from"] is None
    assert answer["to"] == name
    assert next(iter(answer["files"].values())) == out
    assert answer["report"]["layout"]["tp"] == 4
    assert {tuple(sorted(n)) for n in answer["notes"]} <= {("level", "message", "rule")}
    for finding in answer["notes"]:
        assert f"{finding['level']}: {finding['message']}" in err.splitlines()


@pytest.mark.parametrize("name", ["megatron", "primus", "torchtitan", "megatron-bridge"])
def test_all_files_go_into_a_folder(name, convert, tmp_path):
    folder = tmp_path / "new" / "launch"
    code, out, _ = convert(*FLAGS, "--to", name, "--out", folder)
    assert (code, out) == (0, "")
    code, shown, _ = convert(*FLAGS, "--to", name, "--json")
    files = json.loads(shown)["files"]
    assert {p.name: p.read_text() for p in folder.iterdir()} == files


LAUNCH = (
    "torchrun --nproc-per-node 8 --nnodes 2 run_recipe.py --recipe llama3_8b_pretrain_config "
    "model.tensor_model_parallel_size={tp} model.sequence_parallel=true"
)


def test_an_illegal_launch_is_described_and_not_written(convert):
    words = ("--from", "megatron-bridge", "--to", "megatron", LAUNCH.format(tp=3))
    code, out, _ = convert(*words)
    assert code == 1
    assert "Findings" in out
    assert "TP 3" in out
    code, out, err = convert(*words, "--json")
    answer = json.loads(out)
    assert (code, err) == (1, "")
    assert answer["files"] is None
    assert answer["report"]["fits"] is False
    assert [f for f in answer["report"]["findings"] if f["level"] == "error"]


def test_what_a_target_refuses_is_not_written(convert, tmp_path):
    """TorchTitan's 1F1B needs as many micro batches as stages (pipeline_parallel.py)."""
    words = ("llama3-8b", "--gpus", "h100:16", "--tp", "4", "--pp", "4", "--global-batch", "1")
    folder = tmp_path / "launch"
    code, out, err = convert(*words, "--to", "torchtitan", "--out", folder)
    assert (code, out) == (1, "")
    assert any(line.startswith("error: TorchTitan") for line in err.splitlines())
    assert not folder.exists()
    code, out, _ = convert(*words, "--to", "torchtitan", "--json")
    assert code == 1
    assert json.loads(out)["files"] is None


GOOD = ("--from", "megatron-bridge", "--to", "megatron", LAUNCH.format(tp=4))


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ((*GOOD[:3], "megatrn", GOOD[4]), ["nearest: megatron"]),
        (("--from", "vlm", *GOOD[2:]), ["nearest: vllm"]),
        (GOOD[:2] + GOOD[4:], ["--to DIALECT"]),
        ((*GOOD[:4], "/no/such/launch.sh"), ["no such file"]),
        (GOOD[:4], ["must follow"]),
        ((*GOOD, "--tpp", "3"), ["no such flag (nearest: --tp)"]),
        ((*GOOD, "--tp", "many"), ["many"]),
        ((*GOOD, "--model", "lama3-8b"), ["nearest: llama3-8b"]),
        ((*GOOD[:4], "echo hello"), ["no launch of Megatron-Bridge"]),
        (("--to", "nope", "--from", "nothing", "x y", "--what"), ["to:", "from:", "--what"]),
        (("llama3-8b", "--to", "megatron"), ["--gpus GPU:COUNT"]),
    ],
)  # fmt: skip
def test_wrong_questions_get_a_line_a_problem(words, lines, convert):
    code, out, err = convert(*words)
    assert (code, out) == (2, ""), err
    said = err.splitlines()
    assert all(len(line) < 1000 for line in said)
    for part in lines:
        assert any(part in line for line in said), err
    code, out, err = convert(*words, "--json")
    assert (code, err) == (2, "")
    errors = json.loads(out)["errors"]
    assert len(errors) == len(said)
    assert all(set(e) == {"where", "value", "message", "nearest"} for e in errors)


def test_a_file_where_the_folder_should_be(convert, tmp_path):
    file = tmp_path / "launch"
    file.write_text("mine")
    code, _, err = convert(*GOOD, "--out", file)
    assert code == 2
    assert "no folder" in err
    assert file.read_text() == "mine"


def test_a_folder_that_cannot_be_made(convert, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, err = convert(*GOOD, "--out", tmp_path / "file" / "below")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) >= 1


@pytest.mark.parametrize("name", ["", "\0", "x" * 300])
def test_a_folder_that_cannot_be_named(convert, name, tmp_path, monkeypatch):
    monkeypatch.setenv("PLAIT_DEBUG", "1")
    monkeypatch.chdir(tmp_path)
    code, out, err = convert(*GOOD, "--out", name)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert not list(tmp_path.iterdir())


def test_flags_are_stronger_than_the_launch(convert):
    code, out, _ = convert(*GOOD, "--tp", "2", "--global-batch", "64", "--json")
    answer = json.loads(out)
    assert code == 0, answer
    assert answer["report"]["layout"]["tp"] == 2
    assert answer["report"]["batch"]["global"] == 64


def test_torch_is_not_imported(convert):
    import subprocess
    import sys

    program = (
        "import sys; from plait.cli.main import main; "
        f"main({['convert', *GOOD]!r}); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=120)
    assert done.returncode == 0


@pytest.mark.parametrize("name", DIALECTS)
def test_a_schedule_that_nobody_has_gets_a_note(name, convert):
    """Two directions at once: no target has it."""
    launch = "--ranks 8 --pp 4 --schedule dualpipe --global-batch 64 --seq-len 4096".split()
    code, out, err = convert("llama3.1-8b", *launch, "--to", name)
    assert code == 0
    assert out
    assert any(word in err for word in ("dualpipe", "1f1b")), err
    assert "would run interleaved" not in err
