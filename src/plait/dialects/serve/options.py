"""Options of serve commands: flags as argparse takes them, files of options, numbers with a unit,
the model that a name is of."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isfinite, prod
from pathlib import Path
from typing import Any

from plait.cost.serving import Serving
from plait.dialects import tables
from plait.dialects.flags import Word, settings_of
from plait.dialects.huggingface_names import named, nearest_name
from plait.dialects.launch import AT_START, Told, note, refused
from plait.dialects.serve.words import Serve, options
from plait.dialects.settings import Setting, Settings
from plait.dialects.source import LARGEST, Source
from plait.dialects.tree import read_yaml
from plait.spec.findings import Finding, UserError, error
from plait.spec.jobfile import draft
from plait.spec.layout import LARGEST as MOST
from plait.spec.model import Model


@dataclass(frozen=True)
class Flags:
    """The flags of an engine.

    Attributes:
        arity: flag -> "0", "1", "?", "*" or "+". aliases: other spelling -> flag.
        short: whether a flag may be cut short as long as it is the only one that begins so, as
            argparse does it.
    """

    arity: Mapping[str, str]
    aliases: Mapping[str, str]
    short: bool = True


@lru_cache
def flags(name: str, short: bool = True) -> Flags:
    """The flags in `known/<name>.txt`: flag, arity, and the flag that it is another name of."""
    rows = tables.rows(f"{name}.txt")
    arity = {row[0]: row[1] for row in rows}
    return Flags(arity, {row[0]: row[2] for row in rows if len(row) > 2}, short)


@lru_cache
def names(name: str) -> frozenset[str]:
    """The words in `known/<name>.txt`, one a line."""
    return frozenset(tables.first_words(f"{name}.txt"))


def read(
    serve: Serve, known: Flags, positional: str, switches: Iterable[str] = ()
) -> list[Setting]:
    """The options of a server.

    Args:
        positional: the option that the first loose word is. switches: that no version knows any
            more, and that took no value.
    """
    words = [_spelled(word, known) for word in serve.words]
    more = {w.text.partition("=")[0]: "1" for w in words if _is_dotted(w.text)}
    more |= dict.fromkeys(switches, "0")
    said, loose = settings_of(words, {**known.arity, **more}, known.aliases)
    said = [_switched(s, known) for s in said]
    said += [replace(s, name=canonical(s.name, known)) for s in serve.settings]
    if loose:
        said.insert(0, Setting(positional, loose[0].text, loose[0].where, loose[0].open))
    return said


def _spelled(word: Word, known: Flags) -> Word:
    """A word, its flag by its whole name: dashes, and what was cut short."""
    if not word.text.startswith("-") or word.text[1:2].isdigit():
        return word
    name, equals, value = word.text.partition("=")
    if re.fullmatch(r"-O\d", name):
        return replace(word, text=f"-O={name[2:]}")
    base, dot, path = name.partition(".")
    return replace(word, text=canonical(base, known) + dot + path + equals + value)


def canonical(name: str, known: Flags) -> str:
    dashes = name.replace("_", "-") if name.startswith("--") else name
    for spelled in (name, dashes):
        if spelled in known.arity:
            return known.aliases.get(spelled, spelled)
    if known.short and name.startswith("--") and len(name) > 3:
        found = {known.aliases.get(f, f) for f in known.arity if f.startswith(dashes)}
        if len(found) == 1:
            return found.pop()
    return name


def _is_dotted(text: str) -> bool:
    return text.startswith("-") and "." in text.partition("=")[0] and not text[1:2].isdigit()


def _switched(setting: Setting, known: Flags) -> Setting:
    """`--no-x` is the option `--x`, switched off."""
    positive = "--" + setting.name.removeprefix("--no-")
    if setting.name.startswith("--no-") and positive in known.arity and setting.value is True:
        return replace(setting, name=positive, value=False)
    return setting


# ------------------------------------------------------------------------------------------
# Files of options


def options_file(
    name: str,
    serve: Serve,
    source: Source,
    findings: list[Finding],
    known: Flags | None = None,
) -> list[Setting]:
    """The options in a file that a launch names: one that it writes itself, or one beside it.

    What is wrong with it goes to `findings`: it may decide the layout.

    Args:
        known: the flags that its keys are names of, if they are.
    """
    written = dict(serve.files) | {Path(n).name: text for n, text in serve.files.items()}
    text = written.get(name, written.get(Path(name).name))
    try:
        file = Source(text, Path(name).name, Path(name)) if text is not None else _beside(
            source, name
        )  # fmt: skip
        tree = read_yaml(file)
    except UserError as problem:
        missing = all(f.message == "no such file" for f in problem.findings)
        findings += [_left_out(name)] if missing or "$" in name else problem.findings
        return []
    if tree is None:
        return []
    if not isinstance(tree, Mapping):
        findings.append(error(name, None, "holds no options", rule="unreadable-file"))
        return []
    said = [
        replace(s, open=(s.value,))
        if isinstance(s.value, str) and re.fullmatch(r"\$(\w+|\{\w+\})", s.value) else s
        for s in options(tree, Path(name).name)
    ]  # fmt: skip
    return [replace(s, name=canonical(s.name, known)) for s in said] if known else said


def under_flags(
    serve: Serve,
    known: Flags,
    positional: str,
    switches: Iterable[str],
    source: Source,
    told: Told,
) -> Settings:
    """The options of a server over those of the file that `--config` names; as `read`."""
    said = read(serve, known, positional, switches)
    trouble: list[Finding] = []
    files = [s for s in said if s.name == "--config" and isinstance(s.value, str)]
    if files:
        said = options_file(files[-1].value, serve, source, trouble, known) + said
    settings = Settings(said, told.given)
    settings.findings += trouble
    file_taken(settings, "--config", "a file of options")
    return settings


def several(found: Sequence[Serve], engine: str, prefix: str) -> list[Finding]:
    """A note where a launch starts more servers than the one that is read."""
    if len(found) == 1:
        return []
    words = f"{len(found)} servers are started here; this is the first of them"
    return [note(engine, f"{prefix}-several-servers", words)]


def file_taken(settings: Settings, name: str, means: str) -> None:
    """Marks the option that names a file; a name that is open is said where it is not read."""
    if name in settings:
        settings.taken[name] = (settings.said[name].value, means)


def _left_out(name: str) -> Finding:
    """A file of another machine: the launch is read without it."""
    message = f"{name} is not here to be read: what it says is left out"
    return Finding("warning", "file-not-here", message, name)


def _beside(source: Source, name: str) -> Source:
    """A file by its path, or by its name alone beside the launch: paths are of another machine."""
    try:
        return source.beside(name)
    except UserError:
        if "/" in name and source.path is not None:
            return source.beside(Path(name).name)
        raise


def config(settings: Settings, name: str, aliases: Iterable[str] = ()) -> dict[str, Any]:
    """A table that a flag says as JSON, or key by key (`--compilation-config.mode 3`), with
    dotted keys; what cannot be read is a finding."""
    table: dict[str, Any] = {}
    setting = settings.said.get(name)
    if setting is not None:
        value = setting.value
        if isinstance(value, str) and not setting.open:
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                message = f"{value[:60]!r} is not JSON"
                settings.findings.append(error(f"{setting.where} {name}".strip(), value, message))
        settings.taken[name] = (value, "")
        if isinstance(value, Mapping):
            table |= dotted(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            table["mode"] = value
    for key in list(settings.said):
        base, dot, path = key.partition(".")
        if dot and base in (name, *aliases):
            value = settings.said[key].value
            settings.taken[key] = (value, "")
            table[path.replace("-", "_")] = _json(value)
    return table


def _json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def dotted(tree: Mapping[Any, Any], prefix: str = "", deep: int = 0) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and deep < 8:
            flat |= dotted(value, f"{prefix}{key}.", deep + 1)
        else:
            flat[f"{prefix}{key}"] = value
    return flat


# ------------------------------------------------------------------------------------------
# Values


def take(settings: Settings, name: str, kind: Any, default: Any = None, means: str = "") -> Any:
    """An option that decides no degree: one that is set outside of the file is left at its
    default, with a note."""
    setting = settings.said.get(name)
    if setting is None or not setting.open:
        return settings.take(name, kind, default, means)
    settings.taken[name] = (setting.value, f"{means or 'not known'}: by default")
    message = f"{', '.join(setting.open)} is set outside of the file: {name} is left at its default"
    settings.findings.append(Finding("note", "open-limit", message, name, setting.value))
    return default


def count(settings: Settings, name: str, default: int | None = None, means: str = "") -> int | None:
    """A number that may have a unit: "32k" are 32,000 and "32K" 32,768 (vLLM and SGLang both)."""
    setting = settings.said.get(name)
    if setting is None or setting.open or not isinstance(setting.value, str):
        return take(settings, name, int, default, means)
    text = setting.value.strip()
    units = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
    units |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    if len(text) < 24 and re.fullmatch(r"\d+(\.\d+)?[kmgtKMGT]", text):
        value = float(text[:-1]) * units[text[-1]]
        settings.taken[name] = (int(value), means)
        return int(value) if isfinite(value) else default
    return settings.take(name, int, default, means)


def degree(settings: Settings, name: str, means: str, default: int = 1) -> int:
    """A number of ranks: at least 1, and no more than anyone has. What a person says beside the
    launch is stronger than it, and everything that is derived follows."""
    told = str(settings.told.get(means, ""))
    if told.isascii() and told.isdecimal() and len(told) < 8 and 1 <= int(told) <= MOST:
        if name in settings:
            settings.taken[name] = (int(told), f"{means}, as told")
        return int(told)
    value = settings.take(name, int, default, means)
    if isinstance(value, int) and 1 <= value <= MOST:
        return value
    setting = settings.said.get(name)
    if isinstance(value, int) and setting is not None:
        message = f"{value} is no number of ranks"
        settings.findings.append(error(f"{setting.where} {name}".strip(), value, message, 1))
    return default


def positive(value: int | None) -> int | None:
    return value if value is not None and 0 < value < 10**12 else None


def partition(text: str | None) -> tuple[int, ...] | None:
    """Layers of the stages, as a variable lists them; None where it does not."""
    parts = (text or "").split(",")
    whole = all(p.strip().isdecimal() and len(p.strip()) < 6 for p in parts)
    return tuple(int(p) for p in parts) if text and whole and len(parts) < 10_000 else None


def switch(settings: Settings, name: str, means: str = "", default: bool = False) -> bool:
    return bool(settings.take(name, bool, default, means))


# ------------------------------------------------------------------------------------------
# The model and the devices


def model_of(
    settings: Settings, name: str, told: Told, source: Source
) -> tuple[dict[str, Any], str | None, list[Finding]]:
    """The model's fields, how its weights are stored, and what was assumed of its name."""
    repository = settings.take(name, str, None, "model")
    setting = settings.said.get(name)
    if setting is None or setting.open or not isinstance(repository, str):
        return {}, None, []
    known = named(repository)
    if known is not None:
        found = [known.note] if known.note else []
        if not known.exact and told.model is None:
            found.append(f"its shape is taken to be that of {known.fields.get('model')}")
        notes = [note(repository, "model-by-name", "; ".join(found))] if found else []
        return dict(known.fields), known.weights, notes
    folder = (source.path.parent if source.path else Path()) / repository
    try:
        here = (folder / "config.json").is_file() if len(repository) < 4096 else False
    except (OSError, ValueError):
        here = False
    if here and (folder / "config.json").stat().st_size <= LARGEST:
        return {"model": str(folder)}, None, []
    if told.model is None:
        message = f"no model is known by the name {repository!r}: say --model NAME"
        near = nearest_name(repository)
        settings.findings.append(error("model", repository, message, near, "unknown-model"))
    return {}, None, []


