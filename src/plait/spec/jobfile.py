"""Reading a job: one TOML file, any field overridden by its dotted path, every default filled in.

    model = "llama3.1-8b"      # or a table [model]: a name, and fields that differ from it
    gpus = "h100:64"           # or ranks = 4
    metrics = "metrics.jsonl"
    [layout]
    tp = 8
    [train]
    steps = 100
    [data]
    path = ["corpus"]
    [checkpoint]
    every = 10

What a job is for decides its defaults: "train" is small enough for the machine at hand, "plan"
(explain, dryrun) is the model as published on the cluster that is named.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from plait.planner.partition import by_cost
from plait.spec import presets, saved
from plait.spec.build import check_fields
from plait.spec.chunks import balanced
from plait.spec.cluster import Cluster
from plait.spec.findings import Finding, UserError, closest, error
from plait.spec.job import Batch, Checkpoint, Data, Job, Train
from plait.spec.layout import ILLEGAL, LARGEST, Layout, sound_pipeline, sound_words
from plait.spec.model import Model
from plait.spec.tomlfile import read_toml

Purpose = Literal["train", "plan"]

#: Samples of one optimizer step when training and nothing says otherwise, whatever the ranks.
GLOBAL_BATCH = 16
#: Ranks when training and nothing says otherwise.
RANKS = 4
#: Longest sample when training and nothing says otherwise, tokens.
SEQ_LEN = 2048
#: More layers than anyone has; keeps every table of parameters short.
MOST_LAYERS = 10_000


@dataclass(frozen=True)
class _Top:
    """The keys of a job that are no tables."""

    gpus: str | None = None
    ranks: int | None = None
    metrics: str = ""
    explain: bool = False


TABLES = {"model": Model, "layout": Layout, "train": Train, "data": Data, "checkpoint": Checkpoint}

#: Fields that people say without their table: short name -> dotted path.
SHORT = {f.name: f"layout.{f.name}" for f in fields(Layout)} | {
    name: f"train.{name}"
    for name in ("seq_len", "global_batch", "accumulation", "steps", "seed", "dtype")
}

#: Layout fields that count ranks: whoever names one says how the ranks are used.
_DEGREES = ("tp", "cp", "ulysses", "pp", "ep", "etp", "dp_replicate", "dp_shard")

#: Words for layers of chunks: so that the slowest rank has least to do, or as equal as can be.
_STAGES = ("cost", "balanced")

#: Sizes without which there is no model; the others have defaults (see `Model.of`).
_SIZES = ("layers", "hidden", "heads", "vocab")

#: Fields of a model that count something, wherever in it they stand: at least 1.
# fmt: off
_COUNTS = {
    "layers", "hidden", "heads", "vocab", "ffn", "kv_heads", "head_dim", "seq", "window",
    "full_every", "experts", "topk", "every", "shared_ffn", "groups", "topk_groups", "kv_rank",
    "q_rank", "nope_dim", "rope_dim", "v_dim", "original",
}
#: And those that may count nothing.
_COUNTS_OR_NONE = {"shared", "first_dense"}
# fmt: on


def job_paths() -> dict[str, Any]:
    """Dotted path -> type of everything that a job file may say."""
    paths = {"model": str} | get_type_hints(_Top)
    for table, cls in TABLES.items():
        paths |= _paths(cls, table)
    return paths


def _paths(cls: type, where: str) -> dict[str, Any]:
    paths = {}
    for name, kind in get_type_hints(cls).items():
        paths[f"{where}.{name}"] = kind
        if inner := _dataclass_of(kind):
            paths |= _paths(inner, f"{where}.{name}")
    return paths


def _dataclass_of(kind: Any) -> type | None:
    """The dataclass in a field's type, `MoE` in `MoE | None`."""
    return next((k for k in (kind, *get_args(kind)) if is_dataclass(k)), None)


