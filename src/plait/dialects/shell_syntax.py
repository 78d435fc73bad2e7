"""The grammar of the shell, as far as launch scripts use it: text into commands. Nothing is run."""

import re
from dataclasses import dataclass, field

from plait.dialects.source import Source
from plait.spec.findings import UserError, error

#: Levels of brackets, blocks and quotes within each other of a script that a person wrote.
DEEPEST = 40

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\[[^\]\n]*\])?(\+?)=")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?$!-]")
_INDEX = re.compile(r"\[([^\]\n]*)\]")
_OPERATOR = re.compile(r";;&|;;|;&|&&|\|\||\|&|[;&|()\n]")
_REDIRECTION = re.compile(r"[0-9]*(?:<<<|<<-|<<|<>|>>|>\||>&|<&|<|>)|&>>?|\{\w+\}[<>]")
_DECLARE = frozenset({"export", "declare", "local", "readonly", "typeset"})
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "0": "\0"}


@dataclass(frozen=True)
class Text:
    """Letters that stand for themselves."""

    text: str
    quoted: bool
    where: str


@dataclass(frozen=True)
class Name:
    """`$A`, `${A[i]:-x}`: `mark` is the "#" or "!" before the name, `op` what follows it."""

    name: str
    written: str
    quoted: bool
    where: str
    index: str | None = None
    op: str = ""
    argument: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Sum:
    """`$(( ... ))`."""

    text: str
    written: str
    quoted: bool
    where: str


@dataclass(frozen=True)
class Output:
    """`$( ... )`, and what is written in backticks or `<( ... )`."""

    text: str
    written: str
    quoted: bool
    where: str


Part = Text | Name | Sum | Output
#: A word as it is written.
Phrase = tuple[Part, ...]


@dataclass(frozen=True)
class Assignment:
    """`A=x`, `A[i]=x`, `A+=(x y)`: the value is a list of (key or None, phrase) for a list."""

    name: str
    index: str | None
    more: bool
    value: Phrase | list[tuple[Phrase | None, Phrase]]


@dataclass(frozen=True)
class Redirection:
    """Where a command reads or writes; `body` is a here-document's, whose lines stand below the
    command and are therefore filled in later."""

    sign: str
    target: Phrase
    body: list[Part] = field(default_factory=list)


@dataclass(frozen=True)
class Simple:
    """A program with its arguments; of `export` and its kin assignments may stand among them."""

    assignments: tuple[Assignment, ...]
    words: tuple[Phrase, ...]
    redirections: tuple[Redirection, ...]
    declared: tuple[Assignment, ...] = ()


@dataclass(frozen=True)
class Chain:
    """`first && second || third`: each with the sign before it ("" for the first); `turned`
    where a "!" stands before the first."""

    links: tuple[tuple[str, "Node"], ...]
    turned: bool = False


@dataclass(frozen=True)
class Pipe:
    commands: tuple["Node", ...]
    turned: bool = False


@dataclass(frozen=True)
class Branches:
    """`if`: (condition, body) in order; the last one without a condition is the `else`."""

    branches: tuple[tuple["Block | None", "Block"], ...]


@dataclass(frozen=True)
class Case:
    word: Phrase
    branches: tuple[tuple[tuple[Phrase, ...], "Block"], ...]


@dataclass(frozen=True)
class Loop:
    """`for` (`words` is None where it counts), and `while` and `until` (`condition`)."""

    body: "Block"
    name: str = ""
    words: tuple[Phrase, ...] | None = None
    condition: "Block | None" = None


@dataclass(frozen=True)
class Function:
    name: str
    body: "Block"


@dataclass(frozen=True)
class Group:
    """`{ ... }`, or `( ... )`: what is set in the latter is lost."""

    body: "Block"
    subshell: bool
    redirections: tuple[Redirection, ...] = ()


@dataclass(frozen=True)
class Arithmetic:
    """`(( ... ))`."""

    text: str
    where: str


Node = Simple | Chain | Pipe | Branches | Case | Loop | Function | Group | Arithmetic
Block = tuple[Node, ...]


def parse(source: Source, first_line: int = 1) -> Block:
    """A script as a tree.

    Raises:
        UserError: quotes, brackets or blocks that are not closed, or too many within each other.
    """
    return _Reader(source, first_line).script()


def parse_phrase(text: str, source: Source, quoted: bool) -> Phrase:
    """The text of a `${A:-...}` as the word that it is."""
    reader = _Reader(source, 0, text)
    return reader.phrase_to_end(quoted)


