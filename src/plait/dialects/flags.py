"""Command lines of a target: words into settings, by the names and the arity of its flags."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from plait.dialects.settings import Setting


@dataclass(frozen=True)
class Word:
    """A word of a command, variables put in.

    Attributes:
        text: variables that are not known stand as they were written ("$MODEL").
        where: "launch.sh:12".
        open: the variables and substitutions in it that are not known.
    """

    text: str
    where: str = ""
    open: tuple[str, ...] = ()


def settings_of(
    words: Iterable[Word], arity: Mapping[str, str], aliases: Mapping[str, str] | None = None
) -> tuple[list[Setting], list[Word]]:
    """Flags with their values, and the words that belong to none.

    A flag takes what follows up to the next flag, as many as its arity says; one that is not
    known takes one word, if it is no flag. Negative numbers are values. "--name=value" too.

    Args:
        arity: flag -> "0" (a switch: value True), "1", "?" (one or none), "*" and "+" (any
            number: a list of texts).
        aliases: other spelling -> flag ("-tp" -> "--tensor-parallel-size").
    """
    found: list[Setting] = []
    loose: list[Word] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not _is_flag(word.text):
            loose.append(word)
            continue
        name, equals, text = word.text.partition("=")
        name = (aliases or {}).get(name, name)
        name = name if name in arity else name.replace("_", "-")
        takes = arity.get(name, "?")
        if equals:
            value = [text] if takes in "*+" else text
            found.append(Setting(name, value, word.where, word.open))
            continue
        most = {"0": 0, "1": 1, "?": 1}.get(takes, len(rest))
        values: list[Word] = []
        while rest and len(values) < most and not _is_flag(rest[0].text):
            values.append(rest.pop(0))
        opened = tuple(name for v in values for name in v.open)
        texts = [v.text for v in values]
        value = texts if takes in "*+" else texts[0] if texts else True
        found.append(Setting(name, value, word.where, opened))
    return found, loose


def _is_flag(text: str) -> bool:
    """-1 and -1e-5 are values, -tp and --tp are flags."""
    return len(text) > 1 and text[0] == "-" and not (text[1].isdigit() or text[1] == ".")
