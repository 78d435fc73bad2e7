"""Megatron-Bridge: recipes and the overrides that people launch them with.

Read are commands (`torchrun run_recipe.py --recipe NAME model.tensor_model_parallel_size=4`, the
launchers that submit one, the performance scripts), shell scripts that hold one, YAML files of
overrides, and Python files that build a ConfigContainer (as syntax). Written is a command.
"""

from collections.abc import Mapping
from typing import Any

from plait.dialects.launch import Launch, Told, Written, changed, note
from plait.dialects.megatron.arguments import understand
from plait.dialects.megatron.validation import rules
from plait.dialects.megatron_bridge import recipes
from plait.dialects.megatron_bridge.fields import TARGET, Container, resolved, spell
from plait.dialects.megatron_bridge.launch import Said, read_launch
from plait.dialects.megatron_bridge.model import finished, model_of_launch
from plait.dialects.megatron_bridge.validation import bridge_rules
from plait.dialects.megatron_bridge.words import known_flags
from plait.dialects.megatron_bridge.writer import command_of
from plait.dialects.settings import Settings
from plait.dialects.source import Source
from plait.spec.findings import Finding
from plait.spec.job import Job

VERSION = "NVIDIA-NeMo/Megatron-Bridge 067f987d (2026-08)"


def read(source: Source, told: Told) -> Launch:
    """What a launch of Megatron-Bridge says.

    Raises:
        UserError: it cannot be read, or is no launch of Megatron-Bridge.
    """
    said = read_launch(source)
    recipe = said.recipe
    container = resolved(recipe, said.settings, said.synchronized)
    settings = Settings([*container.settings.values(), *said.flags], told.given)
    findings = [*container.findings]
    for finding in said.findings:
        # A recipe that is not known is no matter where a person says the model.
        if finding.rule == "megatron-bridge-recipe" and told.model:
            findings.append(changed(TARGET, finding.rule, finding.message, finding.value))
        else:
            settings.findings.append(finding)
    world, assumed = _world(said, told)
    fields, model = model_of_launch(said, container, settings, told, findings)
    stood = Told(told.given, told.world, told.model or model)
    understood = understand(settings, stood, spell, world, TARGET)
    sizes = {k: v for k, v in understood.fields.items() if k.startswith("model.")}
    fields = fields or finished(sizes, container, settings)
    fields |= {k: v for k, v in understood.fields.items() if not k.startswith("model.")}
    if container.grad_dtype and "train.grad_dtype" not in told.given:
        fields["train.grad_dtype"] = container.grad_dtype
    if "ranks" not in fields and assumed:
        fields["ranks"] = assumed
        message = f"on {assumed} GPUs, as the name of the recipe says"
        findings.append(note(TARGET, "megatron-bridge-world", message, assumed))
    _weak_scaling(said, container, fields, findings)
    _take_flags(said, settings)
    own = recipes.known_fields()
    settings.defaults = {
        name: (value, means)
        for name, (value, means) in settings.defaults.items()
        if name in own and not (stood.model and means.startswith("model."))
    }
    known = _known(settings, said.added)
    findings += understood.findings
    facts = dict(understood.facts) | {
        "container": container,
        "synchronized": said.synchronized,
        "finetunes": bool(recipe and recipe.finetunes),
        "peft": bool(recipe and recipe.peft),
        "encoder": bool(recipe and recipe.encoder and told.model is None),
    }
    if container.on("ddp.use_megatron_fsdp"):
        # What Bridge says of it is enough.
        facts["ckpt_format"] = "fsdp_dtensor"
    held = told.model or model
    if held is not None:
        facts["num_layers"] = held.layers
        facts["mtp_num_layers"] = container.value("model.mtp_num_layers", int, 0)
        facts["num_experts"] = held.moe.experts if held.moe else None
        facts["multi_latent_attention"] = held.mla is not None
        # Providers of mixtures choose these, where Megatron's own defaults are others.
        for name, value in (("moe_grouped_gemm", True), ("moe_token_dispatcher_type", "alltoall")):
            if spell(name) not in container.settings:
                facts[name] = value
    environment = dict(said.environment)
    if recipe and recipe.connections:
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", recipe.connections)
    return Launch(fields, settings, known, findings, environment, None, facts)