def read_job(
    purpose: Purpose,
    file: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    ranks: int | None = None,
    model: str | None = None,
    gpus: str | None = None,
    world: int | None = None,
) -> Job:
    """A complete job.

    Args:
        purpose: "train" or "plan"; decides the defaults.
        file: a TOML file; or a checkpoint (or a folder of them, then its newest): its own job,
            resumed from it.
        overrides: dotted path (or short name: "tp", "seq_len") -> value, or its text. Stronger
            than the file; a model named here replaces the whole [model] table of the file.
        ranks, model, gpus: the same as overrides of these names.
        world: ranks that a launcher has already started; the job must be for as many.

    Raises:
        UserError: everything that is wrong with file, names, types, layout and batch. Whether
            the parts suit each other is for `plait.rules.check`.
    """
    job, findings = draft_job(purpose, file, overrides, ranks, model, gpus, world)
    if findings:
        raise UserError(findings)
    assert job is not None
    return job


def draft_job(
    purpose: Purpose,
    file: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    ranks: int | None = None,
    model: str | None = None,
    gpus: str | None = None,
    world: int | None = None,
) -> tuple[Job | None, list[Finding]]:
    """As `read_job`, without stopping: the job and what is wrong with it.

    With findings the job is a stand-in, in which what was wrong counts as not given: good for
    the rules to find further problems in it, and for nothing else. None: there is no model.
    """
    made = draft(purpose, file, overrides, ranks, model, gpus, world)
    return made.job, made.findings


@dataclass(frozen=True)
class Draft:
    """A job as far as it could be read.

    Attributes:
        job: a stand-in where there are findings (see `draft_job`).
        findings: what is wrong.
        world: ranks, where they are known.
        degrees: whether the degrees of the job's layout are those that were meant.
    """

    job: Job | None
    findings: list[Finding]
    world: int | None = None
    degrees: bool = False

    @property
    def understood(self) -> bool:
        """Nothing is wrong but that the layout is illegal: it can be described."""
        return self.job is not None and all(f.rule in ILLEGAL for f in self.findings)


def draft(
    purpose: Purpose,
    file: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    ranks: int | None = None,
    model: str | None = None,
    gpus: str | None = None,
    world: int | None = None,
) -> Draft:
    """As `draft_job`, with what is known of a layout that is illegal."""
    findings: list[Finding] = []
    said = {"ranks": ranks, "model": model, "gpus": gpus}
    overrides = (overrides or {}) | {k: v for k, v in said.items() if v is not None}
    given = {}
    if file is not None and Path(file).is_dir():
        given = _resumed(Path(file), overrides, findings)
    elif file is not None:
        given = read_toml(Path(file), findings)
    readable = not findings
    _override(given, overrides, findings)

    tables = {name: given.pop(name, {}) for name in TABLES}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            findings.append(error(name, table, f"{table!r} is not a table"))
            tables[name] = {}
    top = _Top(**_top_fields(given, findings))
    if not readable:
        # What is missing may stand in the file, and what does not go together with it, too.
        for name, cls in TABLES.items():
            check_fields(cls, tables[name], name, findings)
        return Draft(None, findings)
    spec = _model(tables["model"], purpose, findings)
    cluster = _attempt(lambda: presets.cluster(top.gpus), findings) if top.gpus else None
    stages = _stages_word(tables["layout"], findings)
    size = _world(purpose, top, cluster, world, tables["layout"], findings)
    layout, whole = _layout(purpose, size, tables["layout"], _start_default(given, world), findings)
    train = Train(**_positive(check_fields(Train, tables["train"], "train", findings), findings))
    data = Data(**check_fields(Data, tables["data"], "data", findings))
    kept = Checkpoint(**check_fields(Checkpoint, tables["checkpoint"], "checkpoint", findings))
    if spec is None:
        return Draft(None, findings, size)

    train = _train_defaults(purpose, train, spec)
    micro = layout.micro_batch if "micro_batch" in tables["layout"] else None
    batch = _batch(purpose, layout.dp, micro, train, findings) if whole else None
    if batch is None:
        micro, accumulation = layout.micro_batch, min(train.accumulation or 1, LARGEST)
        batch = Batch(micro, micro * layout.dp * accumulation, accumulation)
    train = replace(train, global_batch=batch.global_, accumulation=batch.accumulation)
    layout = replace(layout, micro_batch=batch.micro)
    if whole and stages == "cost":
        layout = replace(layout, stages=by_cost(spec, layout, train.seq_len))
    elif whole and stages == "balanced":
        layout = replace(layout, stages=balanced(spec.layers, layout.pp * layout.vpp))
    job = Job(spec, layout, train, data, kept, cluster, top.metrics, top.explain)
    return Draft(job, findings, size, layout.world == size)


