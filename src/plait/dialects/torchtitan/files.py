"""Files that TorchTitan starts from: a recipe in Python, a TOML file for versions before recipes.

The recipe is taken by the release (0.3.0), which counts a batch in samples, and by main, which
counts it in tokens. It starts from one of TorchTitan's own debug recipes, for its data set and
tokenizer, and says everything that decides layout, batch, model and training itself.
"""

import json
from typing import Any

from plait.dialects.launch import Told, Written, note
from plait.dialects.settings import Setting, Settings
from plait.dialects.torchtitan.config import understand
from plait.dialects.torchtitan.models import flavor_of, flavors
from plait.dialects.torchtitan.validation import rules
from plait.dialects.torchtitan.writer import config_of, launch_words
from plait.spec.findings import Finding
from plait.spec.job import Job
from plait.spec.model import Model

RECIPE, TOML, SCRIPT = "plait_recipe.py", "plait_job.toml", "plait_train.sh"
#: Models of 0.2.2, and flavors that came later.
_OLD_MODELS = ("llama3", "llama4", "deepseek_v3", "qwen3", "gpt_oss")
_LATER = {"llama3": ("1B", "3B")}
#: Recipes that the written one starts from, where it is not `<model>_debugmodel`.
_BASES = {"kimi_k2_7": "kimi_k2_5_debugmodel"}

_HEAD = '''\
"""{title}, for TorchTitan: main of August 2026 and release 0.3.0.

    {command}
"""

{imports}

# Main counts a batch in tokens, release 0.3.0 in samples.
if "max_context_length" in {{field.name for field in fields(TrainingConfig)}}:
    BATCH = {tokens}
    PIPELINE = {tokens_pipeline}
else:
    BATCH = {samples}
    PIPELINE = {samples_pipeline}

{model}
def train() -> Trainer.Config:
    # Its data set and tokenizer are for a test: put yours here.
    config = {base}()
    config.model_spec = {spec}
    config.loss = ChunkedLossWrapper.Config(
        loss_fn=CrossEntropyLoss.Config(
            global_vocab_size=decoder_vocab_size(config.model_spec),
        ),
    )
    config.training = TrainingConfig(
{training}
        **BATCH,
    )
    config.parallelism = ParallelismConfig(
{parallelism}
        **PIPELINE,
    )
    config.activation_checkpoint = {recompute}
    config.optimizer = default_adamw(
{optimizer}
    )
    config.lr_scheduler = LRSchedulersContainer.Config(
{schedule}
    )
{rest}    return config
'''
_MODEL = '''\

def model_spec():
    """{name}: blocks of {family} of another size."""
    spec = model_registry("{flavor}", attn_backend="flex")
    base = spec.model
    layers = {builder}(
{sizes}
        rope=replace(base.layers[0].attention.rope, dim={head_dim}, theta={rope_theta}),
        attn_backend="flex",
    )
    model = replace(
        base,
        dim={hidden},
        vocab_size={vocab},
        enable_weight_tying={tied},
        tok_embeddings=replace(
            base.tok_embeddings, num_embeddings={vocab}, embedding_dim={hidden}
        ),
        norm=replace(base.norm, normalized_shape={hidden}),
        lm_head=replace(base.lm_head, in_features={hidden}, out_features={vocab}),
        layers=layers,
    )
    return replace(spec, flavor="{name}", model=model)

'''
#: What a model without a flavor is built of -> (flavor to start from, builder, what its blocks
#: are).
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("debugmodel", "_build_llama3_layers", {"qk_norm": None}),
    "qwen3": ("debugmodel_moe", "_build_qwen3_moe_layers", {"qk_norm": "head"}),
}
#: Choices of a model that all of them share.
_CHOICES: dict[str, Any] = {
    "mlp": "swiglu", "norm": "rms", "norm_at": "input", "positions": "rope", "qkv_bias": False,
    "o_bias": False, "mlp_bias": False, "window": None, "attention_softcap": None,
    "logit_softcap": None, "norm_offset": False, "embed_scale": False, "embed_norm": False,
    "sinks": False, "dropout": 0.0, "attention_scale": None, "mla": None,
}  # fmt: skip


