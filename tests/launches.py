"""Random legal training jobs, for what must hold of every launch language."""

import re
import shlex
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

from hypothesis import assume
from hypothesis import strategies as st

from plait.dialects.launch import Told
from plait.dialects.source import Source
from plait.rules import check
from plait.spec.chunks import chunk_layers
from plait.spec.findings import Finding, UserError
from plait.spec.job import Job
from plait.spec.jobfile import draft
from plait.spec.layout import Layout

#: Dense with and without groups of queries, mixtures, latent attention; published and small.
MODELS = (
    "llama3-8b", "llama3.2-1b", "qwen3-8b", "gpt3-6.7b", "mixtral-8x7b", "qwen3-30b-a3b",
    "deepseek-v2-lite", "tiny", "tiny-moe", "tiny-mla",
)  # fmt: skip
#: Fields of a layout that a training launch may say.
SAID = tuple(f.name for f in fields(Layout) if f.name != "dcp")


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """A job that `plait.rules` finds legal."""
    pick = lambda *options: draw(st.sampled_from(options))  # noqa: E731
    model = pick(*MODELS)
    tp, cp, pp = pick(1, 1, 2, 4), pick(1, 1, 2), pick(1, 1, 2, 4)
    dp = pick(1, 2, 4, 8)
    layout: dict = {"tp": tp, "cp": cp, "pp": pp, "micro_batch": pick(1, 2)}
    if cp > 1:
        layout |= pick({}, {"cp_method": "all-gather"}, {"ulysses": cp})
    if pp > 1:
        layout |= pick({}, {}, {"vpp": 2})
    if tp > 1:
        layout |= pick({}, {"sequence_parallel": False})
    layout |= pick({"zero": 1}, {"zero": 1}, {"zero": 0}, {"zero": 3}, {"zero": 2})
    if layout["zero"] and dp > 1:
        layout |= pick({}, {}, {"dp_replicate": 2})
    layout |= pick({}, {"recompute": "full"}, {"recompute": "selective:norm,mlp"})
    if model in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "tiny-moe", "tiny-mla"):
        layout |= {"ep": pick(1, 2, 4), "etp": pick(1, 1, tp)}
    said = {f"layout.{name}": value for name, value in layout.items()}
    accumulation = pick(1, 2, 4, 8)
    said |= {
        "model": model,
        "ranks": tp * cp * pp * dp,
        "train.seq_len": pick(256, 1024) if model.startswith("tiny") else pick(2048, 4096),
        "train.global_batch": dp * layout["micro_batch"] * accumulation,
    }
    made = draft("plan", None, said)
    assume(made.job is not None and not made.findings)
    assume(not any(f.level == "error" for f in check(made.job, "plan")))
    return made.job


def _plain(job: Job) -> Job:
    """The job with what is the same said in one way: layers of chunks, unused choices."""
    layout = replace(job.layout, stages=tuple(map(len, chunk_layers(job.model, job.layout))))
    moe = job.model.moe
    if moe is not None and not moe.aux_loss:
        moe = replace(moe, aux_form="sequence")
    if moe is not None and moe.shared_ffn is None:
        moe = replace(moe, shared_ffn=moe.shared * moe.ffn)
    return replace(job, layout=layout, model=replace(job.model, moe=moe))


def differences(one: Job, other: Job) -> dict[str, tuple]:
    """Field -> both values, of what decides layout, batch and model."""
    one, other = _plain(one), _plain(other)
    found = {
        f"layout.{name}": (getattr(one.layout, name), getattr(other.layout, name)) for name in SAID
    }
    found |= {
        f"train.{name}": (getattr(one.train, name), getattr(other.train, name))
        for name in ("seq_len", "global_batch", "accumulation", "dtype", "grad_dtype")
    }
    found |= {
        f"model.{f.name}": (getattr(one.model, f.name), getattr(other.model, f.name))
        for f in fields(one.model)
        if f.name not in ("name", "seq")
    }
    return {path: pair for path, pair in found.items() if pair[0] != pair[1]}


def read_back(language: ModuleType, job: Job) -> tuple[Job, set[str]]:
    """The job that is read of what is written of one, and the rules of the notes on it."""
    written = language.write(job)
    first = next(iter(written.files))
    source = Source(written.files[first], first, Path("/nowhere") / first, siblings=written.files)
    launch = language.read(source, Told({"model": job.model.name}, None, job.model))
    said = {k: v for k, v in launch.fields.items() if not k.startswith("model")}
    made = draft("plan", None, said | {"model": job.model.name})
    assert not made.findings
    wrong = [*launch.findings, *launch.settings.findings, *language.check(launch, made.job)]
    assert not [f.message for f in wrong if f.level == "error"]
    assert not launch.unknown()
    return made.job, {note.rule for note in written.notes}


def problems(language: ModuleType, source: Source) -> list[Finding]:
    """What is wrong with a launch, whatever is in it."""
    try:
        launch = language.read(source, Told())
    except UserError as problem:
        return problem.findings
    made = draft("plan", None, launch.fields | {"model": "tiny"})
    return language.check(launch, made.job) if made.job else made.findings


def commands_of(name: str) -> list[list[str]]:
    """The commands that a dialect's page shows, each without the program's name."""
    page = Path(__file__).parent.parent / "docs" / "dialects" / f"{name}.md"
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    commands = [
        shlex.split(line)[1:]
        for block in blocks
        for line in block.replace("\\\n", " ").splitlines()
    ]
    assert commands
    return commands
