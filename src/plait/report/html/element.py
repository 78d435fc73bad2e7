"""Elements of a page: text is escaped, so nothing that a person named becomes markup."""

from html import escape
from typing import Any

#: Elements that have no content.
_VOID = ("meta", "input", "br", "col")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(name: str, /, *content: Any, **attributes: Any) -> Markup:
    """One element. Content: Markup as it is, other things as text, None as nothing.

    Attributes: a trailing underscore is dropped, others become dashes; True stands without a
    value, None and False are left out.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(key if value is True else f'{key}="{escape(str(value))}"')
    start = f"<{' '.join(parts)}>"
    return Markup(start if name in _VOID else f"{start}{join(*content)}</{name}>")


def join(*content: Any) -> Markup:
    """Content side by side."""
    return Markup(
        "".join(c if isinstance(c, Markup) else escape(str(c)) for c in content if c is not None)
    )
