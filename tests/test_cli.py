"""The command line: arguments, exit codes, what goes to which stream, and fast starts."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from plait.cli import arguments
from plait.cli.main import COMMANDS, main
from plait.dialects import DIALECTS
from plait.spec.jobfile import SHORT, job_paths
from plait.spec.schedule import SCHEDULES


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "PLAIT_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def plait(capsys):
    """Runs a command line here: (exit code, stdout, stderr)."""

    def run(*argv):
        code = main([str(word) for word in argv])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def library(monkeypatch):
    """Stands in for what the commands call; keeps what it was called with."""
    calls = SimpleNamespace(report={"fits": True}, measured={"agree": True}, train=0)

    def put(module, **functions):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**functions))

    def launch(job, as_json):
        calls.job, calls.as_json = job, as_json
        return calls.train

    def report(job, findings, world, serving):
        calls.job, calls.findings = job, findings
        return calls.report

    def dryrun(job, findings, **_):
        calls.job, calls.findings = job, findings
        return calls.measured

    from plait.train import launch as real

    monkeypatch.setattr(real, "run", launch)
    put("plait.report.build", report=report)
    put("plait.report.text", render=lambda answer: f"rendered {answer}")
    put("plait.trace.dryrun", dryrun=dryrun)
    return calls


# ------------------------------------------------------------------------------------------
# Commands


def test_help(plait):
    for argv in ((), ("--help",), ("-h",), ("help",)):
        code, out, err = plait(*argv)
        assert code == 0
        assert all(name in out for name in COMMANDS)
        assert err == ""


@pytest.mark.parametrize(
    "command", ["train", "explain", "convert", "dryrun", "schedule", "presets"]
)
def test_help_of_a_command(plait, command):
    code, out, _ = plait(command, "--help")
    assert code == 0
    assert f"usage: plait {command}" in out
    if command not in ("schedule", "presets"):
        for flag in ("--tp", "--global-batch", "weight-decay 0.1", "--json"):
            assert flag in out


def test_version(plait):
    code, out, _ = plait("--version")
    assert code == 0
    assert out.startswith("plait 0.")


def test_unknown_command(plait):
    code, out, err = plait("trian")
    assert (code, out) == (2, "")
    assert "nearest: train" in err


def test_train_hands_over_the_job(plait, library, tmp_path):
    file = tmp_path / "job.toml"
    file.write_text("ranks = 8\n[train]\nsteps = 9\nseed = 1")
    # The file may stand anywhere among the flags.
    for argv in ((file, "--steps", 5, "--tp=2"), ("--steps", 5, "--tp=2", file)):
        code, out, err = plait("train", *argv)
        assert (code, out, err) == (0, "", "")
        job = library.job
        assert (job.train.steps, job.train.seed, job.layout.tp, job.layout.dp) == (5, 1, 2, 4)
        assert library.as_json is False
    library.train = 1
    assert plait("train", "--json")[0] == 1
    assert library.as_json is True


def test_train_warns_on_stderr_and_goes_on(plait, library):
    code, out, err = plait("train", "--tp", 1, "--sequence-parallel", "true", "--json")
    assert (code, out) == (0, "")
    assert err.startswith("warning: layout.sequence_parallel: ")


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (("--train.min-learning-rate", "-1e-3"), "train.min_learning_rate", "-1e-3"),
        (("--train.min-learning-rate=-1e-3",), "train.min_learning_rate", "-1e-3"),
        (("--seed", "-1"), "train.seed", "-1"),
        (("--sequence-parallel",), "layout.sequence_parallel", "true"),
        (("--sequence_parallel", "false"), "layout.sequence_parallel", "false"),
        (("--tp", "2", "--layout.tp", "4"), "layout.tp", "4"),
        (("--metrics", ""), "metrics", ""),
        (("--data.path", "a b,c"), "data.path", "a b,c"),
    ],
)
def test_flags_and_their_texts(argv, field, value):
    parser = arguments.job_parser("train", "", "")
    given, words, findings = arguments.parse(argv, parser)
    assert given == {"json": False, field: value}
    assert (words, findings) == ([], [])


def test_every_field_has_its_flag():
    parser = arguments.job_parser("train", "", "")
    for path in job_paths():
        flag = f"--{path.replace('_', '-')}"
        assert arguments.parse([flag, "1"], parser)[0] == {"json": False, path: "1"}
    for name, path in SHORT.items():
        flag = f"--{name.replace('_', '-')}"
        assert arguments.parse([flag, "1"], parser)[0] == {"json": False, path: "1"}


def test_the_help_speaks_of_every_field(plait):
    out = plait("train", "--help")[1]
    for path in job_paths():
        if path.count(".") < 2:
            assert path.rpartition(".")[2].replace("_", "-") in out


# ------------------------------------------------------------------------------------------
# Bad questions


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("nowhere.toml",), "nowhere.toml: no such file"),
        (("/",), "/: no complete checkpoint in it"),
        (("--global-bach", "8"), "--global-bach: no such flag (nearest: --global-batch)"),
        (("--tpp=8",), "--tpp: no such flag (nearest: --tp)"),
        (("-x",), "-x: no such flag"),
        (("--tp",), "--tp: a value must follow"),
        (("--tp", "--dp-shard", "2"), "--tp: a value must follow"),
        (("--tp", "two"), "layout.tp: 'two' is not a whole number"),
        (("--tp", ""), "layout.tp: '' is not a whole number"),
        (("--tp", "3", "--ranks", "6", "--global-batch", "6"), "layout.tp: 8 attention heads"),
        (("--ranks", "3", "--tp", "2"), "layout.tp: tp = 2 does not divide 3 ranks"),
        (("--ranks", "99999999999999999999"), "ranks: "),
        (("--steps", "1e400"), "train.steps: '1e400' is not a whole number"),
        (("--model", "lama3.1-8b"), "nearest: llama3.1-8b"),
        (("--model", "/nowhere/config.json"), "/nowhere/config.json"),
        (("--gpus", "h100"), "gpus: "),
        (("--gpus", "h100:0"), "gpus: "),
        (("--tp", "2", "--dcp", "2"), "decode context parallelism is not built yet (dcp 2)"),
        (("--cp", "3", "--ranks", "3"), "train.seq_len: "),
        (("--ranks", "2", "--ep", "2"), "tiny has no experts to spread over ep 2"),
        (("--zero", "0", "--dp-shard", "2"), "zero 0 shards no model state"),
    ],
)
def test_one_line_for_a_problem(plait, argv, said):
    code, out, err = plait("train", *argv)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err
    errors = json.loads(plait("train", *argv, "--json")[1])["errors"]
    assert len(errors) == len(err.splitlines())


def test_an_argument_too_many(plait, tmp_path):
    file = tmp_path / "job.toml"
    file.write_text("")
    assert "too many" in plait("train", file, file)[2]
    assert "too many" in plait("explain", "tiny", "tiny", "--ranks", 1)[2]
    assert "too many" in plait("presets", "all")[2]
    assert plait("presets", "--jsn")[2] == "--jsn: no such flag (nearest: --json)\n"


@pytest.mark.parametrize("command", ["explain", "dryrun", "train"])
def test_a_file_that_cannot_be_read_is_the_only_cause(plait, tmp_path, command):
    """What it would have said is not known; what is wrong with the flags themselves is."""
    missing, broken = tmp_path / "nowhere.toml", tmp_path / "broken.toml"
    broken.write_text("tp = = 2")
    for file, said in ((missing, "no such file"), (broken, "not valid TOML")):
        code, out, err = plait(command, file, "--ep", 3)
        assert (code, out) == (2, "")
        assert err.startswith(f"{file}: {said}")
        assert len(err.splitlines()) == 1
        _, _, err = plait(command, file, "--tp", "two", "--tpp", 2)
        assert [line.partition(": ")[0] for line in err.splitlines()] == [
            "--tpp",
            str(file),
            "layout.tp",
        ]


def test_a_rank_that_is_no_number_is_said_with_the_rest(plait):
    code, out, err = plait("dryrun", "tiny", "--ranks", 4, "--tp", "x", "--rank", "2.0")
    assert (code, out) == (2, "")
    assert {line.partition(": ")[0] for line in err.splitlines()} == {"rank", "layout.tp"}


@pytest.mark.parametrize("command", ["explain", "dryrun", "train"])
@pytest.mark.parametrize(
    ("flag", "word"),
    [
        ("--dtype", "fp8"),
        ("--recompute", "x"),
        ("--cp-method", "rong"),
        ("--schedule", "zb-h9"),
        ("--model.mlp", "silu"),
        ("--train.schedule", "sine"),
        ("--stages", "some"),
    ],
)
def test_a_word_that_nobody_knows_is_a_wrong_question(plait, command, flag, word):
    code, out, err = plait(command, "--model", "tiny", "--ranks", 4, flag, word, "--json")
    assert (code, err) == (2, "")
    (found,) = json.loads(out)["errors"]
    assert (found["value"], found["where"].endswith(flag[2:].replace("-", "_"))) == (word, True)


def test_what_cannot_be_recomputed_in_a_pipeline(plait):
    """The rules look at the rest of such a job, its schedule among it."""
    asked = ("explain", "llama3.1-8b", "--gpus", "h100:16", "--pp", "4", "--micro-batch", "0")
    code, out, err = plait(*asked, "--recompute", "selective:norms,router")
    assert (code, out) == (2, "")
    assert {line.partition(":")[0] for line in err.splitlines()} == {
        "layout.micro_batch",
        "layout.recompute",
    }


def test_all_problems_at_once(plait, tmp_path):
    file = tmp_path / "job.toml"
    file.write_text("[layout]\ntpp = 2\n[train]\nsteps = 0\nschedule = 'cosin'")
    argv = ("train", file, "--bogus", "1", "--tp", "3", "--train.clip", "x", "--model.vocab", 5)
    code, out, err = plait(*argv, "--json")
    assert (code, err) == (2, "")
    errors = json.loads(out)["errors"]
    assert all(e.keys() == {"where", "value", "message", "nearest"} for e in errors)
    wheres = ("--bogus", "layout.tpp", "train.clip", "train.steps", "train.schedule", "model.vocab")
    assert {*wheres, "layout.tp"} <= {e["where"] for e in errors}
    nearest = {e["where"]: e["nearest"] for e in errors}
    assert nearest["layout.tpp"] == "layout.tp"
    assert (nearest["train.steps"], nearest["train.schedule"]) == (1, "cosine")
    # What does not divide, of the ranks and of the heads, has one nearest degree.
    assert {e["nearest"] for e in errors if e["where"] == "layout.tp"} == {2}

    code, out, err = plait(*argv)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == len(errors)


def strict(text):
    """JSON as everyone else reads it: without NaN and Infinity."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    "text",
    [
        "ranks = inf",
        "[train]\nclip = nan",
        "[layout]\ntp = nan\nstages = [1, nan]",
        "[data]\npath = 2024-01-01",
        "[model.rope_scaling]\nfactor = nan",
        "bar = nan",
    ],
)
def test_errors_are_strict_json(plait, tmp_path, text):
    file = tmp_path / "job.toml"
    file.write_text(text)
    code, out, _ = plait("explain", file, "--json")
    assert code == 2
    assert strict(out)["errors"]


