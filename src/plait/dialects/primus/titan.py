"""Primus' TorchTitan backend: the sections of TorchTitan v0.2.2's JobConfig, in a Primus file."""

from collections.abc import Collection, Mapping
from functools import lru_cache

from plait.dialects import tables
from plait.dialects.launch import Launch, Told, changed, note
from plait.dialects.primus.config import Experiment, name_settings
from plait.dialects.settings import Setting, Settings
from plait.dialects.torchtitan import config as titan_config
from plait.dialects.torchtitan import validation as titan_rules
from plait.spec.findings import Finding
from plait.spec.job import Job

#: Of the TorchTitan that Primus pins.
RELEASE = "0.2.2"
TARGET = "Primus"

#: Fields of a flavor that a file may set beside it (torchtitan/patches/model_override_patches.py).
_MODEL = {
    "model.n_layers": "model.layers",
    "model.dim": "model.hidden",
    "model.n_heads": "model.heads",
    "model.n_kv_heads": "model.kv_heads",
    "model.vocab_size": "model.vocab",
}


@lru_cache(maxsize=1)
def known() -> frozenset[str]:
    """Keys of a TorchTitan module, by dotted path."""
    return frozenset(tables.first_words("primus_titan.txt"))


def read(
    experiment: Experiment,
    command: Collection[Setting],
    told: Told,
    world: int | None,
    findings: list[Finding],
    environment: Mapping[str, str],
) -> Launch:
    """A launch of the TorchTitan backend; as `primus.megatron.read`."""
    settings = Settings([*experiment.presets, *experiment.said, *command], told.given)
    name_settings(experiment, settings)
    for name in [n for n, s in settings.said.items() if s.value in (None, "null") and not s.open]:
        del settings.said[name]
        settings.defaults[name] = (None, "null: nothing said")
    own = {path: settings.take(name, int, None, path) for name, path in _MODEL.items()}
    turbo = settings.take(
        "primus_turbo.enable_primus_turbo", bool, False, "kernels of Primus-Turbo"
    )
    asynchronous = settings.take(
        "primus_turbo.use_turbo_async_tp", bool, False, "tensor parallelism overlapped"
    )
    # TorchTitan's own recipes give sizes under these names too, and mean a model without a flavor.
    beside = {name: settings.said.pop(name) for name in _MODEL if name in settings}
    fields, facts = titan_config.understand(settings, told, world, RELEASE)
    settings.said |= beside
    if told.model is None:
        fields |= {path: value for path, value in own.items() if value is not None}
    written = {s.name for s in experiment.said} | {s.name for s in command}
    for name in [s.name for s in experiment.presets]:
        if name in written or name not in settings.said:
            continue
        del settings.said[name]
        if name in settings.taken:
            settings.defaults[name] = settings.taken.pop(name)
    facts |= {"turbo": turbo, "turbo_async_tp": asynchronous}
    return Launch(fields, settings, known(), findings, dict(environment), None, facts)


def check(launch: Launch, job: Job) -> list[Finding]:
    """What Primus and TorchTitan say to a job."""
    facts = launch.facts
    found = titan_rules.rules(facts, job, TARGET)
    schedule = str(facts.get("schedule", "")).lower().removeprefix("schedule")
    if job.layout.pp > 1 and schedule == "dualpipev":
        message = "where torch lacks DualPipeV, Primus runs 1F1B in its name, with a line in the "
        message += "log (backends/torchtitan/patches/pipelining_schedule_patches.py)"
        suggest = {"layout__schedule": "zbv"}
        found.append(changed(TARGET, "primus-dualpipev", message, "DualPipeV", **suggest))
    if (facts.get("etp") or 1) > 1:
        message = f"expert_tensor_parallel_degree is read by TorchTitan {RELEASE}, which Primus "
        message += "pins (1, or as large as tp); TorchTitan has dropped it since"
        found.append(note(TARGET, "primus-titan-etp", message, facts.get("etp")))
    return found
