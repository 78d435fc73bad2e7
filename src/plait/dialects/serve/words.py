"""Where a serve command stands: in a shell script, a Dockerfile, a compose or Kubernetes file, a
Python file. Found and taken apart, never run."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from plait.dialects import shell
from plait.dialects.flags import Word
from plait.dialects.settings import Setting
from plait.dialects.source import Source
from plait.dialects.tree import read_json, read_yaml
from plait.spec.findings import UserError, error

#: Commands within commands (ssh node "bash -c '...'") that are looked into.
_DEEPEST = 4


@dataclass(frozen=True)
class Program:
    """By what a server is started.

    Attributes:
        name: as people write it.
        commands: its words, "vllm serve"; a following "--help" is none of them.
        modules: after `python -m`, or a script of that name.
        images: parts of the name of a container that starts the server by itself.
        classes: Python classes that make an engine, and the option that their first argument is.
        package: of these classes.
    """

    name: str
    commands: tuple[str, ...]
    modules: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    classes: Mapping[str, str] = field(default_factory=dict)
    package: str = ""


@dataclass(frozen=True)
class Serve:
    """One server that a launch starts.

    Attributes:
        words: its arguments, where it is a command.
        settings: its options, where Python or a file of options says them.
        environment: variables that are set for it.
        files: name -> text of what the launch writes itself.
        sure: False where it stands under a condition that cannot be decided.
    """

    words: tuple[Word, ...] = ()
    settings: tuple[Setting, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    sure: bool = True


def serves(source: Source, program: Program) -> list[Serve]:
    """Every server that a launch starts, in order, those that are sure first.

    Raises:
        UserError: it cannot be read, or starts none.
    """
    if source.suffix == ".py":
        found = list(_python(source, program))
    elif source.suffix in (".yaml", ".yml", ".json"):
        found = list(_tree(source, program))
    else:
        found = list(_script(source, program))
    if not found:
        message = f"no {program.name} server is started here ({' or '.join(program.commands)} ...)"
        where = str(source.path or source.name)
        raise UserError([error(where, None, message, rule="no-command")])
    return sorted(found, key=lambda serve: not serve.sure)


# ------------------------------------------------------------------------------------------
# Commands


def _script(source: Source, program: Program, depth: int = 0) -> Iterator[Serve]:
    name = source.path.name.lower() if source.path else ""
    if "dockerfile" in name or name.endswith(".containerfile"):
        yield from _dockerfile(source, program)
        return
    script = shell.read(source)
    for command in script.commands:
        environment = dict(command.environment)
        for serve in _in_words(command.words, program, source, depth):
            yield replace(
                serve,
                environment=environment | dict(serve.environment),
                files=dict(script.files) | dict(serve.files),
                sure=command.sure and serve.sure,
            )


def _in_words(
    words: Sequence[Word], program: Program, source: Source, depth: int
) -> Iterator[Serve]:
    """The server in a command, whatever stands before it."""
    texts = [word.text for word in words]
    for start in (_started, _contained):
        for at in range(len(texts)):
            after = start(texts, at, program)
            if after is not None:
                yield Serve(tuple(words[after:]), environment=_set(texts[:at]))
                return
        if start is _started:
            # A command in one word: ssh node "vllm serve ...", tmux new -d "...".
            for word in words if depth < _DEEPEST else ():
                named = any(c in word.text for c in (*program.commands, *program.modules))
                if named and re.search(r"\s", word.text):
                    inner = replace(source, text=word.text, path=None)
                    yield from _script(inner, program, depth + 1)
                    return


def _started(texts: list[str], at: int, program: Program) -> int | None:
    """Where the arguments begin of a server that a word starts; None: it starts none."""
    first = texts[at].rstrip("/").rpartition("/")[2]
    for command in program.commands:
        own = command.split()
        if first == own[0] and texts[at + 1 : at + len(own)] == own[1:]:
            return at + len(own)
    module = texts[at].removesuffix(".py").replace("/", ".")
    for known in program.modules:
        if module == known or (at and texts[at].endswith(".py") and module.endswith(known)):
            return at + 1
    return None


def _contained(texts: list[str], at: int, program: Program) -> int | None:
    """The same of a container whose image starts the server by itself."""
    image = texts[at].lower()
    if not at or "=" in image or not any(part in image for part in program.images):
        return None
    rest = texts[at + 1 :]
    other = rest and (rest[0].startswith("/") or re.fullmatch(r"(ba|z)?sh|python3?|vllm", rest[0]))
    if other:
        return None
    return at + 2 if rest and rest[0] == "serve" else at + 1


def _set(texts: Sequence[str]) -> dict[str, str]:
    """Variables among the words before a program: `env A=1`, `docker run -e A=1`."""
    pairs = (re.fullmatch(r"(?:--env=|-e=?)?([A-Z_][A-Z0-9_]*)=(.*)", t) for t in texts)
    return {pair[1]: pair[2] for pair in pairs if pair}


def _dockerfile(source: Source, program: Program) -> Iterator[Serve]:
    """ENTRYPOINT and CMD, as one command."""
    text = re.sub(r"\\\n", " ", source.text)
    parts: dict[str, list[str]] = {}
    environment = {}
    image = ""
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word.upper() in ("CMD", "ENTRYPOINT"):
            parts[word.upper()] = _argv(rest.strip(), source)
        elif word.upper() == "ENV":
            environment |= _set(rest.split())
        elif word.upper() == "FROM":
            image = rest.split()[0] if rest.split() else ""
    argv = [*parts.get("ENTRYPOINT", [image]), *parts.get("CMD", [])]
    words = [Word("container"), *map(Word, argv)]
    for serve in _in_words(words, program, source, 0):
        yield replace(serve, environment=environment | dict(serve.environment))


def _argv(text: str, source: Source) -> list[str]:
    if text.startswith("["):
        try:
            found = json.loads(text)
        except ValueError:
            found = []
        return [str(part) for part in found] if isinstance(found, list) else []
    commands = shell.read(replace(source, text=text, path=None)).commands
    return [word.text for word in commands[0].words] if commands else []


# ------------------------------------------------------------------------------------------
# Trees


def _tree(source: Source, program: Program) -> Iterator[Serve]:
    """Containers of a compose or Kubernetes file, else the file's own options."""
    json_file = source.suffix == ".json"
    found = False
    for document in [source] if json_file else _documents(source):
        tree = read_json(document) if json_file else read_yaml(document)
        for box in _boxes(tree):
            for serve in _container(box, program, source):
                found = True
                yield serve
        if not found and isinstance(tree, Mapping) and not _is_deployment(tree):
            found = True
            yield Serve(settings=tuple(options(tree, source.name)))


