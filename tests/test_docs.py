"""The documents say what is so: links resolve, commands are understood, tables and outputs are
those of the program, figures those of their script."""

import re
import shlex
import sys
import tomllib
from dataclasses import MISSING, fields
from itertools import chain
from pathlib import Path

import pytest

from plait import dialects
from plait.cli import arguments, convert, explain, schedule, tables
from plait.cli.main import COMMANDS
from plait.cli.question import launched
from plait.spec.findings import UserError
from plait.spec.job import Checkpoint, Data, Train
from plait.spec.jobfile import read_job
from plait.spec.layout import Layout
from plait.spec.model import MLA, Model, MoE, RopeScaling

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import figures  # noqa: E402
import refresh  # noqa: E402

PAGES = list(refresh.documents())


def page(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ------------------------------------------------------------------------------------------
# Links and commands


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_resolve(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        if target.startswith(("https://", "http://")):
            continue
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        assert there.exists(), f"{name_of(path)} links to {target}"
        assert not anchor or anchor in anchors(there.read_text("utf-8")), target


def shown_commands(text: str) -> set[str]:
    """Lines of code blocks, fenced or indented, that are plait commands, and those in tables."""
    lines = re.findall(r"^(?:    |\$ )?(plait [a-z-]+.*)$", text, re.MULTILINE)
    lines += [
        f"{base.strip()} {flags.strip()}"
        for base, *rest in (m.split("|") for m in re.findall(r"<!-- (plait .*?) -->", text))
        for flags in rest
    ]
    inline = re.findall(r"`(plait [a-z-]+ [^`|]*--[^`|]*)`", text)
    return {
        c
        for c in (*lines, *inline)
        if c.split()[1] in COMMANDS and "..." not in c and "DIALECT" not in c
    }


ALL_COMMANDS = sorted({c for p in PAGES for c in shown_commands(p.read_text("utf-8"))})


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_commands_are_understood(command):
    """Every flag exists and the job is legal, as the program itself reads them."""
    _, name, *words = shlex.split(command, comments=True)
    if name == "schedule":
        if not any(word.endswith(".csv") for word in words[:1]):
            schedule.read(words)
        return
    if name == "tables":
        tables.read(words)
        return
    if name == "presets":
        parser, flags = arguments.parser(name, "", ""), {}
    elif name == "convert":
        parser, flags = convert.asking()
    elif name in ("explain", "dryrun"):
        parser, flags = explain.asking(name, "")
    else:
        parser, flags = arguments.job_parser(name, "", ""), arguments.FLAGS
    given, rest, findings = arguments.parse(words, parser, flags)
    assert findings == []
    files = [w for w in rest if w.endswith(".toml") or w.startswith("runs/")]
    if "from" in given:
        dialects.dialect(given["from"])
        # A command that needs no file: an example's is not there to be read.
        if " " in rest[0] and not re.search(r"\.(ya?ml|toml|json|sh)\b", rest[0]):
            launched(given["from"], rest, given, [])
        return
    if name == "presets" or files:  # an example's file is not there to be read
        return
    model = rest[0] if rest else None
    arguments.load_job("train" if name == "train" else "plan", given, [], model=model)


def test_there_are_commands_and_a_wrong_one_is_found():
    assert len(ALL_COMMANDS) > 15
    with pytest.raises(UserError):
        test_commands_are_understood("plait explain llama3.1-8b --gpus h100:8 --tp 3")


def test_the_readme_has_two_commands():
    blocks = re.findall(r"```sh\n(.*?)```", page("README.md"), re.DOTALL)
    assert blocks == ["pip install . && plait train\n", "pip install '.[test]' && pytest\n"]


# ------------------------------------------------------------------------------------------
# The job file

#: Fields that are worked out from others where they are not given.
DERIVED = {
    Layout: {
        "sequence_parallel",
        "vpp",
        "schedule",
        "dp_replicate",
        "dp_shard",
        "zero",
        "micro_batch",
    },
    Model: {"name", "ffn", "kv_heads", "head_dim"},
}
SECTIONS = {
    "[layout]": Layout,
    "[train]": Train,
    "[data]": Data,
    "[checkpoint]": Checkpoint,
    "[model]": Model,
    "[model.rope_scaling]": RopeScaling,
    "[model.moe]": MoE,
    "[model.mla]": MLA,
}


def written(value) -> str:
    """A default as a job file would have it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(written, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def default_of(cls: type, field) -> str:
    if field.name in DERIVED.get(cls, ()):
        return "derived"
    return "required" if field.default is MISSING else f"`{written(field.default)}`"


def sections() -> dict[str, dict[str, str]]:
    """Heading -> field -> default of docs/job.md."""
    parts = re.split(r"^#+ (.+)$", page("docs/job.md"), flags=re.MULTILINE)
    return {
        head: dict(re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", text, re.MULTILINE))
        for head, text in zip(parts[1::2], parts[2::2], strict=True)
    }


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_field_of_a_job_is_described(heading):
    cls = SECTIONS[heading]
    assert sections()[heading] == {f.name: default_of(cls, f) for f in fields(cls)}


def test_the_top_of_a_job_is_described():
    from plait.spec.jobfile import _Top

    top = {f.name: default_of(_Top, f) for f in fields(_Top)}
    assert sections()["Top"] == {"model": '`"tiny"`'} | top


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_job_files_that_are_shown_can_be_read(path, tmp_path):
    for i, text in enumerate(re.findall(r"```toml\n(.*?)```", path.read_text("utf-8"), re.DOTALL)):
        file = tmp_path / f"{i}.toml"
        file.write_text(text, "utf-8")
        gpus = None if "gpus" in tomllib.loads(text) else "h100:8"
        read_job("plan", file, gpus=gpus)


# ------------------------------------------------------------------------------------------
# Dependencies, outputs, figures


def test_every_dependency_has_a_reason():
    project = tomllib.loads(page("pyproject.toml"))["project"]
    named = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    wanted = {re.match(r"[\w-]+", text)[0] for text in named}
    assert set(re.findall(r"^\| `([\w-]+)` \|", page("docs/dependencies.md"), re.M)) == wanted


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_outputs_are_those_of_the_program(path):
    """But of `plait dryrun`, which takes longer and is renewed by hand."""
    text = path.read_text("utf-8")
    renewed = refresh.fresh(text, lambda command: not command.startswith("plait dryrun"))
    assert renewed == text, "run docs/refresh.py"


def test_figures_are_those_of_their_script():
    for name, drawn in figures.figures().items():
        assert page(f"docs/strategies/{name}") == drawn, "run docs/figures.py"
