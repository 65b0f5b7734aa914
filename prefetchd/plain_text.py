"""A stranger's text as a terminal or a log of lines may hold it: nothing in it is obeyed by anything.

Escapes move a cursor and rename a window, a line end makes the next line look like one of ours, and
right-to-left marks show something else than what is there. All of these become question marks.
"""

from __future__ import annotations


def printable(text: str, limit: int) -> str:
    """One line of at most so many characters."""
    shown = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(character if character.isprintable() else "?" for character in shown)


def printable_lines(text: str, limit: int) -> str:
    """The same of a text that may have lines, as a compiler's complaint has: those after the first are
    set in, so that none passes for a line of somebody else's.
    """
    shown = text if len(text) <= limit else text[: limit - 3] + "..."
    return "\n    ".join(printable(line, limit) for line in shown.splitlines())