def test_numbers_beyond_all_sizes_are_one_line(plait):
    code, _, err = plait("explain", "tiny", "--gpus", "h100:8", "--seq-len", "1" + "0" * 400)
    assert code == 2
    assert err.startswith("train.seq_len:")
    assert len(err.splitlines()) == 1


def test_names_are_not_markup(plait, tmp_path):
    folder = tmp_path / "a[b]c"
    folder.mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"intermediate_size": 96, "max_position_embeddings": 128, "rms_norm_eps": 1e-6}
    config = {"model_type": "llama", "vocab_size": 256} | sizes | more
    (folder / "config.json").write_text(json.dumps(config))
    code, out, err = plait("explain", folder, "--gpus", "h100:8")
    assert (code, err) == (0, "")
    assert "a[b]c" in out


def test_a_full_disk_is_one_line():
    code = "import sys; from plait.cli.main import main; sys.exit(main(['explain', '--json']))"
    with open("/dev/full", "w") as full:
        done = fresh(code, stdout=full)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_world_size_under_torchrun(plait, library, monkeypatch):
    place = {"RANK": 0, "WORLD_SIZE": 8, "LOCAL_RANK": 0, "MASTER_ADDR": "here", "MASTER_PORT": 1}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    code, _, err = plait("train", "--ranks", 4)
    assert code == 2
    assert err == "ranks: the job is for 4 ranks, the launcher started 8 (nearest: 8)\n"
    assert plait("train")[0] == 0
    assert (library.job.layout.world, library.job.layout.tp) == (8, 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert plait("train", "--ranks", 4) == (2, "", "")


# ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argv", "wheres"),
    [
        (("--pp", "2", "--schedule", "zbx"), {"layout.schedule"}),
        (("--pp", "2", "--schedule", "zbx", "--tp", "3", "--eval", "3", "--stages", "x"),
         {"layout.schedule", "layout.tp", "--eval", "layout.stages"}),
        (("--pp", "4", "--vpp", "4", "--schedule", "zbx"), {"layout.schedule"}),
        (("--pp", "2", "--schedule", "interleaved-1f1b:x"), {"layout.schedule"}),
        (("--pp", "2", "--schedule", "interleaved-1f1b:" + "9" * 5000), {"layout.schedule"}),
        (("--pp", "2", "--stages", "2,,2"), {"layout.stages"}),
        (("--pp", "2", "--schedule", "nowhere.csv"), {"layout.schedule"}),
        (("--pp", "99999999999"), {"layout.pp"}),
        (("--json=1",), {"--json"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["train", "explain"])
def test_what_is_wrong_with_a_pipeline_is_said_and_nothing_else(plait, command, argv, wheres):
    if command == "explain":
        argv = ("tiny", *argv)
    code, out, _ = plait(command, "--ranks", "4", *argv, "--json")
    assert code == 2
    found = {problem["where"] for problem in json.loads(out)["errors"]}
    assert found == wheres


@pytest.mark.parametrize(
    ("argv", "where"),
    [
        (("--pp", "2", "--stages", "4,4,4"), "layout.stages"),
        (("--pp", "4", "--stages", "1,1"), "layout.stages"),
        (("--pp", "2", "--vpp", "2", "--stages", "2,2"), "layout.stages"),
        (("--pp", "2", "--schedule", "zbv", "--vpp", "1"), "layout.vpp"),
        (("--pp", "2", "--schedule", "zbv", "--stages", "2,2"), "layout.stages"),
        (("--tp", "3"), "layout.tp"),
        (("--tp", "2", "--global-batch", "3"), "train.global_batch"),
    ],
)
def test_a_layout_that_is_illegal_is_described_and_not_run(plait, argv, where):
    code, out, err = plait("explain", "tiny", "--ranks", "4", *argv, "--json")
    report = json.loads(out)
    errors = {f["where"] for f in report["findings"] if f["level"] == "error"}
    assert (code, err, report["fits"], report["memory"]["peak_bytes"]) == (1, "", False, None)
    assert where in errors
    assert report["world"] == 4
    assert plait("explain", "tiny", "--ranks", "4", *argv)[0] == 1
    for command in ("train", "dryrun"):
        argv = ("tiny", *argv) if command == "dryrun" else argv
        code, out, _ = plait(command, "--ranks", "4", *argv, "--json")
        assert code == 2
        assert where in {problem["where"] for problem in json.loads(out)["errors"]}


# explain and dryrun


@pytest.mark.parametrize(
    ("argv", "fits", "code"),
    [
        (("llama3.1-8b", "--gpus", "h100:64", "--tp", "8"), True, 0),
        (("llama3.1-8b", "--gpus", "h100:64", "--tp", "8"), False, 1),
        (("tiny", "--ranks", "4"), None, 0),
        (("tiny", "--ranks", "2", "--tp", "2", "--dcp", "2"), None, 1),  # understood, not built
        (("--model", "tiny", "--ranks", "6", "--tp", "3"), None, 1),  # understood, illegal
    ],
)
def test_explain(plait, library, argv, fits, code):
    library.report = {"fits": fits}
    assert plait("explain", *argv, "--json") == (code, json.dumps(library.report) + "\n", "")
    assert plait("explain", *argv) == (code, f"rendered {library.report}\n", "")


def test_explain_a_job_file(plait, library, tmp_path):
    file = tmp_path / "job.toml"
    file.write_text('model = "gpt2"\ngpus = "a100:16"\n[layout]\ntp = 2')
    assert plait("explain", file)[0] == 0
    assert (library.job.model.name, library.job.layout.dp_shard) == ("gpt2", 8)


@pytest.mark.parametrize(
    "argv",
    [(), ("tiny",), ("tinny", "--ranks", "4"), ("tiny", "--ranks", "4", "--model", "gpt2")],
)
@pytest.mark.parametrize("command", ["explain", "dryrun"])
def test_questions_without_an_answer(plait, library, command, argv):
    code, out, err = plait(command, *argv)
    assert (code, out) == (2, "")
    assert err
    assert "errors" in json.loads(plait(command, *argv, "--json")[1])


def test_dryrun(plait, library):
    argv = ("dryrun", "tiny", "--gpus", "h100:64", "--tp", "2")
    for agree, fits, code in ((True, True, 0), (True, None, 0), (False, True, 1), (True, False, 1)):
        library.measured = {"agree": agree, "fits": fits}
        assert plait(*argv, "--json")[:2] == (code, json.dumps(library.measured) + "\n")
    code, out, err = plait(*argv, "--dcp", "2")
    assert (code, out) == (2, "")
    assert "not built yet" in err


# ------------------------------------------------------------------------------------------
# presets


def test_presets(plait):
    code, out, _ = plait("presets", "--json")
    answer = json.loads(out)
    assert code == 0
    models = {m["name"]: m for m in answer["models"]}
    assert models["llama3.1-8b"]["parameters"] == 8030261248  # Meta's model card
    assert models["mixtral-8x7b"]["experts"] == 8
    assert {"h100", "a100"} <= {c["name"] for c in answer["clusters"]}
    schedules = {s["name"]: s for s in answer["schedules"]}
    assert schedules.keys() == SCHEDULES.keys()
    assert schedules["zbv"]["vpp"] == [2, 2]
    assert "v-schedule" in schedules["zbv"]["aliases"]
    assert [d["name"] for d in answer["dialects"]] == list(DIALECTS)
    assert all(d["version"] for d in answer["dialects"])
    text = plait("presets")[1]
    assert all(name in text for name in (*models, *schedules))


# ------------------------------------------------------------------------------------------
# How it ends


@pytest.mark.parametrize(
    ("problem", "code", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (RuntimeError("a\nb"), 1, "plait: RuntimeError: a b (PLAIT_DEBUG=1 shows where)\n"),
        (MemoryError(), 1, "plait: MemoryError: no message (PLAIT_DEBUG=1 shows where)\n"),
    ],
)
def test_no_traceback(plait, library, monkeypatch, problem, code, said):
    def fail(*_):
        raise problem

    monkeypatch.setattr("plait.train.launch.run", fail)
    assert plait("train") == (code, "", said)
    if code == 1:
        monkeypatch.setenv("PLAIT_DEBUG", "1")
        with pytest.raises(type(problem)):
            main(["train"])


def fresh(code, stdout=subprocess.PIPE):
    """A new interpreter runs the code; what it prints is kept."""
    command = [sys.executable, "-c", code]
    err = subprocess.PIPE
    return subprocess.run(command, check=False, stdout=stdout, stderr=err, text=True, timeout=60)


def test_starts_without_torch_and_rich():
    done = fresh(
        "import sys\n"
        "from types import SimpleNamespace as S\n"
        "sys.modules['plait.report.build'] = S(report=lambda *_: {'fits': True})\n"
        "sys.modules['plait.report.text'] = S(render=str)\n"
        "from plait.cli.main import main\n"
        "assert main(['presets']) == 0\n"
        "assert main(['explain', 'llama3.1-8b', '--gpus', 'h100:64', '--tp', '8']) == 0\n"
        "heavy = {'torch', 'rich', 'numpy', 'transformers'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
        "assert main(['train', '--tp', '3']) == 2\n"
        "heavy = {'torch', 'rich', 'transformers'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves():
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from plait.cli.main import main; sys.exit(main(['presets']))"
    done = fresh(code, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
