"""Pages of HTML for tests: their elements, read by the standard library's parser."""

from collections.abc import Iterator
from html.parser import HTMLParser

VOID = {"meta", "input", "br", "col", "link", "img", "hr"}


class Node:
    """An element, its attributes and what is in it."""

    def __init__(self, name: str, attributes: dict[str, str | None]):
        self.name, self.attributes = name, attributes
        self.content: list[Node | str] = []

    def all(self, name: str | None = None, **attributes: str) -> "Iterator[Node]":
        """Every element inside, by name and attributes (a word of `class_` is enough)."""
        for inner in self.content:
            if isinstance(inner, Node):
                if name in (None, inner.name) and inner._has(attributes):
                    yield inner
                yield from inner.all(name, **attributes)

    def _has(self, wanted: dict[str, str]) -> bool:
        classes = wanted.get("class_")
        if classes is not None and classes not in (self.attributes.get("class") or "").split():
            return False
        rest = {k.replace("_", "-"): v for k, v in wanted.items() if k != "class_"}
        return all(self.attributes.get(key) == value for key, value in rest.items())

    @property
    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text for c in self.content)


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Node("", {})]

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"an attribute twice: {tag} {attrs}"
        node = Node(tag, dict(attrs))
        self.open[-1].content.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag, attrs):
        self.open[-1].content.append(Node(tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert tag == self.open[-1].name, f"</{tag}> where {self.open[-1].name} is open"
        self.open.pop()

    def handle_data(self, data):
        self.open[-1].content.append(data)


def parsed(page: str) -> Node:
    """The document; every element must be closed where it was opened."""
    parser = _Parser()
    parser.feed(page)
    parser.close()
    assert [node.name for node in parser.open] == [""], "an element is not closed"
    return parser.open[0]
