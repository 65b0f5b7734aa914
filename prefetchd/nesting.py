"""How deep a stranger's JSON is nested: a decoder stops at Python's limit, and what handles its outcome would
find that limit a few calls later, where nobody expects it.
"""

from __future__ import annotations

from typing import Any


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects lie more than so many levels within each other. Layer by layer, so that it
    needs no stack of its own.
    """
    layer = [value]
    for _ in range(levels + 1):
        layer = [one for one in layer if isinstance(one, (dict, list))]
        if not layer:
            return False
        layer = [each for one in layer for each in (one.values() if isinstance(one, dict) else one)]
    return True
