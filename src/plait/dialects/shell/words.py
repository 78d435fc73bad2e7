"""Words of the shell with their variables put in, as far as these are known."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase, translate

from plait.dialects.flags import Word
from plait.dialects.shell.arithmetic import Unknown, evaluate
from plait.dialects.shell.syntax import parse_phrase
from plait.dialects.shell.tree import Name, Output, Part, Phrase, Sum, Text
from plait.dialects.source import Source
from plait.spec.findings import UserError, error

#: Letters of one value, and letters and steps in all, of a script that is read to its end.
LONGEST, MOST, STEPS = 1 << 17, 1 << 23, 80_000
#: Letters of a value in which patterns are looked for.
_MATCHED = 4096


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of letters of a value.

    Attributes:
        open: what in it is not known; its text is then as it was written.
        missing: it is open because nothing sets it: the shell would make it empty.
        assumed: it is known under the assumption that nobody gives arguments.
    """

    text: str
    where: str = ""
    open: tuple[str, ...] = ()
    missing: bool = False
    assumed: bool = False


Value = tuple[Piece, ...]


def text_of(value: Value) -> str:
    return "".join(piece.text for piece in value)


def word_of(value: Value) -> Word:
    opened = dict.fromkeys(name for piece in value for name in piece.open)
    return Word(text_of(value), next((p.where for p in value if p.where), ""), tuple(opened))


def is_open(value: Value) -> bool:
    return any(piece.open for piece in value)


def is_empty(value: Value) -> bool:
    """Whether the shell would take it for empty, if nothing comes from outside."""
    return all(piece.missing or not piece.text for piece in value)


@dataclass
class Budget:
    """What may be spent on a script. A hostile one ends here."""

    source: Source
    letters: int = 0
    steps: int = 0

    def spend(self, letters: int = 0) -> None:
        self.letters += letters
        self.steps += 1
        if self.letters > MOST or self.steps > STEPS:
            raise self.error("it would take too long to read: it loops, or repeats itself")

    def check(self, value: Value) -> Value:
        if sum(len(piece.text) for piece in value) > LONGEST:
            raise self.error(f"a variable grows beyond {LONGEST} letters")
        return value

    def error(self, message: str) -> UserError:
        place = str(self.source.path or self.source.name)
        return UserError([error(place, None, message, rule="unreadable-file")])


