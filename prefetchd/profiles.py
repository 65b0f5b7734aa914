"""A model's profile: which matrix products one rank launches, as a table that people can read and correct.

This is the one module to import from. `sites.py` holds the structs and the rules for M, `model_config.py`
makes a profile from a `config.json`, and here a profile becomes a TOML file and is read back.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from prefetchd.architectures import ProfileError
from prefetchd.model_config import profile_from_config
from prefetchd.sites import GemmSite, Profile, m_for_batch, m_ranges
from prefetchd.toml_files import build, check_keys, format_table, read_toml, write_text

__all__ = [
    "GemmSite",
    "Profile",
    "ProfileError",
    "m_for_batch",
    "m_ranges",
    "profile_from_config",
    "read_profile",
    "write_profile",
]

PROFILE_SUFFIX = ".profile.toml"

HEADER = """\
# The matrix products of one model on one rank, for prefetchd; edit it by hand as you like.
# m is "tokens" (1 to the largest batch), "routed" (contiguous experts), "expected" (masked experts),
# "context" (tokens, and up to context_tokens beyond the batch), or ranges: "1..4096, 8192..65536/64".
"""


def read_profile(path: str | Path) -> Profile:
    """A profile from its TOML file. Raises `ProfileError` naming the file, the site and the key."""
    path = Path(path)
    table = read_toml(path, ProfileError)
    check_keys(table, Profile.__struct_fields__, str(path), ProfileError)
    entries = table.get("gemms", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ProfileError(f"{path}: gemms must be a list of tables; begin each site with a line [[gemms]]")
    sites = []
    for number, entry in enumerate(entries, 1):
        where = f"{path}: gemms number {number} ({entry.get('name', 'no name')})"
        sites.append(build(GemmSite, entry, where, ProfileError))
    return build(Profile, table | {"gemms": sites}, str(path), ProfileError)


def write_profile(profile: Profile, path: str | Path) -> None:
    """Writes a file that `read_profile` reads back to an equal profile. Raises `ProfileError`, `OSError`."""
    path = Path(path)
    if not path.name.endswith(PROFILE_SUFFIX):
        raise ProfileError(f"{path}: a profile's name ends in {PROFILE_SUFFIX}; add that ending")
    head = {k: v for k, v in msgspec.structs.asdict(profile).items() if k != "gemms"}
    parts = [HEADER, format_table(head)]
    for site in profile.gemms:
        fields = msgspec.structs.asdict(site)
        shown = {k: v for k, v in fields.items() if v or k not in ("groups", "options")}
        parts.append("\n[[gemms]]\n" + format_table(shown))
    write_text(path, "".join(parts))
