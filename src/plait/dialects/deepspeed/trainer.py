"""Flags of training scripts that DeepSpeed and Accelerate start, as Hugging Face's Trainer and its
kin spell them (transformers/training_args.py). They are the script's own: DeepSpeed reads none."""

from collections.abc import Iterable
from typing import Any

from plait.dialects.flags import Word, settings_of
from plait.dialects.huggingface_names import named
from plait.dialects.launch import note
from plait.dialects.settings import Setting, Settings
from plait.spec.findings import Finding
from plait.spec.job import Job

#: Flag -> kind, and what it means.
_FLAGS: dict[str, tuple[Any, str]] = {
    "--per-device-train-batch-size": (int, "layout.micro_batch"),
    "--per-gpu-train-batch-size": (int, "layout.micro_batch"),
    "--train-micro-batch-size-per-gpu": (int, "layout.micro_batch"),
    "--micro-batch-size": (int, "layout.micro_batch"),
    "--gradient-accumulation-steps": (int, "train.accumulation"),
    "--max-steps": (int, "train.steps"),
    "--learning-rate": (float, "train.learning_rate"),
    "--weight-decay": (float, "train.weight_decay"),
    "--adam-beta1": (float, "train.beta1"),
    "--adam-beta2": (float, "train.beta2"),
    "--adam-epsilon": (float, "train.eps"),
    "--max-grad-norm": (float, "train.clip"),
    "--warmup-steps": (int, "train.warmup"),
    "--num-warmup-steps": (int, "train.warmup"),
    "--seed": (int, "train.seed"),
    "--max-seq-length": (int, "train.seq_len"),
    "--max-seq-len": (int, "train.seq_len"),
    "--block-size": (int, "train.seq_len"),
    "--model-max-length": (int, "train.seq_len"),
    "--max-length": (int, "train.seq_len"),
    "--sequence-length": (int, "train.seq_len"),
}
_MODELS = ("--model-name-or-path", "--model-name", "--model-path", "--model-id", "--base-model",
           "--model", "--actor-model-name-or-path", "--hf-model")  # fmt: skip
_SWITCHES = ("--gradient-checkpointing", "--actor-gradient-checkpointing",
             "--activation-checkpointing", "--bf16", "--fp16")  # fmt: skip
#: What matters to a layout: an open variable there is asked for.
_ASKED = frozenset({"layout.micro_batch", "train.accumulation", "train.seq_len"})


def flags(words: Iterable[Word]) -> list[Setting]:
    """The settings of a script's own command line."""
    return settings_of(words, dict.fromkeys(_SWITCHES, "?"))[0]


def fields_of(settings: Settings, needs_model: bool) -> tuple[dict[str, Any], list[Finding]]:
    """What the flags of a script say, and notes.

    Args:
        needs_model: whether a model in a variable is asked for.
    """
    fields: dict[str, Any] = {}
    found: list[Finding] = []
    for name, (kind, means) in _FLAGS.items():
        setting = settings.said.get(name)
        if setting is None:
            continue
        if (setting.open and means not in _ASKED) or not _fits(setting, kind):
            settings.taken[name] = (setting.value, means)
            continue
        value = settings.take(name, kind, None, means)
        if value is not None and value > 0:
            fields.setdefault(means, value)
    if "train.learning_rate" in fields:
        fields["train.min_learning_rate"] = 0.0
    for name in _SWITCHES:
        if name in settings and _on(settings.said[name]):
            if name.endswith("checkpointing"):
                fields["layout.recompute"] = "full"
            else:
                fields["train.dtype"] = "bfloat16" if name == "--bf16" else "float16"
            means = "layout.recompute" if name.endswith("checkpointing") else "train.dtype"
            settings.taken[name] = (settings.said[name].value, means)
    for name in _MODELS:
        setting = settings.said.get(name)
        if setting is None or setting.value is True:
            continue
        if setting.open and not needs_model:
            settings.taken[name] = (setting.value, "model")
            break
        text = settings.take(name, str, None, "model")
        known = named(text) if text else None
        if known is not None:
            fields |= known.fields
            if known.note:
                found.append(note("the model", "model-name", known.note, text))
        elif text and needs_model:
            message = f"{text!r} is no model that plait knows: say --model"
            found.append(note("the model", "model-name", message, text))
        break
    return fields, found


def written(job: Job, micro: int, accumulation: int) -> list[str]:
    """Flags of a script that trains a job.

    Args:
        micro: samples of a micro-batch. accumulation: micro-batches of a step.
    """
    return [
        f"--model_name_or_path {job.model.name}",
        f"--max_seq_length {job.train.seq_len or job.model.seq}",
        f"--per_device_train_batch_size {micro}",
        f"--gradient_accumulation_steps {accumulation}",
        f"--max_steps {job.train.steps}",
        f"--learning_rate {job.train.learning_rate!r}",
        f"--warmup_steps {job.train.warmup}",
        f"--seed {job.train.seed}",
    ]


def _fits(setting: Setting, kind: Any) -> bool:
    """A script's own flag of that name may take something else: that is no error."""
    if setting.open:
        return True
    try:
        kind(setting.value)
    except (TypeError, ValueError, OverflowError):
        return False
    return setting.value is not True


def _on(setting: Setting) -> bool:
    return str(setting.value).lower() not in ("false", "no", "0", "off") and not setting.open
