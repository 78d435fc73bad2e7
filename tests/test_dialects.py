"""What holds of every dialect: launch files that are broken, hostile or empty end in lines, and
nothing in them is run."""

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.cli.main import main
from plait.dialects import DIALECTS, dialect
from plait.dialects.launch import Told
from plait.dialects.source import LARGEST, Source
from plait.spec.findings import UserError

NAMES = list(DIALECTS)
SUFFIXES = ("", ".sh", ".yaml", ".yml", ".json", ".toml", ".py", ".txt")


@pytest.fixture
def plait(capsys, monkeypatch):
    """Runs a command line here, where nothing is caught but what a person did wrong."""
    monkeypatch.setenv("PLAIT_DEBUG", "1")

    def run(*argv):
        code = main([str(word) for word in argv])
        return code, *capsys.readouterr()

    return run


def one_problem(done, where=None):
    """The one line that a wrong question gets."""
    code, out, err = done
    assert (code, out) == (2, ""), done
    assert len(err.splitlines()) == 1, err
    assert where is None or where in err
    assert len(err) < 1000
    return err


def read(name: str, text: str, suffix: str) -> None:
    """Reads, and asks for everything that a command asks for."""
    path = Path(f"launch{suffix}") if suffix else None
    source = Source(text, path.name if path else "command", path)
    try:
        launch = dialect(name).read(source, Told())
    except UserError as problem:
        lines = [finding.line() for finding in problem.findings]
    else:
        lines = None
    if lines is not None:
        assert lines
        assert not any("\n" in line for line in lines)
        return
    unheeded, unknown = launch.unheeded(), launch.unknown()
    names = {s.name for s in unheeded} | {s.name for s, _ in unknown} | set(launch.settings.taken)
    assert names >= set(launch.settings.said), "an option was dropped silently"
    json.dumps(launch.fields, default=str)


# ------------------------------------------------------------------------------------------
# Names and files


def test_a_misspelt_dialect_has_a_nearest(plait):
    assert "nearest: megatron)" in one_problem(plait("explain", "--from", "megatrn", "x -y"))
    lines = plait("convert", "--from", "megatron", "--to", "vlm", "tp")[2].splitlines()
    assert [("nearest: vllm)" in line, "no such file" in line) for line in lines] == [
        (True, False),
        (False, True),
    ]


def test_what_is_no_file(plait, tmp_path):
    (tmp_path / "launch.sh").write_text("torchrun pretrain_gpt.py")
    missing = tmp_path / "lunch.sh"
    assert "launch.sh" in one_problem(plait("explain", "--from", "megatron", missing))
    one_problem(plait("explain", "--from", "megatron", tmp_path))
    one_problem(plait("explain", "--from", "megatron"))
    os.mkfifo(tmp_path / "pipe")
    one_problem(plait("explain", "--from", "megatron", tmp_path / "pipe"))
    one_problem(plait("explain", "--from", "megatron", "/dev/zero"))
    one_problem(plait("explain", "--from", "megatron", "a\0b"))
    one_problem(plait("explain", "--from", "megatron", "x" * 5000))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfea\0b\0",
        b"\x80\x81\x82",
        b"a\0b",
        b"x" * (LARGEST + 1),
        "törchrun ä".encode("latin-1"),
    ],
    ids=["utf-16", "binary", "nul", "huge", "latin-1"],
)
def test_files_that_are_no_text(plait, tmp_path, name, content):
    for suffix in (".yaml", ".sh"):
        file = tmp_path / f"launch{suffix}"
        file.write_bytes(content)
        one_problem(plait("explain", "--from", name, file), str(file))


# ------------------------------------------------------------------------------------------
# Texts

