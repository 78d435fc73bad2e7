"""Primus' Megatron backend: what its keys say beyond Megatron-LM's arguments, and its own rules.

Arguments go into Megatron's namespace by their names there: a flag's other spelling
(`disable_bias_linear`) is no key (backends/megatron/argument_builder.py).
"""

from collections.abc import Collection, Mapping
from dataclasses import fields as dataclass_fields
from functools import lru_cache
from typing import Any

from plait.dialects import huggingface_names, tables
from plait.dialects.launch import AT_START, Launch, Told, changed, note, refused
from plait.dialects.megatron.arguments import understand
from plait.dialects.megatron.names import known as megatron_flags
from plait.dialects.megatron.names import underscored
from plait.dialects.megatron.validation import rules
from plait.dialects.primus import schedules as primus_schedules
from plait.dialects.primus.config import Experiment, name_settings
from plait.dialects.settings import Setting, Settings
from plait.spec import presets
from plait.spec.findings import Finding
from plait.spec.job import Job
from plait.spec.jobfile import draft
from plait.spec.model import Model

TARGET = "Primus"
#: The vocabulary of mock data where the file says none (args/mock_data_patches.py).
MOCK_VOCAB = 131_072
#: Who carries tokens to experts, where DeepEP does.
_BACKEND = "PRIMUS_TURBO_MOE_DISPATCH_COMBINE_BACKEND"

#: Options of Primus alone that decide one of its rules: name -> (kind, default, what it is).
_OWN: dict[str, tuple[Any, Any, str]] = {
    "data_parallel_replicate_degree": (int, 1, "layout.dp_replicate"),
    "recompute_layer_ids": (None, None, "layout.recompute"),
    "distribute_saved_activations": (bool, False, "activations kept in parts over tp"),
    "mock_data": (bool, False, "model.vocab: of made-up data"),
    "enable_primus_turbo": (bool, False, "kernels of Primus-Turbo"),
    "use_turbo_attention": (bool, False, "kernels of Primus-Turbo"),
    "use_turbo_grouped_gemm": (bool, False, "kernels of Primus-Turbo"),
    "use_turbo_gemm": (bool, False, "kernels of Primus-Turbo"),
    "use_turbo_deepep": (bool, False, "how tokens reach experts"),
    "turbo_deepep_num_cu": (int, 32, "how tokens reach experts"),
    "turbo_sync_free_moe_stage": (int, 0, "how tokens reach experts"),
    "moe_use_legacy_grouped_gemm": (bool, False, "kernels of experts"),
    "use_turbo_parallel_linear": (bool, False, "an option that is gone"),
    "use_turbo_grouped_mlp": (bool, False, "an option that is gone"),
    "use_fsdp2_fp32_param_optimizer": (bool, False, "parameters and states in float32"),
    "use_fsdp2_bf16_master_weight_optimizer": (bool, False, "master weights in bfloat16"),
    "moe_router_force_load_balancing": (bool, False, "experts are chosen equally often"),
    "lora": (None, None, "adapters that are trained in place of the model"),
}
#: Keys that the rules ask for beside those that Megatron's room reads.
_ASIDE: dict[str, tuple[Any, Any, str]] = {
    "ckpt_format": (str, "torch_dist", "how checkpoints are written"),
    "moe_shared_expert_overlap": (bool, False, "shared experts beside the routed ones"),
    "moe_router_dtype": (str, None, "dtype of the router"),
    "model_type": (str, "gpt", "which model is built"),
    "is_hybrid_model": (bool, False, "layers that are not all attention"),
    "virtual_pipeline_model_parallel_size": (int, None, "nothing: it is computed anew"),
}


@lru_cache(maxsize=1)
def known() -> frozenset[str]:
    """Keys of a Megatron module."""
    return frozenset(tables.first_words("primus.txt"))


@lru_cache(maxsize=1)
def _other_spellings() -> frozenset[str]:
    flags = megatron_flags().values()
    arguments = {flag.argument for flag in flags}
    return frozenset(underscored(flag.name) for flag in flags) - arguments


#: Arguments that Primus' own rules read first; and one that Megatron-LM computes anew.
_NOT_ASKED = frozenset(("virtual_pipeline_model_parallel_size",))


