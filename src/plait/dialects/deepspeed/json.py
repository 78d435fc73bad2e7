"""DeepSpeed's configuration as text: JSON, or the Hjson that DeepSpeed's own reader takes too."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from plait.dialects import tables
from plait.dialects.launch import AT_START, changed, refused
from plait.dialects.settings import Setting
from plait.dialects.source import Source
from plait.dialects.tree import DEEPEST, bounded
from plait.spec.findings import Finding, UserError, error

_TARGET = "DeepSpeed"
#: Sections whose class refuses what it does not know (runtime/config_utils.py: extra="forbid").
STRICT = ("zero_optimization", "fp16", "bf16", "bfloat16", "compile", "tensor_parallel")
_TOKEN = re.compile(
    r'\s*(?:(?:#|//)[^\n]*\n?|/\*.*?\*/)|\s*([{}\[\],:])|\s*("(?:[^"\\\n]|\\.)*")|\s*((?:\$\(\([^\n]*?\)\)|\$\([^)\n]*\)|\$\{[^}\n]*\}|[^\s{}\[\],:"#])+)',
    re.DOTALL,
)


@lru_cache(maxsize=1)
def known() -> tuple[str, ...]:
    return tables.first_words("deepspeed.txt")


def known_of(names: Iterator[str]) -> list[str]:
    """The keys that DeepSpeed knows, with those of `names` that stand in a section of which it
    takes whatever there is."""
    plain = [key for key in known() if not key.endswith(".*")]
    free = tuple(key[:-1] for key in known() if key.endswith(".*"))
    sections = {key.rpartition(".")[0] for key in known()} | {f[:-1] for f in free}
    return [*plain, *sections, *(name for name in names if name.startswith(free))]


class Placeholder(str):
    """A bare word where a value belongs, to be filled in by a script: `CONFIG_BATCH_SIZE`."""


def read(source: Source) -> tuple[dict[str, Any], list[Finding]]:
    """The configuration that a file holds, and what DeepSpeed or Hugging Face say to its form.

    Raises:
        UserError: no object of JSON, not even of a lenient reader.
    """
    where = str(source.path or source.name)
    twice: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: set[str] = set()
        for key, _ in items:
            if key in seen:
                twice.append(key)
            seen.add(key)
        return dict(items)

    found: list[Finding] = []
    try:
        tree = json.loads(source.text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as problem:
        tree = _Lenient(source.text).whole()
        if tree is None:
            said = "nested too deeply" if isinstance(problem, RecursionError) else str(problem)
            message = f"not valid JSON: {said}"
            raise UserError([error(where, None, message, rule="unreadable-file")]) from None
        message = f"{source.name} is no strict JSON ({problem}): DeepSpeed's reader takes Hjson, "
        message += "that of Hugging Face (json.load) refuses it"
        found.append(changed(_TARGET, "deepspeed-not-json", message))
    tree = bounded(tree, source)
    if not isinstance(tree, dict):
        message = "not a DeepSpeed configuration: its outermost value is no object"
        raise UserError([error(where, None, message, rule="unreadable-file")])
    if twice:
        names = ", ".join(sorted(set(twice))[:5])
        message = f"keys that stand twice: {names}"
        found.append(refused(_TARGET, "deepspeed-duplicate-keys", AT_START, message))
    return tree, found


def settings_of(tree: Mapping[str, Any], where: str) -> Iterator[Setting]:
    """A setting for each leaf by its dotted path; placeholders and variables are open."""
    from plait.dialects.tree import flat

    for setting in flat(tree, where):
        value = setting.value
        opened: tuple[str, ...] = ()
        if isinstance(value, Placeholder):
            opened = (str(value),)
        elif isinstance(value, str) and re.search(r"\$\{?\w|\$\(|\{\{|<[A-Z_]+>", value):
            opened = (value[:60],)
        yield Setting(setting.name, value, where, opened)


class _Lenient:
    """JSON with comments, commas too many, and bare words."""

    def __init__(self, text: str):
        self.tokens: list[str] = []
        at = 0
        text = text.rstrip() + "\n"
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None or match.end() == at:
                break
            token = match[1] or match[2] or match[3]
            if token:
                self.tokens.append(token)
            at = match.end()
        self.complete = not text[at:].strip()
        self.at = 0

    def whole(self) -> Any:
        """The value; None where it is none."""
        try:
            value = self.value(0)
        except (ValueError, IndexError):
            return None
        return value if self.complete and self.at == len(self.tokens) else None

    def next(self) -> str:
        token = self.tokens[self.at]
        self.at += 1
        return token

    def value(self, depth: int) -> Any:
        if depth > DEEPEST:
            raise ValueError
        token = self.next()
        if token == "{":
            return self.members(depth)
        if token == "[":
            items = []
            while self.tokens[self.at] != "]":
                items.append(self.value(depth + 1))
                self.at += self.tokens[self.at] == ","
            self.at += 1
            return items
        if token in "}],:":
            raise ValueError
        try:
            return json.loads(token)
        except ValueError:
            return {"True": True, "False": False, "None": None}.get(token, Placeholder(token))

    def members(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self.tokens[self.at] != "}":
            key = self.next()
            if key in "{}[],:" or self.next() != ":":
                raise ValueError
            found[json.loads(key) if key[0] == '"' else key] = self.value(depth + 1)
            self.at += self.tokens[self.at] == ","
        self.at += 1
        return found
