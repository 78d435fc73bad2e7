"""The grammar of the shell, as far as launch scripts use it: text into commands. Nothing is run."""

import re

from plait.dialects.shell.letters import LONGEST, Letters
from plait.dialects.shell.tree import (
    Arithmetic,
    Assignment,
    Block,
    Branches,
    Case,
    Chain,
    Function,
    Group,
    Loop,
    Node,
    Phrase,
    Pipe,
    Redirection,
    Simple,
    Text,
)
from plait.dialects.source import Source

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\[[^\]\n]*\])?(\+?)=")
_OPERATOR = re.compile(r";;&|;;|;&|&&|\|\||\|&|[;&|()\n]")
_REDIRECTION = re.compile(r"[0-9]*(?:<<<|<<-|<<|<>|>>|>\||>&|<&|<|>)|&>>?|\{\w+\}[<>]")
_DECLARE = frozenset({"export", "declare", "local", "readonly", "typeset"})


def parse(source: Source, first_line: int = 1) -> Block:
    """A script as a tree.

    Raises:
        UserError: quotes, brackets or blocks that are not closed, or too many within each other.
    """
    reader = _Grammar(source, first_line)
    if len(source.text) > LONGEST:
        raise reader.fail(f"{len(source.text)} letters are more than a script has ({LONGEST})")
    return reader.script()


def parse_phrase(text: str, source: Source, quoted: bool) -> Phrase:
    """The text of a `${A:-...}` as the word that it is."""
    reader = Letters(source, 0, text)
    return reader.phrase_to_end(quoted)


class _Grammar(Letters):
    """Reads commands."""

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
                named = Letters(self.source, self.line, key[1]).phrase("")
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