class _Reader:
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
        inner = _Reader(self.source, first, text)
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

    # Commands.

    def script(self) -> Block:
        block = self.block(())
        if self.at < len(self.text):
            raise self.fail(f"{self.peek()!r} stands where a command should")
        return block

    def block(self, stops: tuple[str, ...]) -> Block:
        """Commands up to a word that ends them, which is left to be read."""
        self.deeper()
        nodes: list[Node] = []
        while True:
            self.ends()
            if self.at >= len(self.text):
                if stops:
                    raise self.fail(f"{' or '.join(stops)} is missing")
                break
            if self.peek() == ")" or self.peek(2) in (";;", ";&"):
                break
            if self._word_ahead() in stops:
                break
            before = self.at
            nodes.append(self.chain())
            self.blanks()
            if self.peek() == "&":
                self.at += 1
            if self.at == before:
                break
        self.depth -= 1
        return tuple(nodes)

    def _word_ahead(self) -> str:
        end = self.at
        while end < len(self.text) and self.text[end] not in " \t\r\n;&|()<>":
            end += 1
            if end - self.at > 10:
                return ""
        return self.text[self.at : end]

    def expect(self, word: str) -> None:
        self.ends()
        if self._word_ahead() != word:
            raise self.fail(f"{word} is missing")
        self.at += len(word)

    def chain(self) -> Node:
        links = [("", self.pipe())]
        while True:
            self.blanks()
            sign = self.peek(2)
            if sign not in ("&&", "||"):
                break
            self.at += 2
            self.ends()
            links.append((sign, self.pipe()))
        return links[0][1] if len(links) == 1 else Chain(tuple(links))

    def pipe(self) -> Node:
        self.blanks()
        turned = False
        while self._word_ahead() == "!":
            turned = not turned
            self.at += 1
            self.blanks()
        commands = [self.command()]
        while True:
            self.blanks()
            if self.peek() != "|" or self.peek(2) == "||":
                break
            self.at += 2 if self.peek(2) == "|&" else 1
            self.ends()
            commands.append(self.command())
        return commands[0] if len(commands) == 1 and not turned else Pipe(tuple(commands), turned)

    def command(self) -> Node:
        self.deeper()
        self.blanks()
        node = self._compound(self._word_ahead())
        self.depth -= 1
        if node is None:
            return self.simple()
        redirections = self.redirections()
        if redirections and not isinstance(node, Function | Group):
            node = Group((node,), False, redirections)
        elif redirections and isinstance(node, Group):
            node = Group(node.body, node.subshell, redirections)
        return node

    def _compound(self, word: str) -> Node | None:
        if self.peek(2) == "((":
            where, start, line = self.where, self.at, self.line
            inner = self.bracket("(", ")")
            if inner.startswith("(") and inner.endswith(")"):
                return Arithmetic(inner[1:-1], where)
            self.at, self.line = start, line
        if self.peek() == "(":
            self.at += 1
            body = self.block(())
            self.ends()
            if self.peek() != ")":
                raise self.fail("a ( is not closed")
            self.at += 1
            return Group(body, True)
        if word == "{":
            self.at += 1
            body = self.block(("}",))
            self.expect("}")
            return Group(body, False)
        if word == "if":
            return self.branches()
        if word in ("while", "until"):
            self.at += 5
            condition = self.block(("do",))
            return Loop(self.body(), condition=condition)
        if word in ("for", "select"):
            self.at += len(word)
            return self.loop()
        if word == "case":
            self.at += 4
            return self.case()
        if word == "function":
            self.at += 8
            self.blanks()
            name = self.phrase()
            self.blanks()
            if self.peek() == "(":
                self.bracket("(", ")")
            return self.function("".join(p.text for p in name if isinstance(p, Text)))
        match = re.compile(r"([\w.:+-]+)[ \t]*\([ \t]*\)").match(self.text, self.at)
        if match:
            self.at = match.end()
            return self.function(match[1])
        return None

    def function(self, name: str) -> Function:
        self.ends()
        body = self.command()
        return Function(name, body.body if isinstance(body, Group) else (body,))

    def body(self) -> Block:
        self.expect("do")
        block = self.block(("done",))
        self.expect("done")
        return block

    def branches(self) -> Branches:
        found: list[tuple[Block | None, Block]] = []
        self.at += 2
        while True:
            condition = self.block(("then",))
            self.expect("then")
            found.append((condition, self.block(("elif", "else", "fi"))))
            word = self._word_ahead()
            self.at += len(word)
            if word == "else":
                found.append((None, self.block(("fi",))))
                self.expect("fi")
            if word != "elif":
                return Branches(tuple(found))

    def loop(self) -> Loop:
        self.blanks()
        if self.peek(2) == "((":
            inner = self.bracket("(", ")")
            name = re.match(r"\(?\s*([A-Za-z_]\w*)", inner)
            self.ends()
            if self._word_ahead() == "{":
                self.at += 1
                block = self.block(("}",))
                self.expect("}")
                return Loop(block, name[1] if name else "")
            return Loop(self.body(), name[1] if name else "")
        name = "".join(p.text for p in self.phrase() if isinstance(p, Text))
        self.ends()
        words: list[Phrase] = []
        if self._word_ahead() == "in":
            self.at += 2
            while True:
                self.blanks()
                if self.peek() in (";", "\n", "") or self.peek() in "&|()<>":
                    break
                words.append(self.phrase())
        return Loop(self.body(), name, tuple(words))

    def case(self) -> Case:
        self.blanks()
        word = self.phrase()
        self.expect("in")
        found: list[tuple[tuple[Phrase, ...], Block]] = []
        while True:
            self.ends()
            if self._word_ahead() == "esac":
                self.at += 4
                return Case(word, tuple(found))
            if self.peek() == "(":
                self.at += 1
            patterns: list[Phrase] = []
            while True:
                self.blanks()
                patterns.append(self.phrase())
                self.blanks()
                if self.peek() == ")":
                    self.at += 1
                    break
                if self.peek() != "|":
                    raise self.fail("esac is missing")
                self.at += 1
            body = self.block(("esac",))
            found.append((tuple(patterns), body))
            if self.peek(2) in (";;", ";&"):
                self.at += 3 if self.peek(3) == ";;&" else 2

    def redirections(self) -> tuple[Redirection, ...]:
        found: list[Redirection] = []
        while self.redirection(found):
            pass
        return tuple(found)

    def redirection(self, found: list[Redirection]) -> bool:
        self.blanks()
        match = _REDIRECTION.match(self.text, self.at)
        if match is None or self.peek(2) in ("<(", ">("):
            return False
        self.at = match.end()
        self.blanks()
        sign = match[0].lstrip("0123456789")
        target = self.phrase()
        redirection = Redirection(match[0], target)
        found.append(redirection)
        if sign in ("<<", "<<-"):
            plain = any(isinstance(p, Text) and p.quoted for p in target)
            end = "".join(p.text if isinstance(p, Text) else p.written for p in target)
            self.waiting.append((redirection.body, end, plain, sign == "<<-"))
        return True

    def simple(self) -> Simple:
        assignments: list[Assignment] = []
        declared: list[Assignment] = []
        words: list[Phrase] = []
        redirections: list[Redirection] = []
        test = False
        while True:
            self.blanks()
            letter = self.peek()
            if test:
                if letter == "\n":
                    self.skip()
                    continue
                if not letter:
                    raise self.fail("a [[ is not closed")
                word = self._in_test()
                words.append(word)
                if word == (Text("]]", False, word[0].where),):
                    test = False
                continue
            if letter in (";", "\n", "", ")") or _is_operator(self.text, self.at):
                break
            if self.redirection(redirections):
                continue
            match = _ASSIGNED.match(self.text, self.at)
            declares = bool(words) and _plain(words[0]) in _DECLARE
            if match and (not words or declares):
                self.at = match.end()
                found = declared if words else assignments
                index = match[2][1:-1] if match[2] else None
                found.append(Assignment(match[1], index, bool(match[3]), self._value()))
                continue
            if letter == "(":
                break
            before = self.at
            word = self.phrase()
            if self.at == before:
                break
            words.append(word)
            if len(words) == 1 and _plain(word) == "[[":
                test = True
        return Simple(tuple(assignments), tuple(words), tuple(redirections), tuple(declared))

    def _value(self) -> Phrase | list[tuple[Phrase | None, Phrase]]:
        if self.peek() != "(":
            return self.phrase()
        self.at += 1
        found: list[tuple[Phrase | None, Phrase]] = []
        while True:
            self.blanks()
            if self.peek() == "\n":
                self.new_line()
                continue
            if not self.peek():
                raise self.fail("a ( is not closed")
            if self.peek() == ")":
                self.at += 1
                return found
            key = re.compile(r"\[([^\]\n]+)\]=").match(self.text, self.at)
            named: Phrase | None = None
            if key:
                named = _Reader(self.source, self.line, key[1]).phrase("")
                self.at = key.end()
            before = self.at
            word = self.phrase()
            if self.at == before and not key:
                raise self.fail(f"{self.peek()!r} stands in a list")
            found.append((named, word))

    def _in_test(self) -> Phrase:
        for sign in ("&&", "||", "(", ")", "<", ">"):
            if self.peek(len(sign)) == sign:
                where = self.where
                self.at += len(sign)
                return (Text(sign, False, where),)
        before = self.at
        word = self.phrase(" \t\r\n;&|()")
        if self.at == before:
            # A regular expression with brackets of its own, or something that is none.
            where = self.where
            letter = self.peek()
            self.skip()
            return (Text(letter, False, where),)
        return word


def _is_operator(text: str, at: int) -> bool:
    return bool(_OPERATOR.match(text, at)) and not _REDIRECTION.match(text, at)


def _plain(phrase: Phrase) -> str:
    """The text of a word that is written plainly, else ""."""
    if len(phrase) == 1 and isinstance(phrase[0], Text) and not phrase[0].quoted:
        return phrase[0].text
    return ""


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
