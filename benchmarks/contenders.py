"""Who is compared: plait's program, and the loops that people write without it.

Each function here, called with a rank, builds that rank's contender and returns its step. Shapes,
batch, loss, clipping and AdamW (fused) are the same for all of a comparison.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from plait.models.transformer import Layer, Transformer
from plait.parallel.mesh import make_mesh
from plait.parallel.tensor import apply_tensor_parallel
from plait.spec.job import Batch, Job, Train
from plait.spec.layout import Layout
from plait.spec.model import Model
from plait.spec.parameters import local_shape, parameters
from plait.train.program import MicroBatch, Program

Step = Callable[[], None]


@dataclass(frozen=True)
class Work:
    """A model and one rank's batch of it: samples of seq tokens."""

    model: Model
    samples: int
    seq: int

    @property
    def tokens(self) -> int:
        return self.samples * self.seq


def work(width: int, layers: int, samples: int, seq: int, vocab: int) -> Work:
    """A Llama of a width: heads of 64 (32 below width 256), half as many for keys and values."""
    dim = 64 if width >= 512 else 32
    heads = max(width // dim, 4)
    model = Model.of(
        f"llama-{width}",
        layers=layers,
        hidden=width,
        heads=heads,
        kv_heads=heads // 2,
        head_dim=width // heads,
        ffn=width * 11 // 4 // 8 * 8,
        vocab=vocab,
        seq=seq,
    )
    return Work(model, samples, seq)


TRAIN = Train(learning_rate=1e-3, weight_decay=0.1, clip=1.0, warmup=0, schedule="constant")


def batch(w: Work, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens [samples, seq] and what comes next (-1 after the last token)."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(w.model.vocab, (w.samples, w.seq), generator=generator)
    targets = torch.full_like(tokens, -1)
    targets[:, :-1] = tokens[:, 1:]
    return tokens, targets


# ------------------------------------------------------------------------------------------
# plait


def plait(w: Work, rank: int, **layout: Any) -> Step:
    """plait's program under a layout, float32, settings otherwise its defaults."""
    world = dist.get_world_size()
    full = Layout.fill(world, micro_batch=w.samples, **layout)
    b = Batch.fill(full.dp, w.samples, None, 1)
    train = replace(
        TRAIN, dtype="float32", seq_len=w.seq, global_batch=b.global_, accumulation=1, steps=1000
    )
    program = Program(Job(w.model, full, train), make_mesh(full, w.model, rank))
    program.initialize()
    data = rank // full.tp  # ranks of one tp group see the same samples
    batches = [MicroBatch(*batch(w, data), torch.arange(w.samples) + data * w.samples)]
    return lambda: program.step(batches, 0)


def plait_block(w: Work, rank: int, sequence_parallel: bool) -> Step:
    """Forward and backward of one layer on all ranks' tp, weights as plain local parameters."""
    world = dist.get_world_size()
    layout = Layout.fill(world, tp=world, sequence_parallel=sequence_parallel)
    with torch.device("meta"):
        module = Transformer(w.model, layers=[0], embed=False, head=False)
    apply_tensor_parallel(module, w.model, make_mesh(layout, w.model, rank))
    shapes = {p.name: local_shape(p, w.model, layout) for p in parameters(w.model)}
    for name in [name for name, _ in module.named_parameters()]:
        path, _, leaf = name.rpartition(".")
        value = torch.randn(shapes[name]) * shapes[name][-1] ** -0.5
        setattr(module.get_submodule(path), leaf, nn.Parameter(value))
    return _block_step(module, module.layers["0"], w, world if sequence_parallel else 1)


# ------------------------------------------------------------------------------------------
# Without plait


def _train_step(
    parameters: Iterable[nn.Parameter], loss: Callable[[], Tensor], after: Callable = lambda: None
) -> Step:
    """The loop of every tutorial: loss, backward, clip, AdamW(fused=True), gradients dropped."""
    weights = list(parameters)
    optimizer = torch.optim.AdamW(
        weights, lr=TRAIN.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def step() -> None:
        loss().backward()
        after()
        torch.nn.utils.clip_grad_norm_(weights, TRAIN.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def hugging_face(w: Work, rank: int, ddp: bool = False) -> Step:
    """transformers' LlamaForCausalLM (sdpa) of the same shape, float32."""
    m = w.model
    config = LlamaConfig(
        hidden_size=m.hidden,
        intermediate_size=m.ffn,
        num_hidden_layers=m.layers,
        num_attention_heads=m.heads,
        num_key_value_heads=m.kv_heads,
        head_dim=m.head_dim,
        vocab_size=m.vocab,
        max_position_embeddings=m.seq,
        rms_norm_eps=m.norm_eps,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    module = LlamaForCausalLM(config)
    if ddp:
        module = DistributedDataParallel(module)
    tokens, _ = batch(w, rank)
    return _train_step(module.parameters(), lambda: module(tokens, labels=tokens).loss)


def plain(w: Work, rank: int, wrap: str = "none") -> Step:
    """plait's own Transformer as any module: alone, in DDP ("ddp") or under FSDP2 ("fsdp")."""
    torch.manual_seed(0)
    module: nn.Module = Transformer(w.model)
    if wrap == "ddp":
        module = DistributedDataParallel(module)
    elif wrap == "fsdp":
        for unit in (module.embed, *module.layers.values(), module.head):
            fully_shard(unit)
        fully_shard(module)
    tokens, targets = batch(w, rank)
    valid = (targets >= 0).sum()
    return _train_step(module.parameters(), lambda: module(tokens, targets) / valid)


def _layer_plan(path: str, rows: bool) -> dict[str, Any]:
    """torchtitan's plan for one layer, for a residual stream [T, hidden]."""
    sequence = Shard(0)
    plan: dict[str, Any] = {}
    for branch, into, out in (("attention", "qkv", "o"), ("mlp", ("gate", "up"), "down")):
        plan |= {f"{path}{branch}.{name}": ColwiseParallel() for name in into}
        if rows:
            # attention is called with (x, ctx), the MLP with (x)
            more = (None,) if branch == "attention" else ()
            plan[f"{path}{branch}_norm"] = SequenceParallel(sequence_dim=0)
            plan[f"{path}{branch}"] = PrepareModuleInput(
                input_layouts=(sequence, *more), desired_input_layouts=(Replicate(), *more)
            )
        layouts = {"output_layouts": sequence} if rows else {}
        plan[f"{path}{branch}.{out}"] = RowwiseParallel(**layouts)
    return plan


def dtensor_block(w: Work, rank: int, sequence_parallel: bool) -> Step:
    """The same plain layer under torch's own tensor parallelism."""
    world = dist.get_world_size()
    module = Transformer(w.model, layers=[0], embed=False, head=False)
    _torch_norms(module)
    layer = module.layers["0"]
    parallelize_module(layer, init_device_mesh("cpu", (world,)), _layer_plan("", sequence_parallel))
    return _block_step(module, layer, w, world if sequence_parallel else 1)


def dtensor(w: Work, rank: int) -> Step:
    """The whole model under torch's own tensor and sequence parallelism, loss parallel too."""
    module = Transformer(w.model)
    _torch_norms(module)
    plan: dict[str, Any] = {
        "embed.tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "head.norm": SequenceParallel(sequence_dim=0),
        "head.output": ColwiseParallel(
            input_layouts=Shard(0), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for name in module.layers:
        plan |= _layer_plan(f"layers.{name}.", True)
    parallelize_module(module, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    module.head.cross_entropy = lambda logits, targets: F.cross_entropy(
        logits, targets, ignore_index=-1
    )
    tokens, targets = batch(w, 0)
    weights = list(module.parameters())

    def loss() -> Tensor:
        return module(tokens, targets)

    def sum_partial_gradients() -> None:
        # Norm weights have partial gradients, which the clipping and the optimizer would each
        # sum anew in every operation.
        for p in weights:
            if isinstance(p.grad, DTensor) and p.grad.placements[0].is_partial():
                p.grad = p.grad.redistribute(placements=[Replicate()])

    step = _train_step(weights, loss, sum_partial_gradients)

    def parallel() -> None:
        with loss_parallel():
            step()

    return parallel


def _torch_norms(module: nn.Module) -> None:
    """torch's own RMSNorm in the place of plait's, whose hand-written backward DTensor would go
    through operation by operation."""
    for name, child in list(module.named_modules()):
        if name.endswith("norm"):
            path, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(path), leaf, nn.RMSNorm(child.weight.shape, child.eps))


def _block_step(module: Transformer, layer: Layer, w: Work, pieces: int) -> Step:
    torch.manual_seed(0)
    x = torch.randn(w.tokens // pieces, w.model.hidden, requires_grad=True)
    grad = torch.randn_like(x)
    ctx = module.context(w.samples, w.seq)

    def step() -> None:
        layer(x, ctx).backward(grad)
        x.grad = None
        module.zero_grad()

    return step
