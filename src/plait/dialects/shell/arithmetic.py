"""The shell's integers: `$((A * B))`, without the shell."""

import re
from collections.abc import Callable

#: What it may be made of; the longest sign first.
_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]+|\d+#\w+|\d+)|([A-Za-z_]\w*)"
    r"|(<<=|>>=|\*\*|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%<>&|^!~?:=(),]))"
)
#: Binary signs by how they bind, the loosest first.
_LEVELS = (("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<=", ">=", "<", ">"),
           ("<<", ">>"), ("+", "-"), ("*", "/", "%"))  # fmt: skip
_LONGEST, _DEEPEST = 4096, 64
#: Expressions within each other (A='B+B', B='C+C', ...) that are looked at.
_MOST = 256


class Unknown(Exception):
    """Not a sum that can be done: a name without a value, a division by zero, or no sum."""

    def __init__(self, *names: str):
        super().__init__(*names)
        self.names = names


def evaluate(
    text: str,
    look: Callable[[str], str | None],
    put: Callable[[str, str], None] | None = None,
) -> int:
    """The value of an expression, as the shell counts: in 64 bits, divisions toward zero.

    Args:
        look: the text of a variable; None where it is not known.
        put: what an assignment in the expression does.

    Raises:
        Unknown: with the names of the variables that are not known.
    """
    return _Sum(text, look, put, 0, [0]).whole()


class _Sum:
    def __init__(
        self,
        text: str,
        look: Callable[[str], str | None],
        put: Callable[[str, str], None] | None,
        depth: int,
        sums: list[int],
    ):
        sums[0] += 1
        if len(text) > _LONGEST or depth > _DEEPEST or sums[0] > _MOST:
            raise Unknown
        self.look, self.put, self.depth, self.sums = look, put, depth, sums
        self.tokens: list[tuple[str, str]] = []
        #: Above 0 where what is read is not counted (`0 && x`, the other side of `? :`).
        self.idle = 0
        at, end = 0, len(text.rstrip())
        while at < end:
            match = _TOKEN.match(text, at)
            if match is None:
                raise Unknown
            number, name, sign = match.groups()
            kind = "number" if number else "name" if name else "sign"
            self.tokens.append((kind, number or name or sign))
            at = match.end()
        self.at = 0

    def peek(self) -> str:
        kind, text = self.tokens[self.at] if self.at < len(self.tokens) else ("", "")
        return text if kind == "sign" else ""

    def whole(self) -> int:
        if not self.tokens:
            return 0
        value = self.commas()
        if self.at < len(self.tokens):
            raise Unknown
        return value

    def commas(self) -> int:
        value = self.choice()
        while self.peek() == ",":
            self.at += 1
            value = self.choice()
        return value

    def choice(self) -> int:
        self.deeper()
        value = self.binary(0)
        if self.peek() == "?":
            self.at += 1
            yes = self.idly(not value, self.choice)
            if self.peek() != ":":
                raise Unknown
            self.at += 1
            no = self.idly(bool(value), self.choice)
            value = yes if value else no
        self.depth -= 1
        return value

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise Unknown

    def idly(self, idle: bool, read: Callable[[], int]) -> int:
        self.idle += idle
        value = read()
        self.idle -= idle
        return value

    def binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self.power()
        left = self.binary(level + 1)
        while (sign := self.peek()) in _LEVELS[level]:
            self.at += 1
            idle = (sign == "&&" and not left) or (sign == "||" and bool(left))
            right = self.idly(idle, lambda: self.binary(level + 1))
            left = 0 if self.idle else _bits(_apply(sign, left, right))
        return left

    def power(self) -> int:
        self.deeper()
        base = self.unary()
        if self.peek() == "**":
            self.at += 1
            exponent = self.power()
            if exponent < 0:
                raise Unknown
            base = 0 if self.idle else _bits(pow(base, exponent, 1 << 64))
        self.depth -= 1
        return base

    def unary(self) -> int:
        sign = self.peek()
        if sign in ("+", "-", "!", "~"):
            self.at += 1
            self.deeper()
            value = self.unary()
            self.depth -= 1
            return _bits({"+": value, "-": -value, "!": int(not value), "~": ~value}[sign])
        if sign in ("++", "--"):
            self.at += 1
            name = self.name()
            return self.assign(name, self.value_of(name) + (1 if sign == "++" else -1))
        return self.primary()

    def name(self) -> str:
        kind, text = self.tokens[self.at] if self.at < len(self.tokens) else ("", "")
        if kind != "name":
            raise Unknown
        self.at += 1
        return text

    def primary(self) -> int:
        if self.at >= len(self.tokens):
            raise Unknown
        kind, text = self.tokens[self.at]
        if kind == "number":
            self.at += 1
            return _bits(_number(text))
        if kind == "name":
            return self.named()
        if text != "(":
            raise Unknown
        self.at += 1
        value = self.commas()
        if self.peek() != ")":
            raise Unknown
        self.at += 1
        return value

    def named(self) -> int:
        name = self.name()
        sign = self.peek()
        if sign == "=" or (
            len(sign) > 1 and sign[-1] == "=" and sign not in _LEVELS[5] + _LEVELS[6]
        ):
            self.at += 1
            right = self.choice()
            if sign != "=" and not self.idle:
                right = _apply(sign[:-1], self.value_of(name), right)
            return self.assign(name, right)
        value = self.value_of(name)
        if sign in ("++", "--"):
            self.at += 1
            self.assign(name, value + (1 if sign == "++" else -1))
        return value

    def assign(self, name: str, value: int) -> int:
        value = _bits(value)
        if self.put and not self.idle:
            self.put(name, str(value))
        return value

    def value_of(self, name: str) -> int:
        if self.idle:
            return 0
        text = self.look(name)
        if text is None:
            raise Unknown(name)
        return _Sum(text, self.look, None, self.depth + 1, self.sums).whole()


def _number(text: str) -> int:
    try:
        if "#" in text:
            base, _, digits = text.partition("#")
            return int(digits, int(base))
        if text[:2] in ("0x", "0X"):
            return int(text, 16)
        return int(text, 8) if text[0] == "0" and len(text) > 1 else int(text[:40])
    except ValueError:
        raise Unknown from None


def _bits(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _apply(sign: str, a: int, b: int) -> int:
    if sign in ("/", "%"):
        if b == 0:
            raise Unknown
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return quotient if sign == "/" else a - quotient * b
    return int({
        "||": lambda: bool(a or b), "&&": lambda: bool(a and b),
        "|": lambda: a | b, "^": lambda: a ^ b,
        "&": lambda: a & b, "==": lambda: a == b, "!=": lambda: a != b, "<=": lambda: a <= b,
        ">=": lambda: a >= b, "<": lambda: a < b, ">": lambda: a > b,
        "<<": lambda: a << (b & 63), ">>": lambda: a >> (b & 63),
        "+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b,
    }[sign]())  # fmt: skip
