"""Where a launch comes from: a file, or a command as it would be typed. Read, never run."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from plait.spec.findings import UserError, error
from plait.spec.tomlfile import neighbour

#: Bytes of the largest file that is read; those that people launch with have a thousandth.
LARGEST = 4 << 20
#: How the script is called that starts with the configuration beside it.
STARTER = "launch.sh"
#: A variable or a substitution that a path begins with, "$HERE/".
_LED = re.compile(r"^(\$\{?\w+\}?|\$\([^)]*\)|`[^`]*`)/*")


@dataclass(frozen=True)
class Source:
    """A text to be read.

    Attributes:
        text: the whole of it.
        name: how messages call it: the file's name, or "command".
        path: the file; None for a command.
        siblings: name -> text of files beside it that are not on disk: those written together
            with it.
        variables: name -> text of environment variables that a person says are set.
    """

    text: str
    name: str
    path: Path | None = None
    siblings: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def suffix(self) -> str:
        """Of the file's name, in lower case, with its dot; "" for a command."""
        return self.path.suffix.lower() if self.path else ""

    def beside(self, relative: str) -> "Source":
        """A file that this one names, by its path from the folder of this one.

        Raises:
            UserError: it cannot be read.
        """
        if relative in self.siblings:
            text, path = self.siblings[relative], Path(relative)
            return replace(self, text=text, name=path.name, path=path)
        base = self.path.parent if self.path else Path()
        return replace(read_file(base / relative), variables=self.variables)

    def at_hand(self, named: str) -> "Source | None":
        """A file that this one names by a path that may be of another machine: from the folder of
        this one, without the variable that it begins with, or by its name alone."""
        for path in dict.fromkeys((named, _LED.sub("", named), named.rpartition("/")[2])):
            if path:
                with suppress(UserError):
                    return self.beside(path)
        return None

    def starter(self) -> "Source | None":
        """The script beside this configuration that starts with it."""
        if self.path is None:
            return None
        try:
            script = self.beside(STARTER)
        except UserError:
            return None
        return script if re.search(rf"\b{re.escape(self.path.name)}\b", script.text) else None


def source_of(words: list[str]) -> Source:
    """The launch that the arguments of a command name: a file, or the command itself, in one
    word ("vllm serve ...") or in many.

    Raises:
        UserError: a file that is not there, or cannot be read.
    """
    if len(words) != 1 or (" " in words[0].strip() and not _is_there(words[0])):
        return Source(" ".join(words), "command")
    return read_file(Path(words[0]).expanduser())


def _is_there(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # no name of a file: too long, or with a NUL in it
        return False


def read_file(path: Path) -> Source:
    """A text file of bearable size.

    Raises:
        UserError: one line that says why it cannot be read.
    """
    where = str(path) if len(str(path)) <= 200 else f"{str(path)[:200]}..."
    problem, hint = None, None
    try:
        about = path.stat()
        if S_ISDIR(about.st_mode):
            problem = "a folder, not a file"
        elif not S_ISREG(about.st_mode):
            problem = "not a regular file"
        elif about.st_size > LARGEST:
            problem = f"{about.st_size} bytes are more than a launch file has ({LARGEST})"
        else:
            return Source(_decoded(path.read_bytes()), path.name, path)
    except (FileNotFoundError, NotADirectoryError):
        problem, hint = "no such file", neighbour(path)
    except OSError as failure:
        problem = f"cannot be read: {failure.strerror}"
    except ValueError as failure:  # not text; or a name with a NUL in it
        problem = str(failure)
    raise UserError([error(where, where, problem, hint, "unreadable-file")])


def _decoded(content: bytes) -> str:
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError("not a text file in UTF-8, but UTF-16")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        raise ValueError(f"not a text file in UTF-8 (byte {failure.start})") from None
    if "\0" in text:
        raise ValueError("not a text file: it holds NUL bytes")
    return text.replace("\r\n", "\n")
