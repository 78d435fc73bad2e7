"""What flags of Megatron-LM say, wherever they stand: in a command or in YAML."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from plait.dialects.launch import AT_START, Launch, Told, changed, note, refused
from plait.dialects.megatron.arguments import understand
from plait.dialects.megatron.names import flags_of, known
from plait.dialects.settings import Setting, Settings
from plait.spec import presets
from plait.spec.findings import Finding
from plait.spec.jobfile import draft

TARGET = "Megatron-LM"
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
        found.append(note(TARGET, "megatron-inference", message))
    elsewhere = open_words or bool(understood.facts.get("use_checkpoint_args"))
    facts = understood.facts | {"open": elsewhere, "inference": serves}
    fields = understood.fields
    for setting in settings.said.values():
        flag = known().get(setting.name)
        if flag and flag.gone:
            message = f"{setting.name} is an option of earlier versions"
            now = next((f.name for f in flags_of(flag.argument) if not f.gone), None)
            message += f"; it is {now}" if now else ""
            found.append(refused(TARGET, "megatron-gone", AT_START, message, setting.value))
    stem = program.removesuffix(".py").lower()
    other = next((what for word, what in _OTHERS.items() if word in stem.split("_")), None)
    if other:
        message = f"{program} trains {other}; described is a decoder of the same sizes"
        found.append(note(TARGET, "megatron-other-model", message, program))
    if told.model is not None and "--num-layers" not in settings and not open_words:
        missing = [f for f in ("--num-layers", "--hidden-size", "--num-attention-heads",
                               "--micro-batch-size") if f not in settings]  # fmt: skip
        message = f"the command lacks {', '.join(missing)}; the model is the one of --model"
        found.append(note(TARGET, "megatron-incomplete", message))
    unknown = [setting.name for setting, _ in settings.left(known().keys())[1]]
    if unknown and stem == "pretrain_gpt":
        message = f"the parser of {program} stops at {', '.join(unknown)}"
        found.append(changed(TARGET, "megatron-parser", message))
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
