"""A daemon that finds logs of earlier runs: every engine gets what they hold, and none can harm it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from daemon_bench import Engine, FakeHelper, Place, eventually, fakes, run
from deep_jit_records import Written

from prefetchd.daemon import Daemon
from prefetchd.node import attaching, groups
from prefetchd.protocol import Published, Stats, StatsQuery
from prefetchd.replaying import select
from prefetchd.shapelog import MAX_LINE_BYTES, Record, ShapeLog

__all__ = ["fakes"]


class Node:
    """A place for a daemon on a machine with a deep_gemm of files, and logs."""

    def __init__(self, place: Place, written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.written = place, written
        self.logs = place.directory / "logs"
        self.logs.mkdir(mode=0o700)
        for name, value in written.site.environment.items():
            monkeypatch.setenv(name, value)
        # Ours and the process that reads logs find the same package.
        (written.site.package / "__init__.py").touch()
        monkeypatch.setenv("PYTHONPATH", str(written.site.package.parent))
        monkeypatch.syspath_prepend(written.site.package.parent)
        for module in (attaching, groups):
            monkeypatch.setattr(module, "COMPILERS", ("deep_jit",))

    def records(self, *numbers: int) -> list[Record]:
        source = self.written.source
        return [
            self.written.record(source=source.replace("512 / 16", f"{number} / 16")) for number in numbers
        ]

    def log(self, *records: Record, rank: int = 0) -> Path:
        log = ShapeLog(self.logs, "host", rank)
        assert all([log.append(record) for record in records])
        log.close()
        return log.path

    def serving(self, **changes: Any) -> AbstractAsyncContextManager[Daemon]:
        return self.place.serving(**{"log_dir": str(self.logs), **changes})

    async def attach(self, root: str = "root", rank: int = 0) -> Engine:
        engine = Engine(self.place.address)
        roots = {"deep_jit": (str(self.place.root(root)),)}
        await engine.attach(cache_roots=roots, rank=rank, generation=f"rank {rank}")
        return engine

    def cached(self, root: str = "root") -> set[str]:
        return {path.name for path in (self.place.root(root) / "cache").glob("*")}


@pytest.fixture
def node(tmp_path: Path, fakes: type[FakeHelper], monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(Place(tmp_path), Written(tmp_path / "machine", new=True), monkeypatch)


def test_every_rank_gets_what_any_rank_had_to_compile_and_ready_waits(node: Node) -> None:
    first, second = node.records(1, 2)
    node.log(first, rank=0)
    node.log(second, rank=1)

    async def scenario() -> None:
        async with node.serving() as daemon:
            engines = [await node.attach("a"), await node.attach("b", rank=1)]
            assert not daemon._node.ready, "the logs are being read"
            await eventually(lambda: daemon._node.ready)
            assert node.cached("a") == node.cached("b") == {first.key, second.key}
            stats = daemon._node.broker.stats()
            assert (stats.compiled, stats.published) == (2, 2)
            for engine in engines:
                await engine.next(Published)
                engine.close()
        assert FakeHelper.started == []

    run(scenario())


def test_rank_that_joins_later_gets_it_too(node: Node) -> None:
    (record,) = node.records(1)
    node.log(record)

    async def scenario() -> None:
        async with node.serving() as daemon:
            early = await node.attach("a")
            await eventually(lambda: daemon._node.ready)
            late = await node.attach("b", rank=1)
            await eventually(lambda: node.cached("b") == {record.key})
            assert daemon._node.broker.stats().compiled == 1
            early.close()
            late.close()

    run(scenario())


def test_damaged_and_forged_logs_cost_their_own_lines(node: Node) -> None:
    good, other, forged = node.records(1, 2, 3)
    forged = node.written.record(key=forged.key, source=node.written.source)
    path = node.log(good, forged)
    with path.open("ab") as file:
        file.write(b'{"compiler": "deep_jit", "key": "' + b"x" * (2 * MAX_LINE_BYTES) + b'"}\n')
        file.write(b"\0" * 4096 + b"\n{not json\n")
    node.log(other)

    async def scenario() -> None:
        async with node.serving() as daemon:
            engine = await node.attach()
            await eventually(lambda: daemon._node.ready)
            await engine.send(StatsQuery(id=1))
            replayed = (await engine.next(Stats)).tables["replay"]
            assert (replayed["jobs"], replayed["refused"], replayed["unreadable"]) == (2, 1, 3)
            engine.close()
        assert node.cached() == {good.key, other.key}

    run(scenario())


def test_engine_is_welcomed_while_a_log_is_still_being_read(node: Node) -> None:
    path = node.log(*node.records(1))
    with path.open("ab") as file:
        for _ in range(64):
            file.write(b"[" * (1 << 20) + b"\n")

    async def scenario() -> None:
        async with node.serving() as daemon:
            engine = await node.attach()
            assert (daemon._node.expanding, daemon._node.replayed) == (1, {})
            await eventually(lambda: daemon._node.ready)
            assert daemon._node.replayed["jobs"] == 1
            engine.close()

    run(scenario())


def test_daemon_ends_at_once_while_a_log_is_being_read(node: Node) -> None:
    node.log(*node.records(1))

    async def scenario() -> None:
        async with node.serving(stop_timeout_s=0.01) as daemon:
            engine = await node.attach()
            assert daemon._node.expanding == 1
            engine.close()

    run(scenario())


@pytest.mark.parametrize("case", ["switched off", "no log", "no directory", "open to others"])
def test_nothing_is_replayed(node: Node, case: str) -> None:
    changes: dict[str, Any] = {"replay": False} if case == "switched off" else {}
    if case != "no log":
        node.log(*node.records(1))
    if case == "no directory":
        changes["log_dir"] = str(node.place.directory / "absent")
    if case == "open to others":
        node.logs.chmod(0o777)

    async def scenario() -> None:
        async with node.serving(**changes) as daemon:
            engine = await node.attach()
            await eventually(lambda: daemon._node.ready)
            assert not daemon._node.replayed
            assert daemon._node.problems["replay"] == (case == "open to others")
            engine.close()
        assert node.cached() == set()

    run(scenario())


def test_reader_that_dies_is_told_and_harms_nobody(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.log(*node.records(1))
    monkeypatch.setattr(select, "__name__", "prefetchd.no_such_module")

    async def scenario() -> None:
        async with node.serving() as daemon:
            engine = await node.attach()
            await eventually(lambda: daemon._node.ready)
            assert (daemon._node.problems["replay"], daemon._node.replayed) == (1, {})
            engine.close()

    run(scenario())
