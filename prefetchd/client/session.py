"""The client's background thread: one socket, one loop, whoever the daemon is at the moment.

The order is the promise: nothing is sent to a daemon before it has answered our hello with a welcome, then
first what is urgent, then every plan that is still wanted, last the universe. A daemon that was started anew
is recognised by its instance and treated as a stranger. Whatever fails in here is counted, the socket is
thrown away and made again after a pause; the engine's threads never learn of it.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from prefetchd.client.link import Link
from prefetchd.client.wakeup import Wakeup
from prefetchd.protocol import (
    Answer,
    Failed,
    Goodbye,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    HelloWanted,
    KeyName,
    MalformedMessage,
    Message,
    Mismatch,
    Published,
    Query,
    Refused,
    Settled,
    State,
    Universe,
    UnknownMessage,
    Welcome,
    decode,
    encode,
)

if TYPE_CHECKING:
    from prefetchd.client import Client

log = logging.getLogger("prefetchd")

# Frames taken in before anything is sent again, so that a flood cannot keep us from sending.
FRAMES_AT_ONCE = 256
# A daemon that has not answered a heartbeat after so many of them is as good as gone.
SILENT_HEARTBEATS = 3
# A hello that was not answered is repeated: a busy daemon may have lost it.
GREET_AGAIN_S = 10.0
# A daemon that asks for a hello at once again and again is not answered more often than this.
GREET_PAUSE_S = 1.0
# A daemon that refused us is asked again after a while: somebody may have put it right.
REFUSED_PAUSE_S = 60.0
# How often the engine is looked at anew: the directories a library uses may change while it runs.
REFRESH_S = 30.0
# After a failure of our own, doubling up to the second.
PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
# Differing fields that are written to the log; more than that are one cause.
MAX_MISMATCHES = 256
# Queries whose answer is awaited: one a waiting thread, and some that nobody answers.
MAX_QUERIES = 1024
NEVER = float("inf")


class Session:
    """What one process's client does with its daemon. Made anew in a forked child."""

    def __init__(self, client: Client, wakeup: Wakeup) -> None:
        self._client, self._wakeup = client, wakeup
        self._counts: Counter[str] = Counter()
        self._queries: dict[int, KeyName] = {}
        self._mismatches: set[tuple[str, str]] = set()
        self._instance = ""
        self._greeted = 0.0
        self._forgotten = 0
        self._heard = 0.0
        self._sequence = 0
        self._forget_connection()

    @property
    def answers(self) -> bool:
        """Whether there is a daemon that has welcomed us and speaks."""
        silent = time.monotonic() - self._heard > SILENT_HEARTBEATS * self._client.heartbeat_s
        return self._welcomed and not silent

    def figures(self) -> dict[str, int]:
        """What was counted here."""
        # Copied in one step, since the loop may add a name meanwhile.
        return {"connected": int(self.answers), **dict(self._counts)}

    def run(self) -> None:
        """The thread: sessions on one socket after another until the client is closed."""
        pause = PAUSE_S
        while not self._client.closed:
            try:
                self._run_socket()
            except Exception as error:
                self._client.guard.caught("the connection to the daemon", error)
                self._forget_connection()
                self._client.variants.nothing_is_coming()
                deadline = time.monotonic() + pause
                while not self._client.closed and time.monotonic() < deadline:
                    time.sleep(0.05)
                pause = min(2 * pause, MAX_PAUSE_S)

    def _run_socket(self) -> None:
        link = Link(self._client.address, self._wakeup, self._client.curve)
        try:
            while not self._client.closed:
                more = self._do_sources()
                now = time.monotonic()
                link.wait(0.0 if more else max(self._next_due() - now, 0.0), to_send=self._stuck)
                for up in link.changes():
                    self._changed(up)
                for frame in link.receive(FRAMES_AT_ONCE):
                    self._received(frame)
                self._keep_up(link)
                self._send(link)
            if self._welcomed:
                link.send(encode(Goodbye()))
        finally:
            link.close()

    def _do_sources(self) -> bool:
        more = False
        for source in self._client.sources:
            try:
                more |= source()
            except Exception as error:
                self._client.guard.caught("a source of the client", error)
        return more

    def _forget_connection(self) -> None:
        self._up = self._welcomed = self._stuck = False
        self._hello: Hello | None = None
        self._universe: Universe | None = None
        self._greet_at = self._refresh_at = self._beat_at = NEVER
        self._unanswered_beat = False
        self._queries.clear()

    def _changed(self, up: bool) -> None:
        self._forget_connection()
        self._client.variants.nothing_is_coming()
        self._counts["connects" if up else "disconnects"] += 1
        if up:
            self._up, self._greet_at = True, 0.0

    def _next_due(self) -> float:
        quiet = time.monotonic() + self._client.heartbeat_s
        return min(quiet, self._greet_at, self._refresh_at, self._beat_at)

    def _keep_up(self, link: Link) -> None:
        """Hello, heartbeat and the universe, when they are due."""
        now = time.monotonic()
        if now >= self._refresh_at or (self._client.refresh_wanted and self._welcomed):
            self._refresh_at, self._client.refresh_wanted = now + REFRESH_S, False
            if self._own_hello() != self._hello:
                self._greet_at = now
        if self._up and now >= self._greet_at:
            self._hello, self._greet_at = self._own_hello(), time.monotonic() + GREET_AGAIN_S
            self._greeted = time.monotonic()
            self._post(link, self._hello)
        if self._welcomed and now >= self._beat_at:
            self._beat_at = now + self._client.heartbeat_s
            # A daemon that does not read gets one heartbeat, not a heap of them.
            if not self._unanswered_beat:
                self._sequence += 1
                self._unanswered_beat = self._post(link, self._heartbeat())

    def _own_hello(self) -> Hello:
        client = self._client
        return msgspec.structs.replace(client.hello(), pid=os.getpid(), generation=client.generation)

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(sequence=self._sequence, figures=dict(self._client.stats()))

    def _send(self, link: Link) -> None:
        self._stuck = False
        if not self._welcomed:
            return
        client = self._client
        while client.queue:
            message = client.queue.popleft()
            if not self._post(link, message):
                client.queue.appendleft(message)
                return
            if isinstance(message, Query) and message.keys:
                self._remember(message)
        while (frame := client.plans.next_unsent()) is not None:
            if not self._post_frame(link, frame):
                return
            client.plans.sent()
        universe = client.universe_wanted
        if universe is not None and universe is not self._universe and self._post(link, universe):
            self._universe = universe

    def _remember(self, query: Query) -> None:
        self._queries[query.id] = query.keys[0]
        if len(self._queries) > MAX_QUERIES:
            del self._queries[next(iter(self._queries))]

    def _post(self, link: Link, message: Message) -> bool:
        try:
            frame = encode(message)
        except (MalformedMessage, msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            # One message that cannot be said must not keep the others from being said.
            self._client.guard.caught("encoding a message", error)
            return True
        return self._post_frame(link, frame)

    def _post_frame(self, link: Link, frame: bytes) -> bool:
        self._stuck = not link.send(frame)
        self._counts["stuck" if self._stuck else "sent"] += 1
        return not self._stuck

    def _received(self, frame: bytes) -> None:
        self._heard = time.monotonic()
        try:
            message = decode(frame)
        except MalformedMessage:
            self._counts["malformed"] += 1
            return
        self._counts["received"] += 1
        variants = self._client.variants
        match message:
            case Published():
                variants.published(KeyName(message.compiler, message.key))
            case Failed():
                variants.not_coming(KeyName(message.compiler, message.key))
            case Settled():
                self._client.plans.settle(message.plans)
            case Answer():
                self._client.inquiries.answered(message)
                self._answered(message)
            case HeartbeatAnswer():
                self._unanswered_beat = False
                if message.instance != self._instance:
                    self._greet_soon()
            case Welcome():
                self._welcome(message)
            case HelloWanted():
                self._greet_soon()
            case Mismatch():
                self._mismatch(message)
            case Refused():
                self._refused(message)
            case Goodbye():
                self._welcomed = False
                variants.nothing_is_coming()
            case UnknownMessage():
                self._counts["unknown"] += 1
            case _:
                self._counts["unexpected"] += 1

    def _welcome(self, message: Welcome) -> None:
        self._counts["restarts"] += bool(self._instance and message.instance != self._instance)
        self._instance = message.instance
        self._welcomed, self._greet_at = True, NEVER
        self._refresh_at = time.monotonic() + REFRESH_S
        self._beat_at, self._unanswered_beat = 0.0, False
        self._universe = None
        self._client.plans.rewind()
        if self._forgotten != self._client.plans.forgotten:
            self._forgotten = self._client.plans.forgotten
            self._client.losses += 1

    def _greet_soon(self) -> None:
        """The daemon does not know us, or is another one: it must hear everything again."""
        self._welcomed = False
        self._greet_at = self._greeted + GREET_PAUSE_S

    def _refused(self, message: Refused) -> None:
        self._counts["refused"] += 1
        self._welcomed, self._greet_at = False, time.monotonic() + REFUSED_PAUSE_S
        self._client.variants.nothing_is_coming()
        if self._counts["refused"] == 1:
            log.warning("prefetchd: the daemon refuses this engine: %s", message.text)

    def _mismatch(self, message: Mismatch) -> None:
        self._counts["mismatches"] += 1
        field = (message.compiler, message.field)
        if field in self._mismatches or len(self._mismatches) >= MAX_MISMATCHES:
            return
        self._mismatches.add(field)
        log.warning(
            "prefetchd: %s: %s differs: the engine has %r, the helper %r; what is prefetched is useless "
            "until they agree. %s",
            *field,
            message.engine,
            message.helper,
            message.fix,
        )

    def _answered(self, message: Answer) -> None:
        name = self._queries.pop(message.id, None)
        if name is None or not message.keys:
            return
        if message.keys[0] is State.PUBLISHED:
            self._client.variants.published(name)
        elif message.keys[0] in (State.FAILED, State.UNKNOWN):
            self._client.variants.not_coming(name)
