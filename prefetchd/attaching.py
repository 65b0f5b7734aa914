"""`prefetchd.attach`: what an engine calls once, to tell prefetchd from then on what it is about to run.

It always returns a handle and never raises. Where prefetchd is switched off, or anything is wrong with it,
the handle does nothing and one line in the log says why; the engine's code is the same either way.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from prefetchd.client import Client
from prefetchd.client.link import CurveKeys
from prefetchd.config import ENABLED_VARIABLE, Settings, load_settings
from prefetchd.curve import client_keys
from prefetchd.cute.pools import with_state_pool
from prefetchd.endpoint import find_endpoint
from prefetchd.introduction import ASKED_AHEAD, Introduction
from prefetchd.observing.watch import Watch
from prefetchd.observing.watch import begin as begin_observing
from prefetchd.planner import Planner
from prefetchd.profiles import Profile, read_profile
from prefetchd.profiles.codec import encode_profile
from prefetchd.protocol import Batch, Universe
from prefetchd.provider import Limits, Provider, load_providers
from prefetchd.targets import Target, load_target

log = logging.getLogger("prefetchd")

# An ordinary step with a bit of everything: a family that asks for nothing here has no site in the profile.
ORDINARY = Batch(tokens=130, prefill_lengths=(64, 64), decodes=2, speculative_tokens=2)
OFF = frozenset({"", "0"})


class NotAttached(Exception):
    """Why an engine goes on alone; the text names the setting and the fix."""


class Handle:
    """What an engine holds. `client` is None when nothing is attached, `watch` when nothing is observed."""

    def __init__(
        self,
        client: Client | None = None,
        planner: Planner | None = None,
        reason: str = "",
        watch: Watch | None = None,
        introduction: Introduction | None = None,
    ) -> None:
        self.client, self.planner, self.watch = client, planner, watch
        self._introduction = introduction
        # Why nothing is attached; empty when something is.
        self.reason = reason
        # What the daemon was told of the model, and the families that serve it.
        self.profile: Profile | None = None
        self.max_tokens = self.state_slots = 0
        self.families: dict[str, Provider] = {}

    @property
    def attached(self) -> bool:
        """Whether messages go anywhere."""
        return self.client is not None

    def use_profile(
        self, profile: Profile, max_tokens: int, providers: Iterable[str] = (), *, state_slots: int = 0
    ) -> None:
        """Plans by this profile from now on, and has the daemon compile all that it can cause.

        `state_slots` is the size of the engine's pool of states, said in its hello from now on; 0 leaves it
        as it was. One that no provider serves leaves the engine observed only. Raises what a provider raises.
        """
        slots = state_slots or self.state_slots
        if self.client is None or (self.profile, self.state_slots) == (profile, slots):
            return
        planned = with_state_pool(profile, slots)
        self.profile, self.max_tokens, self.families = profile, max_tokens, _families(planned, providers)
        self._say_state_slots(self.client, slots)
        limits = _Limits(self.client, max_tokens)
        self.planner = Planner(planned, self.families, self.client, limits) if self.families else None
        if self.families:
            universe = Universe(
                profile=encode_profile(profile), providers=tuple(self.families), max_tokens=max_tokens
            )
            self.client.universe(universe)

    def use_state_slots(self, slots: int) -> None:
        """The size of the engine's pool of states, from an engine that knows it later than its profile.

        Planned anew only where a kernel of the profile depends on it. Raises what a provider raises.
        """
        if self.client is None or slots == self.state_slots:
            return
        if self.profile is not None and with_state_pool(self.profile, slots) != with_state_pool(
            self.profile, self.state_slots
        ):
            self.use_profile(self.profile, self.max_tokens, tuple(self.families), state_slots=slots)
        else:
            self._say_state_slots(self.client, slots)

    def _say_state_slots(self, client: Client, slots: int) -> None:
        self.state_slots = slots
        if self._introduction is not None and self._introduction.state_slots != slots:
            self._introduction.state_slots = slots
            client.refresh()

    def on_schedule(self, batch: Batch) -> None:
        """Tells what the next step will run; see `Planner`."""
        if self.planner is not None:
            self.planner.on_schedule(batch)

    def wait(self, compiler: str, key: str) -> bool:
        """Waits for a variant that is compiling now, as long as `PREFETCHD_WAIT_MS` allows."""
        return self.client is not None and self.client.wait(compiler, key)

    def mark_serving(self) -> None:
        """Where `PREFETCHD_ON_ENGINE_COMPILE_FROM=serving`, the engine's compiles count from now on."""
        if self.watch is not None:
            self.watch.mark_serving()

    def close(self) -> None:
        """Says goodbye; later calls do nothing."""
        if self.client is not None:
            self.client.close()


