"""DeepSpeed: its JSON configuration, commands that name one, and Megatron-DeepSpeed's flags."""

from dataclasses import replace
from typing import Any

from plait.dialects import shell
from plait.dialects.deepspeed import config as deepspeed_config
from plait.dialects.deepspeed import json as deepspeed_json
from plait.dialects.deepspeed import megatron as deepspeed_megatron
from plait.dialects.deepspeed import trainer as deepspeed_trainer
from plait.dialects.deepspeed.validation import rules
from plait.dialects.launch import Launch, Told, Written, changed, note
from plait.dialects.settings import Setting, Settings
from plait.dialects.shell import launchers
from plait.dialects.source import Source
from plait.spec.findings import Finding, UserError, error
from plait.spec.job import Job

VERSION = "DeepSpeed 0.19.6 (edaa7221), Megatron-DeepSpeed (2026-08)"

_TARGET = "DeepSpeed"
#: Flags that name the configuration.
_NAMING = ("--deepspeed_config", "--deepspeed-config", "--deepspeed", "--ds_config", "--ds-config",
           "--deepspeed_cfg", "--ds_config_file", "--ds-config-file", "--config-file")  # fmt: skip
#: Flags of Megatron's that tell its fork from another script.
_MEGATRON = frozenset({"--num-layers", "--hidden-size", "--micro-batch-size",
                       "--num-attention-heads", "--tensor-model-parallel-size"})  # fmt: skip


def read(source: Source, told: Told) -> Launch:
    """What a configuration, a script or a command says.

    Raises:
        UserError: it is none of these.
    """
    if source.suffix == ".json" or source.text.lstrip()[:1] == "{":
        script = source.starter()
        if script is None:
            return _of_json(source, told)
        source = script
    script = shell.read(source)
    run = _best(script)
    if run is None:
        message = "no command that DeepSpeed starts or that names its configuration"
        raise UserError([error("from", source.name, message, rule="no-command")])
    hosts = next((s for s in run.settings if s.name in ("--hostfile", "-H")), None)
    if hosts is not None and str(hosts.value) not in script.files:
        listed = _file(source, script, str(hosts.value))
        if listed is not None:
            files = script.files | {str(hosts.value): listed.text}
            run = _best(replace(script, files=files)) or run
    tree, findings = _configuration(source, script, run)
    found = list(findings)
    if run.world is None and run.open and told.world is None:
        message = f"the number of devices depends on {', '.join(run.open)}"
        found.append(note(_TARGET, "deepspeed-world-open", message))
    names = {word.text.partition("=")[0] for word in run.words}
    if len(names & _MEGATRON) > 1:
        return _of_megatron(run, tree, told, found)
    return _of_script(run, tree, told, found)


def _best(script: shell.Script) -> launchers.Run | None:
    best, most = None, 0
    for run in launchers.runs(script):
        names = {word.text.partition("=")[0] for word in run.words}
        score = 4 * (run.launcher == "deepspeed") + 4 * bool(names & set(_NAMING))
        score += 2 * (len(names & _MEGATRON) > 1)
        printed = run.name in ("ds_report", "echo", "printf")
        score = 0 if printed or not score else 2 * (2 * score + run.command.sure)
        score += bool(score) and run.world is not None
        if score > most:
            best, most = run, score
    return best


def _configuration(
    source: Source, script: shell.Script, run: launchers.Run
) -> tuple[list[Setting], list[Finding]]:
    """The settings of the configuration that a command names."""
    named = None
    words = run.words
    for position, word in enumerate(words):
        flag, equals, value = word.text.partition("=")
        if flag not in _NAMING:
            continue
        after = words[position + 1].text if position + 1 < len(words) else "-"
        value = value if equals else after
        if not value.startswith("-") and ("." in value or flag != "--deepspeed"):
            named = value
    if named is None:
        message = "no configuration is named: the training script makes its own"
        return [], [note(_TARGET, "deepspeed-own-configuration", message)]
    found = _file(source, script, named)
    if found is None:
        message = f"its configuration {named} is not at hand: what it says is not known"
        return [], [changed(_TARGET, "deepspeed-no-configuration", message, named)]
    tree, findings = deepspeed_json.read(found)
    if named not in script.files and named in script.drafts:
        message = f"{named} is written under conditions that the file leaves open"
        findings.append(note(_TARGET, "deepspeed-draft", message))
    return list(deepspeed_json.settings_of(tree, found.name)), findings


def _file(source: Source, script: shell.Script, named: str) -> Source | None:
    written = script.files.get(named) or script.drafts.get(named)
    base = named.rpartition("/")[2]
    if written is None:
        written = next((t for n, t in script.files.items() if n.rpartition("/")[2] == base), None)
    if written is not None:
        return Source(written, base)
    return source.at_hand(named)


