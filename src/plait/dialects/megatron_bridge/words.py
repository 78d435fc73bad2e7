"""Words of Megatron-Bridge's command lines: flags of its launchers, and overrides as Hydra has
them (`model.tensor_model_parallel_size=4`, `+key=value`, `~key`)."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from plait.dialects import tables
from plait.dialects.flags import Word, settings_of
from plait.dialects.settings import Setting

#: Flags of the launchers that stand for fields of the ConfigContainer
#: (scripts/training/run_recipe.py, scripts/performance/argument_parser.py).
FIELDS = {
    "--max_steps": "train.train_iters",
    "--train_iters": "train.train_iters",
    "--global_batch_size": "train.global_batch_size",
    "--micro_batch_size": "train.micro_batch_size",
    "--seq_length": "dataset.seq_length",
    "--tensor_model_parallel_size": "model.tensor_model_parallel_size",
    "--pipeline_model_parallel_size": "model.pipeline_model_parallel_size",
    "--context_parallel_size": "model.context_parallel_size",
    "--virtual_pipeline_model_parallel_size": "model.virtual_pipeline_model_parallel_size",
    "--expert_model_parallel_size": "model.expert_model_parallel_size",
    "--expert_tensor_parallel_size": "model.expert_tensor_parallel_size",
    "--pipeline_model_parallel_layout": "model.pipeline_model_parallel_layout",
    "--hidden_size": "model.hidden_size",
    "--num_layers": "model.num_layers",
    "--num_moe_experts": "model.num_moe_experts",
    "--lr": "optimizer.lr",
    "--min_lr": "optimizer.min_lr",
    "--warmup_iters": "scheduler.lr_warmup_iters",
    "--pretrained_checkpoint": "checkpoint.pretrained_checkpoint",
    "--save_dir": "checkpoint.save",
    "--load_dir": "checkpoint.load",
    "--save_interval": "checkpoint.save_interval",
    "--recompute_num_layers": "model.recompute_num_layers",
    "--recompute_modules": "model.recompute_modules",
    "--use_megatron_fsdp": "ddp.use_megatron_fsdp",
    "--nccl_ub": "ddp.nccl_ub",
    "--moe_a2a_overlap": "comm_overlap.overlap_moe_expert_parallel_comm",
    "--moe_flex_dispatcher_backend": "model.moe_flex_dispatcher_backend",
    "--cuda_graph_impl": "model.cuda_graph_impl",
    "--cuda_graph_scope": "model.cuda_graph_scope",
    "--peft_scheme": "peft",
}

#: An override: a path in the container, or one of its parts as a whole.
_OVERRIDE = re.compile(
    r"(?P<sign>\+{0,2}|~)(?P<path>[A-Za-z_]\w*(?:\.[\w\-]+)*)(?:=(?P<value>.*))?", re.DOTALL
)
_PARTS = ("mixed_precision", "comm_overlap", "peft", "model", "env_vars", "train", "ddp")


@dataclass(frozen=True)
class Words:
    """What the words of a command say.

    Attributes:
        flags: of the launchers, by their names with underscores ("--recipe").
        overrides: by paths in the container, in order.
        added: paths that were said with "+": they may be new. removed: with "~".
        loose: words that are neither.
    """

    flags: dict[str, Setting]
    overrides: list[Setting]
    added: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    loose: list[Word] = field(default_factory=list)


def read_words(words: Iterable[Word]) -> Words:
    """The words after the script's name."""
    arity, aliases = known_flags()
    plain, overrides, added, removed = [], [], set(), set()
    for word in words:
        match = _OVERRIDE.fullmatch(word.text)
        path = match["path"] if match else ""
        is_one = match is not None and (
            (match["value"] is not None and ("." in path or path in _PARTS or match["sign"]))
            or (match["sign"] == "~" and "." in path)
        )
        if not is_one or match is None:
            plain.append(word)
            continue
        if match["sign"] == "~":
            removed.add(path)
            continue
        if match["sign"]:
            added.add(path)
        overrides.append(Setting(path, value_of(match["value"] or ""), word.where, word.open))
    found, loose = settings_of(plain, arity, aliases)
    flags: dict[str, Setting] = {}
    for setting in found:
        name = "--" + setting.name.lstrip("-").replace("-", "_")
        flags[name] = Setting(name, setting.value, setting.where, setting.open)
    first = []
    for name, setting in flags.items():
        if name in FIELDS:
            where = f"{setting.where} {name}".strip()
            first.append(Setting(FIELDS[name], _plain(setting.value), where, setting.open))
    return Words(flags, first + overrides, added, removed, loose)


def value_of(text: str) -> Any:
    """A value as Hydra reads it: null, quoted text, a list; other texts stay as they are."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return value_of(text[1:-1]) if text[1:2] in "'\"" else text[1:-1]
    if text.lower() in ("null", "none", "~"):
        return None
    if text.startswith("[") and text.endswith("]") and len(text) < 100_000:
        return _list(text[1:-1])
    return text


def _plain(value: Any) -> Any:
    return None if value == "None" else value


def _list(text: str) -> list[Any]:
    """The parts of a list, lists in it included."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        if letter in "[({":
            depth += 1
        elif letter in "])}":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    if text.count("[") > 1000:
        return parts
    return [_item(p) for p in parts if p.strip()]


def _item(text: str) -> Any:
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        inner = text[1:-1].split(",")
        return [p.strip().strip("'\"") for p in inner if p.strip()]
    return value_of(text)


@lru_cache(maxsize=1)
def known_flags() -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Flag -> how many values it takes; other spelling -> flag."""
    arity, aliases = {}, {}
    for name, takes, *others in tables.rows("megatron_bridge_flags.txt"):
        arity[name] = takes
        aliases |= {other: name for other in others}
    return arity, aliases
