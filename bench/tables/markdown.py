"""Generated parts of documents: between two comments that name the part, and nowhere else.

<!-- generated: results -->
...
<!-- end of results -->
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

PART = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)


class UnknownPart(LookupError):
    """A document asks for a part that nothing generates; the text names it."""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def filled(document: str, parts: Mapping[str, str]) -> str:
    """The document with its generated parts made anew. Raises `UnknownPart`."""

    def part(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in parts:
            raise UnknownPart(f"part {name!r} is not known; known: {', '.join(sorted(parts))}")
        return f"{match[1]}\n{parts[name]}\n{match[3]}"

    return PART.sub(part, document)


def seconds(value: float) -> str:
    """As people read it: two digits that matter, minutes from two on, and milliseconds below a tenth."""
    if value < 0.0995:
        return f"{value * 1e3:.0f} ms"
    if value >= 120:
        return f"{int(value) // 60} min {int(value) % 60} s"
    return f"{value:.0f} s" if value >= 9.95 else f"{value:.1f} s" if value >= 0.95 else f"{value:.2f} s"
