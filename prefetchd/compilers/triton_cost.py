"""How long a kernel's compile will take, well enough to begin with the long ones."""

from __future__ import annotations

# Fitted to the 110 variants of a KDA prefill, 0.17 to 2.7 s of CPU on sm_90: within a factor of two for nine
# of ten. What counts most is the number of matrix products; fewer warps make each of them longer.
_BASE_S = 0.3
_PER_PRODUCTS = 0.47
_PER_WARPS = -0.29


def predicted_seconds(source: str, warps: int) -> float:
    """CPU seconds for a kernel of this source text; the functions it calls are not looked into."""
    return float(_BASE_S * (1 + source.count("dot(")) ** _PER_PRODUCTS * warps**_PER_WARPS)
