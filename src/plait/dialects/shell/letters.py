"""The shell's letters into words: quotes, variables, brackets, here-documents."""

import re

from plait.dialects.shell.tree import Name, Output, Part, Phrase, Sum, Text
from plait.dialects.source import Source
from plait.spec.findings import UserError, error

#: Levels of brackets, blocks and quotes within each other of a script that a person wrote.
DEEPEST = 40
#: Letters of the longest script; those that people launch with have a tenth.
LONGEST = 1 << 18

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?$!-]")
_INDEX = re.compile(r"\[([^\]\n]*)\]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "0": "\0"}


class Letters:
    """Reads words, and moves past what is no word.

    Attributes:
        at, line: the place. waiting: here-documents whose lines are still to come.
    """

    def __init__(self, source: Source, line: int, text: str | None = None):
        self.source = source
        self.text = source.text if text is None else text
        self.line = line
        self.at = 0
        self.depth = 0
        #: Here-documents whose bodies stand after the next end of a line.
        self.waiting: list[tuple[list[Part], str, bool, bool]] = []

    # Where it stands, and what goes wrong.

    @property
    def where(self) -> str:
        return f"{self.source.name}:{self.line}" if self.source.path and self.line else ""

    def fail(self, message: str) -> UserError:
        place = f"{self.source.path or self.source.name}, line {self.line}"
        return UserError([error(place, None, message, rule="unreadable-file")])

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.fail(f"nested more than {DEEPEST} levels deep")

    def peek(self, ahead: int = 1) -> str:
        return self.text[self.at : self.at + ahead]

    def skip(self, count: int = 1) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def blanks(self) -> None:
        """Past spaces, continued lines and comments, not past the end of a line."""
        while self.at < len(self.text):
            if self.peek() in " \t\r":
                self.at += 1
            elif self.peek(2) == "\\\n":
                self.skip(2)
            elif self.peek() == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def ends(self) -> None:
        """Past ends of lines, `;`, and what blanks are."""
        while True:
            self.blanks()
            if self.peek() == "\n":
                self.new_line()
            elif self.peek() == ";" and self.peek(2) not in (";;", ";&"):
                self.at += 1
            else:
                return

    def new_line(self) -> None:
        self.skip()
        waiting, self.waiting = self.waiting, []
        for body, end, plain, dashed in waiting:
            body += self.document(end, plain, dashed)

    def document(self, end: str, plain: bool, dashed: bool) -> Phrase:
        lines, first = [], self.line
        while self.at < len(self.text):
            stop = self.text.find("\n", self.at)
            stop = len(self.text) if stop < 0 else stop
            line = self.text[self.at : stop]
            self.skip(stop + 1 - self.at)
            line = line.lstrip("\t") if dashed else line
            if line == end:
                break
            lines.append(line)
        text = "".join(f"{line}\n" for line in lines)
        if plain:
            return (Text(text, True, self.where),)
        inner = Letters(self.source, first, text)
        return inner.quoted("")

    # Words.

    def phrase(self, stops: str = " \t\r\n;&|()<>") -> Phrase:
        """A word up to a letter that ends it."""
        parts: list[Part] = []
        plain: list[str] = []
        where = self.where

        def flush() -> None:
            nonlocal where
            if plain:
                parts.append(Text("".join(plain), False, where))
                plain.clear()
            where = self.where

        while self.at < len(self.text):
            letter = self.peek()
            if letter == "\\":
                if self.peek(2) == "\\\n":
                    self.skip(2)
                    continue
                flush()
                parts.append(Text(self.peek(2)[1:], True, where))
                self.skip(2)
            elif letter in "<>" and self.peek(2)[1:] == "(" and not plain and not parts:
                start = self.at
                self.at += 1
                inner = self.bracket("(", ")")
                written = self.text[start : self.at]
                parts.append(Output(inner, written, True, where))
            elif letter in stops:
                break
            elif letter == "'":
                flush()
                parts.append(self.single())
            elif letter == '"':
                flush()
                self.skip()
                inside = self.quoted('"')
                parts += inside or (Text("", True, where),)
            elif self.peek(2) == "$'":
                flush()
                parts.append(self.escaped())
            elif letter in "$`":
                flush()
                parts += self.dollar(False)
            else:
                plain.append(letter)
                self.skip()
        flush()
        return tuple(parts)

    def phrase_to_end(self, quoted: bool) -> Phrase:
        return self.quoted("") if quoted else self.phrase("")

    def single(self) -> Text:
        where, end = self.where, self.text.find("'", self.at + 1)
        if end < 0:
            raise self.fail("a ' is not closed")
        text = self.text[self.at + 1 : end]
        self.skip(end + 1 - self.at)
        return Text(text, True, where)

    def escaped(self) -> Text:
        where, letters = self.where, []
        start = self.at
        self.at += 2
        while self.peek() != "'":
            if not self.peek():
                self.at = start
                raise self.fail("a ' is not closed")
            if self.peek() == "\\":
                self.at += 1
                letters.append(_ESCAPES.get(self.peek(), self.peek()))
            else:
                letters.append(self.peek())
            self.skip()
        self.at += 1
        return Text("".join(letters), True, where)

    def quoted(self, end: str) -> Phrase:
        """What stands in double quotes (`end` is '"') or in a here-document (to the end)."""
        parts: list[Part] = []
        plain: list[str] = []
        where, opened = self.where, self.line

        def flush() -> None:
            nonlocal where
            if plain:
                parts.append(Text("".join(plain), True, where))
                plain.clear()
            where = self.where

        while True:
            letter = self.peek()
            if not letter:
                if end:
                    self.line = opened
                    raise self.fail(f"a {end} is not closed")
                break
            if end and letter == end:
                self.at += 1
                break
            if letter == "\\" and self.peek(2)[1:] == "\n":
                self.skip(2)
                flush()
            elif letter == "\\" and self.peek(2)[1:] in ('"$`\\' if end else "$`\\"):
                plain.append(self.peek(2)[1:])
                self.skip(2)
            elif letter in "$`":
                flush()
                parts += self.dollar(True)
                where = self.where
            elif letter == "\n":
                plain.append(letter)
                self.skip()
                flush()
            else:
                # A run of letters that mean nothing: fast through long texts.
                stop = self.at + 1
                while stop < len(self.text) and self.text[stop] not in '\\$`\n"':
                    stop += 1
                plain.append(self.text[self.at : stop])
                self.at = stop
        flush()
        return tuple(parts)

    def dollar(self, quoted: bool) -> list[Part]:
        where, start = self.where, self.at
        if self.peek() == "`":
            end = self.at + 1
            while self.text[end : end + 1] not in ("`", ""):
                end += 2 if self.text[end] == "\\" else 1
            if end >= len(self.text):
                raise self.fail("a ` is not closed")
            inner = self.text[self.at + 1 : end]
            self.skip(end + 1 - self.at)
            written = self.text[start : self.at]
            return [Output(inner.replace("\\`", "`"), written, quoted, where)]
        if self.peek(3) == "$((":
            closed = self._sum()
            if closed is not None:
                return [Sum(closed, self.text[start : self.at], quoted, where)]
        if self.peek(2) == "$(":
            self.at += 1
            inner = self.bracket("(", ")")
            return [Output(inner, self.text[start : self.at], quoted, where)]
        if self.peek(2) == "$[":
            self.at += 1
            inner = self.bracket("[", "]")
            return [Sum(inner, self.text[start : self.at], quoted, where)]
        if self.peek(2) == "${":
            self.at += 1
            inner = self.bracket("{", "}")
            return [_braced(inner, self.text[start : self.at], quoted, where)]
        name = _NAME.match(self.text, self.at + 1)
        if name is None or self.peek(2) == '$"':
            self.at += 1
            return [] if self.peek() == '"' and not quoted else [Text("$", quoted, where)]
        self.at = name.end()
        written = self.text[start : self.at]
        index = {"@": "@", "*": "*"}.get(name[0])
        return [Name(name[0], written, quoted, where, index)]

    def _sum(self) -> str | None:
        """The inside of `$((...))`; None where it is a `$( (...) )`."""
        start, line = self.at, self.line
        self.at += 1
        inner = self.bracket("(", ")")
        if inner.startswith("(") and inner.endswith(")"):
            return inner[1:-1]
        self.at, self.line = start, line
        return None

    def bracket(self, left: str, right: str) -> str:
        """The inside of brackets, other brackets and quotes in it respected; moves past it."""
        start, line, depth = self.at, self.line, 0
        at = self.at
        text = self.text
        while at < len(text):
            letter = text[at]
            if letter == "\\":
                at += 2
                continue
            if letter == left:
                depth += 1
                if depth > DEEPEST:
                    raise self.fail(f"nested more than {DEEPEST} levels deep")
            elif letter == right:
                depth -= 1
                if depth == 0:
                    self.skip(at + 1 - self.at)
                    return text[start + 1 : at]
            elif letter == "'" and left != "{":
                end = text.find("'", at + 1)
                at = len(text) if end < 0 else end
            elif letter == '"':
                at = self._past_quotes(at, depth)
            elif letter == "#" and left == "(" and text[at - 1] in " \t\n;":
                end = text.find("\n", at)
                at = len(text) if end < 0 else end
            at += 1
        self.at, self.line = start, line
        raise self.fail(f"a {left} is not closed")

    def _past_quotes(self, at: int, depth: int) -> int:
        """The place of the " that closes the one at `at`, past `$( " " )` in between."""
        if depth > DEEPEST:
            raise self.fail(f"nested more than {DEEPEST} levels deep")
        at += 1
        while at < len(self.text) and self.text[at] != '"':
            if self.text[at] == "\\":
                at += 1
            elif self.text[at : at + 2] == "$(":
                start, line = self.at, self.line
                self.at = at + 1
                self.depth += 1
                if self.depth > DEEPEST:
                    raise self.fail(f"nested more than {DEEPEST} levels deep")
                self.bracket("(", ")")
                self.depth -= 1
                at = self.at - 1
                self.at, self.line = start, line
            at += 1
        return at


def _braced(inner: str, written: str, quoted: bool, where: str) -> Part:
    mark = ""
    if len(inner) > 1 and inner[0] in "#!" and _NAME.match(inner, 1):
        mark, inner = inner[0], inner[1:]
    name = re.compile(r"[A-Za-z_]\w*|[0-9]+|[@*#?$!-]").match(inner)
    if name is None:
        return Output(inner, written, quoted, where)
    rest = inner[name.end() :]
    index: str | None = {"@": "@", "*": "*"}.get(name[0])
    bracket = _INDEX.match(rest)
    if bracket:
        index, rest = bracket[1], rest[bracket.end() :]
    sign = re.compile(r":[-=+?]|##|%%|//|/#|/%|\^\^|,,|[-=+?#%/:^,@]").match(rest)
    op = sign[0] if sign else ""
    return Name(name[0], written, quoted, where, index, op, rest[len(op) :], mark)
