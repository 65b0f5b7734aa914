"""attach() to the daemon of another node: by TCP with CURVE keys, with every right but to start a helper."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import pytest
from daemon_bench import Engine, FakeHelper, Place, eventually, fakes, run

import prefetchd
from prefetchd.attaching import Handle
from prefetchd.curve import generate_keys
from prefetchd.profiles import Profile, profile_from_config
from prefetchd.protocol import Batch
from prefetchd.targets import load_target

__all__ = ["fakes"]

pytestmark = pytest.mark.usefixtures("fakes")

ROOT = Path(__file__).parents[2]
PROFILE: Profile = profile_from_config(ROOT / "examples/models/deepseek-v3.json", tp=8)


class FarNode:
    """A node of its own keys, whose engine is to attach to the place's daemon."""

    def __init__(self, place: Place) -> None:
        self.server = generate_keys(place.directory / "daemon-keys")
        self.keys = place.directory / "engine-keys"
        self.public = generate_keys(self.keys)
        self._place = place
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"

    def daemon(self, **changes: Any) -> dict[str, Any]:
        keys = str(self._place.directory / "daemon-keys")
        return {"listen": self.address, "keys": keys, "allow_peers": (self.public,), **changes}

    async def attach(self, **changes: str) -> Handle:
        environment = {
            "PREFETCHD": "1",
            "HOME": str(self._place.directory),
            "PREFETCHD_ENDPOINT": self.address,
            "PREFETCHD_KEYS": str(self.keys),
            "PREFETCHD_SERVER_KEY": self.server,
            **changes,
        }
        return await asyncio.to_thread(
            prefetchd.attach,
            PROFILE,
            target=load_target("h200"),
            providers=("deep_gemm",),
            environment=environment,
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_far_engine_plans_and_asks_and_never_starts_a_helper(place: Place) -> None:
    async def scenario() -> None:
        far = FarNode(place)
        async with place.serving(**far.daemon()) as daemon:
            node = daemon._node
            near = Engine(place.address)
            await near.attach(place.root())
            handle = await far.attach()
            assert handle.client is not None, handle.reason
            handle.on_schedule(Batch(tokens=130, prefill_lengths=(64, 64), decodes=2))
            await eventually(lambda: node.received["Plan"] and node.received["Universe"])
            await eventually(lambda: handle.client is not None and handle.client.stats()["connected"])
            assert [peer.local for peer in node.peers.ranks().values()].count(False) == 1
            assert node.broker.stats().asked > 0
            waited = await asyncio.to_thread(handle.client.wait, "shell", "nobody's", 50)
            assert not waited
            assert node.received["Query"] == 1
            assert FakeHelper.started == []
            await asyncio.to_thread(handle.close)
            near.close()

    run(scenario())


def test_far_engine_whose_key_is_not_allowed_is_not_heard(place: Place) -> None:
    async def scenario() -> None:
        far = FarNode(place)
        async with place.serving(**far.daemon(allow_peers=())) as daemon:
            before = daemon._node.received["Hello"]
            handle = await far.attach()
            assert handle.client is not None
            handle.on_schedule(Batch(tokens=1, decodes=1))
            (gatekeeper,) = daemon._gatekeepers
            await eventually(lambda: gatekeeper.refused)
            assert daemon._node.received["Hello"] == before
            assert not handle.client.stats()["connected"]
            await asyncio.to_thread(handle.close)

    run(scenario())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"PREFETCHD_SERVER_KEY": ""}, "PREFETCHD_SERVER_KEY"),
        ({"PREFETCHD_SERVER_KEY": "short"}, "is no CURVE key"),
        ({"PREFETCHD_KEYS": "/nowhere"}, "prefetchd keygen"),
    ],
)
def test_engine_without_usable_keys_goes_on_alone_and_says_what_to_do(
    place: Place, caplog: pytest.LogCaptureFixture, changes: dict[str, str], reason: str
) -> None:
    handle = asyncio.run(FarNode(place).attach(**changes))

    assert handle.client is None
    assert reason in handle.reason
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
