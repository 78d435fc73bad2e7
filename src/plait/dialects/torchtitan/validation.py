"""What TorchTitan refuses, and what it runs otherwise than it was told.

Each rule names where TorchTitan has it. `facts` is what `config.understand` returns.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from plait.dialects.launch import AT_START, FIRST_STEP, changed, note, refused
from plait.dialects.torchtitan.config import split
from plait.spec.findings import Finding
from plait.spec.job import Job
from plait.spec.layout import divisors, nearest
from plait.spec.schedule import SCHEDULES, canonical, is_file

#: torch's names of schedules (torch.distributed.pipelining.schedules), by plait's.
TORCH_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "zb-h1": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
#: Classes that only a table in a file can fill (with `pipeline_parallel_schedule_csv`).
_ABSTRACT = ("PipelineScheduleSingle", "PipelineScheduleMulti")
#: Models that are not split into stages, by version.
_UNPIPED = {
    "0.2.2": ("qwen3", "gpt_oss", "flux"),
    "0.3.0": ("flux",),
    "main": ("flux",),
}
#: Options of JobConfig that Trainer.Config has not, and where they went.
_LOST = {
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel has it",
    "parallelism.context_parallel_rotate_method": "keys and values are always gathered",
    "parallelism.expert_tensor_parallel_degree": "experts are whole with expert parallelism",
    "parallelism.disable_loss_parallel": "the loss decides it",
    "parallelism.expert_parallel_comm_backend": "model_registry(moe_comm_backend=...) has it",
}
_WAITING = ("standard", "deepep", "torchao")


def rules(facts: Mapping[str, Any], job: Job, target: str = "TorchTitan") -> list[Finding]:
    """What the target would say to this job.

    Args:
        target: how the system calls itself.
    """
    ask = _Ask(facts, job, target)
    every = (
        _lost,
        _grid,
        _heads,
        _experts,
        _batch,
        _tokens,
        _sequence,
        _context,
        _replicas,
        _pipeline,
    )
    return [found for rule in (*every, _compiled, _graphs, _checkpoint) for found in rule(ask)]


class _Ask:
    """What every rule looks at."""

    def __init__(self, facts: Mapping[str, Any], job: Job, target: str):
        self.facts, self.job, self.layout, self.model = facts, job, job.layout, job.model
        self.modern = facts.get("version") in ("main", "0.3.0")
        self.refused = partial(refused, target)
        self.changed = partial(changed, target)
        self.note = partial(note, target)

    def __getitem__(self, name: str) -> Any:
        return self.facts.get(name)

    @property
    def attention(self) -> str:
        """Which kernel runs: what a file says, or the default of the model."""
        flavor, name = str(self["flavor"]), self["model"]
        if self["model.attention"]:
            return str(self["model.attention"])
        if self.modern:
            return "varlen" if name == "gpt_oss" else "flex"
        if "varlen" in flavor:
            return "varlen"
        big = name == "deepseek_v3" and not flavor.startswith("debugmodel")
        return (
            "flex" if big or name == "gpt_oss" or "flex" in flavor or "irope" in flavor else "sdpa"
        )


def _lost(ask: _Ask) -> Iterator[Finding]:
    """config/configs.py: dataclasses with slots; tyro knows no such option."""
    for name in ask["said"] or () if ask.modern else ():
        if name in _LOST:
            message = f"{name} is gone since recipes: {_LOST[name]}"
            yield ask.refused("torchtitan-lost", AT_START, message, name)


def _grid(ask: _Ask) -> Iterator[Finding]:
    """parallel_dims.py, ParallelDims._validate."""
    layout = ask.layout
    ranks = layout.tp * layout.cp * (layout.dp_shard if layout.zero else 1)
    if layout.ep > 1 and ask.modern and ranks % layout.ep:
        message = f"expert_parallel_degree {layout.ep} must divide dp_shard x cp x tp = {ranks}"
        legal = nearest(layout.ep, divisors(ranks))
        yield ask.refused("torchtitan-expert-grid", AT_START, message, layout.ep, layout__ep=legal)
    etp = ask["etp"] or 1
    if not ask.modern and layout.ep > 1 and etp not in (1, layout.tp):
        message = f"expert_tensor_parallel_degree {etp} must be 1 or tp = {layout.tp}"
        yield ask.refused("torchtitan-etp", AT_START, message, etp, layout__etp=1)


def _heads(ask: _Ask) -> Iterator[Finding]:
    """models/common/decoder.py, update_from_config; before it the split of a weight fails."""
    model, tp = ask.model, ask.layout.tp
    if tp <= 1:
        return
    when = AT_START
    kinds = {"n_heads": model.heads}
    if model.mla is None:
        kinds["n_kv_heads"] = model.kv_heads
    for name, heads in kinds.items():
        if heads % tp:
            legal = max(d for d in divisors(tp) if all(h % d == 0 for h in kinds.values()))
            message = f"tensor_parallel_degree {tp} must divide {name} {heads}"
            yield ask.refused("torchtitan-heads", when, message, tp, layout__tp=legal)
            return


def _experts(ask: _Ask) -> Iterator[Finding]:
    """models/common/decoder.py; models/common/token_dispatcher.py."""
    moe, ep = ask.model.moe, ask.layout.ep
    if moe is None:
        if ep > 1:
            message = f"expert_parallel_degree {ep} does nothing: the model has no experts"
            yield ask.changed("torchtitan-no-experts", message, ep, layout__ep=1)
        return
    if moe.experts % ep:
        legal = nearest(ep, divisors(moe.experts))
        message = f"{moe.experts} experts must be divisible by expert_parallel_degree {ep}"
        yield ask.refused("torchtitan-experts", AT_START, message, ep, layout__ep=legal)
    backend = ask["model.moe_comm_backend"] or "standard"
    if backend == "standard":
        backend = ask["parallelism.expert_parallel_comm_backend"] or "standard"
    if backend == "standard":
        return
    if ep == 1 and ask["version"] == "0.2.2":
        message = f"{backend} needs expert_parallel_degree above 1"
        yield ask.refused("torchtitan-dispatcher", AT_START, message, backend)
    shards = ask.layout.cp * ask.layout.tp
    tokens = ask["tokens"]
    if ep > 1 and tokens and tokens % shards:
        message = f"{backend} needs {tokens} tokens to be divisible by cp x tp = {shards}"
        yield ask.refused("torchtitan-dispatcher", AT_START, message, backend)
    if backend == "minimal_async_ep" and ask.job.layout.recompute != "full":
        message = "minimal_async_ep needs full activation checkpointing"
        yield ask.refused(
            "torchtitan-dispatcher", AT_START, message, backend, layout__recompute="full"
        )


def _batch(ask: _Ask) -> Iterator[Finding]:
    """train.py (0.2.2), trainer.py: a batch in samples."""
    local, total, part = ask["local"], ask["global"], ask["part"]
    if local is None:
        return
    layout = ask.layout
    dp = layout.dp
    if local < 1:
        yield ask.refused("torchtitan-batch", AT_START, f"local_batch_size {local}", local)
        return
    if total is not None and total >= 0 and (total == 0 or total % (local * dp)):
        legal = max(1, round(total / (local * dp))) * local * dp
        message = (
            f"global_batch_size {total} must be a multiple of local_batch_size {local} x"
            f" data-parallel degree {dp}"
        )
        yield ask.refused("torchtitan-batch", AT_START, message, total, train__global_batch=legal)
    if layout.pp > 1 and (not part or part < 1 or local % part):
        legal = nearest(part or 1, divisors(local))
        message = (
            f"local_batch_size {local} is split into micro batches of"
            f" pipeline_parallel_microbatch_size {part}, which must divide it"
        )
        yield ask.refused("torchtitan-batch", AT_START, message, part, layout__micro_batch=legal)


def _tokens(ask: _Ask) -> Iterator[Finding]:
    """configs.py, TrainingConfig.__post_init__; trainer.py: a batch in tokens."""
    tokens, step, batches = ask["tokens"], ask["step_tokens"], ask["batches"]
    if tokens is None:
        return
    said = {"num_tokens_per_microbatch_per_dp_rank": tokens, "max_context_length": ask["longest"]}
    said["num_pp_microbatches"] = batches
    wrong = {name: value for name, value in said.items() if value is not None and value <= 0}
    for name, value in wrong.items():
        yield ask.refused("torchtitan-batch", AT_START, f"{name} {value} is not above 0", value)
    if wrong or step is None or step == -1:
        return
    unit = tokens * (batches or 1) * ask.layout.dp
    if step <= 0 or step % unit:
        seq = ask.job.train.seq_len or 1
        legal = max(1, round(step / unit)) * unit
        message = (
            f"num_tokens_per_train_step {step} must be a multiple of {tokens} tokens x {batches}"
            f" pipeline micro batches x data-parallel degree {ask.layout.dp} = {unit}"
        )
        yield ask.refused(
            "torchtitan-batch", AT_START, message, step, train__global_batch=legal // seq
        )


def _sequence(ask: _Ask) -> Iterator[Finding]:
    """trainer.py; models/common/decoder.py."""
    layout = ask.layout
    seq = ask.job.train.seq_len or 1
    divisor = layout.tp * layout.cp * 2
    if ask.modern:
        divisor = layout.tp if ask["sequence_parallel"] else 1
        divisor *= 2 * layout.cp if layout.cp > 1 else 1
    length = ask["tokens"] or seq
    if layout.tp * layout.cp > 1 and length % divisor:
        counted = "tokens of a micro batch" if ask["tokens"] else "seq_len"
        message = f"{counted} {length} must be divisible by {divisor}, for tp and 2 x cp"
        legal = max(1, round(seq / divisor)) * divisor
        yield ask.refused("torchtitan-sequence", AT_START, message, length, train__seq_len=legal)
    longest, most = ask["longest"], ask.model.seq
    if longest and longest > most:
        message = f"a context of {longest} tokens is longer than the {most} of the model"
        if ask.modern:
            yield ask.refused("torchtitan-context", AT_START, message, longest, train__seq_len=most)
        else:
            yield ask.changed("torchtitan-context", f"{message}; it only warns")


def _context(ask: _Ask) -> Iterator[Finding]:
    """context_parallel/api.py, decoder.py; in 0.2.2 models/*/model/args.py."""
    cp = ask.layout.cp
    if cp <= 1:
        return
    backend = ask["parallelism.spmd_backend"]
    if ask["version"] == "main" and backend not in (None, "spmd_types"):
        message = f"context parallelism needs spmd_backend spmd_types, not {backend}"
        yield ask.refused("torchtitan-cp-backend", AT_START, message, backend)
    attention, name = ask.attention, ask["model"]
    if ask.modern:
        legal = attention in ("flex", "flex_flash")
        wanted = "FlexAttention"
    elif name == "gpt_oss":
        legal, wanted = False, "another model than gpt_oss"
    else:
        legal = attention == "sdpa" or (attention == "flex" and name == "llama3")
        wanted = "SDPA"
    if not legal:
        message = f"context parallelism needs {wanted}; {name} {ask['flavor']} runs {attention}"
        yield ask.refused("torchtitan-cp-attention", AT_START, message, attention, layout__cp=1)
    balancer = ask["parallelism.context_parallel_load_balancer"]
    if balancer not in (None, "headtail", "ptrr", "none", "None"):
        message = f"context_parallel_load_balancer {balancer!r} is none of headtail, ptrr, None"
        yield ask.refused("torchtitan-cp-balancer", FIRST_STEP, message, balancer)
    masks = name == "gpt_oss" or ask.model.window is not None
    if balancer == "ptrr" and masks and not ask["parallelism.context_parallel_ptrr_mask_key"]:
        message = "ptrr with several attention masks needs context_parallel_ptrr_mask_key"
        yield ask.refused("torchtitan-cp-balancer", FIRST_STEP, message, balancer)


def _replicas(ask: _Ask) -> Iterator[Finding]:
    """models/*/infra/parallelize.py of 0.2.2."""
    layout = ask.layout
    if ask["version"] == "0.2.2" and layout.zero == 0 and layout.dp_replicate > 1:
        others = layout.tp * layout.pp
        if others > 1:
            message = f"plain data parallelism (dp_replicate {layout.dp_replicate}, dp_shard 1)"
            yield ask.refused(
                "torchtitan-ddp", AT_START, f"{message} does not go with tp or pp",
                layout.dp_replicate, layout__dp_replicate=1, layout__dp_shard=layout.dp,
                layout__zero=3,
            )  # fmt: skip


def _pipeline(ask: _Ask) -> Iterator[Finding]:
    """pipeline_parallel.py; torch.distributed.pipelining.schedules."""
    layout = ask.layout
    if layout.pp <= 1:
        return
    name = ask["model"]
    if name in _UNPIPED.get(str(ask["version"]), ()):
        message = f"{name} does not support pipelining"
        yield ask.refused("torchtitan-pipeline", AT_START, message, layout.pp, layout__pp=1)
        return
    if ask.model.tied and ask.modern:
        message = "tied embeddings are not supported with pipeline parallelism"
        yield ask.refused("torchtitan-tied", AT_START, message, layout.pp, layout__pp=1)
    yield from _schedule(ask)
    yield from _stages(ask)


def _schedule(ask: _Ask) -> Iterator[Finding]:
    said, layout = str(ask["schedule"] or ""), ask.layout
    if ask["csv"]:
        if said and said not in _ABSTRACT:
            message = f"a table in a file needs one of {', '.join(_ABSTRACT)}, not {said}"
            yield ask.refused("torchtitan-schedule", AT_START, message, said)
        return
    known = {name.lower() for name in TORCH_SCHEDULES.values()}
    if said and said.lower() not in known and said not in _ABSTRACT:
        near = canonical(said)
        near = near if near in TORCH_SCHEDULES else "1f1b"
        message = f"torch has no schedule {said!r}; it has {', '.join(TORCH_SCHEDULES.values())}"
        yield ask.refused("torchtitan-schedule", AT_START, message, said, layout__schedule=near)
        return
    if said in _ABSTRACT:
        yield ask.refused("torchtitan-schedule", AT_START, f"{said} needs a table in a file", said)
        return
    yield from _micro_batches(ask, canonical(said) or layout.schedule)


def _micro_batches(ask: _Ask, schedule: str) -> Iterator[Finding]:
    layout, many = ask.layout, _pipelined(ask)
    stages = layout.pp * layout.vpp
    rounds = max(1, many // layout.pp)
    message, legal = None, stages
    if schedule in ("gpipe", "1f1b") and many < stages:
        message = f"needs at least as many micro batches as stages: {many} for {stages}"
    elif schedule == "dualpipev" and many < stages:
        message = f"needs at least {stages} micro batches, one a stage, not {many}"
    elif schedule in ("interleaved-1f1b", "zb-h1") and many % rounds:
        message = f"does {many} micro batches in {rounds} rounds, and must do as many in each"
        legal = rounds * layout.pp
    if message:
        micro = layout.micro_batch * layout.dp
        yield ask.refused(
            "torchtitan-micro-batches", AT_START, f"{ask['schedule']} {message}", many,
            train__accumulation=legal, train__global_batch=micro * legal,
        )  # fmt: skip
    elif many < stages:
        message = f"{many} micro batches are fewer than {stages} stages: it only warns of a bubble"
        yield ask.changed("torchtitan-micro-batches", message)
    again = (ask.job.batch.accumulation or 1) / max(1, many)
    if again > 1:
        message = f"the pipeline runs {again:g} times a step, {many} micro batches each: a bubble"
        yield ask.changed("torchtitan-micro-batches", f"{message} each time")


def _pipelined(ask: _Ask) -> int:
    """Micro batches that the pipeline works on between two rounds of accumulation."""
    if ask["batches"] is not None:
        return int(ask["batches"])
    if ask["local"] is not None and (ask["part"] or 0) > 0:
        return int(ask["local"]) // int(ask["part"])
    return ask.job.batch.accumulation or 1


def _stages(ask: _Ask) -> Iterator[Finding]:
    layout, per_stage, parts = ask.layout, ask["layers_per_stage"], ask["parts"]
    first, last = ask["first_less"], ask["last_less"]
    if first is None or last is None:
        return
    layers = ask.model.layers
    plain = canonical(str(ask["schedule"] or ""))
    single = plain is not None and SCHEDULES[plain].vpp == (1, 1)
    count = layout.pp * (1 if single else 2)
    if parts is not None:
        count = len(parts)
        if sum(parts) != layers:
            message = f"module_fqns_per_model_part names {sum(parts)} layers of {layers}"
            yield ask.changed("torchtitan-stages", f"{message}; the others would be left out")
    elif per_stage is not None:
        if per_stage < 1:
            message = f"pipeline_parallel_layers_per_stage {per_stage}"
            yield ask.refused("torchtitan-stages", AT_START, message, per_stage)
            return
        count = -(-(layers + first + last) // per_stage)
        message = (
            f"{layers} layers + {first} for the embedding + {last} for the head, {per_stage} a"
            f" stage, are {count} stages"
        )
        if count % layout.pp:
            yield ask.refused(
                "torchtitan-stages",
                AT_START,
                f"{message}: no multiple of pp {layout.pp}",
                per_stage,
            )
            return
        if (single and count != layout.pp) or (not single and count < 2 * layout.pp):
            wanted = "exactly 1" if single else "at least 2"
            text = f"{message}, {count // layout.pp} a rank: {ask['schedule']} takes {wanted}"
            yield ask.refused("torchtitan-stages", AT_START, text, per_stage)
            return
    if plain in ("zbv", "dualpipev") and count != 2 * layout.pp:
        message = f"{ask['schedule']} takes exactly 2 stages a rank, not {count / layout.pp:g}"
        yield ask.refused("torchtitan-stages", AT_START, message, count, layout__vpp=2)
    elif parts is None and split(count, layers, first, last) is None:
        message = f"{layers} layers cannot be shared out over {count} stages"
        yield ask.refused("torchtitan-stages", AT_START, message, count)


def _compiled(ask: _Ask) -> Iterator[Finding]:
    """configs.py, CompileConfig.__post_init__; trainer.py, Trainer.Config.__post_init__."""
    compiled = ask["compile.enable"] and "model" in (ask["compile.components"] or ())
    old = ask["parallelism.enable_async_tensor_parallel"]
    wanted = ask["compile.enable_async_tensor_parallel"] or old
    if wanted and not compiled and (ask.modern or ask.layout.tp > 1):
        message = "async tensor parallelism needs a compiled model (compile.enable)"
        yield ask.refused("torchtitan-async-tp", AT_START, message)
    if ask["ac_mode"] == "memory_budget" and not compiled:
        message = "a memory budget for activations needs a compiled model (compile.enable)"
        yield ask.refused("torchtitan-memory-budget", AT_START, message)
    split_weights = not is_file(ask.layout.schedule) and SCHEDULES.get(ask.layout.schedule)
    if ask.layout.pp > 1 and compiled and split_weights and split_weights.split:
        message = "torch cannot part input and weight gradients of a compiled stage"
        yield ask.refused("torchtitan-compiled-stages", FIRST_STEP, message)


def _graphs(ask: _Ask) -> Iterator[Finding]:
    """trainer.py, Trainer.Config._validate_cuda_graphs and __post_init__."""
    if ask["debug.spmd_typechecking"] and ask.layout.pp > 1 and ask.modern:
        message = "types of sharding are not checked under pipeline parallelism"
        yield ask.refused("torchtitan-typechecking", AT_START, message)
    if not ask.modern or ask["training.disable_cuda_graphs"]:
        return
    if ask.layout.pp > 1:
        message = "CUDA graphs, on by default, do not go with pipeline parallelism"
        text = f"{message}: set training.disable_cuda_graphs"
        yield ask.refused("torchtitan-cuda-graphs", AT_START, text)
    elif ask.layout.ep > 1 and ask.model.moe is not None:
        backend = ask["model.moe_comm_backend"] or "standard"
        unbound = backend == "hybridep" and ask["model.non_blocking_capacity_factor"] is None
        if backend in _WAITING or unbound:
            message = f"CUDA graphs, on by default, do not go with the {backend} dispatcher"
            text = f"{message}: set training.disable_cuda_graphs"
            yield ask.refused("torchtitan-cuda-graphs", AT_START, text)


def _checkpoint(ask: _Ask) -> Iterator[Finding]:
    """components/checkpoint.py; components/checkpointer/base.py."""
    if not ask["checkpoint.enable"]:
        return
    if ask["checkpoint.keep_latest_k"] == 1:
        message = (
            "keep_latest_k may not be 1: the only checkpoint could be lost while it is written"
        )
        yield ask.refused("torchtitan-keep", AT_START, message, 1, checkpoint__keep=2)
    if ask["checkpoint.last_save_in_hf"] and not ask["checkpoint.last_save_model_only"]:
        message = "last_save_in_hf needs last_save_model_only"
        yield ask.refused("torchtitan-checkpoint", AT_START, message)
    if ask["checkpoint.initial_load_in_hf"] and not ask["checkpoint.initial_load_model_only"]:
        message = "initial_load_in_hf needs initial_load_model_only"
        yield ask.refused("torchtitan-checkpoint", AT_START, message)
