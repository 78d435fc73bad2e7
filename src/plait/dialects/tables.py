"""Long lists of facts about targets, which lie as data in `known/`: flags, keys, presets."""

import json
from importlib.resources import files
from typing import Any


def text_of(name: str) -> str:
    """A file of `known/`, by its name."""
    return files("plait.dialects").joinpath("known", name).read_text("utf-8")


def rows(name: str) -> list[list[str]]:
    """The words of each line; lines that begin with # are comments."""
    lines = text_of(name).splitlines()
    return [line.split() for line in lines if line.strip() and not line.startswith("#")]


def first_words(name: str) -> tuple[str, ...]:
    """The first word of each line."""
    return tuple(row[0] for row in rows(name))


def tree(name: str) -> Any:
    """What a JSON file holds."""
    return json.loads(text_of(name))
