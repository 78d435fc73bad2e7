"""A whole step with every tensor on another device than the default, and no device needed for it.

On torch's meta device an operation that mixes it with a CPU tensor is an error, as it is on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

import cases
from harness import Case, global_batch
from plait.models.transformer import Transformer
from plait.parallel.mesh import make_mesh
from plait.spec.job import Job
from plait.spec.layout import Layout
from plait.train.program import MicroBatch, Program

LAYOUTS = {
    "one": Layout.fill(1, micro_batch=2),
    "ddp": Layout.fill(2, zero=0, dp_replicate=2, micro_batch=2),
    "zero1": Layout.fill(2, zero=1, micro_batch=2),
    "zero2": Layout.fill(2, zero=2, micro_batch=2),
    "zero3": Layout.fill(2, zero=3, micro_batch=2, recompute="full"),
    "tp": Layout.fill(2, tp=2, micro_batch=2, sequence_parallel=False),
    "sp": Layout.fill(8, tp=2, micro_batch=2, zero=3, dp_replicate=2, recompute="selective"),
}


@contextmanager
def alone(world: int) -> Iterator[None]:
    """Rank 0 of a world without other ranks: collectives return at once."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_meta(job: Job) -> Program:
    program = Program(job, make_mesh(job.layout, job.model, 0), "meta")
    made = [b.full for b in program.engine.buckets] + [s.grad for s in program.engine.segments]
    assert {t.device.type for t in made} == {"meta"}
    return program


def meta_batches(job: Job) -> list[MicroBatch]:
    shape = (job.layout.micro_batch, job.train.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64, device="meta")
    batch = MicroBatch(tokens, tokens, torch.zeros(shape[:1], dtype=torch.int64, device="meta"))
    return [batch] * job.train.accumulation


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", cases.MODELS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_step_stays_on_its_device(dtype, model, layout):
    job = Case(cases.MODELS[model], LAYOUTS[layout], accumulation=2).job
    job = replace(job, train=replace(job.train, dtype=dtype))
    with alone(job.layout.world):
        program = on_meta(job)
        program.initialize()
        mean_loss, _ = program.forward_backward(meta_batches(job))
        loss, norm, _ = program.totals(mean_loss)
        program.engine.publish()
    assert loss.device.type == norm.device.type == "meta"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_that_never_came_are_made_on_the_device(layout):
    job = Case(cases.MODELS["llama"], LAYOUTS[layout]).job
    with alone(job.layout.world):
        engine = on_meta(job).engine
        engine.begin()
        with engine.chunks[0].micro_batch(last=True):
            pass
        engine.finish()
        engine.publish()


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2"])
def test_any_kernel_of_attention_will_do(name):
    """Devices choose their own: its gradients may come in another memory order."""
    model = replace(cases.MODELS[name], kv_heads=2, dropout=0.0)
    job = Case(model, Layout.fill(1, micro_batch=2)).job
    batch = global_batch(job, 0)
    torch.manual_seed(0)
    module = Transformer(model).double()

    def gradients() -> list[torch.Tensor]:
        module(batch.tokens, batch.targets, batch.index).backward()
        taken = [p.grad for p in module.parameters()]
        module.zero_grad()
        return taken

    usual = gradients()
    with sdpa_kernel(SDPBackend.MATH):
        other = gradients()
    for (which, _), a, b in zip(module.named_parameters(), usual, other, strict=True):
        error = (a - b).abs().max().item()
        assert error <= 1e-10 * a.abs().max().item() + 1e-14, f"{which} off by {error}"