def attach(
    profile: Profile | str | Path | None = None,
    *,
    engine: str = "python",
    rank: int = 0,
    world: int = 1,
    device: int = 0,
    target: Target | None = None,
    max_tokens: int | None = None,
    providers: Iterable[str] = (),
    state_slots: int = 0,
    or_observe: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Handle:
    """Attaches this rank to the daemon, whether that is there yet or not.

    `profile` is one, or its file; without it the setting `profile` names the file. `device` is the CUDA
    device of this rank as this process counts them, and `target` says what it is where that is known already.
    `state_slots` is the size of its pool of states, where it has one and knows it by now.
    With `or_observe` an engine without a profile, or with one that no provider serves, is attached all the
    same: what it compiles is seen and logged, and nothing is planned.
    """
    environment = os.environ if environment is None else environment
    if environment.get(ENABLED_VARIABLE, "") in OFF:
        return Handle(reason=f"{ENABLED_VARIABLE} is not set")
    # Observing needs neither daemon nor profile.
    watch = begin_observing(environment)
    try:
        settings = load_settings(environment)
        chosen = _profile(profile, settings) if profile or settings.profile or not or_observe else None
        families = _families(chosen, providers) if chosen else {}
        if not families and not or_observe:
            assert chosen is not None
            raise NotAttached(
                f"no provider serves {chosen.model}: each asks for nothing; correct the profile's sites or "
                "install the provider of their ops"
            )
        introduction = Introduction(
            engine=engine,
            # An observed engine may use any; one that is not there describes nothing.
            compilers=ASKED_AHEAD
            if or_observe
            else dict.fromkeys(name for one in families.values() for name in one.compilers),
            rank=rank,
            world=world,
            device=device,
            target=target or (load_target(settings.target) if settings.target else None),
            state_slots=state_slots,
        )
        address, keys = _address(settings, environment)
        client = Client(address, introduction, wait_ms=settings.wait_ms, curve=keys)
        handle = Handle(client, watch=watch, introduction=introduction)
        if watch is not None:
            watch.use(client, lambda: handle.planner, device=device, rank=rank, target=target)
        if chosen is not None and families:
            handle.use_profile(chosen, max_tokens or settings.max_tokens, families, state_slots=state_slots)
        else:
            client.start()
    except Exception as error:
        log.warning("prefetchd: not attached, the engine goes on alone: %s", error)
        return Handle(reason=str(error), watch=watch)
    what = ", ".join(families) or "what it compiles itself"
    log.info("prefetchd: rank %d attached to %s for %s", rank, client.address, what)
    return handle


class _Limits:
    """The bounds of the universe that the daemon was told of, once the device is known."""

    def __init__(self, client: Client, max_tokens: int) -> None:
        self._client, self._max_tokens = client, max_tokens

    def __call__(self) -> Limits | None:
        target = self._client.hello().target
        return Limits(max_tokens=self._max_tokens, target=target) if target else None


def _profile(given: Profile | str | Path | None, settings: Settings) -> Profile:
    if isinstance(given, Profile):
        return given
    named = given or settings.profile
    if not named:
        raise NotAttached("no profile: pass one to attach(), or name its file in PREFETCHD_PROFILE")
    return read_profile(named)


def _families(profile: Profile, names: Iterable[str]) -> dict[str, Provider]:
    """The installed providers that have something to say about this profile."""
    found = load_providers(names)
    return {name: one for name, one in found.items() if any(True for _ in one.plan(ORDINARY, profile))}


def _address(settings: Settings, environment: Mapping[str, str]) -> tuple[str, CurveKeys | None]:
    """Where to connect to, and the keys that a daemon of another node asks for."""
    endpoint = find_endpoint(environment, settings.endpoint)
    if endpoint.directory is None:
        return endpoint.address, client_keys(settings, environment)
    endpoint.check()
    return endpoint.address, None
