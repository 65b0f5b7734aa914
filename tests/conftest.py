"""For every folder: properties are judged by what they find, not by how fast this machine was meanwhile."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# 200 ms an example is missed on a shared machine by code that is fine; time has its own tests.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
