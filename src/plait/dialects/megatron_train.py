"""Batch, lengths and optimizer in Megatron's arguments."""

from typing import Any

from plait.dialects.megatron_arguments import Arguments

#: `lr_decay_style` -> plait's schedule.
_DECAYS = {"constant": "constant", "cosine": "cosine", "WSD": "wsd"}


def train_fields(arguments: Arguments, world: int | None) -> dict[str, Any]:
    """`train.*`. Samples everywhere, as in Megatron.

    Args:
        world: ranks, where they are known.
    """
    take = arguments.take
    batch = take("global_batch_size", int, None, "train.global_batch")
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
    grad = "float32"
    if (bf16 and narrow) or (fp16 and not wide):
        grad = dtype
    return {"train.dtype": dtype, "train.grad_dtype": grad}


def _steps(arguments: Arguments, batch: int | None) -> dict[str, Any]:
    return {}


def _optimizer(arguments: Arguments) -> dict[str, Any]:
    return {}


def _other_batches(arguments: Arguments) -> None:
    pass
