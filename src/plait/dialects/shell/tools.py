"""What small programs print that scripts make words and files with: echo, cat, sed s/a/b/, ..."""

import re
from collections.abc import Callable

from plait.dialects.shell.arithmetic import Unknown, evaluate
from plait.dialects.shell.words import Piece, Value, is_open, text_of

#: Numbers that `seq` prints at most.
_MOST = 4096
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\", '\\"': '"'}


def printed(
    words: list[Value], given: Value | None, look: Callable[[Value], Value | None]
) -> Value | None:
    """What a program prints; None where that cannot be known.

    Args:
        words: the program and its arguments. given: what it reads, where it reads.
        look: the text of a file that is named.
    """
    name = text_of(words[0]).rpartition("/")[2]
    arguments = words[1:]
    if name == "echo":
        return _echo(arguments)
    if name == "printf" and arguments:
        return _printf(arguments)
    if name in ("cat", "tee"):
        files = [word for word in arguments if not text_of(word).startswith("-")]
        if name == "tee" or not files:
            return given
        texts = [look(word) for word in files]
        if any(text is None for text in texts):
            return None
        return tuple(piece for text in texts for piece in text or ())
    if name == "sed":
        return _sed(arguments, given, look)
    if name in ("basename", "dirname") and arguments:
        return _path(name, arguments)
    if name in ("expr", "seq"):
        return _counted(name, arguments)
    return None


def _counted(name: str, arguments: list[Value]) -> Value | None:
    """`expr A op B ...` of whole numbers, and `seq FIRST STEP LAST`; of what is not known, the
    variables in it."""
    unknown = tuple(dict.fromkeys(n for value in arguments for p in value for n in p.open))
    words = [text_of(value) for value in arguments]
    if name == "expr":
        if not all(re.fullmatch(r"-?\d{1,18}|[-+*/%()]", w) or is_open(v)
                   for w, v in zip(words, arguments, strict=True)):  # fmt: skip
            return None
        if unknown:
            return (Piece(f"$(expr {' '.join(words)})", open=unknown),)
        try:
            return (Piece(str(evaluate(" ".join(words), lambda _: None))),)
        except Unknown:
            return None
    if unknown or not 1 <= len(words) <= 3:
        return None
    if not all(re.fullmatch(r"-?\d{1,9}", word) for word in words):
        return None
    numbers = [int(word) for word in words]
    first = numbers[0] if len(numbers) > 1 else 1
    step = numbers[1] if len(numbers) > 2 else 1
    last = numbers[-1]
    if step == 0 or (last - first) // step > _MOST:
        return None
    return (Piece("\n".join(map(str, range(first, last + (1 if step > 0 else -1), step)))),)


def _echo(arguments: list[Value]) -> Value:
    escaped = False
    while arguments and text_of(arguments[0]) in ("-n", "-e", "-en", "-ne", "-E"):
        escaped = escaped or "e" in text_of(arguments[0])
        arguments = arguments[1:]
    pieces: list[Piece] = []
    for number, value in enumerate(arguments):
        pieces += [Piece(" "), *value] if number else value
    return _unescaped(tuple(pieces)) if escaped else tuple(pieces)


def _unescaped(value: Value) -> Value:
    return tuple(
        piece if piece.open else Piece(
            re.sub(r'\\[nt"\\]', lambda m: _ESCAPES[m[0]], piece.text), piece.where
        )
        for piece in value
    )  # fmt: skip


def _printf(arguments: list[Value]) -> Value | None:
    form = text_of(arguments[0])
    if is_open(arguments[0]) or text_of(arguments[0]).startswith("-"):
        return None
    pieces: list[Piece] = []
    rest = list(arguments[1:])
    parts = re.split(r"(%[%sd])", form)
    if any("%" in part and part not in ("%s", "%d", "%%") for part in parts):
        return None
    while True:  # once more for the words that are left
        left = len(rest)
        for part in parts:
            if part in ("%s", "%d"):
                pieces += rest.pop(0) if rest else ()
            else:
                pieces += _unescaped((Piece("%" if part == "%%" else part),))
        if not rest or len(rest) == left:
            return tuple(pieces)


def _path(name: str, arguments: list[Value]) -> Value | None:
    if any(is_open(value) for value in arguments):
        return None
    path = text_of(arguments[0]).rstrip("/")
    folder, slash, last = path.rpartition("/")
    if name == "dirname":
        return (Piece(folder or ("/" if slash else ".")),)
    if len(arguments) > 1:
        last = last.removesuffix(text_of(arguments[1]))
    return (Piece(last),)


def _sed(
    arguments: list[Value], given: Value | None, look: Callable[[Value], Value | None]
) -> Value | None:
    """`sed s/a/b/ [FILE]`, where a is a plain word."""
    scripts: list[Value] = []
    files: list[Value] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        text = text_of(word)
        if text in ("-e", "--expression") and rest:
            scripts.append(rest.pop(0))
        elif text.startswith("-"):
            if text not in ("-i", "--in-place", "-r", "-E"):
                return None
        elif not scripts:
            scripts.append(word)
        else:
            files.append(word)
    value = look(files[0]) if files else given
    if value is None:
        return None
    for script in scripts:
        changed = _substituted(value, script)
        if changed is None:
            return None
        value = changed
    return value


def _substituted(value: Value, script: Value) -> Value | None:
    if not script or script[0].open or not re.match(r"s[/|#@,:]", script[0].text):
        return None
    sign = script[0].text[1]
    whole = text_of(script)[2:]
    old, _, rest = whole.partition(sign)
    # The new text may hold what is not known, with the sign in it: it ends at the last one.
    new_text, found, flags = rest.rpartition(sign)
    if not found or not re.fullmatch(r"[gI0-9]*", flags) or not old:
        return None
    if re.search(r"[.*\[\]^$\\+?(){}]", old):
        return None
    opened = tuple(name for piece in script for name in piece.open)
    pieces: list[Piece] = []
    for piece in value:
        parts = [piece.text] if piece.open else piece.text.split(old)
        for number, part in enumerate(parts):
            if number:
                pieces.append(Piece(new_text, script[0].where, opened))
            if part:
                pieces.append(Piece(part, piece.where, piece.open, piece.missing))
    return tuple(pieces)
