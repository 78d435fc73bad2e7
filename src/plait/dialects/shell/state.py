"""What a shell knows while a script is read: its variables, and the files that it wrote."""

import re
from dataclasses import dataclass, field, replace

from plait.dialects.flags import Word
from plait.dialects.shell import syntax, tree
from plait.dialects.shell.tools import printed
from plait.dialects.shell.words import Budget, Expansion, Piece, Scope, Value, is_open, text_of
from plait.dialects.source import Source
from plait.spec.findings import UserError

#: Files that a script may bring in or write.
_FILES = 40
_SET = re.compile(r"([A-Za-z_]\w*)=")


@dataclass(frozen=True)
class Command:
    """One simple command.

    Attributes:
        words: the program and its arguments, quotes removed, variables put in.
        environment: variables that are exported when it runs, and those written before it.
        sure: False where it stands under a condition that cannot be decided and is taken to be
            false, or in a function that is never called.
        under: the commands whose shell runs it, the outermost first (`srun ... bash -c "..."`).
    """

    words: tuple[Word, ...]
    environment: dict[str, str] = field(default_factory=dict)
    sure: bool = True
    under: tuple["Command", ...] = ()


@dataclass(frozen=True)
class Script:
    """What a script holds.

    Attributes:
        commands: in order; of a condition that cannot be decided, the branches that would be
            taken if it were false. Those of the other branches come last, not `sure`.
        variables: name -> value at the end, as far as they are known.
        files: name -> text of what it writes by a here-document, echo, or a template.
        drafts: the same of branches that are not taken.
        directives: of `#SBATCH` lines, by their long names ("nodes", "ntasks-per-node", "gres").
    """

    commands: tuple[Command, ...]
    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    directives: dict[str, str] = field(default_factory=dict)
    drafts: dict[str, str] = field(default_factory=dict)


@dataclass
class Shared:
    """What all shells of a script write to."""

    budget: Budget
    directives: dict[str, str]
    commands: list[Command] = field(default_factory=list)
    unsure: list[Command] = field(default_factory=list)
    files: dict[str, Value] = field(default_factory=dict)
    drafts: dict[str, Value] = field(default_factory=dict)
    opened: int = 0
    depth: int = 0
    running: list[str] = field(default_factory=list)


