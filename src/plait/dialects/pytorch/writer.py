"""A job as a mesh script: a small transformer of the llama kind, its mesh, plans, sharding and
pipeline, all in one file that torchrun starts."""

from string import Template

from plait.dialects import tables
from plait.dialects.launch import Written, note
from plait.dialects.torchtitan.validation import TORCH_SCHEDULES
from plait.dialects.torchtitan.writer import INSTEAD, launch_words
from plait.spec.chunks import chunk_layers
from plait.spec.findings import Finding
from plait.spec.job import Job
from plait.spec.layout import Layout
from plait.spec.model import Model
from plait.spec.schedule import is_file

SCRIPT = "mesh_script.py"

#: What the script's model is; a model of other choices is written without them.
_CHOICES = {
    "mlp": "swiglu", "norm": "rms", "norm_at": "input", "positions": "rope", "qk_norm": None,
    "tied": False, "qkv_bias": False, "o_bias": False, "mlp_bias": False, "window": None,
    "rope_scaling": None, "attention_softcap": None, "logit_softcap": None, "sinks": False,
    "embed_scale": False, "embed_norm": False, "norm_offset": False, "attention_scale": None,
}  # fmt: skip


def written(job: Job) -> Written:
    """The script, and a note for what it leaves out."""
    model, layout = job.model, job.layout
    if model.moe is not None or model.mla is not None:
        kind = "experts" if model.moe is not None else "latent attention"
        message = f"PyTorch: plain torch has no plan for {kind}; TorchTitan has (--to torchtitan)"
        return Written({}, [Finding("error", "pytorch-model", message)])
    notes = [*_model_notes(model), *_layout_notes(job)]
    command = f"{launch_words(layout)} {SCRIPT}"
    template = Template(tables.text_of("mesh_script.txt"))
    text = template.substitute(
        TITLE=f"{model.name} on {layout.world} ranks", COMMAND=command, **_numbers(job),
        **_plans(layout.sequence_parallel and layout.tp > 1),
        SCHEDULE=f"Schedule{_schedule(layout)}", STAGES=_stages(job), CHUNKS=_chunks(layout),
        DATA_PARALLEL=_data_parallel(layout), RECOMPUTE=_recompute(layout), LOOP=_loop(job),
    )  # fmt: skip
    return Written({SCRIPT: text}, notes)


def _model_notes(model: Model) -> list[Finding]:
    other = [name for name, usual in _CHOICES.items() if getattr(model, name) != usual]
    if not other:
        return []
    message = f"the script's transformer is plain: without the model's {', '.join(other)}"
    return [note("PyTorch", "pytorch-model", message)]


def _layout_notes(job: Job) -> list[Finding]:
    layout, found = job.layout, []

    def say(rule: str, message: str) -> None:
        found.append(note("PyTorch", rule, message))

    if layout.zero == 1 and layout.fsdp > 1:
        say("pytorch-zero", "fully_shard has no ZeRO-1: gradients are sharded too (ZeRO-2)")
    if layout.ulysses > 1:
        say("pytorch-cp", "context_parallel has no Ulysses: keys and values are gathered instead")
    if layout.recompute.startswith("selective"):
        say("pytorch-recompute", f"{layout.recompute} is written as full recompute of each block")
    name, _, group = layout.schedule.partition(":")
    if layout.pp > 1 and is_file(layout.schedule):
        say("pytorch-schedule", f"the table {layout.schedule} is left out; 1F1B instead")
    elif layout.pp > 1 and name not in TORCH_SCHEDULES:
        say("pytorch-schedule", f"torch has no schedule {name}; {_schedule(layout)} instead")
    if group and int(group) != layout.pp:
        say("pytorch-schedule", f"a chunk does {layout.pp} micro batches in a row, not {group}")
    return found


