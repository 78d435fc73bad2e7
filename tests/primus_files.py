"""Small Primus experiments, and what plait finds in them."""

from pathlib import Path

from plait.dialects import primus
from plait.dialects.launch import Told
from plait.dialects.source import Source
from plait.spec.jobfile import draft

HEAD = """\
work_group: ${PRIMUS_TEAM:amd}
user_name: ${PRIMUS_USER:root}
exp_name: ${PRIMUS_EXP_NAME:a-run}
workspace: ./output
"""


def experiment(
    overrides: str = "",
    model: str = "llama3.1_8B.yaml",
    framework: str = "megatron",
    module: str = "pre_trainer",
    config: str = "pre_trainer.yaml",
    head: str = HEAD,
    more: str = "",
) -> str:
    lines = "".join(f"      {line}\n" for line in overrides.strip().splitlines())
    return (
        f"{head}{more}modules:\n  {module}:\n    framework: {framework}\n    config: {config}\n"
        f"    model: {model}\n    overrides:\n{lines}"
    )


def source(text: str) -> Source:
    return Source(text, "exp.yaml", Path("/nowhere/exp.yaml"))


def read(overrides: str = "", told: Told | None = None, **how):
    return primus.read(source(experiment(overrides, **how)), told or Told())


def checked(launch, world: int = 8):
    """The findings of the file and of the target's own rules."""
    made = draft("plan", None, {"ranks": world} | launch.fields)
    assert made.job is not None, made.findings
    return [*launch.findings, *launch.settings.findings, *primus.check(launch, made.job)]


def named(found, rule: str):
    return [f for f in found if f.rule == rule]


def errors(found) -> set[str]:
    return {f.rule for f in found if f.level == "error"}


def job_of(**said):
    made = draft("plan", None, {k.replace("__", "."): v for k, v in said.items()})
    assert not made.findings, made.findings
    return made.job


def read_back(job, told: Told | None = None):
    written = primus.write(job)
    ((name, text),) = written.files.items()
    launch = primus.read(Source(text, name, Path("/nowhere") / name), told or Told())
    made = draft("plan", None, {**launch.fields, "ranks": job.layout.world})
    assert not made.findings, made.findings
    assert not launch.unknown()
    wrong = [f for f in [*launch.findings, *launch.settings.findings,
                         *primus.check(launch, made.job)] if f.level == "error"]  # fmt: skip
    assert not wrong, wrong
    return made.job, written