def _documents(source: Source) -> list[Source]:
    texts = re.split(r"(?m)^---[ \t]*(?:#.*)?$", source.text)[:64]
    return [replace(source, text=t) for t in texts if t.strip()]


def _is_deployment(tree: Mapping[Any, Any]) -> bool:
    return bool(tree.keys() & {"services", "apiVersion", "kind", "spec", "jobs"})


def _boxes(tree: Any) -> Iterator[Mapping[Any, Any]]:
    """Every mapping that says what a container starts; the tree is bounded already."""
    level = [tree]
    while level:
        value = level.pop(0)
        if isinstance(value, Mapping):
            if value.keys() & {"command", "args", "entrypoint"} or "image" in value:
                yield value
            level += value.values()
        elif isinstance(value, list):
            level += value


def _container(box: Mapping[Any, Any], program: Program, source: Source) -> Iterator[Serve]:
    argv: list[str] = [str(box.get("image") or "container")]
    for key in ("entrypoint", "command", "args"):
        said = box.get(key)
        if isinstance(said, list):
            argv += [str(part) for part in said]
        elif isinstance(said, str):
            argv += _argv(said, source)
    environment = _environment(box.get("env", box.get("environment")))
    words = [Word("container"), *(_word(text, environment) for text in argv)]
    inner = replace(source, variables=dict(source.variables) | environment)
    for serve in _in_words(words, program, inner, 0):
        yield replace(serve, environment=environment | dict(serve.environment))