def spell(name: str) -> str | None:
    """An argument of Megatron as a key; None for what is none."""
    return None if name in _other_spellings() or name in _NOT_ASKED else name


def read(
    experiment: Experiment,
    command: Collection[Setting],
    told: Told,
    world: int | None,
    findings: list[Finding],
    environment: Mapping[str, str],
) -> Launch:
    """A launch of the Megatron backend.

    Args:
        command: what the command says after the file.
        world: ranks, as the launch says them.
        findings: what was found on the way here.
    """
    settings = Settings([*experiment.presets, *experiment.said, *command], told.given)
    name_settings(experiment, settings)
    for name, setting in settings.said.items():
        if setting.value == "null":
            settings.said[name] = Setting(name, None, setting.where)
    own = {name: _take(settings, name, *how) for name, how in _OWN.items()}
    own |= primus_schedules.options(settings)
    own |= {name: _take(settings, name, *how) for name, how in _ASIDE.items()}
    found = [*findings, *_vocabulary(settings, own, told), *_replicas(settings, own)]
    understood = understand(settings, told, spell, world, TARGET)
    fields, facts = dict(understood.fields), understood.facts | own
    fields |= _layout(fields, facts, told)
    fields |= _named(experiment, fields, told)
    if told.model is not None or _draws(facts, experiment):
        fields = {k: v for k, v in fields.items() if k.partition(".")[0] != "model"}
    facts["sequence_parallel_said"] = facts.get("sequence_parallel")
    if fields.get("layout.tp") == 1:  # args/sequence_parallel_tp1_patches.py
        facts["sequence_parallel"] = False
    found += [*understood.findings, *_notes(experiment, facts, fields, told)]
    if facts.get("recompute_num_layers") == 0:
        found = [f for f in found if f.rule != "megatron-recompute-block"]
    _settle(settings, experiment, command)
    connections = _connections(facts, environment)
    return Launch(fields, settings, known(), found, connections, None, facts)


def _draws(facts: Mapping[str, Any], experiment: Experiment) -> bool:
    """A model of pictures: none that plait describes, so it is asked for."""
    kinds = (str(facts.get("model_type")), experiment.trainer_class.lower())
    return any(kind.startswith(("flux", "diffusion")) for kind in kinds)