def _schedule(layout: Layout) -> str:
    """torch's name of the schedule, or of the nearest that it has."""
    name = "1f1b" if is_file(layout.schedule) else layout.schedule.partition(":")[0]
    name = name if name in TORCH_SCHEDULES else INSTEAD.get(name, ("1f1b", ""))[0]
    if name in ("1f1b", "gpipe") and layout.vpp > 1:
        name = "interleaved-1f1b"
    return TORCH_SCHEDULES[name]


def _numbers(job: Job) -> dict[str, object]:
    model, layout, train = job.model, job.layout, job.train
    return {
        "MICRO": layout.micro_batch, "ACCUMULATION": job.batch.accumulation,
        "SEQ_LEN": train.seq_len, "STEPS": train.steps, "LAYERS": model.layers,
        "HIDDEN": model.hidden, "HEADS": model.heads, "KV_HEADS": model.kv_heads,
        "HEAD_DIM": model.head_dim, "FFN": model.ffn, "VOCAB": model.vocab,
        "MAX_SEQ_LEN": model.seq, "ROPE_THETA": model.rope_theta, "PP": layout.pp,
        "DP_REPLICATE": layout.dp_replicate, "DP_SHARD": layout.dp_shard, "CP": layout.cp,
        "TP": layout.tp, "SEED": train.seed, "LR": train.learning_rate, "BETA1": train.beta1,
        "BETA2": train.beta2, "WEIGHT_DECAY": train.weight_decay,
        "DTYPE": "bfloat16" if train.dtype == "auto" else train.dtype,
        "GRAD_DTYPE": "float32" if train.grad_dtype == "auto" else train.grad_dtype,
    }  # fmt: skip


def _plans(sequence: bool) -> dict[str, str]:
    """Plans of the two ends and of a block: columns, then rows; between blocks activations are
    whole, or split along the sequence."""
    region = "Shard(1)" if sequence else "Replicate()"
    block = [
        '"attention.wq": ColwiseParallel(),',
        '"attention.wk": ColwiseParallel(),',
        '"attention.wv": ColwiseParallel(),',
        f'"attention.wo": RowwiseParallel(output_layouts={region}),',
        '"feed_forward.w1": ColwiseParallel(),',
        '"feed_forward.w3": ColwiseParallel(),',
        f'"feed_forward.w2": RowwiseParallel(output_layouts={region}),',
    ]
    norm = ""
    if sequence:
        whole = "(Replicate(), None, None)"
        block = [
            '"attention_norm": SequenceParallel(),',
            '"attention": PrepareModuleInput(',
            f"    input_layouts=(Shard(1), None, None), desired_input_layouts={whole}",
            "),",
            '"ffn_norm": SequenceParallel(),',
            '"feed_forward": PrepareModuleInput(',
            "    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)",
            "),",
            *block,
        ]
        norm = '        plan["norm"] = SequenceParallel()\n'
    return {
        "EMBEDDING_PLAN": f"RowwiseParallel(\n            input_layouts=Replicate(),"
        f" output_layouts={region}\n        )",
        "OUTPUT_PLAN": f"ColwiseParallel(\n            input_layouts={region},"
        " output_layouts=Replicate()\n        )",
        "NORM_PLAN": norm,
        "BLOCK_PLAN": "\n".join(f"            {line}" for line in block),
    }


def _stages(job: Job) -> str:
    return repr([len(layers) for layers in chunk_layers(job.model, job.layout)])


def _chunks(layout: Layout) -> str:
    if _schedule(layout) in ("ZBVZeroBubble", "DualPipeV"):
        return f"[rank, {2 * layout.pp - 1} - rank]"
    return f"[rank + i * {layout.pp} for i in range({layout.vpp})]"


