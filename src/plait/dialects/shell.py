"""Shell scripts, read as text: which commands they would run, with which words.

Nothing is executed. Variables that the script sets are put in; what depends on anything outside
of it (arguments, the environment, the output of commands) stays as it is written, and the words
that hold it say so.
"""

from dataclasses import dataclass, field

from plait.dialects.flags import Word
from plait.dialects.source import Source


@dataclass(frozen=True)
class Command:
    """One simple command.

    Attributes:
        words: the program and its arguments, quotes removed, variables put in.
        environment: variables that are exported when it runs, and those written before it.
    """

    words: tuple[Word, ...]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Script:
    """What a script holds.

    Attributes:
        commands: in order; of a condition that cannot be decided, the branches that would be
            taken if it were false.
        variables: name -> value at the end, as far as they are known.
        files: name -> text of what it writes by a here-document.
    """

    commands: tuple[Command, ...]
    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


def read(source: Source) -> Script:
    """A script, or a command as it would be typed.

    Raises:
        UserError: quotes or brackets that are not closed: one line.
    """
    raise NotImplementedError
