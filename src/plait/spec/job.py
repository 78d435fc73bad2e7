"""A job: a model, a layout, a batch and how to train. One TOML file, every field a flag too."""

from dataclasses import dataclass, field

from plait.spec.cluster import Cluster
from plait.spec.findings import Finding, UserError, error
from plait.spec.layout import LARGEST, Layout, divisors, nearest
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
        eval_every: steps between evaluations (0: never) on samples that are not trained on,
            the last `eval_batches` global batches of the corpus.
        expert_shares: how often each expert is chosen, in any unit, where a ledger is asked for
            without a run (None: equally often).
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
    eval_every: int = 0
    eval_batches: int = 1
    expert_shares: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Data:
    """What to train on.

    Attributes:
        path: text files or folders, read as bytes (none: the source of Python's own library).
        suffixes: which files of a folder are read.
        document_mask: attention does not look beyond the document that a token is of, where a
            sample holds parts of several.
    """

    path: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = (".txt", ".md", ".py", ".rst", ".jsonl")
    document_mask: bool = False


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
        findings = []
        for where, value in (
            ("layout.micro_batch", micro),
            ("train.global_batch", global_),
            ("train.accumulation", accumulation),
        ):
            name = where.rpartition(".")[2]
            if value is not None and value < 1:
                findings.append(error(where, value, f"{name} {value} is below 1", 1))
            elif value is not None and value > LARGEST:
                findings.append(error(where, value, f"{name} is above {LARGEST}", LARGEST))
        if findings:
            raise UserError(findings)
        if global_ is None:
            micro, accumulation = micro or 1, accumulation or 1
            return Batch(micro, micro * dp * accumulation, accumulation)
        if global_ % dp:
            # The nearest that the other numbers divide too.
            unit = dp * (micro or 1) * (accumulation or 1)
            legal = unit if micro and accumulation else max(1, round(global_ / unit)) * unit
            message = f"global batch {global_} is no multiple of dp {dp}"
            raise UserError([_product("train.global_batch", global_, message, legal)])
        share = global_ // dp
        if micro is None and accumulation is None:
            return Batch(share, global_, 1)
        name, where, value = (
            ("accumulation", "train.accumulation", accumulation)
            if micro is None
            else ("micro batch", "layout.micro_batch", micro)
        )
        if share % value:
            message = f"global batch {global_} / dp {dp} = {share} is no multiple of {name} {value}"
            legal = nearest(value, divisors(share))
            raise UserError([_product(where, value, message, legal)])
        if micro is None:
            return Batch(share // accumulation, global_, accumulation)
        if accumulation not in (None, share // micro):
            message = (
                f"micro batch {micro} x dp {dp} x accumulation {accumulation} = "
                f"{micro * dp * accumulation}, not the global batch {global_}"
            )
            where, legal = "train.accumulation", share // micro
            raise UserError([_product(where, accumulation, message, legal)])
        return Batch(micro, global_, share // micro)


def _product(where: str, value: int, message: str, legal: int) -> Finding:
    return error(where, value, message, legal, "batch-product")


@dataclass(frozen=True)
class Job:
    """Everything that a run needs, complete.

    `layout.micro_batch`, `train.global_batch` and `train.accumulation` agree (see `Batch`).

    Attributes:
        metrics: file that gets one JSON line a step ("": none).
        explain: every step is recorded, and its ledger shown beside the predicted one.
    """

    model: Model
    layout: Layout
    train: Train
    data: Data = field(default_factory=Data)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    cluster: Cluster | None = None
    metrics: str = ""
    explain: bool = False

    @property
    def batch(self) -> Batch:
        return Batch(self.layout.micro_batch, self.train.global_batch, self.train.accumulation)