def _data_parallel(layout: Layout) -> str:
    if layout.zero == 0 and layout.dp * layout.cp > 1:
        return "\n".join((
            '    replicas = mesh["dp_replicate", "dp_shard", "cp"]._flatten("replicas")',
            "    for block in model.layers:",
            "        replicate(block, mesh=replicas, mp_policy=policy)",
            "    replicate(model, mesh=replicas, mp_policy=policy)",
        ))  # fmt: skip
    names = '"dp_replicate", "fsdp"' if layout.dp_replicate > 1 else '"fsdp"'
    again = layout.zero == 3
    return "\n".join((
        '    mesh["dp_shard", "cp"]._flatten("fsdp")',
        f"    data = mesh[{names}]",
        "    for block in model.layers:",
        f"        fully_shard(block, mesh=data, mp_policy=policy, reshard_after_forward={again})",
        f"    fully_shard(model, mesh=data, mp_policy=policy, reshard_after_forward={again})",
    ))  # fmt: skip


def _recompute(layout: Layout) -> str:
    if layout.recompute == "none":
        return ""
    lines = (
        "for n, block in enumerate(model.layers):",
        "    model.layers[n] = checkpoint_wrapper(block)",
    )
    return "".join(f"        {line}\n" for line in lines)


def _loop(job: Job) -> str:
    """Steps over random tokens, where a person's data belongs."""
    layout = job.layout
    lines = []
    if layout.cp > 1 and layout.cp_method == "ring" and layout.ulysses == 1:
        lines += ['set_rotate_method("alltoall")']
    if layout.pp > 1:
        name = f"Schedule{_schedule(layout)}"
        stages = "stages" if _multi(layout) else "stages[0]"
        lines += [
            "stages = []",
            "for i, model in zip(chunks, models, strict=True):",
            '    group = mesh.get_group("pp")',
            "    stage = PipelineStage(",
            "        model, i, len(STAGES), torch.device(device), group=group",
            "    )",
            "    stages.append(stage)",
            f"schedule = {name}(",
            f"    {stages}, n_microbatches=gradient_accumulation_steps, loss_fn=loss_of",
            ")",
        ]
    lines += [
        "for step in range(steps):",
        "    batch = torch.randint(args.vocab_size, (rows, seq_len + 1), generator=sample)",
        "    tokens, labels = batch[:, :-1].to(device), batch[:, 1:].to(device)",
    ]
    inner = _pipelined() if layout.pp > 1 else _accumulated(layout.cp > 1)
    if layout.pp > 1 and layout.cp > 1:
        inner = [f"with {_context('tokens', 'labels')}:", *(f"    {line}" for line in inner)]
    lines += [f"    {line}" for line in (*inner, "optimizer.step()", "optimizer.zero_grad()")]
    return "\n".join(f"    {line}" for line in lines)


def _multi(layout: Layout) -> bool:
    return _schedule(layout) not in ("1F1B", "GPipe")


def _context(*names: str) -> str:
    tokens = ", ".join(names)
    return (
        f'context_parallel(mesh["cp"], buffers=[{tokens}, COS, SIN],'
        f" buffer_seq_dims=[1, 1, 0, 0], no_restore_buffers={{{tokens}}})"
    )


def _pipelined() -> list[str]:
    return [
        "inputs = (tokens,) if 0 in chunks else ()",
        "target = labels if len(STAGES) - 1 in chunks else None",
        "losses = []",
        "schedule.step(*inputs, target=target, losses=losses)",
        "if losses:",
        "    print(step, torch.stack(losses).mean().item())",
    ]


def _accumulated(context: bool) -> list[str]:
    around = _context("x", "y") if context else "nullcontext()"
    return [
        "for part in range(gradient_accumulation_steps):",
        "    cut = slice(part * micro_batch_size, (part + 1) * micro_batch_size)",
        "    x, y = tokens[cut].contiguous(), labels[cut].contiguous()",
        f"    with {around}:",
        "        loss = loss_of(models[0](x), y) / gradient_accumulation_steps",
        "        loss.backward()",
        "print(step, loss.item() * gradient_accumulation_steps)",
    ]