class State:
    """Variables and files.

    Attributes:
        doubt: above 0 under a condition that cannot be decided: commands are not sure there.
        assumed: above 0 under one that holds if nothing comes from outside: `exit` is no end.
        silent: above 0 where a body is read a second time.
    """

    def __init__(
        self, source: Source, scope: Scope, shared: Shared, under: tuple[Command, ...] = ()
    ):
        self.source, self.scope, self.shared, self.under = source, scope, shared, under
        self.words = Expansion(scope, source, shared.budget, self.output)
        self.functions: dict[str, tree.Block] = {}
        self.called: set[str] = set()
        self.doubt = self.assumed = self.silent = 0

    # What commands print, and the files that they leave.

    def all_words(self, command: tree.Simple) -> list[Value]:
        first = command.words[0] if command.words else ()
        if len(first) == 1 and isinstance(first[0], tree.Text) and first[0].text == "[[":
            return [self.words.value(phrase) for phrase in command.words]
        return [value for phrase in command.words for value in self.words.fields(phrase)]

    def prints(self, command: tree.Simple, words: list[Value], given: Value | None) -> Value | None:
        for redirection in command.redirections:
            if redirection.sign.startswith("<<<"):
                given = self.words.value(redirection.target)
            elif redirection.sign.startswith("<<"):
                given = self.words.value(tuple(redirection.body))
            elif redirection.sign == "<":
                given = self.file(self.words.value(redirection.target))
        return printed(words, given, self.file)

    def write_files(self, node: tree.Simple, words: list[Value], given: Value | None) -> None:
        """What echo, cat, sed and tee leave in files."""
        targets = [(r.sign, self.words.value(r.target)) for r in node.redirections
                   if r.sign in (">", ">>", "1>", ">|", "1>>")]  # fmt: skip
        name = text_of(words[0]).rpartition("/")[2]
        if name == "tee":
            flags = [text_of(w) for w in words[1:]]
            targets += [(">>" if "-a" in flags else ">", w) for w in words[1:]
                        if not text_of(w).startswith("-")]  # fmt: skip
        if name == "sed" and any(text_of(w).startswith("-i") for w in words):
            targets = [(">", words[-1])]
        if not targets or self.silent:
            return
        text = self.prints(node, words, given)
        if text is None:
            return
        if name == "echo":
            text = (*text, Piece("\n"))
        for sign, target in targets:
            path = text_of(target)
            if self.doubt and len(self.shared.drafts) < _FILES:
                self.shared.drafts.setdefault(path, text)
            elif len(self.shared.files) < _FILES and path and not path.startswith("/dev/"):
                held = self.shared.files.get(path, ()) if sign.endswith(">>") else ()
                self.shared.files[path] = self.shared.budget.check((*held, *text))

    def beside(self, value: Value) -> Source | None:
        """A file that a word names: from the folder of the script, whatever that is called."""
        path = text_of(tuple(piece for piece in value if not piece.open)).lstrip("/")
        up = sum(len(re.findall(r"/\.\.(?=[/\"')\s`]|$)", p.text)) for p in value if p.open)
        absolute = bool(value) and not value[0].open and value[0].text.startswith("/")
        if not path or absolute or self.shared.opened >= _FILES:
            return None
        self.shared.opened += 1
        for tried in dict.fromkeys(("../" * up + path, path)):
            try:
                return self.source.beside(tried)
            except UserError:
                continue
        return None

    def file(self, value: Value) -> Value | None:
        name = text_of(value)
        if name in self.shared.files:
            return self.shared.files[name]
        source = self.beside(value)
        return None if source is None else self.shared.budget.check((Piece(source.text),))

    def output(self, part: tree.Output) -> Value | None:
        """What `$( ... )` becomes, where that can be known."""
        if len(part.text) > 1 << 16:
            return None
        try:
            block = syntax.parse(replace(self.source, text=part.text), 1)
        except UserError:
            return None
        if len(block) != 1:
            return None
        commands = block[0].commands if isinstance(block[0], tree.Pipe) else (block[0],)
        text: Value | None = None
        for command in commands:
            if not isinstance(command, tree.Simple) or not command.words:
                return None
            words = self.all_words(command)
            name = text_of(words[0]) if words else ""
            if name not in ("echo", "printf", "cat", "sed", "basename", "dirname", "expr", "seq"):
                return None
            if any(p.missing for word in words for p in word) and name != "echo":
                return None
            text = self.prints(command, words, text)
        if text is None or not text:
            return text
        last = text[-1]
        trimmed = last if last.open else Piece(last.text.rstrip("\n"), last.where)
        return (*text[:-1], trimmed)

    # Variables.

    def assign(self, assignment: tree.Assignment) -> None:
        name, scope = assignment.name, self.scope
        held = scope.values.get(name)
        check = self.shared.budget.check
        if isinstance(assignment.value, list):
            items = dict(held) if assignment.more and isinstance(held, dict) else {}
            if assignment.more and held is not None and not isinstance(held, dict):
                items = {"0": held}
            following = len(items)
            for key, phrase in assignment.value:
                if key is not None:
                    items[text_of(self.words.value(key))] = self.words.value(phrase)
                    continue
                for value in self.words.fields(phrase):
                    items[str(following)] = value
                    following += 1
            self.shared.budget.spend(len(items))
            check(tuple(piece for value in items.values() for piece in value))
            scope.values[name] = items
            return
        value = self.words.value(assignment.value)
        if assignment.index is not None:
            key = self.words.key(assignment.index, held)
            items = dict(held) if isinstance(held, dict) else {} if held is None else {"0": held}
            if key is not None:
                more = items.get(key, ()) if assignment.more else ()
                items[key] = check((*more, *value))
                scope.values[name] = items
        elif isinstance(held, dict):
            more = held.get("0", ()) if assignment.more else ()
            scope.values[name] = held | {"0": check((*more, *value))}
        elif assignment.more:
            before = held or ()
            scope.values[name] = check((*before, *value))
        else:
            scope.values[name] = check(value)

    def declare(self, name: str, node: tree.Simple, words: list[Value]) -> None:
        flags = [text_of(w) for w in words[1:] if text_of(w).startswith("-")]
        names = [a.name for a in node.declared]
        for assignment in node.declared:
            self.assign(assignment)
        for word in words[1:]:
            text = text_of(word)
            if text.startswith("-"):
                continue
            if _SET.match(text):
                names.append(text.partition("=")[0])
                self.scope.values[names[-1]] = after_equals(word)
            elif text.isidentifier():
                names.append(text)
                if any("A" in flag or "a" in flag for flag in flags) and name != "export":
                    self.scope.values.setdefault(text, {})
        if name == "export" or any("x" in flag for flag in flags):
            self.scope.exported |= set(names)

    def reads(self, rest: list[Value], node: tree.Simple) -> None:
        document = [r for r in node.redirections if r.sign.startswith("<<")]
        names = [text_of(w) for w in rest if text_of(w).isidentifier()]
        if len(names) > 1 and document and document[-1].sign == "<<<":
            self.split(names, self.words.value(document[-1].target), node)
            return
        for name in names[-1:] if document else names:
            if document and document[-1].sign == "<<<":
                value = self.words.value(document[-1].target)
            elif document:
                value = self.words.value(tuple(document[-1].body))
            else:
                value = (Piece(f"${name}", "", (f"${name}",)),)
            self.scope.values[name] = value

    def split(self, names: list[str], value: Value, node: tree.Simple) -> None:
        """`IFS=, read -r A B <<< "$x"`: a part of a value for each name, the rest for the last."""
        own = {a.name: self.words.value(a.value) for a in node.assignments
               if not isinstance(a.value, list)}  # fmt: skip
        held = own.get("IFS", self.scope.values.get("IFS"))
        between = text_of(held) if held is not None and not isinstance(held, dict) else None
        text = text_of(value).strip()
        letters = re.escape(between) if between and between.strip() else r"\s"
        parts = re.split(f"[{letters}]+" if letters == r"\s" else f"[{letters}]", text)
        for position, name in enumerate(names):
            if is_open(value):
                self.scope.values[name] = (Piece(f"${name}", "", (f"${name}",)),)
                continue
            last = position == len(names) - 1
            mine = parts[position:] if last else parts[position : position + 1]
            self.scope.values[name] = (Piece((between or " ")[:1].join(mine).strip()),)


def after_equals(value: Value) -> Value:
    """What follows the = in a word."""
    pieces = list(value)
    while pieces and "=" not in pieces[0].text:
        pieces.pop(0)
    first = pieces[0]
    rest = Piece(first.text.partition("=")[2], first.where, first.open if first.open else ())
    return (rest, *pieces[1:])