def called(settings: Settings, name: str) -> str:
    """What a launch calls its model; "" where it leaves it open."""
    setting = settings.said.get(name)
    return str(setting.value) if setting is not None and not setting.open else ""


def positions(settings: Settings, name: str) -> int | None:
    """Positions that the model's configuration allows, by its name."""
    known = named(called(settings, name)) if "model" not in settings.told else None
    return known.longest if known else None


def shape(fields: Mapping[str, Any], told: Told) -> Model | None:
    """The model, where it is known by now."""
    if told.model is not None:
        return told.model
    own = {k: v for k, v in fields.items() if k == "model" or k.startswith("model.")}
    made = draft("plan", None, own | {"ranks": 1}) if own else None
    return made.job.model if made and made.job else None


def whole_fields(
    own: Mapping[str, Any], serving: Serving, told: Told, engine: str
) -> tuple[dict[str, Any], list[Finding]]:
    """What a job file would say of a layout, and of how often it fits on the ranks that there
    are."""
    fields: dict[str, Any] = {f"layout.{name}": value for name, value in own.items()}
    fields["layout.sequence_parallel"] = False
    ranks, notes = prod(own[axis] for axis in ("tp", "pp", "cp", "dp_shard", "dp_replicate")), []
    if told.world and told.world > ranks and told.world % ranks == 0:
        times = told.world // ranks
        fields["layout.dp_replicate"] *= times
        words = f"this takes {ranks} of {told.world} devices: {times} servers are counted"
        notes.append(note(engine, "replicas-assumed", words, times))
        ranks = told.world
    fields["ranks"] = ranks
    if serving.max_len is not None:
        fields["train.seq_len"] = serving.max_len
    fields["train.dtype"] = serving.dtype
    return fields, notes