def _attempt(read: Callable[[], Any], findings: list[Finding]) -> Any:
    """What `read` returns, or None when the user erred; the errors go into `findings`."""
    try:
        return read()
    except UserError as problem:
        findings += problem.findings
        return None


# ------------------------------------------------------------------------------------------
# File and overrides


def _resumed(folder: Path, overrides: Mapping[str, Any], findings: list[Finding]) -> dict[str, Any]:
    """The job of a checkpoint, set to go on from it.

    Whoever names a degree or the ranks says anew how the ranks are used: only the ZeRO stage and
    what is recomputed stay. Then, or with a part of the batch named, the ranks share it anew.
    """
    before = len(findings)
    folder = _attempt(lambda: saved.find(folder), findings)
    told = _attempt(lambda: saved.about(folder), findings) if folder else None
    given = (told or {}).get("job", {})
    if len(findings) == before and not (given and isinstance(given, dict)):
        findings.append(error(str(folder), None, "the checkpoint does not say its job"))
    if len(findings) > before:
        return {}
    names = {SHORT.get(k.replace("-", "_"), k) for k in overrides}
    layout, train = given.get("layout", {}), given.get("train", {})
    anew = bool(names & {"ranks", "gpus", *(f"layout.{d}" for d in _DEGREES)})
    if anew:
        given["layout"] = layout = {k: layout[k] for k in ("zero", "recompute") if k in layout}
    if anew or names & {"train.global_batch", "train.accumulation", "layout.micro_batch"}:
        layout.pop("micro_batch", None)
        train.pop("accumulation", None)
    given.setdefault("checkpoint", {})["resume"] = str(folder)
    return given


def _override(given: dict[str, Any], overrides: Mapping[str, Any], findings: list[Finding]) -> None:
    """Put dotted paths into the nested dicts, the model's name first: it clears the table."""
    if "model" in overrides:
        given["model"] = {"name": overrides["model"]}
    for key, value in overrides.items():
        path = key.replace("-", "_")
        *tables, name = SHORT.get(path, path).split(".")
        if path == "model":
            continue
        if tables and tables[0] not in TABLES:
            known = job_paths()
            findings.append(_unknown(path, value, known))
            continue
        inner = given
        for table in tables:
            if not isinstance(inner.get(table), dict):
                inner[table] = {}
            inner = inner[table]
        inner[name] = value


def _unknown(path: str, value: Any, known: Iterable[str]) -> Finding:
    match = closest(path, known)
    return error(path, value, "no such key", match, "unknown-key")


def _top_fields(given: Mapping[str, Any], findings: list[Finding]) -> dict[str, Any]:
    known = {f.name for f in fields(_Top)}
    for key in given.keys() - known:
        # A key that belongs into a table, or into none.
        known_keys = SHORT | {name: name for name in (*known, *TABLES)}
        match = known_keys.get(closest(key, known_keys))
        findings.append(error(key, given[key], "no such key", match, "unknown-key"))
    return check_fields(_Top, {k: v for k, v in given.items() if k in known}, "", findings)


# ------------------------------------------------------------------------------------------
# Model


