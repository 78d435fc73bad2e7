"""A job as a configuration of TorchTitan: sections and values, in the names of a version."""

from math import ceil
from typing import Any

from plait.dialects.launch import note
from plait.dialects.torchtitan.config import split
from plait.dialects.torchtitan.models import flavor_of
from plait.dialects.torchtitan.validation import TORCH_SCHEDULES
from plait.spec.chunks import chunk_layers
from plait.spec.findings import Finding
from plait.spec.job import Job
from plait.spec.layout import Layout
from plait.spec.schedule import is_file

#: Schedules that torch lacks -> (its nearest by the same chunks a rank, what that means).
INSTEAD = {
    "zb-h2": ("zb-h1", "it keeps fewer micro batches in flight and has more of a bubble"),
    "zb-auto": ("zb-h1", "the order that a search would find is not kept"),
    "v-half": ("zbv", "it keeps twice as many activations"),
    "v-min": ("zbv", "it keeps three times as many activations"),
    "dualpipe": ("1f1b", "one pipeline in one direction, without a second copy of the weights"),
    "auto": ("zb-h1", "the order that a search would find is not kept"),
}


def config_of(
    job: Job, version: str = "main", target: str = "TorchTitan"
) -> tuple[dict[str, dict[str, Any]], list[Finding]]:
    """Section -> option -> value, and a note for what the target cannot say.

    "model" is left out where TorchTitan has no flavor of that size (with a note).
    `activation_checkpoint.mode` is "none", "full" or "selective", in every version.

    Args:
        version: "0.2.2" (JobConfig, as Primus has it), "0.3.0" or "main".
    """
    notes: list[Finding] = []

    def say(rule: str, message: str) -> None:
        notes.append(note(target, rule, message))

    parallelism = _degrees(job, version, say) | _sharding(job, version, say)
    parallelism |= _experts(job, version, say) | _pipeline(job, version, say)
    training = _batch(job, version, parallelism) | _dtypes(job, say)
    config: dict[str, dict[str, Any]] = {}
    flavor = flavor_of(job.model)
    if flavor is None:
        message = f"it has no flavor of the size of {job.model.name}"
        say("torchtitan-model", f"{message}; register one, and name it")
    else:
        config["model"] = {"name": flavor[0], "flavor": flavor[1]}
    config |= {"training": training, "parallelism": parallelism}
    config["activation_checkpoint"] = {"mode": _recompute(job, say)}
    if version == "0.2.2" and config["activation_checkpoint"]["mode"] == "selective":
        config["activation_checkpoint"]["selective_ac_option"] = "op"
    if version != "0.2.2" and (job.layout.pp > 1 or (job.layout.ep > 1 and job.model.moe)):
        training["disable_cuda_graphs"] = True
    config |= _optimizer(job)
    if job.train.seed:
        config["debug"] = {"seed": job.train.seed}
    return config, notes


def _degrees(job: Job, version: str, say: Any) -> dict[str, Any]:
    layout = job.layout
    said: dict[str, Any] = {
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
        "context_parallel_degree": layout.cp,
        "expert_parallel_degree": layout.ep,
    }
    if layout.tp > 1 and version != "0.2.2":
        said["enable_sequence_parallel"] = layout.sequence_parallel
    elif layout.tp > 1 and not layout.sequence_parallel:
        say("torchtitan-sequence-parallel", "norm regions are split wherever tp is")
    if layout.cp > 1:
        ring = layout.cp_method == "ring" and layout.ulysses < layout.cp
        if version == "0.2.2":
            said["context_parallel_rotate_method"] = "alltoall" if ring else "allgather"
        elif ring:
            say("torchtitan-cp", "context parallelism gathers keys and values; there is no ring")
        if layout.ulysses > 1:
            say("torchtitan-cp", "there is no Ulysses: keys and values are gathered instead")
    if layout.dcp > 1:
        say("torchtitan-dcp", "it does not serve: decode context parallelism is left out")
    return said


def _sharding(job: Job, version: str, say: Any) -> dict[str, Any]:
    layout = job.layout
    replicate, shard, zero = layout.dp_replicate, layout.dp_shard, layout.zero
    if zero == 0 and layout.dp > 1:
        apart = version == "0.2.2" and layout.tp * layout.pp > 1
        crossing = layout.ep > 1 and (layout.tp * layout.cp) % layout.ep
        if apart or crossing:
            why = "experts are not spread over replicas" if crossing else "replicas go alone"
            say("torchtitan-zero", f"{why}: model states are sharded instead (ZeRO-2)")
            replicate, shard, zero = 1, layout.dp, 2
        elif layout.cp > 1:
            say("torchtitan-zero", "model states are always sharded over cp (ZeRO-2 here)")
            zero = 2
    if zero == 1:
        say("torchtitan-zero", "there is no ZeRO-1: gradients are sharded too (ZeRO-2)")
    return {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "always" if zero == 3 else "never",
    }


def _experts(job: Job, version: str, say: Any) -> dict[str, Any]:
    layout = job.layout
    if job.model.moe is None:
        return {}
    if layout.ep == 1 and layout.etp != layout.tp:
        message = f"without expert parallelism experts are split over tp: etp {layout.tp}"
        say("torchtitan-etp", f"{message}, not {layout.etp}")
    if layout.ep > 1 and version == "0.2.2":
        return {"expert_tensor_parallel_degree": layout.etp}
    if layout.ep > 1 and layout.etp > 1:
        message = "with expert parallelism experts are whole: etp 1"
        say("torchtitan-etp", f"{message}, not {layout.etp}")
    return {}


