"""Primus: its experiment files, for its Megatron and its TorchTitan backend, and what starts them.

Read are an experiment (YAML) and a command or script that names one. Written is an experiment for
the Megatron backend; for TorchTitan where only torch has the schedule.
"""

from plait.dialects.launch import Launch, Told, Written, note
from plait.dialects.primus import commands as primus_commands
from plait.dialects.primus import megatron as primus_megatron
from plait.dialects.primus import titan as primus_titan
from plait.dialects.primus.config import Experiment, read_experiment
from plait.dialects.settings import Setting
from plait.dialects.source import Source
from plait.spec.findings import Finding
from plait.spec.job import Job

VERSION = "AMD-AGI/Primus fd1eeabb (2026-08-22): Megatron-LM d3528a2, TorchTitan 0.2.2"

_BACKENDS = {"megatron": primus_megatron, "torchtitan": primus_titan}


def read(source: Source, told: Told) -> Launch:
    """What an experiment, or a command that starts one, says.

    Raises:
        UserError: neither; or its backend is none of the two that are read.
    """
    if source.suffix in (".yaml", ".yml") or _is_experiment(source):
        return _launch(read_experiment(source, {}), (), told, None, {})
    started = primus_commands.read_command(source)
    experiment = read_experiment(started.experiment, started.environment, started.suite)
    launch = _launch(experiment, started.overrides, told, started.world, started.environment)
    if started.open and told.world is None:
        message = f"how many devices depends on {', '.join(started.open)}: say --gpus or --ranks"
        launch.findings.append(note("Primus", "primus-world", message))
    return launch


def _is_experiment(source: Source) -> bool:
    """YAML under another name."""
    return (
        source.path is not None
        and source.suffix in ("", ".txt", ".conf")
        and ("\nmodules:" in f"\n{source.text}")
    )


def _launch(
    experiment: Experiment,
    command: tuple[Setting, ...],
    told: Told,
    world: int | None,
    environment: dict[str, str],
) -> Launch:
    environment = {**_deciding(environment), **experiment.environment}
    findings = list(experiment.findings)
    launch = _BACKENDS[experiment.framework].read(
        experiment, command, told, world, findings, environment
    )
    launch.facts["framework"] = experiment.framework
    launch.findings.extend(_variables(experiment))
    return launch


def _deciding(environment: dict[str, str]) -> dict[str, str]:
    """Variables that Primus or one of its rules looks at."""
    starts = ("PRIMUS_", "CUDA_DEVICE_MAX", "NVTE_", "NNODES", "GPUS_PER_NODE", "EXP")
    return {name: value for name, value in environment.items() if name.startswith(starts)}


def _variables(experiment: Experiment) -> list[Finding]:
    """The defaults that stand for environment variables."""
    found = []
    if experiment.defaults:
        said = ", ".join(f"{name}={value}" for name, value in experiment.defaults.items())
        message = f"no such environment variables are set; their defaults hold: {said}"
        found.append(note("Primus", "primus-variables", message))
    dashed = [n for n, v in experiment.defaults.items() if v.startswith("-") and not _number(v)]
    if dashed:
        message = f"${{{dashed[0]}:-...}} is the shell's form; here the default begins with the -"
        found.append(note("Primus", "primus-shell-default", message))
    return found


def _number(text: str) -> bool:
    return text.lstrip("-").replace(".", "").isdecimal() and text.count("-") == 1


def check(launch: Launch, job: Job) -> list[Finding]:
    """What Primus and its backend say to a job."""
    return _BACKENDS[launch.facts.get("framework", "megatron")].check(launch, job)


def write(job: Job) -> Written:
    """An experiment file, and a note for each thing that it cannot say."""
    from plait.dialects.primus.writer import write_experiment

    return write_experiment(job)
