"""The size of an engine's pool of states, put into its profile before the engine introduces itself with it.

Some keys contain the number of slots (TensorRT-LLM's last KDA kernel, cuLA's decode), and only the engine
knows it, when it has divided its memory. A profile of a model therefore says `pool` where it matters, with
any number, and the engine's plug-in replaces that by the real one.
"""

from __future__ import annotations

import msgspec

from prefetchd.profiles import Profile

FLAG = "pool"


def with_state_pool(profile: Profile, slots: int) -> Profile:
    """The profile with this many slots at every site that has a pool. Raises `ValueError` for none."""
    if slots < 1:
        raise ValueError(f"slots = {slots}: a pool of states has at least one")
    kernels = tuple(
        msgspec.structs.replace(site, flags={**site.flags, FLAG: slots}) if FLAG in site.flags else site
        for site in profile.kernels
    )
    return msgspec.structs.replace(profile, kernels=kernels)
