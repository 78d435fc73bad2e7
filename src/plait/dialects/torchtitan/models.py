"""The models that TorchTitan has, by name and flavor; as data in known/titan_models.json."""

from dataclasses import replace
from functools import cache
from typing import Any

from plait.dialects import tables
from plait.dialects.huggingface_names import named
from plait.dialects.launch import AT_START, Told, refused
from plait.dialects.settings import Settings
from plait.spec import presets
from plait.spec.findings import Finding, UserError, closest
from plait.spec.model import Model

#: Models that are more than plait describes: what is left out.
_APART = {
    "kimi_k2_7": "the encoder of images",
    "muse_glimmer": "the gates of its attention and the encoder of images",
}


@cache
def flavors() -> dict[str, dict[str, dict[str, Any]]]:
    """Model -> flavor -> dotted path -> value of a job file; "model" names a preset."""
    return tables.tree("titan_models.json")


def flavor_fields(settings: Settings, told: Told, facts: dict[str, Any]) -> dict[str, Any]:
    """The fields of the model that a configuration picks; none where it has to be asked for.

    `facts` gets what the rules need: "model", "flavor", "experts" (whether it has any).
    """
    sizes = _own_sizes(settings)
    if sizes and told.model is None:
        experts = "model.moe.experts" in sizes
        family = "qwen3" if "model.qk_norm" in sizes else "llama3"
        facts |= {"model": family, "flavor": sizes["model.name"], "experts": experts}
        return sizes
    if facts["version"] != "0.2.2" and not {"model.name", "model.flavor"} <= settings.said.keys():
        facts |= {"model": None, "flavor": None, "experts": _experts(told)}
        return {}  # a recipe has no default
    name = settings.take("model.name", str, "llama3", "model")
    flavor = settings.take("model.flavor", str, "debugmodel", "model")
    # "simple_fsdp.llama3" and "llama3_ft" are experiments on a model of TorchTitan's.
    name = str(name).replace("-", "_").rpartition(".")[2].removesuffix("_ft")
    facts |= {"model": name, "flavor": flavor, "experts": _experts(told)}
    if told.model is not None:
        return {}
    said = [settings.said[key] for key in ("model.name", "model.flavor") if key in settings]
    if any(setting.open for setting in said):
        return {}
    if name in _BACKENDS:
        return _of_the_hub(settings, facts)
    known = flavors().get(name)
    if known is None:
        _unknown(settings, f"no model is called {name!r}", name, flavors())
        return {}
    found = known.get(flavor) or known.get(_plain(flavor))
    if found is None:
        _unknown(settings, f"{name} has no flavor {flavor!r}", flavor, known)
        return {}
    if not found:
        message = (
            f"{name} {flavor} is no decoder-only transformer that plait describes: say --model"
        )
        settings.findings.append(
            refused("plait", "torchtitan-model", AT_START, message, f"{name} {flavor}")
        )
        return {}
    facts["experts"] = _has_experts(found)
    if name in _APART:
        message = f"TorchTitan: {name} is described without {_APART[name]}"
        settings.findings.append(Finding("note", "torchtitan-model", message))
    return dict(found)


#: Models that are Hugging Face's, by name.
_BACKENDS = ("transformers_modeling_backend", "transformers_backend")


def _of_the_hub(settings: Settings, facts: dict[str, Any]) -> dict[str, Any]:
    """A model that transformers builds, by the name of its repository."""
    option = next((n for n in ("hf_transformers.model", "hf_model") if n in settings), None)
    repository = settings.take(option, str, None, "model") if option else None
    found = named(repository) if repository and facts["flavor"] == "full" else None
    if found is None:
        return {}
    facts["experts"] = _has_experts(found.fields)
    return dict(found.fields)


#: What a recipe that builds blocks itself calls sizes -> the same of a job file.
_SIZES: dict[str, tuple[str, type]] = {
    "model.head_dim": ("model.head_dim", int),
    "model.qk_norm": ("model.qk_norm", str),
    "model.num_experts": ("model.moe.experts", int),
    "model.top_k": ("model.moe.topk", int),
    "model.moe_hidden_dim": ("model.moe.ffn", int),
    "model.n_layers": ("model.layers", int),
    "model.dim": ("model.hidden", int),
    "model.n_heads": ("model.heads", int),
    "model.n_kv_heads": ("model.kv_heads", int),
    "model.hidden_dim": ("model.ffn", int),
    "model.vocab_size": ("model.vocab", int),
    "model.theta": ("model.rope_theta", float),
    "model.enable_weight_tying": ("model.tied", bool),
}


def _own_sizes(settings: Settings) -> dict[str, Any]:
    """A model whose sizes a recipe gives itself; empty where it picks a flavor."""
    if "model.n_layers" not in settings:
        return {}
    found: dict[str, Any] = {"model.name": settings.take("model.flavor", str, "custom", "model")}
    for name, (path, kind) in _SIZES.items():
        value = settings.take(name, kind, None, path)
        if value is not None:
            found[path] = value
    return found


def _experts(told: Told) -> bool:
    return told.model is not None and told.model.moe is not None


def _plain(flavor: str) -> str:
    """A flavor without the words for its attention: sizes do not depend on them."""
    for tail in (
        "_flex_attn",
        "_varlen_attn",
        "_flex",
        "_varlen",
        "_irope",
        "_non_fused_qkv",
        "_mm",
    ):
        flavor = flavor.removesuffix(tail)
    return flavor


def _unknown(settings: Settings, message: str, word: str, known: Any) -> None:
    near = closest(word, known)
    hint = f" (nearest: {near})" if near else f"; there are {', '.join(known)}"
    settings.findings.append(
        refused("TorchTitan", "torchtitan-flavor", AT_START, message + hint, word)
    )


def _has_experts(fields: dict[str, Any]) -> bool:
    if "model" in fields:
        return presets.model(fields["model"]).moe is not None
    return any(path.startswith("model.moe.") for path in fields)


def flavor_of(model: Model) -> tuple[str, str] | None:
    """The name and flavor under which TorchTitan has a model, whatever it is called."""
    for name, known in flavors().items():
        for flavor, found in known.items():
            if found and _same(model, found):
                return name, flavor
    return None


def _same(model: Model, fields: dict[str, Any]) -> bool:
    try:
        if "model" in fields:
            return _sizes(presets.model(fields["model"])) == _sizes(model)
    except UserError:
        return False
    return all(
        _value(model, path.removeprefix("model.")) == value
        for path, value in fields.items()
        if path != "model.name"
    )


def _sizes(model: Model) -> Model:
    """What decides a model but its name and the length that it is meant for."""
    return replace(model, name="", seq=0)


def _value(model: Model, path: str) -> Any:
    value: Any = model
    for part in path.split("."):
        value = getattr(value, part, None)
    return value
