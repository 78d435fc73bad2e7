"""`[ ... ]` and `[[ ... ]]`: true, false, or not to be known from a script alone."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from plait.dialects.shell.arithmetic import Unknown
from plait.dialects.shell.words import Value, text_of

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b, "-ne": lambda a, b: a != b, "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b, "-lt": lambda a, b: a < b, "-le": lambda a, b: a <= b,
}  # fmt: skip
_TEXTS = frozenset({"=", "==", "!=", "<", ">", "=~"})


@dataclass(frozen=True)
class Truth:
    """Whether a condition holds; `value` None where it cannot be known, `assumed` where it holds
    if nothing is set and given from outside."""

    value: bool | None
    assumed: bool = False

    def __invert__(self) -> "Truth":
        return Truth(None if self.value is None else not self.value, self.assumed)


UNKNOWN = Truth(None)


def settled(value: Value) -> tuple[str | None, bool]:
    """The text of a value and whether that is an assumption; None where it is not known."""
    pieces = [piece for piece in value if not piece.missing]
    if any(piece.open for piece in pieces):
        return None, False
    assumed = len(pieces) < len(value) or any(piece.assumed for piece in pieces)
    return text_of(tuple(pieces)), assumed


def decide(
    words: list[Value], double: bool, number: Callable[[str], int], is_set: Callable[[str], bool]
) -> Truth:
    """The truth of a test.

    Args:
        words: what stands between the brackets. double: of `[[ ]]`.
    """
    return _Test(words, double, number, is_set).whole()


class _Test:
    def __init__(
        self,
        words: list[Value],
        double: bool,
        number: Callable[[str], int],
        is_set: Callable[[str], bool],
    ):
        self.words, self.double, self.number, self.is_set = words, double, number, is_set
        self.at = 0
        self.depth = 0

    def peek(self, ahead: int = 0) -> str | None:
        place = self.at + ahead
        return text_of(self.words[place]) if place < len(self.words) else None

    def whole(self) -> Truth:
        if not self.words:
            return Truth(False)
        truth = self.either()
        return truth if self.at >= len(self.words) else UNKNOWN

    def either(self) -> Truth:
        self.depth += 1
        if self.depth > 50:
            self.at = len(self.words)
            return UNKNOWN
        truth = self.both()
        while self.peek() in ("||", "-o"):
            self.at += 1
            other = self.both()
            if truth.value is not True:
                truth = _or(truth, other)
        self.depth -= 1
        return truth

    def both(self) -> Truth:
        truth = self.one()
        while self.peek() in ("&&", "-a"):
            self.at += 1
            truth = ~_or(~truth, ~self.one())
        return truth

    def one(self) -> Truth:
        turned = False
        while self.peek() == "!" and self.peek(1) not in (None, *_TEXTS, *_NUMBERS):
            self.at += 1
            turned = not turned
        truth = self.primary()
        return ~truth if turned else truth

    def primary(self) -> Truth:
        word = self.peek()
        if word is None:
            return UNKNOWN
        if word == "(" and self.peek(1) is not None:
            self.at += 1
            truth = self.either()
            self.at += self.peek() == ")"
            return truth
        sign = self.peek(1)
        if sign in _TEXTS or sign in _NUMBERS:
            left, right = self.words[self.at], self.words[self.at + 2 : self.at + 3]
            self.at += 2 + len(right)
            if sign == "=~":
                # A regular expression of brackets comes in several words.
                while self.peek() not in (None, "&&", "||", ")"):
                    self.at += 1
                    right = []
            return self.compared(left, sign or "", right[0]) if right else UNKNOWN
        if re.fullmatch(r"-[a-zA-Z]", word) and sign is not None:
            value = self.words[self.at + 1]
            self.at += 2
            return self.unary(word, value)
        value = self.words[self.at]
        self.at += 1
        text, assumed = settled(value)
        return UNKNOWN if text is None else Truth(bool(text), assumed)

    def unary(self, sign: str, value: Value) -> Truth:
        text, assumed = settled(value)
        if text is None:
            return UNKNOWN
        if sign in ("-z", "-n"):
            return Truth((text == "") == (sign == "-z"), assumed)
        if sign == "-v":
            known = self.is_set(text)
            return Truth(known, not known)
        return UNKNOWN  # of files and terminals

    def compared(self, left: Value, sign: str, right: Value) -> Truth:
        (a, first), (b, second) = settled(left), settled(right)
        if a is None or b is None:
            return UNKNOWN
        assumed = first or second
        if sign in _NUMBERS:
            if not self.double and not (a.strip() and b.strip()):
                return Truth(False, True)
            try:
                return Truth(_NUMBERS[sign](self.number(a), self.number(b)), assumed)
            except Unknown:
                return UNKNOWN
        if sign == "=~":
            return Truth(re.search(b, a) is not None, assumed) if b.isalnum() else UNKNOWN
        if sign in ("<", ">"):
            return Truth(a < b if sign == "<" else a > b, assumed)
        if self.double and b.count("*") < 4:
            same = fnmatchcase(a, b)
        else:
            same = a == b
        return Truth(same == (sign != "!="), assumed)


def _or(a: Truth, b: Truth) -> Truth:
    for truth in (a, b):
        if truth.value:
            return truth
    if a.value is None or b.value is None:
        return UNKNOWN
    return Truth(False, a.assumed or b.assumed)
