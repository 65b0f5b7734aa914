"""A model's sizes as one rank sees them, and the error that says which of them is wrong.

Engines divide heads and widths by the number of ranks and refuse to start where that does not go evenly; so
do these look-ups, which never round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Every library takes its sizes as C ints.
MOST = 2**31 - 1


class ProfileError(ValueError):
    """A profile that cannot be made, read or used; the text names the site or key, its value and the fix."""


class ConfigError(ProfileError):
    """What a configuration says cannot be used. Whoever knows where it was read puts that in front."""


class Sizes:
    """A model's configuration and how it is divided; every look-up that fails names the key."""

    def __init__(self, config: Mapping[str, Any], *, tp: int, ep: int, quantized: bool) -> None:
        self.config = config
        self.tp = tp
        self.ep = ep
        self.quantized = quantized

    def size(self, key: str, *, least: int = 1) -> int:
        """A whole number that must be there; `a.b` looks into a nested table."""
        table, _, name = key.rpartition(".")
        found: Any = self.config.get(table) if table else self.config
        value = found.get(name) if isinstance(found, Mapping) else None
        if value is None:
            raise ConfigError(f"the key {key!r} is missing; is this the model's own configuration?")
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
            raise ConfigError(f"{key} = {value!r}: must be a whole number of {least} to {MOST}")
        return value

    def optional(self, key: str, default: int, *, least: int = 0) -> int:
        """Like `size` for a key that may be absent or null; may be 0 where that is not excluded."""
        return default if self.config.get(key) is None else self.size(key, least=least)

    def split(self, value: int, by: int, what: str, how: str = "tp") -> int:
        """One rank's share of a dimension; engines refuse to start where it does not divide."""
        if value % by:
            raise ProfileError(f"{what} = {value} is not divisible by {how} = {by}; choose another {how}")
        return value // by

    def share(self, key: str) -> int:
        """One tensor-parallel rank's share of a size given by key."""
        return self.split(self.size(key), self.tp, key)