def _model(given: Mapping[str, Any], purpose: Purpose, findings: list[Finding]) -> Model | None:
    """The model by name, by its fields, or by a name and what differs from it."""
    before = len(findings)
    given = dict(given)
    stated = all(size in given for size in _SIZES)
    name = given.pop("name", "tiny" if purpose == "train" and not stated else None)
    base = None
    if name is not None and not isinstance(name, str):
        findings.append(error("model.name", name, f"{name!r} is not a text"))
    elif name is not None:
        unknown: list[Finding] = []
        base = _attempt(lambda: presets.model(name), unknown)
        if not stated:
            findings += unknown
    elif not stated:
        missing = [f"model.{size}" for size in _SIZES if size not in given]
        message = f"a model needs a name, or its sizes: {', '.join(missing)} missing"
        findings.append(error("model", None, message, rule="no-model"))
    told = _model_fields(Model, given, base, "model", findings)
    if len(findings) > before:
        return None
    if base is not None:
        return replace(base, **told)
    if "head_dim" not in told and told["hidden"] % told["heads"]:
        message = f"hidden {told['hidden']} is no multiple of {told['heads']} heads"
        legal = max(1, round(told["hidden"] / told["heads"])) * told["heads"]
        findings.append(error("model.hidden", told["hidden"], message, legal))
        return None
    return Model.of(name or "custom", **told)


def _model_fields(
    cls: type, given: Mapping[str, Any], base: Any, where: str, findings: list[Finding]
) -> dict[str, Any]:
    """The given fields of a model or of a table in it, which `base` completes."""
    hints = get_type_hints(cls)
    flat, nested = {}, {}
    for key, value in given.items():
        inner, path = _dataclass_of(hints.get(key)), f"{where}.{key}"
        if inner is None or value == "none":
            flat[key] = value
        elif not isinstance(value, Mapping):
            findings.append(error(path, value, f"{value!r} is not a table"))
        else:
            known = getattr(base, key, None)
            told = _model_fields(inner, value, known, path, findings)
            whole = (asdict(known) if known else {}) | told
            required = [f.name for f in fields(inner) if f.default is MISSING]
            missing = [name for name in required if name not in {*whole, *value}]
            if missing:
                names = ", ".join(f"{path}.{name}" for name in missing)
                findings.append(error(path, dict(value), f"incomplete: {names} missing"))
            elif all(name in whole for name in required):
                nested[key] = inner(**whole)
    result = check_fields(cls, flat, where, findings)
    for key, value in result.items():
        low = 1 if key in _COUNTS else 0
        if key in _COUNTS | _COUNTS_OR_NONE and value is not None and value < low:
            findings.append(error(f"{where}.{key}", value, f"{key} {value} is below {low}", low))
        if key == "layers" and value > MOST_LAYERS:
            message = f"more than {MOST_LAYERS} layers"
            findings.append(error(f"{where}.{key}", value, message, MOST_LAYERS))
    if result.get("qk_norm") == "none":
        result["qk_norm"] = None
    return result | nested


# ------------------------------------------------------------------------------------------
# Ranks, layout, batch


def _world(
    purpose: Purpose,
    top: _Top,
    cluster: Cluster | None,
    world: int | None,
    layout: Mapping[str, Any],
    findings: list[Finding],
) -> int | None:
    """Number of ranks; None when it is not known."""
    ranks = top.ranks
    if ranks is not None and ranks < 1:
        findings.append(error("ranks", ranks, f"{ranks} ranks: at least one is needed", 1))
        return None
    if cluster is not None and ranks not in (None, cluster.devices):
        message = f"{ranks} ranks do not match the {cluster.devices} devices of {cluster.name}"
        findings.append(error("ranks", ranks, message, cluster.devices, "world-size"))
        return None
    ranks = cluster.devices if cluster is not None else ranks
    if world is not None and ranks not in (None, world):
        message = f"the job is for {ranks} ranks, the launcher started {world}"
        findings.append(error("ranks", ranks, message, world, "world-size"))
        return None
    ranks = world if world is not None else ranks
    if ranks is None and not top.gpus:
        if purpose == "train":
            return RANKS
        message = "on how many devices? --gpus GPU:COUNT (h100:64), or --ranks COUNT"
        findings.append(error("gpus", None, message, rule="no-devices"))
    return ranks


