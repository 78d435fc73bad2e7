"""What the tests of serve commands share: layouts that an engine can express, and reading back what
it writes."""

from pathlib import Path

from plait.cost.serving import on
from plait.dialects.launch import Told
from plait.dialects.source import Source
from plait.spec.jobfile import draft

FIELDS = ("tp", "pp", "cp", "dcp", "ep", "etp", "dp_shard", "dp_replicate")


def read(language, text, suffix="", told=None, siblings=None):
    path = Path(f"launch{suffix}") if suffix else None
    return language.read(Source(text, "launch", path, siblings or {}), told or Told())


def job_of(launch, **more):
    """The job that a launch describes; it must be one."""
    made = draft("plan", None, launch.fields | more)
    assert made.job is not None, made.findings
    assert not made.findings, made.findings
    return made.job


def again(language, job, serving=None):
    """What is read of what is written: (launch, job)."""
    written = language.write(job, serving)
    name, text = next(iter(written.files.items()))
    launch = language.read(Source(text, name, Path(name), written.files), Told())
    assert not launch.settings.findings, (text, launch.settings.findings)
    assert not launch.unknown(), (text, launch.unknown())
    return launch, job_of(launch)


def same_layout(job, other):
    return [
        (name, getattr(job.layout, name), getattr(other.layout, name))
        for name in FIELDS
        if getattr(job.layout, name) != getattr(other.layout, name)
    ]


def errors(language, launch, job):
    return [f for f in (*launch.findings, *language.check(launch, job)) if f.level == "error"]


def roles(launch, job):
    return on(launch.serving, job.layout)