def _pipeline(job: Job, version: str, say: Any) -> dict[str, Any]:
    layout = job.layout
    if layout.pp == 1:
        return {}
    if is_file(layout.schedule):
        said: dict[str, Any] = {
            "pipeline_parallel_schedule": "PipelineScheduleMulti",
            "pipeline_parallel_schedule_csv": layout.schedule,
        }
        return said | {"module_fqns_per_model_part": _parts(job, version)}
    name, _, group = layout.schedule.partition(":")
    if name not in TORCH_SCHEDULES:
        near, meaning = INSTEAD.get(name, ("1f1b", "one forward, one backward"))
        near = "interleaved-1f1b" if near == "1f1b" and layout.vpp > 1 else near
        near = "zbv" if near == "zb-h1" and layout.vpp == 2 and name != "auto" else near
        message = f"torch has no schedule {name}; {TORCH_SCHEDULES[near]} instead: {meaning}"
        say("torchtitan-schedule", message)
        name = near
    if group and int(group) != layout.pp:
        message = f"a chunk does {layout.pp} micro batches before the next, not {group}"
        say("torchtitan-schedule", message)
    said = {"pipeline_parallel_schedule": TORCH_SCHEDULES[name]}
    single = name in ("gpipe", "1f1b")
    shares = [len(layers) for layers in chunk_layers(job.model, layout)]
    usual = layout.vpp == (1 if single else 2)
    if not usual or shares != split(len(shares), job.model.layers):
        said["module_fqns_per_model_part"] = _parts(job, version)
    return said


def _parts(job: Job, version: str) -> list[list[str]]:
    """The modules of each chunk, by TorchTitan's names."""
    parts = [[f"layers.{i}" for i in layers] for layers in chunk_layers(job.model, job.layout)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output" if version == "0.2.2" else "lm_head"]
    return parts


def _batch(job: Job, version: str, parallelism: dict[str, Any]) -> dict[str, Any]:
    """The batch; how it is cut for the pipeline goes into `parallelism`."""
    micro, total = job.layout.micro_batch, job.batch.global_
    seq = job.train.seq_len or job.model.seq
    pieces = (job.batch.accumulation or 1) if job.layout.pp > 1 else 1
    if version == "main":
        if job.layout.pp > 1:
            parallelism["num_pp_microbatches"] = pieces
        return {
            "num_tokens_per_microbatch_per_dp_rank": micro * seq,
            "num_tokens_per_train_step": total * seq,
            "max_context_length": seq,
        }
    if job.layout.pp > 1:
        parallelism["pipeline_parallel_microbatch_size"] = micro
    return {
        "local_batch_size": micro * pieces,
        "global_batch_size": total,
        "seq_len": seq,
    }


def _dtypes(job: Job, say: Any) -> dict[str, Any]:
    train = job.train
    if train.dtype in ("bfloat16", "auto"):
        if train.grad_dtype == "bfloat16":
            say("torchtitan-dtype", "gradients are reduced in float32, not bfloat16")
        return {"dtype": "float32", "mixed_precision_param": "bfloat16"}
    if train.dtype != "float32":
        say("torchtitan-dtype", f"it has no {train.dtype}; float32 instead")
    return {"dtype": "float32", "mixed_precision_param": "float32"}


def _recompute(job: Job, say: Any) -> str:
    recompute = job.layout.recompute
    kind = recompute.partition(":")[0]
    if kind == "selective":
        message = "selective recompute goes by operator: attention's result and every second"
        say("torchtitan-recompute", f"{message} matrix product are kept, not {recompute}")
    return kind


def _optimizer(job: Job) -> dict[str, dict[str, Any]]:
    train = job.train
    optimizer = {
        "lr": train.learning_rate,
        "beta1": train.beta1,
        "beta2": train.beta2,
        "eps": train.eps,
        "weight_decay": train.weight_decay,
    }
    low = train.min_learning_rate / train.learning_rate if train.learning_rate else 0.0
    decay: dict[str, Any] = {"warmup_steps": train.warmup}
    if train.schedule == "constant":
        low = 1.0
    elif train.schedule == "cosine":
        decay["decay_type"] = "cosine"
    else:
        decay |= {"decay_type": "linear", "decay_ratio": _ratio(train.decay, train.steps)}
    decay["min_lr_factor"] = round(low, 12)
    return {"optimizer": optimizer, "lr_scheduler": decay}


def _ratio(part: int, whole: int) -> float:
    """A short fraction of `whole` that rounds to `part`."""
    for digits in range(1, 12):
        ratio = round(part / whole, digits) if whole else 0.0
        if round(ratio * whole) == part:
            return ratio
    return part / max(1, whole)


def launch_words(layout: Layout, per_node: int = 8) -> str:
    """The words of torchrun that start as many ranks."""
    nodes = ceil(layout.world / per_node)
    if layout.world % per_node or nodes == 1:
        return f"torchrun --nproc_per_node={layout.world}"
    return f"torchrun --nnodes={nodes} --nproc_per_node={per_node}"
