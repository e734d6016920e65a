"""Name templates: ``"{root}layers.{i}.mlp.experts.{e}.gate_proj.weight"``.

What stands in braces is an index, a constant of the table, a root, or an integer expression such as
``{num_hidden_layers + j}``. Names are enumerated from templates and looked up; they are never
matched.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache

from ckptbridge.errors import ConfigError, TableError
from ckptbridge.tables.expressions import Expression, Look, parse_expression
from ckptbridge.tables.messages import located, shorten

MAX_LENGTH = 500  # characters of a template


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template: literal text and expressions, in order. ``names`` are what those look up."""

    text: str
    parts: tuple[str | Expression, ...]
    names: frozenset[str] = field(compare=False)

    def render(self, look: Look) -> str:
        """The name. Raises ConfigError when a part is absent, negative, or neither integer nor string."""
        return "".join([p if isinstance(p, str) else _text(p, look) for p in self.parts])

    def fixed(self, look: Look, free: Collection[str]) -> Template:
        """The same template with every part rendered that does not look up a name in ``free``."""
        parts: list[str | Expression] = []
        for part in self.parts:
            if isinstance(part, Expression) and not part.names.isdisjoint(free):
                parts.append(part)
                continue
            text = part if isinstance(part, str) else _text(part, look)
            if parts and isinstance(parts[-1], str):
                parts[-1] += text
            else:
                parts.append(text)
        return Template(self.text, tuple(parts), self.names)


def _text(part: Expression, look: Look) -> str:
    value = part.evaluate(look)
    if type(value) is int and value >= 0:
        return str(value)
    if isinstance(value, str):
        return value
    raise ConfigError(
        f"'{{{part.text}}}' is {shorten(value)}; a name needs a string or an integer from 0 up.", expression=part.text
    )


@lru_cache(maxsize=4096)
def parse_template(text: str) -> Template:
    """Parse a template. Raises TableError for an empty one, unpaired braces, or characters that do not print."""
    if not text or len(text) > MAX_LENGTH or not text.isprintable():
        raise TableError(f"A name has from 1 to {MAX_LENGTH} characters, all of them printable.", name=shorten(text))
    parts: list[str | Expression] = []
    rest = text
    while rest:
        literal, opened, rest = rest.partition("{")
        inside, closed, after = rest.partition("}")
        if "}" in literal or "{" in inside or bool(opened) != bool(closed):
            raise TableError("The braces of a name do not pair.", name=text)
        if literal:
            parts.append(literal)
        if opened:
            with located(name=text):
                parts.append(parse_expression(inside))
            rest = after
    names = frozenset(n for p in parts if isinstance(p, Expression) for n in p.names)
    return Template(text, tuple(parts), names)
