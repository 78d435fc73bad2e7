"""Shell scripts, read as text: which commands they would run, with which words.

Nothing is executed. Variables that the script sets are put in; what depends on anything outside
of it (arguments, the environment, the output of commands) stays as it is written, and the words
that hold it say so. A script is read as if it were started with no arguments and in a bare
environment: so a default that it gives itself holds.
"""

import re
from dataclasses import replace
from fnmatch import fnmatchcase

from plait.dialects.shell import syntax, tree
from plait.dialects.shell.arithmetic import Unknown
from plait.dialects.shell.conditions import UNKNOWN, Truth, decide, settled
from plait.dialects.shell.slurm import directives, variables
from plait.dialects.shell.state import Command, Script, Shared, State, after_equals
from plait.dialects.shell.words import (
    Budget,
    Piece,
    Scope,
    Value,
    is_open,
    text_of,
    word_of,
)
from plait.dialects.source import Source
from plait.spec.findings import UserError

#: Scripts and functions within each other.
_DEEPEST = 24
#: How often a function is read within itself.
_AGAIN = 3
#: Rounds of a loop over known values that are gone through one by one.
_ROUNDS = 64
_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})
_DECLARE = frozenset({"export", "declare", "local", "readonly", "typeset"})
_SET = re.compile(r"([A-Za-z_]\w*)=")


def read(source: Source) -> Script:
    """A script, or a command as it would be typed.

    Raises:
        UserError: quotes or brackets that are not closed, or a script that grows without end:
            one line.
    """
    asked = directives(source.text)
    known = variables(asked) | dict(source.variables)
    scope = Scope({name: (Piece(text),) for name, text in known.items()})
    scope.exported = set(scope.values)
    reader = _Shell(source, scope, Shared(Budget(source), asked))
    try:
        reader.run(syntax.parse(source))
        reader.leftovers()
    except RecursionError:
        raise reader.shared.budget.error("nested too deeply") from None
    shared = reader.shared
    known = {
        name: text_of(value)
        for name, value in scope.values.items()
        if not isinstance(value, dict) and not is_open(value)
    }
    files = {name: text_of(value) for name, value in shared.files.items()}
    drafts = {name: text_of(value) for name, value in shared.drafts.items() if name not in files}
    commands = (*shared.commands, *shared.unsure)
    return Script(commands, known, files, asked, drafts)


class _Stop(Exception):
    """`exit`."""


class _Return(Exception):
    """`return`."""


