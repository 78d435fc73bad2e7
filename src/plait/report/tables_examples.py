"""Layouts that are in print, each held against the rules and the ledger.

Where a text shows flags without a model, a model of the size that it speaks of stands in.
"""

from dataclasses import dataclass
from typing import Any

from plait.report.build import report
from plait.rules import check
from plait.spec.jobfile import draft_job

_STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Example:
    """A layout in print.

    Attributes:
        name: short. source: where it is printed.
        given: dotted path of a job -> value.
        note: what the source says, or what stands in for what.
    """

    name: str
    source: str
    given: dict[str, Any]
    note: str


_MEGATRON = {
    "model": "mixtral-8x22b",
    "gpus": "h100:128",
    "layout.tp": 8,
    "layout.pp": 4,
    "layout.cp": 2,
    "layout.ep": 8,
    "layout.recompute": "full",
    "train.seq_len": 8192,
    "train.global_batch": 128,
}

EXAMPLES = (
    Example(
        "7b-ddp",
        "Primus, parallelism guide: ~7B on 8 GPUs, 8-way DP",
        {"model": "llama2-7b", "gpus": "mi300x:8", "layout.zero": 0, "train.global_batch": 64},
        "fits on devices of 192 GB; 18 bytes a parameter do not go into 80",
    ),
    Example(
        "7b-fsdp",
        "Primus, parallelism guide: ~7B on 8 GPUs, or FSDP",
        {"model": "llama2-7b", "gpus": "h100:8", "layout.zero": 3, "train.global_batch": 64},
        "the same on devices of 80 GB",
    ),
    Example(
        "70b",
        "Primus, parallelism guide: ~70B on 64 GPUs, TP 8, PP 2, 4-way DP",
        {
            "model": "llama2-70b",
            "gpus": "h100:64",
            "layout.tp": 8,
            "layout.pp": 2,
            "train.global_batch": 64,
        },
        "",
    ),
    Example(
        "671b",
        "Primus, parallelism guide: large MoE (671B-class) on 256 GPUs, TP 8, PP 4, EP 8",
        {
            "model": "deepseek-v3",
            "gpus": "h100:256",
            "layout.tp": 8,
            "layout.pp": 4,
            "layout.ep": 8,
            "layout.recompute": "full",
            "train.seq_len": 4096,
            "train.global_batch": 512,
        },
        "world / (TP x PP x EP) in the guide makes DP 1; Megatron-LM runs it with DP 8",
    ),
    Example(
        "2d-fsdp-tp",
        "PyTorch, tensor parallel tutorial: TP inside a node of 8, FSDP across 8 nodes",
        {
            "model": "llama3.1-70b",
            "gpus": "h100:64",
            "layout.tp": 8,
            "layout.zero": 3,
            "train.seq_len": 8192,
            "train.global_batch": 64,
        },
        "the tutorial names no model",
    ),
    Example(
        "megatron-flags",
        "Megatron-LM flags, 16 nodes of 8: TP 8 with SP, PP 4, CP 2, EP 8, as Megatron reads them",
        _MEGATRON | {"layout.etp": 8},
        "Megatron's expert TP is TP where it is not given: 8 x 8 x 4 = 256 does not divide 128",
    ),
    Example(
        "megatron-flags-etp-1",
        "the same with --expert-tensor-parallel-size 1",
        _MEGATRON | {"layout.etp": 1},
        "DP 2, and each expert on 4 ranks (EDP)",
    ),
    Example(
        "gpt-1t",
        "Narayanan et al. 2021 (2104.04473), Table 1: 1T on 3072 A100, TP 8, PP 64",
        {
            "model": "sc21-gpt-1008b",
            "gpus": "a100:3072",
            "layout.tp": 8,
            "layout.pp": 64,
            "layout.sequence_parallel": False,
            "layout.zero": 0,
            "layout.recompute": "full",
            "train.global_batch": 3072,
        },
        "published: 502 PFLOP/s in all, 163 TFLOP/s a GPU, 52% of peak",
    ),
    Example(
        "gshard-600b",
        "GShard (2006.16668): 600B mixture on 2048 TPU v3 cores, an expert of each layer a core",
        {
            "ranks": 2048,
            "model.layers": 36,
            "model.hidden": 1024,
            "model.heads": 16,
            "model.head_dim": 128,
            "model.ffn": 8192,
            "model.vocab": 64000,
            "model.seq": 1024,
            "model.mlp": "gelu",
            "model.tied": True,
            "model.moe.experts": 2048,
            "model.moe.topk": 2,
            "model.moe.ffn": 8192,
            "model.moe.every": 2,
            "model.moe.aux_loss": 0.01,
            "layout.ep": 2048,
            "layout.zero": 0,
            "layout.micro_batch": 2,
            "train.dtype": "bfloat16",
            "train.global_batch": 4096,
        },
        "a decoder of 36 layers stands in for encoder and decoder together, Adam for Adafactor, "
        "no dropping for capacity; a core has 16 GB",
    ),
)


