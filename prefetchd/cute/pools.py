"""The size of an engine's pool of states, put into a profile of its model.

Some keys contain the number of slots (TensorRT-LLM's last KDA kernel, cuLA's decode), and only the engine
knows it, when it has divided its memory: it says so in its hello. A profile therefore says `pool` where it
matters, with any number; daemon and planner both put the hello's in its place, so that they mean the same.
"""

from __future__ import annotations

import msgspec

from prefetchd.profiles import Profile

FLAG = "pool"


def with_state_pool(profile: Profile, slots: int) -> Profile:
    """The profile with this many slots at every site that has a pool; unchanged where nobody knows (0)."""
    if slots < 0:
        raise ValueError(f"slots = {slots}: a pool of states has at least one, and 0 is for not known")
    if slots == 0:
        return profile
    kernels = tuple(
        msgspec.structs.replace(site, flags={**site.flags, FLAG: slots}) if FLAG in site.flags else site
        for site in profile.kernels
    )
    return msgspec.structs.replace(profile, kernels=kernels)
