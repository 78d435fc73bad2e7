"""What the calls of a mesh script say of a layout, a batch and a model."""

from collections.abc import Iterator
from typing import Any

from plait.dialects.huggingface_names import named
from plait.dialects.python.reader import Reader
from plait.dialects.python.values import Made, Open
from plait.dialects.pytorch.mesh import Mesh, Meshes
from plait.dialects.pytorch.plan import Plan, plan_of
from plait.dialects.settings import Setting
from plait.spec.schedule import SCHEDULES, canonical

#: Names of mesh dims -> axis, where no call says what a dim is for.
_NAMES = {
    "tp": "tp", "tensor": "tp", "model": "tp", "tensor_parallel": "tp", "mp": "tp",
    "pp": "pp", "pipe": "pp", "pipeline": "pp", "stage": "pp", "pipeline_parallel": "pp",
    "cp": "cp", "context": "cp", "seq": "cp", "sp": "cp", "ring": "cp",
    "ep": "ep", "expert": "ep",
    "dp": "dp_shard", "data": "dp_shard", "dp_shard": "dp_shard", "fsdp": "dp_shard",
    "shard": "dp_shard", "data_parallel": "dp_shard", "sharded": "dp_shard",
    "dp_replicate": "dp_replicate", "replicate": "dp_replicate", "ddp": "dp_replicate",
    "replica": "dp_replicate", "inter": "dp_replicate", "intra": "dp_shard",
    "dp_outer": "dp_replicate", "dp_inner": "dp_shard", "dp_mod_ep": "dp_shard",
}  # fmt: skip
#: FSDP1's strategies -> (ZeRO stage, over a part of the ranks only).
_STRATEGIES = {
    "FULL_SHARD": (3, False), "SHARD_GRAD_OP": (2, False), "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True), "_HYBRID_SHARD_ZERO2": (2, True),
}  # fmt: skip
#: Names of variables and options that say a batch -> plait's path.
_BATCH = {
    "layout.micro_batch": ("micro_batch_size", "microbatch_size", "mbs", "micro_batch"),
    "rank_batch": ("local_batch_size", "per_device_batch_size", "batch_size", "bs",
                   "batch_per_rank", "train_batch_size"),
    "train.global_batch": ("global_batch_size", "global_batch", "gbs"),
    "train.seq_len": ("seq_len", "seq_length", "sequence_length", "max_seq_len", "block_size",
                      "max_length", "context_length", "seqlen"),
    "train.accumulation": ("gradient_accumulation_steps", "grad_accum_steps", "accumulation_steps",
                           "grad_accum", "accum_steps"),
    "train.steps": ("steps", "num_steps", "max_steps", "num_iterations", "train_steps",
                    "num_iters", "max_iters"),
}  # fmt: skip
#: Arguments of model configurations -> plait's path, in the order of trust.
_MODEL = {
    "model.layers": ("n_layers", "num_hidden_layers", "n_layer", "num_layers", "depth"),
    "model.hidden": ("dim", "hidden_size", "n_embd", "d_model", "hidden_dim", "emb_dim"),
    "model.heads": ("n_heads", "num_attention_heads", "n_head", "num_heads", "nhead"),
    "model.vocab": ("vocab_size", "vocab", "n_vocab"),
    "model.kv_heads": ("n_kv_heads", "num_key_value_heads", "n_kv_head", "num_kv_heads"),
    "model.ffn": ("intermediate_size", "ffn_dim", "ffn_hidden", "d_ff", "dim_feedforward"),
    "model.head_dim": ("head_dim",),
    "model.seq": ("max_seq_len", "max_position_embeddings", "block_size", "max_seq_length"),
    "model.rope_theta": ("rope_theta",),
}  # fmt: skip