def _word(text: str, environment: Mapping[str, str]) -> Word:
    """A word of a container's command; `$(NAME)` and `${NAME}` are of its environment."""
    opened = []

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[3]
        if name in environment:
            return environment[name]
        if default:
            return default[2:]
        opened.append(name)
        return match[0]

    pattern = r"\$(?:\((\w+)\)|\{(\w+)(:-[^}]*)?\})"
    return Word(re.sub(pattern, value, text), open=tuple(opened))


def _environment(said: Any) -> dict[str, str]:
    if isinstance(said, Mapping):
        return {str(name): str(value) for name, value in said.items() if value is not None}
    found = {}
    for item in said if isinstance(said, list) else []:
        if isinstance(item, Mapping) and "name" in item and item.get("value") is not None:
            found[str(item["name"])] = str(item["value"])
        elif isinstance(item, str) and "=" in item:
            name, _, value = item.partition("=")
            found[name] = value
    return found


def options(tree: Mapping[Any, Any], where: str) -> Iterator[Setting]:
    """The options of a file of options, as flags would say them."""
    for key, value in tree.items():
        yield Setting(f"--{key}" if not str(key).startswith("-") else str(key), value, where)


# ------------------------------------------------------------------------------------------
# Python


def _python(source: Source, program: Program) -> Iterator[Serve]:
    """Engines that a Python file makes, and commands that it starts."""
    from plait.dialects.python.reader import Reader
    from plait.dialects.python.values import Made, Open, parse

    reader = Reader()
    reader.run(parse(source))
    for name in reader.functions():
        reader.call(name)
    found: dict[tuple[str, int], Made] = {}
    for call in reader.calls:
        own = call.name.startswith(program.package) or "." not in call.name
        if call.word in program.classes and own:
            found.setdefault((call.name, call.line), call)
    for call in found.values():
        where = f"{source.name}:{call.line}"
        first = {program.classes[call.word]: call.args[0]} if call.args else {}
        said = {
            f"--{k.replace('_', '-')}": v
            for k, v in call.fields.items()
            if not (isinstance(v, Made) and v.name == f"{call.name}.{k}")  # a method
        }
        settings = []
        for name, value in (first | said).items():
            opened = value.name if isinstance(value, Open) else None
            kept = f"${opened}" if opened is not None else _plain(value)
            settings.append(Setting(name, kept, where, (opened,) if opened is not None else ()))
        yield Serve(settings=tuple(settings))
    if found:
        return
    for call in reader.calls:
        argv = call.args[0] if call.args else None
        if call.word not in ("run", "Popen", "call", "check_call", "system") or argv is None:
            continue
        where = f"{source.name}:{call.line}"
        if isinstance(argv, str):
            yield from _in_words([Word(f"{argv} ", where)], program, source, 0)
        elif isinstance(argv, list | tuple):
            yield from _in_words([_argument(a, where) for a in argv], program, source, 0)


def _argument(value: Any, where: str) -> Word:
    """An element of a command that Python starts."""
    from plait.dialects.python.values import Open

    if isinstance(value, Open):
        return Word(f"${value.name}", where, (value.name,))
    return Word(str(_plain(value)), where)


def _plain(value: Any, deep: int = 0) -> Any:
    """What a setting can hold of a Python value; calls may hold each other."""
    if isinstance(value, str | int | float | bool | None):
        return value
    if deep > 8:
        return "..."
    if isinstance(value, list | tuple):
        return [_plain(v, deep + 1) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _plain(v, deep + 1) for k, v in value.items()}
    fields = getattr(value, "fields", None)
    if isinstance(fields, Mapping):
        return _plain(fields, deep + 1)
    return str(getattr(value, "name", value))
