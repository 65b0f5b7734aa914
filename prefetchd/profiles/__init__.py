"""A model's profile: which kernels one rank launches, as tables that people can read and correct.

This is the one module to import from. `sites.py` holds the structs and the rules for M, `model_config.py`
makes a profile from a `config.json`, and here a profile becomes a TOML file and is read back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from prefetchd.profiles.architectures import ProfileError
from prefetchd.profiles.model_config import profile_from_config
from prefetchd.profiles.sites import GemmSite, KernelSite, Profile, m_for_batch, m_ranges
from prefetchd.toml_files import build, check_keys, format_table, read_toml, write_text

__all__ = [
    "GemmSite",
    "KernelSite",
    "Profile",
    "ProfileError",
    "m_for_batch",
    "m_ranges",
    "profile_from_config",
    "read_profile",
    "write_profile",
]

Site = TypeVar("Site", GemmSite, KernelSite)

PROFILE_SUFFIX = ".profile.toml"

HEADER = """\
# The kernels of one model on one rank, for prefetchd; edit it by hand as you like.
# [[gemms]] are matrix products; m is "tokens" (1 to the largest batch), "routed" (contiguous experts),
# "expected" (masked experts), "context" (tokens, and up to context_tokens beyond the batch), or ranges:
# "1..4096, 8192..65536/64".
# [[kernels]] are the others: op of the kernels in home (fla, vllm, sglang, mamba_ssm, or the dotted path of a
# module), on sizes. flags.set names whose flags it is called with (vllm, fla-layer, sglang, vllm-verify, or a
# list of them); further flags override, and a list stands for each of its values.
"""

# Keys left out of a table when they are empty.
OPTIONAL = ("groups", "options", "flags")


def read_profile(path: str | Path) -> Profile:
    """A profile from its TOML file. Raises `ProfileError` naming the file, the site and the key."""
    path = Path(path)
    table = read_toml(path, ProfileError)
    check_keys(table, Profile.__struct_fields__, str(path), ProfileError)
    sites = {
        "gemms": _read_sites(table, "gemms", GemmSite, path),
        "kernels": _read_sites(table, "kernels", KernelSite, path),
    }
    return build(Profile, table | sites, str(path), ProfileError)


def _read_sites(table: dict[str, Any], key: str, kind: type[Site], path: Path) -> list[Site]:
    entries = table.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ProfileError(f"{path}: {key} must be a list of tables; begin each site with a line [[{key}]]")
    sites = []
    for number, entry in enumerate(entries, 1):
        where = f"{path}: {key} number {number} ({entry.get('name', 'no name')})"
        sites.append(build(kind, entry, where, ProfileError))
    return sites


def write_profile(profile: Profile, path: str | Path) -> None:
    """Writes a file that `read_profile` reads back to an equal profile. Raises `ProfileError`, `OSError`."""
    path = Path(path)
    if not path.name.endswith(PROFILE_SUFFIX):
        raise ProfileError(f"{path}: a profile's name ends in {PROFILE_SUFFIX}; add that ending")
    fields = msgspec.structs.asdict(profile)
    parts = [HEADER, format_table({k: v for k, v in fields.items() if k not in ("gemms", "kernels")})]
    for key, sites in (("gemms", profile.gemms), ("kernels", profile.kernels)):
        for site in sites:
            shown = {k: v for k, v in msgspec.structs.asdict(site).items() if v or k not in OPTIONAL}
            parts.append(f"\n[[{key}]]\n" + format_table(shown))
    write_text(path, "".join(parts))
