"""Megatron-LM: its command line, scripts that hold one, and its YAML files.

Read are a command ("torchrun ... pretrain_gpt.py ..."), a shell script, the `model_config.yaml`
of its functional tests (MODEL_ARGS, ENV_VARS), and files for `--yaml-cfg`. Written is a bash
script.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from plait.dialects import shell
from plait.dialects.flags import settings_of
from plait.dialects.launch import Launch, Told, Written, note
from plait.dialects.megatron.launch import TARGET, launch_of
from plait.dialects.megatron.names import known
from plait.dialects.megatron.validation import rules
from plait.dialects.megatron.writer import script_of
from plait.dialects.megatron.yaml import read_yaml
from plait.dialects.settings import Setting
from plait.dialects.shell import launchers
from plait.dialects.source import Source
from plait.spec.findings import Finding, UserError, error
from plait.spec.job import Job
from plait.spec.jobfile import draft

VERSION = "NVIDIA/Megatron-LM d98e8a64d (2026-08-22)"

#: Changes that follow from each other, at most.
_ROUNDS = 8
#: A command that no script has: what follows is a variable's name and what it holds.
_HOLDS = "plait-holds"
#: Flags without which a command is no training of Megatron's.
_TELLING = (
    "--num-layers", "--hidden-size", "--tensor-model-parallel-size", "--micro-batch-size",
    "--pipeline-model-parallel-size", "--seq-length", "--use-checkpoint-args", "--yaml-cfg",
    "--num-attention-heads", "--expert-model-parallel-size",
)  # fmt: skip


def read(source: Source, told: Told) -> Launch:
    """What a launch file of Megatron-LM says.

    Raises:
        UserError: it holds no command of Megatron's.
    """
    if source.suffix in (".yaml", ".yml"):
        return read_yaml(source, told)
    script = shell.read(source)
    run = _best(script)
    if run is None:
        return launch_of(_of_variables(source), told, {}, open_words=True)
    found = []
    settings, loose = settings_of(run.words, _arity())
    opened = sorted({name for word in loose for name in word.open})
    if opened:
        names = ", ".join(opened)
        found.append(note(TARGET, "megatron-open", f"what {names} adds is set outside of the file"))
    if run.world is None and run.open and told.world is None:
        message = f"the number of devices depends on {', '.join(run.open)}, set outside of the file"
        found.append(note(TARGET, "megatron-world-open", message))
    yaml = next((s for s in settings if s.name == "--yaml-cfg"), None)
    if yaml is not None and not yaml.open and source.path:
        return read_yaml(source.beside(str(yaml.value)), told, run.environment, run.world)
    environment = dict(run.environment)
    world = run.world
    if world is None and environment.get("WORLD_SIZE", "").isdecimal():
        world = int(environment["WORLD_SIZE"][:7])
    return launch_of(settings, told, environment, found, world, run.name, bool(opened))


def _best(script: shell.Script) -> launchers.Run | None:
    """The run with most flags of Megatron's; None where there is none that trains."""
    best, most = None, (0, False, 0)
    for run in launchers.runs(script):
        names = {word.text.partition("=")[0] for word in run.words}
        telling = len(names.intersection(_TELLING))
        named = run.name.startswith("pretrain_") and run.name.endswith(".py")
        if run.name in ("echo", "printf") or not (telling or named):
            continue
        score = (telling + named, run.command.sure, len(names & known().keys()))
        if score > most:
            best, most = run, score
    return best


def _of_variables(source: Source) -> list[Setting]:
    """The flags in a script that only sets variables, for another one to start the program.

    Raises:
        UserError: there are none.
    """
    names = dict.fromkeys(re.findall(r"^\s*(?:export\s+)?([A-Za-z_]\w*)\+?=", source.text, re.M))
    # What a variable holds at the end is what a command would be given there.
    asked = "".join(f"\n{_HOLDS} {name} ${{{name}[@]}}" for name in list(names)[:200])
    script = shell.read(replace(source, text=f"{source.text}\n{asked}\n"))
    found: list[Setting] = []
    for command in script.commands:
        if not command.words or command.words[0].text != _HOLDS:
            continue
        settings, _ = settings_of(command.words[2:], _arity())
        if sum(s.name in known() for s in settings) > 1:
            found += settings
    if not found:
        message = "no command of Megatron-LM (torchrun ... pretrain_gpt.py --num-layers ...)"
        raise UserError([error("from", source.name, message, rule="no-command")])
    tokenizer = script.variables.get("TOKENIZER_MODEL") or script.variables.get("HF_MODEL_CKPT")
    if tokenizer and all(s.name != "--tokenizer-model" for s in found):
        found.append(Setting("--tokenizer-model", tokenizer, f"{source.name}: TOKENIZER_MODEL"))
    return found


def _arity() -> Mapping[str, str]:
    return {name: flag.arity for name, flag in known().items()}


def check(launch: Launch, job: Job) -> list[Finding]:
    """What Megatron-LM says to the job."""
    spell = launch.facts.get("spell")
    more: dict[str, Any] = {"spell": spell} if spell else {}
    return rules(launch.facts, job, launch.environment, **more)


def write(job: Job) -> Written:
    """A bash script that runs the job."""
    return script_of(job, VERSION)


def settle(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a launch of which some were changed, with the rest changed as Megatron's rules
    then ask."""
    fields = dict(fields)
    for _ in range(_ROUNDS):
        pp, vpp, stages = (fields.get(f"layout.{name}") for name in ("pp", "vpp", "stages"))
        if pp == 1 and vpp not in (None, 1):
            fields |= {"layout.vpp": 1, "layout.schedule": "1f1b"}
            vpp = 1
        chunks = pp * (vpp or 1) if isinstance(pp, int) and isinstance(vpp, int | None) else 0
        if isinstance(stages, tuple | list) and chunks and len(stages) != chunks:
            fields["layout.stages"] = "balanced"
        made = draft("plan", None, fields)
        wrong = rules({}, made.job) if made.job and not made.findings else []
        if made.job and made.findings:  # of a stand-in, only its degrees can be trusted
            found = rules({"world": made.world}, made.job)
            wrong = [f for f in found if f.rule == "megatron-world"]
        cure = next((f.suggest for f in wrong if f.level == "error" and f.suggest), None)
        if cure is None:
            break
        fields |= cure
    return fields