def _start_default(given: Mapping[str, Any], world: int | None) -> bool:
    """Nobody said how many ranks there are."""
    return world is None and "ranks" not in given and "gpus" not in given


def _layout(
    purpose: Purpose,
    world: int | None,
    given: Mapping[str, Any],
    free: bool,
    findings: list[Finding],
) -> tuple[Layout, bool]:
    """The layout, and whether it is whole; if not, it holds only what was given."""
    told = check_fields(Layout, given, "layout", findings)
    sound = told.keys() == {k for k in given if k in SHORT}
    if purpose == "train" and free and not any(d in given for d in _DEGREES):
        told["tp"] = 2
    if sound and world is not None:
        layout = _attempt(lambda: Layout.fill(world, **told), findings)
        if layout is not None:
            return layout, True
        # Where only the experts' grid is wrong, the dense one is known.
        dense = {k: v for k, v in told.items() if k not in ("ep", "etp")}
        layout = _attempt(lambda: Layout.fill(world, **dense), [])
        if layout is not None:
            return replace(
                layout, **{k: max(1, told[k]) for k in ("ep", "etp") if k in told}
            ), False
    counts = {
        k: v for k, v in told.items() if not isinstance(v, int) or 0 < v <= LARGEST or k == "zero"
    }
    sound_ones = sound_pipeline(counts) | sound_words(counts)
    several = ("schedule", "vpp", "stages", "cp_method", "recompute")
    counts = {k: v for k, v in counts.items() if k not in several}
    # Whether sequence parallelism suits the batch is not known without a batch; and whether a
    # degree suits the ranks has been said, if they are known.
    copies = {"dp_replicate": world or 1, "dp_shard": 1}
    counts |= sound_ones | copies | {"sequence_parallel": False}
    return Layout(**counts), False


def _stages_word(given: dict[str, Any], findings: list[Finding]) -> str | None:
    """How layers are to be shared out, taken out of a layout's table; None: it holds numbers."""
    said = given.get("stages")
    if not isinstance(said, str) or said == "none" or any(c.isdecimal() for c in said):
        return None
    del given["stages"]
    if said not in _STAGES:
        message = f"{said!r} is neither layers of each chunk (5,6,6,5) nor cost nor balanced"
        findings.append(error("layout.stages", said, message, closest(said, _STAGES) or "cost"))
    return said


def _positive(told: dict[str, Any], findings: list[Finding]) -> dict[str, Any]:
    """Without the numbers of the batch that are below 1."""
    for name in ("seq_len", "global_batch", "accumulation"):
        value = told.get(name)
        if value is not None and value < 1:
            findings.append(error(f"train.{name}", value, f"{name} {value} is below 1", 1))
            del told[name]
    return told


def _train_defaults(purpose: Purpose, train: Train, model: Model) -> Train:
    seq_len = train.seq_len or (min(model.seq, SEQ_LEN) if purpose == "train" else model.seq)
    train = replace(train, seq_len=seq_len)
    if purpose == "plan":
        dtype = "bfloat16" if train.dtype == "auto" else train.dtype
        wide = "float64" if dtype == "float64" else "float32"
        grad_dtype = wide if train.grad_dtype == "auto" else train.grad_dtype
        train = replace(train, dtype=dtype, grad_dtype=grad_dtype)
    return train


def _batch(
    purpose: Purpose, dp: int, micro: int | None, train: Train, findings: list[Finding]
) -> Batch | None:
    total, accumulation = train.global_batch, train.accumulation
    if purpose == "train" and total is None and None in (micro, accumulation):
        total = GLOBAL_BATCH
    if purpose == "plan" and micro is None and None in (total, accumulation):
        micro = 1
    return _attempt(lambda: Batch.fill(dp, micro, total, accumulation), findings)