class _Shell(State):
    """Reads commands as a shell would run them."""

    def run(self, block: tree.Block) -> Truth:
        """Reads commands one after the other, up to an `exit`."""
        self.shared.depth += 1
        if self.shared.depth > _DEEPEST:
            raise self.shared.budget.error(f"more than {_DEEPEST} scripts within each other")
        try:
            return self.block(block)
        except (_Stop, _Return):
            return Truth(True)
        finally:
            self.shared.depth -= 1

    def leftovers(self) -> None:
        """Functions that nobody calls, as they stand."""
        for name, body in list(self.functions.items()):
            if name not in self.called:
                self.aside(body)

    def block(self, block: tree.Block) -> Truth:
        truth = Truth(True)
        for node in block:
            truth = self.node(node)
        return truth

    def aside(self, block: tree.Block) -> None:
        """A branch that is not taken as far as anyone knows: its commands are noted as not sure,
        and what it sets is forgotten."""
        kept, arguments = self.scope.values, self.scope.arguments
        self.scope.values = dict(kept)
        self.doubt += 1
        try:
            self.block(block)
        except (_Stop, _Return):
            pass
        finally:
            self.doubt -= 1
            self.scope.values, self.scope.arguments = kept, arguments

    def node(self, node: tree.Node) -> Truth:
        self.shared.budget.spend()
        match node:
            case tree.Simple():
                return self.simple(node)
            case tree.Pipe():
                return self.pipe(node)
            case tree.Chain():
                return self.chain(node)
            case tree.Branches():
                return self.branches(node)
            case tree.Case():
                return self.case(node)
            case tree.Loop():
                return self.loop(node)
            case tree.Function():
                self.functions[node.name] = node.body
                return Truth(True)
            case tree.Group():
                return self.group(node)
            case tree.Arithmetic():
                return self.arithmetic(node.text)

    # Conditions.

    def arithmetic(self, text: str) -> Truth:
        assumed = "$#" in text and self.scope.arguments is None
        try:
            return Truth(self.words.number(text) != 0, assumed)
        except Unknown:
            return UNKNOWN

    def under_condition(self, truth: Truth, block: tree.Block) -> Truth:
        self.assumed += truth.assumed
        try:
            return self.block(block)
        finally:
            self.assumed -= truth.assumed

    def branches(self, node: tree.Branches) -> Truth:
        doubtful: list[tree.Block] = []
        result = Truth(True)
        for position, (condition, body) in enumerate(node.branches):
            truth = Truth(True) if condition is None else self.block(condition)
            if truth.value:
                if condition is None and doubtful:
                    truth = Truth(True, True)
                result = self.under_condition(truth, body)
                if truth.assumed:
                    doubtful += [body for _, body in node.branches[position + 1 :]]
                break
            if truth.value is None or truth.assumed:
                doubtful.append(body)
        for body in doubtful:
            self.aside(body)
        return result

    def case(self, node: tree.Case) -> Truth:
        text, assumed = settled(self.words.value(node.word))
        doubtful: list[tree.Block] = []
        result = Truth(True)
        for position, (patterns, body) in enumerate(node.branches):
            fits = False
            for pattern in patterns:
                wanted = text_of(self.words.value(pattern))
                if text is not None and wanted.count("*") < 4:
                    fits = fits or fnmatchcase(text, wanted)
            if fits:
                result = self.under_condition(Truth(True, assumed), body)
                if assumed:
                    doubtful += [body for _, body in node.branches[position + 1 :]]
                break
            if text is None or assumed:
                doubtful.append(body)
        for body in doubtful:
            self.aside(body)
        return result

    def chain(self, node: tree.Chain) -> Truth:
        truth = Truth(True)
        assumed = 0
        for sign, link in node.links:
            if sign == "":
                truth = self.node(link)
                continue
            wanted = sign == "&&"
            if truth.value is None or truth.value == wanted:
                if truth.value is None:
                    if wanted:
                        self.aside((link,))
                    continue
                self.assumed += truth.assumed
                assumed += truth.assumed
                truth = self.node(link)
            elif truth.assumed:
                self.aside((link,))
        self.assumed -= assumed
        return truth

    def loop(self, node: tree.Loop) -> Truth:
        if node.condition is not None:
            truth = self.block(node.condition)
            if truth.value is False:
                self.aside(node.body)
                return Truth(True)
            return self.once(node.body)
        if node.words is None:
            return self.once(node.body, node.name)
        values = [value for word in node.words for value in self.words.fields(word)]
        if not node.words:
            values = list(self.scope.arguments or [])
        if not values:
            self.aside(node.body)
            return Truth(True)
        if len(values) > _ROUNDS or any(is_open(value) for value in values):
            return self.once(node.body, node.name)
        truth = Truth(True)
        for value in values:
            self.scope.values[node.name] = value
            truth = self.block(node.body)
        return truth

    def once(self, body: tree.Block, name: str = "") -> Truth:
        """A body that may run any number of times: what it counts up is not known."""
        if name:
            self.scope.values[name] = (Piece(f"${name}", "", (f"${name}",)),)
        before = dict(self.scope.values)
        self.assumed += 1
        truth = self.block(body)
        if self.silent < 2:
            first = dict(self.scope.values)
            self.silent += 1
            self.block(body)
            self.silent -= 1
            for key, value in self.scope.values.items():
                held = first.get(key)
                if held != value and key in before and not isinstance(value, dict):
                    counted = not isinstance(held, dict) and held and not is_open(held)
                    unknown = (Piece(f"${key}", "", (f"${key}",)),)
                    self.scope.values[key] = unknown if counted else held or value
        self.assumed -= 1
        return truth

    def group(self, node: tree.Group) -> Truth:
        if not node.subshell:
            return self.block(node.body)
        kept = self.scope.values
        self.scope.values = dict(kept)
        try:
            return self.block(node.body)
        except _Stop:
            return Truth(True)
        finally:
            self.scope.values = kept

    # Commands.

    def pipe(self, node: tree.Pipe) -> Truth:
        text: Value | None = None
        truth = Truth(True)
        for command in node.commands:
            if isinstance(command, tree.Simple):
                text, truth = self.piped(command, text)
            else:
                text, truth = None, self.node(command)
        return ~truth if node.turned else truth

    def piped(self, command: tree.Simple, given: Value | None) -> tuple[Value | None, Truth]:
        """A command in a pipe: what it prints, as far as anyone can know."""
        words = self.all_words(command)
        truth = self.simple(command, given)
        return (self.prints(command, words, given) if words else None), truth

    def simple(self, node: tree.Simple, given: Value | None = None) -> Truth:
        words = self.all_words(node)
        if not words:
            for assignment in node.assignments:
                self.assign(assignment)
            return Truth(True)
        self.write_files(node, words, given)
        name = text_of(words[0]).removeprefix("\\")
        if name in _DECLARE:
            self.declare(name, node, words)
            return Truth(True)
        if name in self.functions and not is_open(words[0]):
            return self.call(name, words[1:])
        truth = self.builtin(name, words, node)
        if truth is not None:
            return truth
        before = {a.name: self.words.value(a.value) for a in node.assignments
                  if not isinstance(a.value, list)}  # fmt: skip
        self.record(words, before)
        return Truth(True)

    def record(self, words: list[Value], before: dict[str, Value]) -> None:
        if self.silent:
            return
        exported = {
            name: value
            for name in self.scope.exported
            if (value := self.scope.get(name)) is not None
        } | before
        self.shared.budget.spend(sum(len(p.text) for v in exported.values() for p in v))
        environment = {name: text_of(value) for name, value in exported.items()}
        command = Command(
            tuple(word_of(value) for value in words), environment, not self.doubt, self.under
        )
        (self.shared.unsure if self.doubt else self.shared.commands).append(command)
        self.inner(command, words, exported)

    def inner(self, command: Command, words: list[Value], exported: dict[str, Value]) -> None:
        """What a shell that a command starts would run: `bash -c "..."`, `bash file.sh`."""
        for position, word in enumerate(words):
            name = text_of(word).rpartition("/")[2]
            if name not in _SHELLS and not (position == 0 and name in ("sbatch", "srun")):
                continue
            rest = words[position + 1 :]
            flags = 0
            while flags < len(rest) and text_of(rest[flags]).startswith(("-", "+")):
                flags += 1
            scope = Scope(dict(exported), set(exported))
            for value in _passed(words[:position]):
                scope.values[text_of(value).partition("=")[0]] = after_equals(value)
            letters = "".join(text_of(value) for value in rest[:flags] if _short(value))
            if name in _SHELLS and "c" in letters and flags < len(rest):
                scope.arguments = [*rest[flags + 2 :]]
                self.text(rest[flags], scope, (*self.under, command))
                return
            scripts = [n for n, value in enumerate(rest) if text_of(value).endswith(".sh")]
            if scripts and (name not in _SHELLS or scripts[0] == flags):
                scope.arguments = rest[scripts[0] + 1 :]
                self.script(rest[scripts[0]], scope, (*self.under, command))
                return

    def text(self, value: Value, scope: Scope, under: tuple[Command, ...]) -> None:
        """Commands that stand in a value. What is not known in it is read as it was written."""
        where = next((piece.where for piece in value if piece.where), "")
        line = where.rpartition(":")[2]
        source = replace(self.source, text=text_of(value))
        self.nested(source, scope, under, int(line) if line.isdecimal() else 1)

    def nested(
        self, source: Source, scope: Scope, under: tuple[Command, ...], line: int = 1
    ) -> None:
        reader = _Shell(source, scope, self.shared, under)
        if scope is self.scope:
            reader.functions = self.functions
        reader.doubt, reader.assumed, reader.silent = self.doubt, self.assumed, self.silent
        try:
            block = syntax.parse(source, line)
        except UserError:
            return  # it would fail when it is run, and says nothing of this script
        reader.run(block)
        self.called |= reader.called

    def script(self, value: Value, scope: Scope, under: tuple[Command, ...]) -> bool:
        """Another script, where it lies beside this one."""
        source = self.beside(value)
        if source is None:
            return False
        self.shared.directives |= directives(source.text)
        asked = variables(self.shared.directives)
        scope.values |= {name: (Piece(text),) for name, text in asked.items()}
        scope.exported |= set(asked)
        self.nested(source, scope, under)
        return True

    def call(self, name: str, arguments: list[Value]) -> Truth:
        """A function's body. What ends its calling itself is often a thing of the machine: it is
        followed a few times, and the rest is not known."""
        self.called.add(name)
        if self.shared.running.count(name) > _AGAIN or self.shared.depth >= _DEEPEST:
            return UNKNOWN
        kept = self.scope.arguments
        self.shared.depth += 1
        self.shared.running.append(name)
        self.scope.arguments = arguments
        try:
            return self.block(self.functions[name])
        except _Return:
            return Truth(True)
        finally:
            self.shared.running.pop()
            self.shared.depth -= 1
            self.scope.arguments = kept

    def builtin(self, name: str, words: list[Value], node: tree.Simple) -> Truth | None:
        """What the shell does itself; None for a program."""
        rest = words[1:]
        match name:
            case "[" | "[[" | "test":
                inner = rest[:-1] if name != "test" else rest
                return decide(
                    inner, name == "[[", self.words.number, self.scope.values.__contains__
                )
            case ":" | "true":
                return Truth(True)
            case "false":
                return Truth(False)
            case "let":
                for word in rest:
                    self.arithmetic(text_of(word))
            case "unset":
                for word in rest:
                    self.scope.values.pop(text_of(word), None)
            case "shift":
                count = int(text_of(rest[0])) if rest and text_of(rest[0]).isdecimal() else 1
                if self.scope.arguments is not None:
                    self.scope.arguments = self.scope.arguments[count:]
            case "set":
                texts = [text_of(word) for word in rest]
                if "--" in texts:
                    self.scope.arguments = rest[texts.index("--") + 1 :]
            case "exit":
                # An error is a guard, mostly of a placeholder that is to be filled in.
                if not self.assumed and (not rest or text_of(rest[0]) == "0"):
                    raise _Stop
            case "return":
                status = text_of(rest[0]) if rest else "0"
                if not self.assumed:
                    raise _Return
                return Truth(status == "0", True)
            case "eval":
                joined = [p for word in rest for p in (*word, Piece(" "))]
                self.text(tuple(joined), self.scope, self.under)
            case "source" | ".":
                if not rest:
                    return Truth(True)
                kept = self.scope.arguments
                self.scope.arguments = rest[1:] or kept
                self.script(rest[0], self.scope, self.under)
                self.scope.arguments = kept
            case "read" | "mapfile" | "readarray":
                self.reads(rest, node)
            case "break" | "continue" | "shopt" | "trap" | "ulimit" | "wait":
                pass
            case _:
                return None
        return Truth(True)


def _passed(words: list[Value]) -> list[Value]:
    """`A=1` among the words before a shell (`env A=1 bash`, `docker run -e A=1 ... bash`)."""
    return [w for w in words if _SET.match(text_of(w)) and w and not w[0].open]


def _short(value: Value) -> bool:
    text = text_of(value)
    return text.startswith("-") and not text.startswith("--")