def _of_json(source: Source, told: Told) -> Launch:
    tree, found = deepspeed_json.read(source)
    said = list(deepspeed_json.settings_of(tree, ""))
    settings = Settings(said, told.given)
    understood = deepspeed_config.understand(settings, told.world)
    if {"train_batch_size", "train_micro_batch_size_per_gpu"} & {*understood.autos}:
        understood.facts["batch_elsewhere"] = True
    return _launch(settings, understood.fields, understood, found, {})


def _of_script(run: launchers.Run, said: list[Setting], told: Told, found: list[Finding]) -> Launch:
    """A command of a script of one's own, with the flags that such scripts have."""
    own = deepspeed_trainer.flags(run.words)
    settings = Settings([*own, *said], told.given)
    world = told.world or run.world
    understood = deepspeed_config.understand(settings, world)
    fields, notes = deepspeed_trainer.fields_of(settings, told.model is None)
    said_twice = [
        path for path in ("layout.micro_batch", "train.accumulation")
        if path in fields and understood.fields.get(path, fields[path]) != fields[path]
    ]  # fmt: skip
    for path in said_twice:
        message = f"the script says {path} {fields[path]}, the configuration "
        message += f"{understood.fields[path]}: Hugging Face's Trainer refuses that"
        found.append(changed("DeepSpeed", "deepspeed-mismatch", message, fields[path]))
    configured = dict(understood.fields)
    if not understood.facts["fp16"] and not understood.facts["bf16"] and "train.dtype" in fields:
        configured.pop("train.dtype")
        configured["train.grad_dtype"] = fields["train.dtype"]
    zero = None if "zero_optimization.stage" in settings else _zero_flag(settings)
    if zero is not None:
        configured["layout.zero"] = zero
    if not said and "layout.micro_batch" not in fields:
        understood.facts["batch_elsewhere"] = True
    if "layout.micro_batch" in fields and understood.facts["micro"] is None:
        understood.facts["batch_elsewhere"] = True
    found = [*found, *notes]
    return _launch(settings, fields | configured, understood, found, run.environment,
                   known=[s.name for s in own])  # fmt: skip


def _zero_flag(settings: Settings) -> int | None:
    for name in ("--zero-stage", "--actor-zero-stage", "--stage"):
        setting = settings.said.get(name)
        if setting is not None and setting.open:
            settings.take(name, int, None, "layout.zero")
            return None
        if setting is not None and str(setting.value) in ("0", "1", "2", "3"):
            settings.taken[name] = (setting.value, "layout.zero")
            return int(setting.value)
    return None


def _of_megatron(
    run: launchers.Run, said: list[Setting], told: Told, found: list[Finding]
) -> Launch:
    flags = deepspeed_megatron.injected(deepspeed_megatron.flags(run.words))
    settings = Settings([*flags, *said], told.given)
    world = told.world or run.world
    fields, facts, notes = deepspeed_megatron.fields_of(settings, told, world)
    degrees = {k: fields.get(f"layout.{k}", 1) for k in ("tp", "pp")}
    understood = deepspeed_config.understand(settings, world, degrees["pp"], degrees["tp"])
    stage = understood.facts["stage"] if "zero_optimization.stage" in settings else None
    configured = {
        path: value
        for path, value in understood.fields.items()
        if path not in ("train.dtype", "train.grad_dtype", "train.learning_rate", "train.clip")
        and path not in fields
    }
    if stage is not None:
        configured["layout.zero"] = stage
    facts = facts | understood.facts | {"world": understood.facts["world"]}
    facts["stage"] = stage
    own = deepspeed_megatron.known()
    fields = fields | configured
    understood = deepspeed_config.Understood(fields, facts, understood.findings, ())
    launch = _launch(settings, fields, understood, [*found, *notes], run.environment, known=own)
    launch.facts["megatron"] = True
    return launch


def _launch(
    settings: Settings,
    fields: dict[str, Any],
    understood: deepspeed_config.Understood,
    found: list[Finding],
    environment: dict[str, str],
    known: Any = (),
) -> Launch:
    keys = [*deepspeed_json.known_of(iter(settings.said)), *known]
    found = [*found, *understood.findings, *deepspeed_config.strangers(settings, keys)]
    facts = dict(understood.facts)
    return Launch(fields, settings, keys, found, dict(environment), facts=facts)


def check(launch: Launch, job: Job) -> list[Finding]:
    """What DeepSpeed says to the job."""
    found = rules(launch.facts, job)
    if launch.facts.get("megatron"):
        found += deepspeed_megatron.rules(launch.facts, job)
    return found


def write(job: Job) -> Written:
    """A configuration, and a script that starts a training with it."""
    from plait.dialects.deepspeed.writer import written

    return written(job)