def examples() -> list[dict[str, Any]]:
    """A row for each example: layout, both grids, batch, memory, traffic, bubble, legality."""
    return [_row(example) for example in EXAMPLES]


def _row(example: Example) -> dict[str, Any]:
    job, findings = draft_job("plan", None, example.given)
    assert job is not None, findings
    # Where fields do not go together, the job is a stand-in, and more said about it is not said
    # about the example.
    found = findings or check(job, "plan")
    answer = report(job, found)
    errors = [f.line() for f in found if f.level == "error"]
    held = answer["memory"]["by_stage"]
    fullest = max(held, key=lambda row: row["total"]) if held else None
    # Of a layout that is illegal only what was asked for is known.
    layout = answer["layout"] if not errors else _said(example)
    return {
        "example": example.name,
        "source": example.source,
        "note": example.note,
        "command": _command(example),
        "model": answer["model"]["name"] if "model" in example.given else example.name,
        "parameters": answer["model"]["parameters"],
        "world": job.cluster.devices if job.cluster else answer["world"],
        "layout": layout,
        "grids": answer["grids"] if not errors else None,
        "batch": answer["batch"] if not errors else None,
        "state_bytes": sum(fullest[name] for name in _STATES) if fullest else None,
        "activation_bytes": fullest["activations"] if fullest else None,
        "peak_bytes": answer["memory"]["peak_bytes"],
        "device_bytes": answer["memory"]["device_bytes"],
        "sent_bytes": _sent(answer["traffic"]) if held else None,
        "bubble": answer["bubble"],
        "legal": not errors,
        "fits": answer["fits"],
        "findings": [{"level": f.level, "rule": f.rule, "line": f.line()} for f in found],
    }


def _said(example: Example) -> dict[str, Any]:
    """The layout fields that an example gives."""
    given = example.given.items()
    return {k.removeprefix("layout."): v for k, v in given if k.startswith("layout.")}


def _command(example: Example) -> str:
    """The `plait explain` that says more."""
    words = ["plait explain"]
    for path, value in example.given.items():
        table, _, name = path.rpartition(".")
        short = name if table in ("layout", "train", "") else path
        text = str(value).lower() if isinstance(value, bool) else value
        words.append(str(value) if path == "model" else f"--{short.replace('_', '-')} {text}")
    return " ".join(words)


def _sent(traffic: list[dict[str, Any]]) -> dict[str, int]:
    """Axis -> bytes on the wire a step, of a rank of the stage that sends most."""
    by_stage: dict[int, dict[str, int]] = {}
    for row in traffic:
        sent = by_stage.setdefault(row["stage"], {})
        sent[row["axis"]] = sent.get(row["axis"], 0) + row["wire_bytes"]
    return max(by_stage.values(), key=lambda sent: sum(sent.values()), default={})