DEEP = 20_000
HOSTILE = {
    "empty": "",
    "blank": " \n\t\n",
    "comment": "# nothing\n",
    "brackets": "[" * DEEP,
    "braces": "{" * DEEP,
    "json-deep": '{"a":' * DEEP + "1" + "}" * DEEP,
    "yaml-deep": "".join("  " * i + "a:\n" for i in range(300)),
    "parentheses": "(" * DEEP,
    "quotes": "torchrun '" + "a" * 100,
    "aliases": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{after}: &{after} [{','.join([f'*{before}'] * 9)}]\n"
        for before, after in pairwise("abcdefghij")
    ),
    "tag": "a: !!python/object/apply:os.system ['touch /tmp/plait-was-run']\n",
    "substitution": "torchrun pretrain_gpt.py --tensor-model-parallel-size $(touch plait-was-run)",
    "backticks": "torchrun pretrain_gpt.py --tensor-model-parallel-size `touch plait-was-run`",
    "python": "import os\nos.system('touch plait-was-run')\nm = init_device_mesh('cuda', (2,))\n",
    "doubling": "A=x\n" + "A=$A$A\n" * 60 + "torchrun pretrain_gpt.py --save $A\n",
    "loop": "A='$A'\neval $A\n" * 50,
    "null": "null",
    "list": "[1, 2, 3]",
    "text": '"a text"',
    "number": "1",
    "large": '{"train_batch_size": 1' + "0" * 400 + "}",
    "nan": '{"train_batch_size": NaN, "zero_optimization": {"stage": Infinity}}',
    "not-yaml": "a: b: c:\n  - d\n e",
    "tabs": "a:\n\tb: 1",
    "control": "\x01\x02\x1b[31m",
    "documents": "a: 1\n---\nb: 2\n",
    "keys": "? [a, b]\n: 1\n1: 2\nnull: 3\n",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_texts(name, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for suffix in SUFFIXES:
        read(name, text, suffix)
    assert list(tmp_path.iterdir()) == []
    assert not Path("/tmp/plait-was-run").exists()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_text(name, data):
    pieces = st.sampled_from(
        ["torchrun", "--nproc-per-node", "8", "--tensor-model-parallel-size", "-tp", "vllm serve",
         "$A", "${A:-8}", "$(", ")", "`", "'", '"', "\\\n", "\n", " ", "=", "A=", "(", "EOF", "<<",
         "[", "]", "{", "}", ":", ",", "- ", "  ", "null", "-1", "1e999", "tp", "def f():", "cfg.",
         "true", '"zero_optimization"', "parallelism", "modules:", "$((1/0))", "${", "#", "&&"]
    )  # fmt: skip
    text = "".join(data.draw(st.lists(st.one_of(pieces, st.text(max_size=5)), max_size=30)))
    read(name, text, data.draw(st.sampled_from(SUFFIXES)))


# ------------------------------------------------------------------------------------------
# What is said of a launch that the target refuses, and of one that leaves its model open

REFUSED = (
    "CUDA_DEVICE_MAX_CONNECTIONS=8 torchrun --nproc-per-node 8 pretrain_gpt.py --bf16 "
    "--tensor-model-parallel-size 2 --micro-batch-size 1 --seq-length 4096"
)


def test_a_launch_that_is_refused_may_fit_all_the_same(plait, tmp_path):
    page = tmp_path / "page.html"
    asked = ("--from", "megatron", REFUSED, "--model", "llama2-7b", "--gpus", "h200:8")
    code, out, _ = plait("explain", *asked, "--html", page)
    assert code == 1
    assert "megatron would not run this" in out
    assert "Fits. " in out
    assert "Does not fit" not in out
    text = page.read_text("utf-8")
    assert "megatron would not run this." in text
    assert "Does not fit" not in text
    code, out, _ = plait("explain", *asked, "--json")
    assert (code, json.loads(out)["fits"]) == (1, False)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("vllm", "vllm serve $MODEL -tp 8"),
        ("sglang", "python -m sglang.launch_server --model-path $MODEL --tp 8"),
        ("trtllm", "trtllm-serve $MODEL --tp_size 8"),
        ("megatron", "torchrun --nproc-per-node 8 pretrain_gpt.py --micro-batch-size 1"),
    ],
)
def test_a_model_is_asked_for_once(plait, name, command):
    one_problem(plait("explain", "--from", name, command), "--model")
