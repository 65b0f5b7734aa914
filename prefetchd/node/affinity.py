"""On which CPUs our children run: those that the fewest engines claim.

An engine pins itself because it needs those CPUs; one that may run everywhere claims all alike and so says
nothing. That single rule also answers what to do when every CPU is claimed: there is always one at least.
A process that is already running keeps its CPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable


def least_claimed(own: Collection[int], engines: Iterable[Collection[int]]) -> frozenset[int]:
    """The CPUs of `own` on which the fewest engines run. `own` is not empty, and neither is the answer."""
    claims: Counter[int] = Counter()
    for cpus in engines:
        claims.update(set(cpus))
    fewest = min(claims[cpu] for cpu in own)
    return frozenset(cpu for cpu in own if claims[cpu] == fewest)