def files_of(job: Job) -> Written:
    """A recipe, the command that starts it, and, where 0.2.2 can run the job, a TOML file."""
    config, notes = config_of(job)
    notes = [n for n in notes if n.rule != "torchtitan-model"]
    flavor = flavor_of(job.model)
    if job.model.mla is not None and flavor is None:
        message = f"it has no flavor of {job.model.name}, and no blocks with such latent attention"
        return Written({}, [Finding("error", "torchtitan-model", f"TorchTitan: {message}")])
    if flavor is None:
        notes.append(note("TorchTitan", "torchtitan-model", _built(job.model)))
    notes += _refusals(job, config, "main")
    words = f"{launch_words(job.layout)} -m torchtitan.train"
    command = f"{words} --module plait_recipe --config train"
    files = {RECIPE: _recipe(job, config, flavor, command)}
    files[SCRIPT] = f"#!/usr/bin/env bash\nset -e\n{command}\n"
    files |= _toml(job, flavor, words)
    return Written(files, notes)


def _family(model: Model) -> str:
    return "llama3" if model.moe is None else "qwen3"


def _built(model: Model) -> str:
    """what a model without a flavor is built of, and what is other there."""
    family = _family(model)
    usual = _CHOICES | _FAMILIES[family][2]
    other = [name for name, value in usual.items() if getattr(model, name) != value]
    if family == "llama3" and model.head_dim * model.heads != model.hidden:
        other.append("head_dim")
    moe = model.moe
    if moe is not None:
        other += ["shared experts"] if moe.shared else []
        other += ["dense layers"] if moe.first_dense or moe.every > 1 else []
    message = f"it has no flavor of {model.name}; the recipe builds it of {family}'s blocks"
    return f"{message}, which differ in {', '.join(other)}" if other else message


def _refusals(job: Job, config: dict[str, Any], version: str) -> list[Finding]:
    """What TorchTitan refuses of what would be written."""
    said = [
        Setting(f"{section}.{name}", value)
        for section, options in config.items()
        for name, value in options.items()
    ]
    if version != "0.2.2" and job.layout.cp > 1:
        said.append(Setting("model.attention", "flex"))
    told = Told({}, job.layout.world, job.model)
    _, facts = understand(Settings(said), told, version=version)
    return [found for found in rules(facts, job) if found.level == "error"]


def _recipe(job: Job, config: dict[str, Any], flavor: tuple[str, str] | None, command: str) -> str:
    older, _ = config_of(job, "0.3.0")
    name, size = flavor or (_family(job.model), "")
    base = _BASES.get(name, f"{name}_debugmodel")
    batch = {"num_tokens_per_microbatch_per_dp_rank", "num_tokens_per_train_step"}
    batch |= {"max_context_length", "local_batch_size", "global_batch_size", "seq_len"}
    training = {k: v for k, v in config["training"].items() if k not in batch}
    training |= {"steps": job.train.steps, "max_norm": job.train.clip}
    pipeline = ("num_pp_microbatches", "pipeline_parallel_microbatch_size")
    parallelism = {k: v for k, v in config["parallelism"].items() if k not in pipeline}
    mode = config["activation_checkpoint"]["mode"]
    classes = {"full": "FullAC", "selective": "SelectiveAC"}
    optimizer = dict(config["optimizer"])
    optimizer["betas"] = (optimizer.pop("beta1"), optimizer.pop("beta2"))
    backend = "flex" if job.layout.cp > 1 or name != "gpt_oss" else "varlen"
    attention = f', attn_backend="{backend}"' if backend != "varlen" else ""
    seed = config.get("debug", {}).get("seed")
    return _HEAD.format(
        title=f"{job.model.name} on {job.layout.world} ranks",
        command=command,
        imports="\n".join(_imports(name, base, flavor is None, classes.get(mode))),
        tokens=_dict(config["training"], batch),
        tokens_pipeline=_dict(config["parallelism"], pipeline),
        samples=_dict(older["training"], batch),
        samples_pipeline=_dict(older["parallelism"], pipeline),
        model="" if flavor else _custom(job.model),
        base=base,
        spec=f'model_registry("{size}"{attention})' if flavor else "model_spec()",
        training=_arguments(training),
        parallelism=_arguments(parallelism),
        recompute=f"{classes[mode]}.Config()" if mode in classes else "None",
        optimizer=_arguments(optimizer),
        schedule=_arguments(config["lr_scheduler"]),
        rest=f"    config.debug.seed = {seed}\n" if seed else "",
    )