def _world(said: Said, told: Told) -> tuple[int | None, int | None]:
    """Ranks as the launch says them, and as the name of its recipe does."""
    named = said.recipe.world if said.recipe else None
    return said.world, None if told.world or said.world else named


def _weak_scaling(
    said: Said, container: Container, fields: dict[str, Any], findings: list[Finding]
) -> None:
    """On other GPUs than its own, a benchmark keeps its samples per data-parallel rank
    (run_recipe._apply_benchmark_weak_scaling)."""
    recipe = said.recipe
    ranks = fields.get("ranks")
    if recipe is None or not recipe.benchmark or not recipe.world or not isinstance(ranks, int):
        return
    if "train.global_batch_size" in container.said or not said.synchronized:
        return
    canonical = 1
    model_ranks = 1
    for name in ("tensor", "pipeline"):
        path = f"model.{name}_model_parallel_size"
        canonical *= int(recipe.settings.get(path, 1))
    canonical *= int(recipe.settings.get("model.context_parallel_size", 1))
    for axis in ("tp", "pp", "cp"):
        model_ranks *= fields.get(f"layout.{axis}", 1)
    before, now = recipe.world // max(1, canonical), ranks // max(1, model_ranks)
    batch = fields.get("train.global_batch")
    if before == now or before < 1 or not batch or now < 1 or batch * now % before:
        return
    fields["train.global_batch"] = batch * now // before
    message = (
        f"a benchmark recipe keeps its samples per data-parallel rank: global batch {batch} on "
        f"DP {before} becomes {fields['train.global_batch']} on DP {now}"
    )
    findings.append(changed(TARGET, "megatron-bridge-weak-scaling", message, batch))


def _take_flags(said: Said, settings: Settings) -> None:
    """What flags of the launcher mean."""
    means = {
        "--recipe": "the recipe", "--recipe_name": "the recipe", "--model": "the recipe",
        "--mode": "the recipe", "--model_recipe_name": "the recipe", "--model_name": "the recipe",
        "--model_size": "the recipe", "--task": "the recipe", "--gpu": "the recipe",
        "--compute_dtype": "the recipe", "--config_variant": "the recipe",
        "--num_gpus": "ranks", "--nodes": "ranks", "--gpus_per_node": "ranks",
        "--devices": "ranks", "--config_file": "a file of overrides",
    }  # fmt: skip
    if "recipe" in settings:
        settings.take("recipe", str, None, "model")
    for flag in said.flags:
        if flag.name in means:
            settings.taken[flag.name] = (flag.value, means[flag.name])


#: Parts that hold what they are given.
_OPEN = ("env_vars.", "peft.", "model.teacher.", "model.kd_config.", "model.dist_train.",
         "tensor_inspect.", "dataset.source.", "dataset.tokenizer.")  # fmt: skip


def _known(settings: Settings, added: set[str]) -> frozenset[str]:
    """Names that Megatron-Bridge has: fields, what stands in them, and flags of its launchers."""
    flags = {f"--{n.lstrip('-').replace('-', '_')}" for n in known_flags()[0]}
    names = recipes.known_fields() | added | flags
    inner = {
        name
        for name in settings.said
        if name.startswith(_OPEN)
        or (name.count(".") > 1 and ".".join(name.split(".")[:2]) in names)
    }
    return frozenset(names | inner)


def check(launch: Launch, job: Job) -> list[Finding]:
    """What Megatron-Bridge, and Megatron below it, say to the job."""
    facts: Mapping[str, Any] = launch.facts
    container = facts.get("container") or Container({})
    environment = dict(launch.environment)
    own = bridge_rules(container, job, environment, facts)
    below = rules(facts, job, environment, TARGET, spell, True)
    return [*own, *(_milder(f, container) for f in below)]


def _milder(finding: Finding, container: Container) -> Finding:
    """Megatron's argument layer asks for one connection; Bridge has none, and goes on without."""
    if finding.rule != "megatron-connections" or container.on("ddp.use_megatron_fsdp"):
        return finding
    message = (
        "TP or CP wants CUDA_DEVICE_MAX_CONNECTIONS=1 before Blackwell, so that communication "
        "starts before the matrices that it is to hide behind; nothing stops without it"
    )
    return changed(TARGET, finding.rule, message, finding.value)


def write(job: Job) -> Written:
    """A command that runs the job: a recipe, and what differs from it."""
    return command_of(job)
