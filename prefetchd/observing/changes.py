"""What is new about a variant: how its key differs from the nearest one known, and which field never settles.

A key comes by named fields. Two variants are compared only within one family (a kernel, an op), since between
families nearly everything differs and says nothing. The subtle rule: a number that keeps taking new values is
a defect of whoever calls the kernel, unless the values are powers of two, of which there are few; so only the
others are counted, and each field is warned of once.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping

# The field that names the family; the others are compared.
FAMILY = "kernel"
# Variants of one family that a new one is compared with; the latest are the likeliest to be near.
MAX_KNOWN = 64
# A model has some hundred kernels.
MAX_FAMILIES = 4096
# How far apart two variants are that differ in the value of one field; nothing is nearer.
ONE_FIELD = 2
# Distinct values that are no power of two, in one field of one family. Two tile sizes, head counts or strides
# are common; so many mean that a batch's length is in the key.
UNBOUNDED_AFTER = 8
# A text for people stays a line.
MAX_CHANGES, MAX_SAME, MAX_VALUE = 12, 4, 60


class Family:
    """The variants of one kernel, as their fields."""

    def __init__(self) -> None:
        self.known: deque[dict[str, str]] = deque(maxlen=MAX_KNOWN)
        self.numbers: dict[str, set[float]] = {}
        self.warned: set[str] = set()


class Changes:
    """Every family met in this process. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._families: OrderedDict[tuple[str, str], Family] = OrderedDict()

    def add(self, compiler: str, parts: Mapping[str, str]) -> tuple[str, list[str]]:
        """Remembers a variant; says how it differs from the nearest, and which fields turn out unbounded."""
        if not parts:
            return "", []
        name = parts.get(FAMILY, "")
        family = self._families.setdefault((compiler, name), Family())
        self._families.move_to_end((compiler, name))
        if len(self._families) > MAX_FAMILIES:
            self._families.popitem(last=False)
        fields = {field: str(value) for field, value in parts.items() if field != FAMILY}
        text = describe(fields, nearest(fields, family.known), name)
        family.known.append(fields)
        return text, _unbounded(family, fields)


def nearest(fields: Mapping[str, str], known: deque[dict[str, str]]) -> Mapping[str, str] | None:
    """The variant with the fewest differing fields, of equals the latest."""
    found, least = None, math.inf
    for other in reversed(known):
        # In C, as most of a compile's cost in the engine is this; a field that one of them lacks counts half.
        distance = len(fields.items() ^ other.items())
        if distance < least:
            found, least = other, distance
        if distance <= ONE_FIELD:
            break
    return found


def differing(fields: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The fields in which the two differ, in the first one's order."""
    return [name for name in {**fields, **other} if fields.get(name) != other.get(name)]


def describe(fields: Mapping[str, str], other: Mapping[str, str] | None, name: str = "") -> str:
    """A line such as "T%16: yes -> no; num_warps, D same"."""
    if other is None:
        return f"first variant of {name}" if name else "first variant"
    changed = differing(fields, other)
    if not changed:
        return "every named field is the same; what differs is not among them"
    same = [field for field in fields if field not in changed]
    texts = [
        f"{field}: {_short(other.get(field))} -> {_short(fields.get(field))}"
        for field in changed[:MAX_CHANGES]
    ]
    if len(changed) > MAX_CHANGES:
        texts.append(f"and {len(changed) - MAX_CHANGES} more")
    if same:
        more = f" and {len(same) - MAX_SAME} more" if len(same) > MAX_SAME else ""
        texts.append(f"{', '.join(same[:MAX_SAME])}{more} same")
    return "; ".join(texts)


def _short(value: str | None) -> str:
    if value is None:
        return "absent"
    return value if len(value) <= MAX_VALUE else f"{value[: MAX_VALUE - 3]}..."


def _unbounded(family: Family, fields: Mapping[str, str]) -> list[str]:
    found = []
    for field, text in fields.items():
        number = _odd_number(text)
        if number is None or field in family.warned:
            continue
        values = family.numbers.setdefault(field, set())
        values.add(number)
        if len(values) > UNBOUNDED_AFTER:
            family.warned.add(field)
            del family.numbers[field]
            found.append(field)
    return found


def _odd_number(text: str) -> float | None:
    """The number a text is, unless it is zero or a power of two, of which there are few."""
    try:
        number = float(text)
    except ValueError:
        return None
    if number == 0 or not math.isfinite(number):
        return None
    return None if math.frexp(abs(number))[0] == 0.5 else number
