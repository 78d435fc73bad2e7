"""What a shell script is made of: words, and commands of words."""

from dataclasses import dataclass, field


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
