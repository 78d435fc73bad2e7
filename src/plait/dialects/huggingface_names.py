"""Which model a name on the Hugging Face hub is of: "meta-llama/Llama-3.1-8B-Instruct".

Names are folded: who published it, how it was tuned and how its numbers are stored do not change
the shape of a model. The table is data: `known/hf_models.json`. A name that is not in it is not
guessed.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from plait.dialects import tables
from plait.spec import presets
from plait.spec.findings import closest

#: Words of a name that say nothing of the shape.
_TUNED = frozenset(
    "instruct chat hf it pt base meta dynamic kv autofp8 marlin bnb gguf unsloth channelwise "
    "channel block g128 sym asym tensorwise original preview quantized moe qat".split()
)
#: Months and days of a release, as in -2507 and -0324.
_DATE = re.compile(r"(0[1-9]|1[0-2])([0-2]\d|3[01])|2[3-9](0[1-9]|1[0-2])")
#: A model that only drafts for another has its name and not its shape.
_DRAFTS = frozenset(("eagle", "eagle3", "draft", "medusa", "mtp", "speculator", "dspark"))


@dataclass(frozen=True)
class Named:
    """What a repository's name says.

    Attributes:
        fields: what a job file would say: "model" (a preset's name), "model.vocab", ...
        weights: how its weights are stored: a scheme of `cost.serving_weights`, None: as the
            dtype of the run says.
        exact: False where only the end of the name is known: a model tuned from another.
        note: what the fields leave out, "".
        longest: positions that its configuration allows, where they are more than the fields say:
            the tokens that an engine lets a request have.
    """

    fields: dict[str, Any]
    weights: str | None = None
    exact: bool = True
    note: str = ""
    longest: int | None = None


def named(repository: str) -> Named | None:
    """The model that a repository, a folder of the hub's cache or a folder named like one holds;
    None where its name is not known."""
    words = _words(repository)
    table = _table()
    stored = next((table["words"][w] for w in words if w in table["words"]), None)
    if stored == "fp8" and repository.lower().startswith(tuple(table["fp8_in_blocks"])):
        stored = "fp8-block"
    exact = [w for w in words if w not in _TUNED]
    bare = [w for w in words if w not in table["words"]]
    plain = [w for w in bare if w not in _TUNED]
    dateless = [w for w in plain if not _DATE.fullmatch(w) and w != "thinking"]
    whole = next((n for n in map("".join, (exact, bare, plain, dateless)) if n in _models()), None)
    if whole is not None:
        told = [w for w in plain if w != "thinking"]
        names = map("".join, (exact, bare, plain, told, dateless))
        longest = next((_longest()[n] for n in names if n in _longest()), None)
        return replace(_entry(whole, stored, True), longest=longest)
    if _DRAFTS & set(words):
        return None
    ends = ("".join(dateless[i:]) for i in range(1, len(dateless) - 1))
    end = next((n for n in ends if n in _models()), None)
    return _entry(end, stored, False) if end else None


def nearest_name(repository: str) -> str | None:
    """The preset whose name is most like a repository's."""
    return closest("-".join(_words(repository)), presets.model_names(), 0.4)


def repository_of(preset: str) -> str | None:
    """Where a preset model lies on the hub."""
    return _table()["repositories"].get(preset)


def _words(repository: str) -> list[str]:
    """The words of a name, in lower case; of a path, those of the folder that is named."""
    parts = [p for p in repository.strip().replace("\\", "/").split("/") if p not in ("", ".")]
    if "snapshots" in parts[1:]:
        parts = parts[: parts.index("snapshots", 1)]
    name = parts[-1] if parts else ""
    name = name.rpartition("--")[2].partition(":")[0].lower()
    name = re.sub(r"(?<=\d)[-_](?=\d(?:[-_]|$))", ".", name) if "llama" in name else name
    return [w for w in re.split(r"[-_\s]", name.removesuffix(".git")) if w]


def _entry(key: str, stored: str | None, exact: bool) -> Named:
    fields, note, own = _models()[key]
    # "fp8" of a model whose blocks are 128 x 128 already says nothing new.
    weights = own if stored is None or (stored == "fp8" and own == "fp8-block") else stored
    if stored == "nvfp4" and own == "fp8-block":
        weights = "nvfp4-experts"  # such checkpoints of DeepSeek leave attention as it is
    return Named(dict(fields), None if weights == "none" else weights, exact, note)


@lru_cache(1)
def _table() -> dict[str, Any]:
    return tables.tree("hf_models.json")


@lru_cache(1)
def _longest() -> dict[str, int]:
    return {"".join(name.split("-")): n for name, n in _table()["longest"].items()}


@lru_cache(1)
def _models() -> dict[str, tuple[dict[str, Any], str, str | None]]:
    """Folded name -> (fields, note, how its weights are stored)."""
    table, models = _table(), {}
    names = {name: {"model": name} for name in presets.model_names()}
    names |= {name: {"model": preset} for name, preset in table["same"].items()}
    for name, fields in (names | table["sizes"]).items():
        fields = dict(fields)
        note = fields.pop("note", "")
        base = {"model": fields.pop("model")} if "model" in fields else {"model.name": name}
        said = base | {f"model.{field}": value for field, value in fields.items()}
        models["".join(name.split("-"))] = said, note, table["stored"].get(name)
    return models
