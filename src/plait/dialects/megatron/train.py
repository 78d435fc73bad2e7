"""Batch, lengths and optimizer in Megatron's arguments."""

from typing import Any

from plait.dialects.megatron.arguments import Arguments

#: `lr_decay_style` -> plait's schedule.
_DECAYS = {"constant": "constant", "cosine": "cosine", "WSD": "wsd"}


def train_fields(arguments: Arguments, world: int | None) -> dict[str, Any]:
    """`train.*`. Samples everywhere, as in Megatron.

    Args:
        world: ranks, where they are known.
    """
    take = arguments.take
    batch = take("global_batch_size", int, None, "train.global_batch") or _scheduled(arguments)
    length = take("seq_length", int, None, "train.seq_len")
    fields: dict[str, Any] = {
        "train.global_batch": batch,
        "train.seq_len": length,
        "train.seed": take("seed", int, 1234, "train.seed", False),
    }
    fields |= _dtypes(arguments) | _steps(arguments, batch) | _optimizer(arguments)
    _other_batches(arguments)
    return {path: value for path, value in fields.items() if value is not None}


def _dtypes(arguments: Arguments) -> dict[str, Any]:
    bf16 = arguments.switch("bf16", False, "train.dtype")
    fp16 = arguments.switch("fp16", False, "train.dtype")
    wide = arguments.switch("accumulate_allreduce_grads_in_fp32", False, "train.grad_dtype")
    narrow = arguments.switch("grad_reduce_in_bf16", False, "train.grad_dtype")
    dtype = "bfloat16" if bf16 else "float16" if fp16 else "float32"
    if dtype == "float32" and not (fp16 or bf16):
        message = f"without {arguments.spelled('bf16')} it trains in float32"
        arguments.note("megatron-float32", message)
    kept = arguments.take("main_grads_dtype", str, None, "train.grad_dtype")
    grad = "float32"
    if (bf16 and (narrow or kept == "bf16")) or (fp16 and not wide):
        grad = dtype
    if fp16 and not bf16 and not wide:
        # optimizer/optimizer.py; the figures are those of its distributed optimizer's guide.
        message = "its optimizer copies float16 gradients to float32 for the step: 20 bytes a "
        message += "parameter, or 4 + 16/N; plait has no such copy and counts 16, or 4 + 12/N"
        arguments.note("megatron-fp16-gradients", message)
    return {"train.dtype": dtype, "train.grad_dtype": grad}


def _steps(arguments: Arguments, batch: int | None) -> dict[str, Any]:
    """Steps and what the learning rate does over them."""
    take = arguments.take
    steps = take("train_iters", int, None, "train.steps", False)
    samples = take("train_samples", int, None, "train.steps", False)
    if steps is None and samples and batch and batch > 0:
        steps = max(1, samples // batch)
    style = take("lr_decay_style", str, "linear", "train.schedule", False)
    decay = take("lr_decay_iters", int, None, "train.schedule", False)
    warmup = take("lr_warmup_iters", int, 0, "train.warmup", False)
    warm_samples = take("lr_warmup_samples", int, 0, "train.warmup", False)
    fraction = take("lr_warmup_fraction", float, None, "train.warmup", False)
    last = take("lr_wsd_decay_iters", int, None, "train.decay", False)
    if not warmup and warm_samples and batch and batch > 0:
        warmup = warm_samples // batch
    if not warmup and fraction and (decay or steps):
        warmup = int(fraction * (decay or steps))
    fields = {"train.steps": steps, "train.warmup": warmup}
    if style in _DECAYS:
        fields["train.schedule"] = _DECAYS[style]
    elif arguments.spell("lr") in arguments.settings:
        message = f"learning rate decays {style}; plait has constant, cosine and WSD"
        arguments.note("megatron-decay", message, style)
    return fields | ({"train.decay": last} if style == "WSD" and last else {})


def _optimizer(arguments: Arguments) -> dict[str, Any]:
    take = arguments.take
    kind = take("optimizer", str, "adam", "optimizer", False)
    peak = take("lr", float, None, "train.learning_rate", False)
    lowest = None if peak is None else 0.0
    if kind != "adam":
        arguments.note("megatron-optimizer", f"optimizer {kind}; counted as Adam", kind)
    return {
        "train.learning_rate": peak,
        "train.min_learning_rate": take("min_lr", float, lowest, "train.min_learning_rate", False),
        "train.weight_decay": take("weight_decay", float, 0.01, "train.weight_decay", False),
        "train.beta1": take("adam_beta1", float, 0.9, "train.beta1", False),
        "train.beta2": take("adam_beta2", float, 0.999, "train.beta2", False),
        "train.eps": take("adam_eps", float, 1e-8, "train.eps", False),
        "train.clip": take("clip_grad", float, 1.0, "train.clip", False),
    }


def _scheduled(arguments: Arguments) -> int | None:
    """The last batch of a schedule, "0:384 200B:768" (samples from a token or sample on)."""
    text = arguments.take("step_batch_size_schedule", str, None, "train.global_batch", False)
    last = text.split()[-1].rpartition(":")[2] if text and text.split() else ""
    if not last.isdecimal() or len(last) > 9:
        return None
    arguments.values["global_batch_size"] = int(last)
    message = f"the batch follows a schedule ({text}); its end is what is described"
    arguments.note("megatron-batch-schedule", message, text)
    return int(last)


def _other_batches(arguments: Arguments) -> None:
    """Batches that grow: the last one is taken."""
    ramp = arguments.numbers("rampup_batch_size", "train.global_batch while it grows", False)
    if ramp and len(ramp) == 3:
        message = f"the batch grows from {ramp[0]} by {ramp[1]} over {ramp[2]} samples; its end "
        arguments.note("megatron-rampup", f"{message}is what is described", ramp[0])
    arguments.switch("decrease_batch_size_if_needed", False, "batch that dp does not divide")