def _connections(facts: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """The environment as Primus leaves it (patches/env_patches.py)."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    kinds = ("use_torch_fsdp2", "use_custom_fsdp", "use_megatron_fsdp")
    if any(facts.get(kind) for kind in kinds):
        return {**environment, name: "8"}
    return {name: "1", **environment}


def _take(settings: Settings, name: str, kind: Any, default: Any, means: str) -> Any:
    """As `Settings.take`; null says nothing."""
    setting = settings.said.get(name)
    if setting is not None and setting.value is None and not setting.open:
        settings.taken[name] = (None, means)
        return default
    return settings.take(name, kind, default, means)


def _settle(settings: Settings, experiment: Experiment, command: Collection[Setting]) -> None:
    """What only presets say are defaults, and those of them that nobody asked for are left out."""
    written = {s.name for s in experiment.said} | {s.name for s in command}
    for name in [s.name for s in experiment.presets]:
        if name in written or name not in settings.said:
            continue
        del settings.said[name]
        if name in settings.taken:
            value, means = settings.taken.pop(name)
            settings.defaults[name] = (value, means)


def _vocabulary(settings: Settings, own: Mapping[str, Any], told: Told) -> list[Finding]:
    """Made-up data has its own tokenizer (args/mock_data_patches.py)."""
    said = settings.said.get("vocab_size")
    if told.model is not None or (said is not None and (said.value is not None or said.open)):
        return []
    if own["mock_data"]:
        settings.said["vocab_size"] = Setting("vocab_size", MOCK_VOCAB, "mock_data")
        settings.said["tokenizer_type"] = Setting("tokenizer_type", "NullTokenizer", "mock_data")
        message = f"mock_data takes a tokenizer of {MOCK_VOCAB} words in place of the model's own"
        return [note(TARGET, "primus-mock-vocabulary", message, MOCK_VOCAB)]
    return []


def _replicas(settings: Settings, own: Mapping[str, Any]) -> list[Finding]:
    """data_parallel_replicate_degree becomes num_distributed_optimizer_instances
    (args/hsdp_args_patches.py)."""
    degree = own["data_parallel_replicate_degree"]
    if degree is None or degree <= 1:
        return []
    name = "num_distributed_optimizer_instances"
    settings.said[name] = Setting(name, degree, "data_parallel_replicate_degree")
    return []


def _layout(fields: Mapping[str, Any], facts: dict[str, Any], told: Told) -> dict[str, Any]:
    """Schedule and recompute, where Primus' own options say them."""
    changes: dict[str, Any] = {}
    pp, vpp = fields.get("layout.pp", 1), fields.get("layout.vpp", 1)
    pp = pp if isinstance(pp, int) else 1
    ours, theirs = primus_schedules.schedule(facts, pp, vpp)
    facts["schedule"], facts["vpp"] = theirs, vpp
    if ours is not None:
        changes["layout.schedule"] = ours
    if (facts.get("recompute_method"), facts.get("recompute_num_layers")) == ("block", 0):
        changes["layout.recompute"] = "none"
    ids, wrong = layer_ids(facts.get("recompute_layer_ids"))
    facts["layer_ids"], facts["layer_ids_wrong"] = ids, wrong
    if ids is not None and facts.get("recompute_granularity") == "full":
        layers = told.model.layers if told.model else fields.get("model.layers")
        changes["layout.recompute"] = "full" if not layers or 2 * len(ids) >= layers else "none"
    return changes


def layer_ids(said: Any) -> tuple[tuple[int, ...] | None, bool]:
    """The layers of `recompute_layer_ids`, "0,3,4" or a list; and whether it is neither."""
    if said is None:
        return None, False
    parts = said.split(",") if isinstance(said, str) else said
    if not isinstance(parts, list | tuple):
        parts = [parts]
    words = [str(part).strip() for part in parts if str(part).strip()]
    good = [w for w in words if w.lstrip("-").isascii() and w.lstrip("-").isdecimal()]
    numbers = {int(w[:12]) for w in good if w.count("-") <= 1}
    return tuple(sorted(numbers)), len(good) != len(words)


def _named(experiment: Experiment, fields: Mapping[str, Any], told: Told) -> dict[str, Any]:
    """What the model is called: plait's name where its preset is the same but for words and
    length, or else the name of Primus' preset."""
    stem = experiment.model.rpartition("/")[2]
    if told.model is not None or "model.layers" not in fields or not stem or "$" in stem:
        return {}
    named = huggingface_names.named(stem)
    preset = named.fields.get("model") if named is not None else None
    if preset is None:
        return {"model.name": stem}
    said = {k: v for k, v in fields.items() if k.startswith("model.")}
    alone, over = (_model(said | {"model.name": name}) for name in (stem, preset))
    if alone is None or over is None or _sizes(alone) != _sizes(presets.model(preset)):
        return {"model.name": stem}
    # What the preset has and the launch does not is taken off again.
    off = {
        f"model.{f.name}": "none" if getattr(alone, f.name) is None else getattr(alone, f.name)
        for f in dataclass_fields(Model)
        if f.name != "name" and getattr(alone, f.name) != getattr(over, f.name)
    }
    plain = all(isinstance(value, str | int | float) for value in off.values())
    return {"model.name": preset} | off if plain else {"model.name": stem}


def _sizes(model: Model) -> tuple[Any, ...]:
    """What makes a model the one that it is known as."""
    moe = model.moe and (model.moe.experts, model.moe.topk, model.moe.ffn, model.moe.first_dense)
    shape = (model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim, model.ffn)
    return *shape, model.mlp, model.tied, moe, model.mla


def _model(fields: Mapping[str, Any]) -> Model | None:
    made = draft("plan", None, {**fields, "ranks": 1})
    return made.job.model if made.job else None


def _notes(
    experiment: Experiment, facts: Mapping[str, Any], fields: Mapping[str, Any], told: Told
) -> list[Finding]:
    """What the file alone shows."""
    found = []

    def say(rule: str, message: str, value: Any = None) -> None:
        found.append(note(TARGET, rule, message, value))

    kind = facts.get("model_type")
    if told.model is None and _draws(facts, experiment):
        message = f"{experiment.model} makes pictures: no decoder that plait describes"
        found.append(changed(TARGET, "primus-diffusion-model", message, kind))
    elif told.model is None and (kind != "gpt" or facts.get("is_hybrid_model")):
        message = f"{experiment.model or 'the model'} has layers that are no attention "
        message += f"(model_type {kind}); all are counted as attention, so its memory and traffic "
        found.append(changed(TARGET, "primus-hybrid-model", message + "are rough", kind))
    lora = facts.get("lora")
    if isinstance(lora, Mapping) and lora.get("enabled") in (True, "true", "True"):
        message = "trains adapters (lora); plait counts gradients and states of the whole model"
        say("primus-lora", message)
    ids = facts.get("layer_ids")
    if ids is not None and facts.get("recompute_granularity") == "full":
        counted = "all" if fields.get("layout.recompute") == "full" else "none"
        message = f"recomputes {len(ids)} layers by their number; {counted} are counted so"
        say("primus-recompute-layers", message, len(ids))
    return found


# ------------------------------------------------------------------------------------------
# Its own rules


def check(launch: Launch, job: Job) -> list[Finding]:
    """What Primus, and Megatron-LM under it, say to a job."""
    facts, environment = launch.facts, launch.environment
    found = primus_schedules.check(facts, job)
    found += _sharding(facts, job) + _turbo(facts, job, environment)
    found += _recompute(facts, job) + _silent(launch, job) + _dp(job)
    if facts.get("layer_ids") is not None:
        # Primus hides the granularity from Megatron's own check (recompute_layer_patches.py).
        facts = {**facts, "recompute_granularity": None}
    theirs = rules(facts, job, environment, TARGET, spell)
    if primus_schedules.has(facts, job.layout.schedule):
        theirs = [f for f in theirs if f.rule != "megatron-schedule"]
    return [*found, *theirs]


def _sharding(facts: Mapping[str, Any], job: Job) -> list[Finding]:
    found = []
    degree = facts.get("data_parallel_replicate_degree") or 1
    one = {"layout__dp_replicate": 1}
    if degree > 1 and not facts.get("use_torch_fsdp2"):
        message = f"data_parallel_replicate_degree {degree} needs use_torch_fsdp2"
        found.append(refused(TARGET, "primus-replicate-fsdp2", AT_START, message, degree, **one))
    elif degree > 1 and facts.get("ckpt_format") != "torch_dcp":
        message = f"data_parallel_replicate_degree {degree} needs ckpt_format torch_dcp, "
        message += f"not {facts.get('ckpt_format')}"
        found.append(
            refused(TARGET, "primus-replicate-checkpoint", AT_START, message, degree, **one)
        )
    both = ("use_fsdp2_fp32_param_optimizer", "use_fsdp2_bf16_master_weight_optimizer")
    if all(facts.get(name) for name in both):
        message = f"{' and '.join(both)} exclude each other"
        found.append(refused(TARGET, "primus-fsdp2-optimizers", AT_START, message))
    return found


def _turbo(facts: Mapping[str, Any], job: Job, environment: Mapping[str, str]) -> list[Finding]:
    """args/rocm_arg_validation.py, after Megatron-LM's own validation."""
    found = []

    def no(rule: str, message: str, value: Any = None) -> None:
        found.append(refused(TARGET, f"primus-{rule}", AT_START, message, value))

    for gone, new in (
        ("use_turbo_parallel_linear", "use_turbo_gemm"),
        ("use_turbo_grouped_mlp", "use_turbo_grouped_gemm"),
    ):
        if facts.get(gone):
            no("turbo-gone", f"{gone} is gone; it is called {new}")
    grouped = facts.get("use_turbo_grouped_gemm")
    if grouped and facts.get("moe_use_legacy_grouped_gemm"):
        message = "use_turbo_grouped_gemm and moe_use_legacy_grouped_gemm exclude each other"
        no("grouped-gemm", message)
    stage = facts.get("turbo_sync_free_moe_stage") or 0
    if not 0 <= stage <= 3:
        no("sync-free-stage", f"turbo_sync_free_moe_stage {stage} is none of 0 to 3", stage)
    elif stage and not facts.get("enable_primus_turbo"):
        no("sync-free-turbo", f"turbo_sync_free_moe_stage {stage} needs enable_primus_turbo")
    elif stage > 1 and not grouped:
        no("sync-free-grouped", f"turbo_sync_free_moe_stage {stage} needs use_turbo_grouped_gemm")
    deepep = facts.get("use_turbo_deepep") or stage in (2, 3)
    if not deepep:
        return found
    if facts.get("moe_shared_expert_overlap"):
        no("deepep-shared", "use_turbo_deepep needs moe_shared_expert_overlap: false")
    if facts.get("moe_router_dtype") != "fp32":
        no("deepep-router", "use_turbo_deepep needs moe_router_dtype: fp32")
    units, backend = (
        facts.get("turbo_deepep_num_cu") or 32,
        "PRIMUS_TURBO_MOE_DISPATCH_COMBINE_BACKEND",
    )
    if job.layout.ep >= 16 and units > 32 and environment.get(backend, "TURBO") == "TURBO":
        no("deepep-units", f"with ep {job.layout.ep} turbo_deepep_num_cu is at most 32", units)
    return found


def _recompute(facts: Mapping[str, Any], job: Job) -> list[Finding]:
    """recompute_layer_patches.py."""
    ids = facts.get("layer_ids")
    if ids is None:
        return []
    found = []

    def no(message: str) -> None:
        found.append(refused(TARGET, "primus-recompute-layers", AT_START, message))

    last = job.model.layers - 1 + (facts.get("mtp_num_layers") or 0)
    if facts.get("layer_ids_wrong"):
        no("recompute_layer_ids holds what is no number")
    elif not ids:
        no("recompute_layer_ids must not be empty")
    elif ids[0] < 0 or ids[-1] > last:
        bad = ids[0] if ids[0] < 0 else ids[-1]
        no(f"recompute_layer_ids names layer {bad}; they go from 0 to {last}")
    if facts.get("recompute_granularity") != "full":
        no("recompute_layer_ids needs recompute_granularity: full")
    if facts.get("recompute_method") is not None:
        no("recompute_layer_ids needs recompute_method: null")
    if facts.get("distribute_saved_activations") and job.layout.sequence_parallel:
        no("recompute_layer_ids with sequence_parallel needs distribute_saved_activations: false")
    return found


def _silent(launch: Launch, job: Job) -> list[Finding]:
    """What Primus changes, or keeps without using it, and says nothing of."""
    facts, found = launch.facts, []
    given = facts.get("given", frozenset())
    written = launch.settings.taken
    wanted = facts.get("sequence_parallel_said") and "sequence_parallel" in written
    if wanted and job.layout.tp == 1:
        message = "sequence_parallel is switched off where tensor_model_parallel_size is 1"
        found.append(note(TARGET, "primus-sequence-parallel", message))
    direct = facts.get("virtual_pipeline_model_parallel_size")
    others = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage",
              "pipeline_model_parallel_layout")  # fmt: skip
    if direct is not None and direct > 1 and not given & set(others) and job.layout.pp > 1:
        message = f"virtual_pipeline_model_parallel_size {direct} is computed anew and becomes 1; "
        message += f"num_virtual_stages_per_pipeline_rank: {direct} says it"
        found.append(changed(TARGET, "primus-virtual-pipeline", message, direct))
    if "norm_epsilon" in launch.settings.said and facts.get("model_type") != "deepseek_v4":
        message = "norm_epsilon is read by one model only (deepseek_v4); layernorm_epsilon decides"
        found.append(note(TARGET, "primus-norm-epsilon", message))
    return found


def _dp(job: Job) -> list[Finding]:
    """The data-parallel degree that Primus' guide and its tuning agent count, where it differs
    from the one that it runs with (docs parallelism-strategies; agents/tuning_agent/legality.py).
    """
    layout = job.layout
    world = layout.world
    guided = world // max(1, layout.tp * layout.pp * layout.ep)
    if job.model.moe is None or layout.ep == 1 or guided == layout.dp:
        return []
    micro, total = max(1, layout.micro_batch), job.train.global_batch or 0
    wrong = total // (micro * guided) if guided else None
    rest = f", so {wrong} micro batches a step" if wrong else ""
    message = f"its guide and its tuning agent count dp = world / (tp pp ep) = {guided}{rest}; it "
    message += f"runs with dp = world / (tp pp cp) = {layout.dp}, "
    message += f"so {job.train.accumulation} micro batches a step"
    return [note(TARGET, "primus-dp-formula", message, guided)]