#: dtypes of serve commands -> plait's.
DTYPES = {
    "bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32",
    "float": "float32",
}  # fmt: skip

#: What engines call a way of storing weights -> a scheme of `cost.serving_memory`.
SCHEMES = {
    "fp8": "fp8", "awq": "awq", "awq_marlin": "awq", "auto_awq": "awq", "gptq": "gptq",
    "gptq_marlin": "gptq", "auto_gptq": "gptq", "bitsandbytes": "bnb-4bit", "fbgemm_fp8": "fp8",
    "modelopt": "fp8", "modelopt_fp8": "fp8", "modelopt_fp4": "nvfp4", "nvfp4": "nvfp4",
    "nvfp4_online": "nvfp4", "petit_nvfp4": "nvfp4", "w8a8_fp8": "fp8", "w8a8_int8": "int8",
    "ptpc_fp8": "fp8", "mxfp4": "mxfp4", "mxfp8": "fp8", "deepspeedfp": "fp8",
    "moe_wna16": "gptq", "experts_int8": "int8", "int8_per_channel_weight_only": "int8",
    "fp8_per_tensor": "fp8", "fp8_per_block": "fp8-block", "gpt_oss_mxfp4": "mxfp4-experts",
}  # fmt: skip


def weights_of(said: str | None, stored: str | None) -> str | None:
    """The scheme of the weights: as they are stored, else what the engine makes of them."""
    return stored or SCHEMES.get((said or "").lower())


