"""A job: a model, a layout, a batch and how to train. One TOML file, every field a flag too."""

from dataclasses import dataclass, field

from plait.spec.cluster import Cluster
from plait.spec.findings import Finding, UserError
from plait.spec.layout import Layout, divisors, nearest
from plait.spec.model import Model

#: dtype -> bytes of one element.
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}


@dataclass(frozen=True)
class Train:
    """How to train.

    Attributes:
        steps: optimizer steps in all (a resumed run goes on to the same number).
        seq_len: tokens of one sample (None: the model's own, up to 2048 when training).
        global_batch: samples of one optimizer step. accumulation: micro batches of a rank in it.
        seed: decides the initial parameters and the order of the data.
        dtype: of parameters and activations in forward and backward; "auto": bfloat16 on GPUs
            that have it, float32 elsewhere. Master weights are float32 (float64 for float64).
        grad_dtype: in which gradients are accumulated and reduced ("auto": float32, or float64).
        learning_rate: peak. min_learning_rate: where the decay ends.
        warmup: steps of linear warm-up. schedule: "cosine", "wsd" (stable, then linear decay
            over the last `decay` steps) or "constant".
        weight_decay: decoupled (AdamW, 1711.05101), on matrices only. beta1, beta2, eps: Adam.
        clip: largest gradient norm (0: never clipped).
        bucket_mib: gradients travel in buckets of about so many MiB (ZeRO 0 to 2).
        loss_scale: first loss scale under float16.
        check_collectives: "first-step", "always" or "never": before each collective the ranks
            compare what they are about to send (on gloo, which dies of a difference).
        timeout: seconds that a rank waits for another.
    """

    steps: int = 60
    seq_len: int | None = None
    global_batch: int | None = None
    accumulation: int | None = None
    seed: int = 0
    dtype: str = "auto"
    grad_dtype: str = "auto"
    learning_rate: float = 3e-3
    min_learning_rate: float = 3e-4
    warmup: int = 10
    schedule: str = "cosine"
    decay: int = 10
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0
    bucket_mib: float = 25.0
    loss_scale: float = 65536.0
    check_collectives: str = "first-step"
    timeout: float = 300.0


@dataclass(frozen=True)
class Data:
    """What to train on.

    Attributes:
        path: text files or folders, read as bytes (none: the source of Python's own library).
        suffixes: which files of a folder are read.
    """

    path: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = (".txt", ".md", ".py", ".rst", ".jsonl")


@dataclass(frozen=True)
class Checkpoint:
    """What is kept of a run.

    Attributes:
        folder: where checkpoints go ("": runs/<model>; "none": nowhere).
        every: steps between checkpoints (0: only at the end).
        resume: a checkpoint folder to go on from ("": start anew).
        keep: how many of the newest to keep.
    """

    folder: str = ""
    every: int = 0
    resume: str = ""
    keep: int = 2


@dataclass(frozen=True)
class Batch:
    """Batch arithmetic: global = micro * dp * accumulation (samples)."""

    micro: int
    global_: int
    accumulation: int

    @staticmethod
    def fill(dp: int, micro: int | None, global_: int | None, accumulation: int | None) -> "Batch":
        """The whole batch from any two of its three numbers, or from fewer (the rest are 1).

        Raises:
            UserError: they do not multiply.
        """
        if global_ is None:
            micro, accumulation = micro or 1, accumulation or 1
            return Batch(micro, micro * dp * accumulation, accumulation)
        if global_ % dp:
            raise UserError([_uneven(global_, dp, "dp", dp, max(dp, round(global_ / dp) * dp))])
        share = global_ // dp
        if micro is None and accumulation is None:
            return Batch(share, global_, 1)
        if micro is None:
            if share % accumulation:
                legal = nearest(accumulation, divisors(share))
                raise UserError([_uneven_share(global_, dp, "accumulation", accumulation, legal)])
            return Batch(share // accumulation, global_, accumulation)
        if share % micro:
            raise UserError(
                [_uneven_share(global_, dp, "micro_batch", micro, nearest(micro, divisors(share)))]
            )
        if accumulation not in (None, share // micro):
            raise UserError(
                [
                    Finding(
                        "error",
                        "batch-product",
                        f"micro batch {micro} x dp {dp} x accumulation {accumulation} = "
                        f"{micro * dp * accumulation}, not the global batch {global_}",
                        "train.accumulation",
                        accumulation,
                        {"train.accumulation": share // micro},
                    )
                ]
            )
        return Batch(micro, global_, share // micro)


def _uneven(global_: int, product: int, names: str, value: int, legal: int) -> Finding:
    return Finding(
        "error",
        "batch-product",
        f"global batch {global_} is no multiple of {names} {value}",
        "train.global_batch",
        global_,
        {"train.global_batch": legal},
    )


def _uneven_share(global_: int, dp: int, name: str, value: int, legal: int) -> Finding:
    where = "layout.micro_batch" if name == "micro_batch" else f"train.{name}"
    words = name.replace("_", " ")
    return Finding(
        "error",
        "batch-product",
        f"global batch {global_} / dp {dp} = {global_ // dp} is no multiple of {words} {value}",
        where,
        value,
        {where: legal},
    )


@dataclass(frozen=True)
class Job:
    """Everything that a run needs, complete.

    `layout.micro_batch`, `train.global_batch` and `train.accumulation` agree (see `Batch`).
    """

    model: Model
    layout: Layout
    train: Train
    data: Data = field(default_factory=Data)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    cluster: Cluster | None = None
    metrics: str = ""

    @property
    def batch(self) -> Batch:
        return Batch(self.layout.micro_batch, self.train.global_batch, self.train.accumulation)