def _imports(name: str, base: str, custom: bool, recompute: str | None) -> list[str]:
    builder = f"{_FAMILIES[name][1]}, " if custom else ""
    checkpoint = f"from torchtitan.distributed.activation_checkpoint import {recompute}"
    return [
        f"from dataclasses import fields{', replace' if custom else ''}",
        "",
        "from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss",
        "from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw",
        "from torchtitan.config import ParallelismConfig, TrainingConfig",
        *([checkpoint] if recompute else []),
        "from torchtitan.models.common.config_utils import decoder_vocab_size",
        f"from torchtitan.models.{name} import {builder}model_registry",
        f"from torchtitan.models.{name}.config_registry import {base}",
        "from torchtitan.trainer import Trainer",
    ]


def _custom(model: Model) -> str:
    family = _family(model)
    flavor, builder, _ = _FAMILIES[family]
    sizes: dict[str, Any] = {
        "n_layers": model.layers, "dim": model.hidden, "n_heads": model.heads,
        "n_kv_heads": model.kv_heads,
    }  # fmt: skip
    head_dim = model.hidden // model.heads
    if model.moe is None:
        sizes["hidden_dim"] = model.ffn
    else:
        head_dim = model.head_dim
        sizes |= {"head_dim": head_dim, "moe_hidden_dim": model.moe.ffn}
        sizes |= {"num_experts": model.moe.experts, "top_k": model.moe.topk}
        sizes["moe_comm_backend"] = "standard"
    name = "".join(c for c in model.name if c.isalnum() or c in "._-")[:60] or "custom"
    return _MODEL.format(
        name=name, family=family, flavor=flavor, builder=builder, sizes=_arguments(sizes),
        head_dim=head_dim, rope_theta=model.rope_theta, hidden=model.hidden, vocab=model.vocab,
        tied=model.tied,
    )  # fmt: skip


def _dict(options: dict[str, Any], names: Any) -> str:
    kept = {name: value for name, value in options.items() if name in names}
    if not kept:
        return "{}"
    lines = [f'        "{name}": {value!r},' for name, value in kept.items()]
    return "\n".join(["{", *lines, "    }"])


def _arguments(options: dict[str, Any]) -> str:
    lines = []
    for name, value in options.items():
        if isinstance(value, list) and value:
            parts = [f"            {json.dumps(part)}," for part in value]
            lines.append("\n".join([f"        {name}=[", *parts, "        ],"]))
        else:
            shown = json.dumps(value) if isinstance(value, str) else repr(value)
            lines.append(f"        {name}={shown},")
    return "\n".join(lines)


def _toml(job: Job, flavor: tuple[str, str] | None, words: str) -> dict[str, str]:
    if flavor is None or flavor[0] not in _OLD_MODELS or flavor[1] in _LATER.get(flavor[0], ()):
        return {}
    if flavor[1] not in flavors()[flavor[0]]:
        return {}
    config, _ = config_of(job, "0.2.2")
    if _refusals(job, config, "0.2.2"):
        return {}
    config["training"] |= {"steps": job.train.steps, "max_norm": job.train.clip}
    lines = [f"# For TorchTitan 0.2.2: {words} --job.config_file {TOML}"]
    for section, options in config.items():
        lines += ["", f"[{section}]"]
        lines += [f"{name} = {_value(value)}" for name, value in options.items()]
    return {TOML: "\n".join(lines) + "\n"}


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value)
