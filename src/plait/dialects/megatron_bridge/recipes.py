"""Megatron-Bridge's recipes: what each of its recipe functions sets, and how launchers name one.

The recipes are data, `known/megatron_bridge.json`, read from their sources. A recipe sets a whole
ConfigContainer; the table holds what of it decides layout, batch, memory or a rule.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from plait.dialects import tables
from plait.dialects.huggingface_names import named as model_named
from plait.spec.findings import closest

#: How command lines call a precision -> how names of recipes do
#: (scripts/performance/utils/utils.py).
_PRECISIONS = {
    "fp8_cs": "fp8cs", "fp8_ds": "fp8ds", "fp8_mx": "fp8mx", "fp8_sc": "fp8sc", "fp8": "fp8cs",
}  # fmt: skip
#: Ends of a recipe's name, in the order in which a bare model's name is completed.
_MODES = {"pretrain": "pretrain", "sft": "sft", "lora": "peft", "dora": "peft", "peft": "peft"}
#: Arguments of recipe functions of older releases -> fields.
ARGUMENTS = {
    "tensor_parallelism": "model.tensor_model_parallel_size",
    "pipeline_parallelism": "model.pipeline_model_parallel_size",
    "virtual_pipeline_parallelism": "model.virtual_pipeline_model_parallel_size",
    "context_parallelism": "model.context_parallel_size",
    "expert_parallelism": "model.expert_model_parallel_size",
    "expert_tensor_parallelism": "model.expert_tensor_parallel_size",
    "use_megatron_fsdp": "ddp.use_megatron_fsdp",
    "seq_length": "dataset.seq_length",
    "train_iters": "train.train_iters",
    "global_batch_size": "train.global_batch_size",
    "micro_batch_size": "train.micro_batch_size",
    "lr": "optimizer.lr",
    "finetune_lr": "optimizer.lr",
    "lr_warmup_iters": "scheduler.lr_warmup_iters",
    "precision_config": "mixed_precision",
}
MODEL_ARGUMENTS = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "virtual_pipeline_model_parallel_size", "sequence_parallel", "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """What a recipe sets.

    Attributes:
        name: of the function.
        model: as fields of a job file; {} where plait has no words for it.
        hub: its name on the Hugging Face hub, "".
        lacks: why plait has no words for the model, "".
        encoder: an encoder of images or sound stands before the language model.
        settings: path in the ConfigContainer -> value.
        world: GPUs that its name says it is for, None.
        peft: only adapters are trained. finetunes: its samples are questions with answers.
        connections: CUDA_DEVICE_MAX_CONNECTIONS, "" where it does not set it.
        rebuilt: its pipeline layout is made anew for other numbers of stages and chunks.
        benchmark: one of perf_recipes, tuned for as many GPUs as its name says.
    """

    name: str
    model: dict[str, Any] = field(default_factory=dict)
    hub: str = ""
    lacks: str = ""
    encoder: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    world: int | None = None
    peft: bool = False
    finetunes: bool = False
    benchmark: bool = False
    connections: str = ""
    rebuilt: bool = False


def recipe(name: str) -> Recipe | None:
    """A recipe by the name of its function; None where there is none."""
    table = _table()
    entry = table["recipes"].get(name)
    if isinstance(entry, str):
        entry = table["recipes"][entry]
    if entry is None:
        return None
    said = dict(entry)
    hub = said.pop("model", "")
    return _recipe(name, hub, said)


def common(mode: str = "pretrain") -> Recipe:
    """What recipes start from that say nothing else (recipes/common.py)."""
    said: dict[str, Any] = {"gbs": 32, "mbs": 2, "warmup": 500, "steps": 300000}
    if mode != "pretrain":
        said = {"gbs": 128, "steps": 1000, "warmup": 50, "seq": 2048, "beta2": 0.98, "seed": 5678}
        said |= {"averaged": False, "sharded": False, "finetunes": True, "packed": True}
        said |= {"lr": 1e-4, "peft": True} if "peft" in mode else {"lr": 5e-6}
        said |= {"min_lr": 0.0}
    if mode.endswith("vlm"):
        said |= {"gbs": 32, "mbs": 2, "steps": 300000, "warmup": 500, "seq": 4096, "seed": 1234}
        said |= {"averaged": True, "sharded": True, "packed": False, "in_batch": True}
        said |= {"lr": 1e-4, "min_lr": 1e-5} if "peft" in mode else {"lr": 3e-4, "min_lr": 3e-5}
    return _recipe(f"_{mode}_common", "", said)


def _recipe(name: str, hub: str, said: dict[str, Any]) -> Recipe:
    table = _table()
    peft, finetunes = said.pop("peft", False), said.pop("finetunes", False)
    about = table["models"].get(hub, {})
    benchmark, connections = said.pop("benchmark", False), said.pop("connections", "")
    rebuilt, unsaved = said.pop("rebuilt", False), said.pop("unsaved", False)
    words = table["words"]
    settings = {words[word]: value for word, value in (table["common"] | said).items()}
    settings.setdefault("model.seq_length", settings["dataset.seq_length"])
    gpus = re.search(r"_(\d+)gpu_", name)
    return Recipe(
        name,
        dict(about.get("fields", {})),
        hub,
        about.get("lacks", ""),
        about.get("encoder", False),
        {path: value for path, value in settings.items() if value is not None}
        | (dict.fromkeys(("checkpoint.save", "checkpoint.load")) if unsaved else {}),
        int(gpus[1]) if gpus else None,
        peft,
        finetunes,
        benchmark,
        connections,
        rebuilt,
    )


def nearest_recipe(name: str) -> str | None:
    """The recipe whose name is most like another; of the words of a name the numbers count."""
    names = _table()["recipes"]
    stem = re.split(r"_(?:pretrain|sft|peft|finetune)", name)[0]
    alike = [n for n in names if n.startswith(f"{stem}_")]
    return closest(name, alike or names, 0.5)


def selected(model: str, mode: str) -> str:
    """The recipe of `--model gpt_oss_20b --mode lora`."""
    return f"{model}_{_MODES.get(mode, mode)}_config"


def benchmark(
    model: str, task: str, gpus: int | None, gpu: str, precision: str, variant: str = ""
) -> str | None:
    """The recipe that a performance script selects; None where there is none for such GPUs.

    One for another number of GPUs is taken where there is none for this one: the one for most.
    """
    precision = _PRECISIONS.get(precision.lower(), precision.lower().replace("_", ""))
    suffix = f"_{variant.lower()}" if variant and variant.lower() not in ("v1", "v2") else ""
    shape = re.compile(
        rf"{re.escape(model)}_{re.escape(task)}_(\d+)gpu_{re.escape(gpu)}_"
        rf"{re.escape(precision)}{re.escape(suffix)}_config"
    )
    found = {int(m[1]): n for n in _table()["recipes"] if (m := shape.fullmatch(n))}
    return found.get(gpus or 0) or (found[max(found)] if found else None)


def model_of(hub: str) -> dict[str, Any]:
    """A model by its name on the hub, as fields of a job file; {} where it is not known."""
    about = _table()["models"].get(hub)
    if about is not None:
        return dict(about.get("fields", {}))
    known = model_named(hub)
    return dict(known.fields) if known else {}


def provided(provider: str) -> dict[str, Any]:
    """A model by the name of the class that provides it, as fields of a job file; {} where its
    sizes are arguments."""
    preset = _table()["providers"].get(provider)
    return {"model": preset} if preset else {}


def recipe_for(preset: str) -> tuple[str, bool] | None:
    """The recipe that trains a preset model, for writing, and whether its model is exactly that
    of the preset; the smallest one that pre-trains, where there is one."""
    table = _table()
    best: tuple[Any, str] | None = None
    for name, entry in table["recipes"].items():
        entry = table["recipes"][entry] if isinstance(entry, str) else entry
        about = table["models"].get(entry.get("model", ""), {})
        if about.get("fields") != {"model": preset} or about.get("encoder"):
            continue
        rank = ("pretrain" not in name, entry.get("peft", False), "gpu_" in name, len(name), name)
        if best is None or rank < best[0]:
            best = rank, name
    return (best[1], True) if best else None


def known_fields() -> frozenset[str]:
    """Paths in a ConfigContainer that Megatron-Bridge has."""
    return frozenset(tables.first_words("megatron_bridge.txt"))


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    return tables.tree("megatron_bridge.json")
