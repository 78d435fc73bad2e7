"""Megatron-LM: its command line, scripts that hold one, and its YAML files.

Read are a command ("torchrun ... pretrain_gpt.py ..."), a shell script, the `model_config.yaml`
of its functional tests (MODEL_ARGS, ENV_VARS), and files for `--yaml-cfg`. Written is a bash
script.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from plait.dialects import launchers, shell
from plait.dialects.flags import settings_of
from plait.dialects.launch import AT_START, Launch, Told, Written, changed, note, refused
from plait.dialects.megatron_arguments import understand
from plait.dialects.megatron_names import flags_of, known
from plait.dialects.megatron_rules import rules
from plait.dialects.megatron_yaml import read_yaml
from plait.dialects.settings import Setting, Settings
from plait.dialects.source import Source
from plait.spec import presets
from plait.spec.findings import Finding, UserError, error
from plait.spec.job import Job
from plait.spec.jobfile import draft

VERSION = "NVIDIA/Megatron-LM d98e8a64d (2026-08-22)"

_TARGET = "Megatron-LM"
#: Scripts of Megatron-LM that train something else than a decoder.
_OTHERS = {
    "bert": "an encoder",
    "t5": "an encoder and a decoder",
    "vlm": "a language model with a vision encoder",
    "vision": "a vision model",
    "ict": "a retriever",
    "retro": "a decoder with a retriever",
    "mimo": "encoders beside a language model",
}
#: Fields of a model, and of its mixtures, that are of a run: a launch says them, or they are off.
_FREE = ("seq", "vocab", "dropout", "norm_eps", "rope_theta")
_FREE_OF_MIXTURES = ("aux_loss", "aux_form", "z_loss", "capacity", "drop", "correction_speed")
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
        found.append(
            note(_TARGET, "megatron-open", f"what {names} adds is set outside of the file")
        )
    if run.world is None and run.open and told.world is None:
        message = f"the number of devices depends on {', '.join(run.open)}, set outside of the file"
        found.append(note(_TARGET, "megatron-world-open", message))
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


def launch_of(
    said: list[Setting],
    told: Told,
    environment: dict[str, str],
    found: Sequence[Finding] = (),
    world: int | None = None,
    program: str = "",
    open_words: bool = False,
) -> Launch:
    """What flags say.

    Args:
        found: what is known already. world: ranks, as the launch says them. program: what is
            started. open_words: the command holds more that the file does not show.
    """
    found = list(found)
    settings = Settings(said, told.given)
    understood = understand(settings, told, world=world)
    serves = any(word in program for word in ("inference", "generation", "server"))
    if serves:
        message = "this runs a model; described is training it under the same layout"
        found.append(note(_TARGET, "megatron-inference", message))
    elsewhere = open_words or bool(understood.facts.get("use_checkpoint_args"))
    facts = understood.facts | {"open": elsewhere, "inference": serves}
    fields = understood.fields
    for setting in settings.said.values():
        flag = known().get(setting.name)
        if flag and flag.gone:
            message = f"{setting.name} is an option of earlier versions"
            now = next((f.name for f in flags_of(flag.argument) if not f.gone), None)
            message += f"; it is {now}" if now else ""
            found.append(refused(_TARGET, "megatron-gone", AT_START, message, setting.value))
    stem = program.removesuffix(".py").lower()
    other = next((what for word, what in _OTHERS.items() if word in stem.split("_")), None)
    if other:
        message = f"{program} trains {other}; described is a decoder of the same sizes"
        found.append(note(_TARGET, "megatron-other-model", message, program))
    if told.model is not None and "--num-layers" not in settings and not open_words:
        missing = [f for f in ("--num-layers", "--hidden-size", "--num-attention-heads",
                               "--micro-batch-size") if f not in settings]  # fmt: skip
        message = f"the command lacks {', '.join(missing)}; the model is the one of --model"
        found.append(note(_TARGET, "megatron-incomplete", message))
    unknown = [setting.name for setting, _ in settings.left(known().keys())[1]]
    if unknown and stem == "pretrain_gpt":
        message = f"the parser of {program} stops at {', '.join(unknown)}"
        found.append(changed(_TARGET, "megatron-parser", message))
    found = [*found, *understood.findings]
    if name := _named(fields):
        fields["model.name"] = name
    return Launch(fields, settings, known().keys(), found, environment, facts=facts)


def _named(fields: Mapping[str, Any]) -> str | None:
    """The preset that a model is but for what leaves it the model that it is."""
    made = {path: value for path, value in fields.items() if path.startswith("model.")}
    job = draft("plan", None, {**made, "ranks": 1}).job if made else None
    if job is None:
        return None
    model = replace(job.model, name="")
    free = {name: getattr(model, name) for name in ("name", *_FREE)}
    for name in presets.model_names():
        preset = presets.model(name)
        if preset.layers != model.layers or (preset.moe is None) != (model.moe is None):
            continue
        if preset.moe is not None and model.moe is not None:
            chosen = {name: getattr(model.moe, name) for name in _FREE_OF_MIXTURES}
            preset = replace(preset, moe=replace(preset.moe, **chosen))
        if replace(preset, **free) == model:
            return name
    return None


def check(launch: Launch, job: Job) -> list[Finding]:
    """What Megatron-LM says to the job."""
    spell = launch.facts.get("spell")
    more: dict[str, Any] = {"spell": spell} if spell else {}
    return rules(launch.facts, job, launch.environment, **more)


def write(job: Job) -> Written:
    """A bash script that runs the job."""
    from plait.dialects.megatron_write import script_of

    return script_of(job)


def settle(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a launch of which some were changed, with the rest changed as Megatron's rules
    then ask."""
    fields = dict(fields)
    for _ in range(_ROUNDS):
        pp, vpp = fields.get("layout.pp", 1), fields.get("layout.vpp", 1)
        if pp == 1 and vpp != 1:
            fields |= {"layout.vpp": 1, "layout.schedule": "1f1b"}
        stages = fields.get("layout.stages")
        if isinstance(stages, tuple | list) and len(stages) != pp * fields.get("layout.vpp", 1):
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