def lost(settings: Settings, gone: Mapping[str, str], engine: str) -> list[Finding]:
    """What is refused of options that this version does not have any more."""
    found = []
    for name in settings.said.keys() & gone.keys():
        settings.taken[name] = (settings.said[name].value, "gone")
        words = f"{name} is gone" + (f": {gone[name]}" if gone[name] else "")
        rule = f"{engine.lower().replace('-', '')}-lost-option"
        found.append(refused(engine, rule, AT_START, words, name))
    return sorted(found, key=lambda f: f.message)


def ambiguous(settings: Settings, known: Flags, engine: str) -> list[Finding]:
    """What is refused of flags that are cut so short that they could be several."""
    found = []
    for name in [n for n in settings.said if n.startswith("--") and n not in known.arity]:
        could = sorted({known.aliases.get(f, f) for f in known.arity if f.startswith(name)})
        if len(name) > 3 and len(could) > 1 and name not in settings.taken:
            settings.taken[name] = (settings.said[name].value, "ambiguous")
            words = f"{name} could be {', '.join(could[:4])}"
            rule = f"{engine.lower().replace('-', '')}-ambiguous-option"
            found.append(refused(engine, rule, AT_START, words, name))
    return found


def unread(settings: Settings, known: Flags) -> set[str]:
    """Names of options that the engine knows: its flags, and keys of its tables."""
    tables = {n for n in settings.said if n.partition(".")[0] in {*known.arity, *known.aliases}}
    return {*known.arity, *tables}