class Script:
    """A script whose calls have been followed.

    Attributes:
        roles: axis -> the dims of the mesh that it spans.
        plan: what its plans of tensor parallelism say.
        facts: what the rules need.
    """

    def __init__(self, reader: Reader, meshes: Meshes):
        self.reader, self.meshes = reader, meshes
        self.calls = reader.calls
        self.plan: Plan = plan_of(self.calls)
        self.facts: dict[str, Any] = {}
        self.roles = self._roles()
        self.mesh = self._main_mesh()

    def settings(self) -> Iterator[Setting]:
        """What it says, by names that `pytorch.read` knows."""
        yield from self._degrees()
        yield from self._sharding()
        yield from self._pipeline()
        yield from self._others()
        yield from self._numbers()
        yield from self._model()

    def named(self, *words: str) -> list[Made]:
        return [call for call in self.calls if call.word in words]

    # -- the mesh

    def _main_mesh(self) -> Mesh | None:
        used = [mesh for mesh, _ in self._uses()]
        roots = [mesh.whole() for mesh in used] or self.meshes.made
        return max(roots, key=lambda mesh: len(mesh.dims), default=None)

    def _uses(self) -> Iterator[tuple[Mesh, str]]:
        """Each mesh that a call takes, and for which axis."""
        for call in self.calls:
            given = [v for v in (*call.args, *call.fields.values()) if isinstance(v, Mesh)]
            for mesh in given:
                match call.word:
                    case "parallelize_module" | "loss_parallel":
                        yield mesh, "tp"
                    case "fully_shard" | "FSDP" | "FullyShardedDataParallel":
                        yield mesh, "fsdp"
                    case "DDP" | "DistributedDataParallel" | "replicate":
                        yield mesh, "dp_replicate"
                    case "context_parallel" | "context_parallel_shard":
                        yield mesh, "cp"
                    case "PipelineStage" | "build_stage" | "pipeline":
                        yield mesh, "pp"
                    case "from_pretrained":
                        yield mesh, "tp"  # transformers splits by its own plan

    def _roles(self) -> dict[str, tuple[str, ...]]:
        """Axis -> dims. What a call does with a dim goes before what the dim is called."""
        roles: dict[str, tuple[str, ...]] = {}
        uses = list(self._uses())
        certain = {dim for mesh, axis in uses if axis != "fsdp" for dim in mesh.flat()}
        for mesh, axis in uses:
            dims = mesh.flat()
            if axis != "fsdp":
                roles.setdefault(axis, dims)
            elif len(mesh.dims) == 2:
                outer, inner = mesh.dims
                parts = mesh.whole().parts
                roles.setdefault("dp_replicate", parts.get(outer, (outer,)))
                roles["dp_shard"] = parts.get(inner, (inner,))
            elif "dp_shard" not in roles:
                roles["dp_shard"] = dims
        taken = certain | {dim for dims in roles.values() for dim in dims}
        for mesh in [mesh.whole() for mesh, _ in uses] or self.meshes.made:
            for dim in mesh.dims:
                axis = _NAMES.get(dim.lower())
                if axis and dim not in taken and axis not in roles:
                    roles[axis] = (dim,)
                    taken.add(dim)
        # Dims of the sharded axis that belong to cp are cp's.
        for axis in ("dp_shard", "dp_replicate") if "cp" in roles else ():
            if axis in roles:
                roles[axis] = tuple(d for d in roles[axis] if d not in roles["cp"])
        for axis in ("dp_shard", "dp_replicate"):
            many = [d for d in roles.get(axis, ()) if _NAMES.get(d.lower()) == "cp"]
            if many and len(roles[axis]) > 1:
                roles[axis] = tuple(d for d in roles[axis] if d not in many)
                roles.setdefault("cp", tuple(many))
        if "dp_shard" in roles:
            byname = [
                d for d in roles["dp_shard"] if _NAMES.get(d.lower()) in ("cp", "dp_replicate")
            ]
            for dim in byname if len(roles["dp_shard"]) > 1 else ():
                roles["dp_shard"] = tuple(d for d in roles["dp_shard"] if d != dim)
                roles.setdefault(_NAMES[dim.lower()], (dim,))
        return roles

    def size(self, axis: str) -> int | None:
        """Ranks along an axis; 1 where there is none, None where that is open."""
        total = 1
        mesh = self.mesh
        for dim in self.roles.get(axis, ()):
            size = mesh.dims.get(dim) if mesh is not None else None
            if size is None:
                return None
            total *= size
        return total

    def _degrees(self) -> Iterator[Setting]:
        mesh = self.mesh
        for call in self.named("ParallelismConfig"):
            # Accelerate makes the mesh of these.
            for name, axis in _ACCELERATE.items():
                size = call.fields.get(name)
                if isinstance(size, int) and not isinstance(size, bool):
                    yield Setting(f"mesh.{axis}", size, f"line {call.line}")
        planned = [c for c in self.named("from_pretrained") if c.fields.get("tp_plan")]
        if planned:
            self.plan.open = True  # the model's own plan splits every part
        if planned and mesh is None:
            size = planned[0].fields.get("tp_size", self.meshes.world)
            opened = () if isinstance(size, int) else ("the number of ranks",)
            yield Setting("mesh.tp", size, f"line {planned[0].line}", opened)
        if mesh is None:
            return
        total = 1
        for name, size in mesh.dims.items():
            total = total * size if total and size else 0
            axis = next((a for a, dims in self.roles.items() if name in dims), None)
            if axis is None and size is not None and size != 1:
                yield Setting(f"mesh.{name}", size, f"line {mesh.line}")
        self.facts["mesh"] = total or None
        for axis in ("tp", "cp", "pp", "ep", "dp_replicate"):
            size = self.size(axis)
            if axis in self.roles and size is None:
                yield Setting(f"mesh.{axis}", "?", f"line {mesh.line}", (self._open(axis),))
            elif axis in self.roles:
                yield Setting(f"mesh.{axis}", size, f"line {mesh.line}")
        if self.plan.styles and "tp" in self.roles:
            yield Setting("plan.sequence_parallel", self.plan.sequence_parallel)

    def _open(self, axis: str) -> str:
        return f"the size of {', '.join(self.roles[axis])}"

    # -- data parallelism

    def _sharding(self) -> Iterator[Setting]:
        shards = self.named("fully_shard")
        wrapped = self.named("FSDP", "FullyShardedDataParallel")
        shard = self.size("dp_shard") if "dp_shard" in self.roles else None
        if shards:
            yield Setting("fully_shard", self._reshard(shards), f"line {shards[0].line}")
        elif wrapped:
            said = wrapped[0].fields.get("sharding_strategy")
            word = said.word if isinstance(said, Made) else "FULL_SHARD"
            zero, hybrid = _STRATEGIES.get(word, (3, False))
            yield Setting("sharding_strategy", word, f"line {wrapped[0].line}")
            yield Setting("fully_shard", zero, f"line {wrapped[0].line}")
            self.facts["hybrid"] = hybrid
        elif self.named("ZeroRedundancyOptimizer"):
            yield Setting("fully_shard", 1)
        elif self.named("DDP", "DistributedDataParallel", "replicate"):
            yield Setting("fully_shard", 0)
        else:
            self.facts["unwrapped"] = shard
        if shard is not None:
            yield Setting("mesh.dp_shard", shard)

    def _reshard(self, shards: list[Made]) -> int:
        said = [call.fields.get("reshard_after_forward") for call in shards]
        inner = said[:-1] if len(said) > 1 else said
        whole = [value for value in inner if isinstance(value, int) and not isinstance(value, bool)]
        if whole:
            self.facts["reshard_ranks"] = whole[0]
        kept = bool(inner) and all(value is False for value in inner)
        return 2 if kept else 3

    # -- pipeline

    def _pipeline(self) -> Iterator[Setting]:
        found = [c for c in self.calls if c.word.startswith("Schedule") or c.word in _TORCH]
        made = next((c for c in found if canonical(c.word)), None)
        if made is None:
            return
        yield Setting("schedule", made.word, f"line {made.line}")
        many = made.fields.get("n_microbatches", made.args[1] if len(made.args) > 1 else None)
        if isinstance(many, int):
            yield Setting("n_microbatches", many, f"line {made.line}")
        elif many is not None:
            name = many.name if isinstance(many, Open | Made) else "n_microbatches"
            yield Setting("n_microbatches", name, f"line {made.line}", (name,))
        table = self.reader.names.get("STAGES")
        if isinstance(table, list | tuple) and all(isinstance(n, int) for n in table):
            yield Setting("STAGES", list(table))
        stages = self.named("PipelineStage")
        plain = canonical(made.word)
        counts = [
            s.fields.get("num_stages", s.args[2] if len(s.args) > 2 else None) for s in stages
        ]
        pp = self.size("pp")
        known = [n for n in counts if isinstance(n, int)]
        if "pp" not in self.roles:
            # Stages over all ranks, without a mesh.
            pieces = [c.fields.get("split_spec") for c in self.named("pipeline")]
            known += [len(spec) + 1 for spec in pieces if isinstance(spec, dict)]
            pp = known[0] if known else self.meshes.world
            yield Setting("mesh.pp", pp, f"line {made.line}", () if pp else ("num_stages",))
        if known and pp and known[0] % pp == 0:
            yield Setting("num_stages", known[0])
        elif plain and SCHEDULES[plain].vpp[0] > 1:
            yield Setting("num_stages", (pp or 1) * 2)

    # -- the rest

    def _others(self) -> Iterator[Setting]:
        if self.named("checkpoint_wrapper", "apply_activation_checkpointing", "apply_ac",
                      "gradient_checkpointing_enable") or any(
            c.name.endswith("checkpoint.checkpoint") for c in self.calls
        ):  # fmt: skip
            yield Setting("checkpoint_wrapper", True)
        for policy in self.named("MixedPrecisionPolicy", "MixedPrecision"):
            for name in ("param_dtype", "reduce_dtype"):
                said = policy.fields.get(name)
                if isinstance(said, Made):
                    yield Setting(name, said.word, f"line {policy.line}")
        for call in self.named("context_parallel", "set_rotate_method"):
            if call.word == "set_rotate_method" and call.args:
                yield Setting("rotate_method", call.args[0])

    def _numbers(self) -> Iterator[Setting]:
        for path, names in _BATCH.items():
            for name in names:
                value = self.reader.options.get(name, self.reader.names.get(name))
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    yield Setting(path, value)
                    break
        loaders = [c.fields.get("batch_size") for c in self.named("DataLoader")]
        sizes = [size for size in loaders if isinstance(size, int)]
        if sizes:
            yield Setting("DataLoader.batch_size", sizes[0])
        for call in self.named("AdamW", "Adam"):
            rate = call.fields.get("lr")
            if isinstance(rate, int | float) and not isinstance(rate, bool):
                yield Setting("lr", rate, f"line {call.line}")

    def _model(self) -> Iterator[Setting]:
        for call in self.calls:
            if call.word == "from_pretrained" and len(call.args) > 0:
                said = next((a for a in call.args if isinstance(a, str)), None)
                if said is not None and named(said) is not None and "oken" not in call.name:
                    yield Setting("from_pretrained", said, f"line {call.line}")
                    return
                opened = next((a for a in call.args if isinstance(a, Open)), None)
                if opened is not None and "oken" not in call.name:
                    yield Setting("from_pretrained", opened.name, "", (opened.name,))
                    return
        for call in self.calls:
            fields = {k: v for k, v in call.fields.items() if isinstance(v, int | float)}
            sizes = {
                path: next((fields[name] for name in names if name in fields), None)
                for path, names in _MODEL.items()
            }
            needed = ("model.layers", "model.hidden", "model.heads", "model.vocab")
            if all(sizes[path] for path in needed):
                for path, value in sizes.items():
                    if value is not None:
                        yield Setting(path, value, f"line {call.line}")
                self.facts["sizes"] = call.word
                return


_TORCH = ("GPipe",)
#: Sizes of Accelerate's ParallelismConfig -> axis.
_ACCELERATE = {
    "tp_size": "tp",
    "cp_size": "cp",
    "dp_shard_size": "dp_shard",
    "dp_replicate_size": "dp_replicate",
}