@dataclass
class Scope:
    """Variables as they stand at a place of a script. A list is a mapping from its keys."""

    values: dict[str, Value | dict[str, Value]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    #: The arguments; None where the script's own are not known.
    arguments: list[Value] | None = None

    def copy(self) -> "Scope":
        return Scope(dict(self.values), set(self.exported), self.arguments)

    def child(self, arguments: list[Value] | None = None) -> "Scope":
        """What another program sees of it."""
        kept = {name: v for name, v in self.values.items() if name in self.exported}
        return Scope(kept, set(kept), arguments)

    def get(self, name: str) -> Value | None:
        value = self.values.get(name)
        return value.get("0", ()) if isinstance(value, dict) else value


class Expansion:
    """Words into values.

    Args:
        output: what a command in `$( )` would print; None where nobody can know.
    """

    def __init__(
        self,
        scope: Scope,
        source: Source,
        budget: Budget,
        output: Callable[[Output], Value | None],
    ):
        self.scope, self.source, self.budget, self.output = scope, source, budget, output
        self.depth = 0

    def fields(self, phrase: Phrase) -> list[Value]:
        """The words that a word becomes: none, one or several."""
        found: list[Value] = []
        pieces: list[Piece] = []
        started = False

        def close() -> None:
            nonlocal started
            if started:
                found.append(self.budget.check(tuple(pieces)))
            pieces.clear()
            started = False

        for part in phrase:
            if isinstance(part, Text):
                pieces.append(Piece(part.text, part.where))
                started = True
                continue
            values, separate = self.resolve(part)
            if part.quoted:
                if not separate:
                    values = [_joined(values)]
                for number, value in enumerate(values):
                    if number:
                        close()
                    pieces += value or (Piece("", part.where),)
                    started = True
                continue
            for number, value in enumerate(values):
                if number:
                    close()
                for piece in value:
                    if piece.open:
                        pieces.append(piece)
                        started = True
                        continue
                    for run in re.findall(r"\s+|\S+", piece.text):
                        if run[0] in " \t\n\r\f\v":
                            close()
                        else:
                            pieces.append(Piece(run, piece.where, (), False, piece.assumed))
                            started = True
        close()
        self.budget.spend(64 * len(found))
        return found

    def value(self, phrase: Phrase) -> Value:
        """A word that is not split: of an assignment, a test, a here-document."""
        pieces: list[Piece] = []
        for part in phrase:
            if isinstance(part, Text):
                pieces.append(Piece(part.text, part.where))
            else:
                pieces += _joined(self.resolve(part)[0])
        return self.budget.check(tuple(pieces))

    def resolve(self, part: Part) -> tuple[list[Value], bool]:
        """The values of a variable or substitution, and whether they are words of their own."""
        self.depth += 1
        if self.depth > 30:
            raise self.budget.error("variables stand within each other too deeply")
        try:
            if isinstance(part, Name):
                values, separate = self._name(part)
            elif isinstance(part, Sum):
                values, separate = [self._sum(part)], False
            else:
                assert isinstance(part, Output)
                printed = self.output(part)
                shown = part.written if len(part.written) < 60 else part.written[:56] + "...)"
                unknown = (Piece(part.written, part.where, (shown,)),)
                values, separate = [unknown if printed is None else printed], False
        finally:
            self.depth -= 1
        self.budget.spend(sum(len(p.text) for value in values for p in value))
        return values, separate

    def _sum(self, part: Sum) -> Value:
        try:
            return (Piece(str(self.number(part.text)), part.where),)
        except Unknown as unknown:
            names = tuple(unknown.names) or (part.written,)
            return (Piece(part.written, part.where, names),)

    def number(self, text: str) -> int:
        """The value of an arithmetic expression.

        Raises:
            Unknown: it holds what is not known.
        """
        value = self.value(parse_phrase(text, self.source, True))
        unknown = [name for piece in value for name in piece.open]
        if unknown:
            raise Unknown(*dict.fromkeys(unknown))

        def look(name: str) -> str | None:
            found = self.scope.get(name)
            if found is None or is_open(found):
                names = [n for piece in found or () for n in piece.open]
                raise Unknown(*(dict.fromkeys(names) or [f"${name}"]))
            return text_of(found)

        def put(name: str, number: str) -> None:
            self.scope.values[name] = (Piece(number),)

        return evaluate(text_of(value), look, put)

    def _name(self, part: Name) -> tuple[list[Value], bool]:
        values = self._looked_up(part)
        separate = part.index == "@"
        if part.mark == "!" and values is not None:
            return self._indirect(part, values)
        if part.mark == "#":
            return [self._length(part, values)], False
        if part.op:
            return self._changed(part, values), separate
        if values is None:
            return [self._missing(part)], False
        return values, separate

    def _missing(self, part: Name) -> Value:
        return (Piece(part.written, part.where, (f"${part.name}",), True),)

    def _looked_up(self, part: Name) -> list[Value] | None:
        """None where nothing sets it."""
        name, scope = part.name, self.scope
        if name in ("@", "*"):
            return list(scope.arguments or [])
        if name == "#":
            known = scope.arguments is not None
            return [(Piece(str(len(scope.arguments or [])), part.where, (), False, not known),)]
        if name.isdecimal():
            number = int(name[:4])
            if scope.arguments is None or number == 0:
                return None
            return [scope.arguments[number - 1] if number <= len(scope.arguments) else ()]
        if name in ("?", "$", "!", "-", "RANDOM", "SECONDS", "LINENO"):
            return [(Piece(part.written, part.where, (f"${name}",)),)]
        held = scope.values.get(name)
        if held is None:
            return None
        if part.index is None:
            return [held.get("0", ()) if isinstance(held, dict) else held]
        if part.index in ("@", "*"):
            return list(held.values()) if isinstance(held, dict) else [held]
        items = held if isinstance(held, dict) else {"0": held}
        key = self.key(part.index, held)
        if key is None:
            return [(Piece(part.written, part.where, (part.written,)),)]
        return [items.get(key, ())]

    def key(self, index: str, held: object) -> str | None:
        """The key that an index names in a list; None where it is not known."""
        value = self.value(parse_phrase(index.strip("\"'"), self.source, True))
        if is_open(value):
            return None
        text = text_of(value)
        if isinstance(held, dict) and text in held:
            return text
        try:
            number = self.number(text)
        except Unknown:
            return text
        if number < 0 and isinstance(held, dict):
            number += 1 + max((int(key) for key in held if key.isdecimal()), default=-1)
        return str(number)

    def _indirect(self, part: Name, values: list[Value]) -> tuple[list[Value], bool]:
        if part.index in ("@", "*"):
            held = self.scope.values.get(part.name)
            keys = list(held) if isinstance(held, dict) else ["0"]
            return [(Piece(key, part.where),) for key in keys], part.index == "@"
        name = text_of(values[0])
        if is_open(values[0]) or not re.fullmatch(r"\w{1,80}", name):
            return [(Piece(part.written, part.where, (part.written,)),)], False
        plain = Name(name, part.written, part.quoted, part.where, None, part.op, part.argument)
        return self._name(plain)

    def _length(self, part: Name, values: list[Value] | None) -> Value:
        if values is None:
            return self._missing(part)
        if part.index in ("@", "*"):
            return (Piece(str(len(values)), part.where),)
        if is_open(values[0]):
            return (Piece(part.written, part.where, (part.written,)),)
        return (Piece(str(len(text_of(values[0]))), part.where),)

    def _changed(self, part: Name, values: list[Value] | None) -> list[Value]:
        op = part.op
        if op.lstrip(":") in ("-", "=", "+", "?") and op != ":":
            empty = values is None or (op[0] == ":" and is_empty(_joined(values)))
            if values is not None and not empty and op[0] != ":":
                empty = (
                    bool(values)
                    and all(p.missing for value in values for p in value)
                    and any(values)
                )  # a variable set to an argument that nobody gives
            if op[-1] == "+":
                return [()] if empty else [self._argument(part)]
            if not empty:
                assert values is not None
                return values
            if op[-1] == "?":
                return [self._missing(part)]
            chosen = self._argument(part)
            if op[-1] == "=":
                self.scope.values[part.name] = chosen
            return [chosen]
        if values is None:
            return [self._missing(part)]
        if op == ":" and part.index in ("@", "*"):
            return self._some(part, values)
        return [self._edited(part, value) for value in values]

    def _some(self, part: Name, values: list[Value]) -> list[Value]:
        """`${A[@]:1:2}`; of arguments, `$0` is the first."""
        if part.name in ("@", "*"):
            values = [(Piece("$0", part.where, ("$0",)),), *values]
        first, _, length = part.argument.partition(":")
        try:
            start = self.number(first)
            count = self.number(length) if length else len(values)
        except Unknown:
            return [(Piece(part.written, part.where, (part.written,)),)]
        start = max(len(values) + start, 0) if start < 0 else start
        return values[start : start + max(count, 0)]

    def _argument(self, part: Name) -> Value:
        return (
            self.value(parse_phrase(part.argument, self.source, False))
            if (not part.quoted or '"' in part.argument)
            else self.value(parse_phrase(part.argument, self.source, True))
        )

    def _edited(self, part: Name, value: Value) -> Value:
        """`${A#x}`, `${A/x/y}`, `${A^^}`, `${A:1:2}`, of a value that is known."""
        argument, op = part.argument, part.op
        unknown = (Piece(part.written, part.where, (part.written,)),)
        text = text_of(value)
        if is_open(value) or len(text) > _MATCHED or len(argument) > 256:
            return unknown
        where = value[0].where if value else part.where
        if op in ("^^", ",,", "^", ",") and not argument:
            done = {"^^": text.upper(), ",,": text.lower(),
                    "^": text[:1].upper() + text[1:], ",": text[:1].lower() + text[1:]}  # fmt: skip
            return (Piece(done[op], where),)
        if op == ":":
            return self._cut(argument, text, where) or unknown
        if op == "@":
            return value
        pattern, _, new = argument.partition("/") if op[0] == "/" else (argument, "", "")
        patterns = self.value(parse_phrase(pattern, self.source, False))
        news = self.value(parse_phrase(new, self.source, False))
        if is_open(patterns) or is_open(news):
            return unknown
        edited = _replaced(text, text_of(patterns), text_of(news), op)
        return unknown if edited is None else (Piece(edited, where),)

    def _cut(self, argument: str, text: str, where: str) -> Value | None:
        first, _, length = argument.partition(":")
        try:
            start = self.number(first)
            start = max(len(text) + start, 0) if start < 0 else start
            count = self.number(length) if length else len(text)
        except Unknown:
            return None
        end = len(text) + count if count < 0 else start + count
        return (Piece(text[start:end], where),)


def _joined(values: list[Value]) -> Value:
    pieces: list[Piece] = []
    for number, value in enumerate(values):
        pieces += [Piece(" "), *value] if number else value
    return tuple(pieces)


def _replaced(text: str, pattern: str, new: str, op: str) -> str | None:
    plain = not set(pattern) & set("*?[\\")
    if op in ("#", "##", "%", "%%"):
        if pattern.count("*") > 3:
            return None
        ends = range(len(text) + 1) if op in ("#", "%%") else range(len(text), -1, -1)
        for at in ends:
            part = text[:at] if op[0] == "#" else text[at:]
            if fnmatchcase(part, pattern):
                return text[at:] if op[0] == "#" else text[:at]
        return text
    if not pattern:
        return text
    if op in ("/#", "/%"):
        fits = plain and (text.startswith(pattern) if op == "/#" else text.endswith(pattern))
        if not plain:
            return None
        kept = text[len(pattern) :] if op == "/#" else text[: -len(pattern)]
        return (new + kept if op == "/#" else kept + new) if fits else text
    if plain:
        return text.replace(pattern, new) if op == "//" else text.replace(pattern, new, 1)
    if pattern.count("*") > 1:
        return None
    found = translate(pattern).replace("\\Z", "").replace("\\z", "")
    return re.sub(found, lambda _: new, text, count=0 if op == "//" else 1)
