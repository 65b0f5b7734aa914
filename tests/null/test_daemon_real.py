"""The real daemon with the real library on the null device, and an nvcc that takes no time."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from serving import Served, serving
from warming import SMALL_VARIANTS, Bench

from prefetchd.null_device.guard import LIBRARIES

pytestmark = pytest.mark.slow


@pytest.fixture
def served(bench: Bench) -> Iterator[Served]:
    bench.cache.mkdir()
    with serving(bench) as found:
        yield found


@pytest.mark.ci
def test_universe_of_a_profile_is_published_and_an_engine_then_compiles_nothing(served: Served) -> None:
    with served.engine() as client:
        served.universe(client)
        served.until(lambda: served.figure("planned_total{compiler=deep_jit}") == SMALL_VARIANTS)
        served.until(lambda: served.figure("ready"))
        assert len(served.bench.nvcc.compiles()) == len(served.bench.entries()) == SMALL_VARIANTS
        assert served.figure("wasted{compiler=deep_jit}") == SMALL_VARIANTS
    assert served.end() == 0
    assert served.bench.leftovers() == []
    assert served.bench.engine()["failed"] == []


def test_two_ranks_with_two_caches_cost_one_compile_a_variant(served: Served) -> None:
    caches = [served.bench.cache, served.bench.place / "other"]
    caches[1].mkdir()
    with served.engine(0, caches[0]) as one, served.engine(1, caches[1]) as two:
        for client in (one, two):
            served.plan(client)
        for client in (one, two):
            served.settled(client)
        assert len(served.bench.nvcc.compiles()) == SMALL_VARIANTS
        names = [[entry.name for entry in served.bench.entries(cache)] for cache in caches]
        assert names[0] == names[1]
        assert len(names[0]) == SMALL_VARIANTS
        assert len(served.stats()["tables"]["helpers"]) == 1
    for entry in served.bench.entries(caches[1]):
        # As if it had been compiled there.
        assert str(entry) in (entry / "meta.json").read_text()
        first = caches[0] / "cache" / entry.name
        assert (entry / "kernel.cubin").samefile(first / "kernel.cubin")
        assert not (entry / "meta.json").samefile(first / "meta.json")
        assert str(first) in (first / "meta.json").read_text()


def test_helper_has_no_device_and_no_driver_of_a_real_one(served: Served) -> None:
    with served.engine() as client:
        served.plan(client)
        served.settled(client)
        helper = psutil.Process(served.helper()["pid"])
        opened = [str(path.readlink()) for path in Path(f"/proc/{helper.pid}/fd").iterdir()]
        maps = Path(f"/proc/{helper.pid}/maps").read_text()
    drivers = set(re.findall(r"\S*/lib(?:cuda|nvidia-ml)\.so\S*", maps))
    assert not [path for path in opened if path.startswith("/dev/nvidia")]
    assert drivers
    assert all(str(LIBRARIES) in path for path in drivers)


def test_killed_helper_is_replaced_and_the_next_plan_is_served(served: Served) -> None:
    with served.engine() as client:
        served.universe(client)
        served.until(lambda: served.figure("ready") and served.helper()["pid"])
        os.kill(served.helper()["pid"], signal.SIGKILL)
        served.until(lambda: served.helper()["restarts"] == 1 and served.helper()["state"] == "up")
        served.bench.profile.write_text(served.bench.profile.read_text().replace("n = 512", "n = 1024"))
        before = len(served.bench.entries())
        served.plan(client)
        served.settled(client)
        assert len(served.bench.entries()) > before


def test_stopped_helper_is_replaced(served: Served) -> None:
    with served.engine() as client:
        served.plan(client)
        served.settled(client)
        helper = served.helper()["pid"]
        os.kill(helper, signal.SIGSTOP)
        served.until(lambda: served.helper()["restarts"] == 1 and served.helper()["state"] == "up")
        assert not psutil.pid_exists(helper)


def test_killed_compile_is_tried_again(served: Served) -> None:
    nvcc = served.bench.nvcc
    once = nvcc.directory / "killed"
    nvcc.behave(f"[ -e {once} ] || {{ touch {once}; kill -9 $$; }}")
    with served.engine() as client:
        served.plan(client)
        served.settled(client)
    assert len(served.bench.entries()) == SMALL_VARIANTS
    assert served.figure("compiles_total{result=failed}") >= 1


def test_killed_daemon_leaves_no_process_and_the_next_cleans_up_and_goes_on(served: Served) -> None:
    nvcc = served.bench.nvcc
    event = nvcc.event()
    nvcc.behave(f"{event}\nsleep 600")
    with served.engine() as client:
        served.plan(client)
        nvcc.wait_for_event(served.process)
        served.end(signal.SIGKILL)
        served.nobody_left()
        assert served.bench.leftovers() != []
        nvcc.behave()
        served.start()
        served.settled(client)
        assert len(served.bench.entries()) == SMALL_VARIANTS
    assert served.end() == 0
    assert served.bench.leftovers() == []


def test_sigterm_in_the_middle_of_a_compile_leaves_nothing(bench: Bench) -> None:
    bench.cache.mkdir()
    event = bench.nvcc.event()
    bench.nvcc.behave(f"{event}\nsleep 600")
    with serving(bench, {"PREFETCHD_STOP_TIMEOUT_S": "0.2"}) as served, served.engine() as client:
        served.plan(client)
        bench.nvcc.wait_for_event(served.process)
        assert served.end() == 0
        served.nobody_left()
        assert (bench.leftovers(), bench.entries()) == ([], [])
        assert not (bench.place / "run/daemon").exists()


def test_engine_that_is_killed_is_forgotten(served: Served) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with served.engine(rank=3) as client:
            client.start()
            while not client.stats().get("connected"):
                threading.Event().wait(0.01)
            os.write(writer, b"x")
            signal.pause()
    assert os.read(reader, 1) == b"x"
    assert [row["rank"] for row in served.stats()["tables"]["ranks"]] == ["test/3"]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    served.until(lambda: served.figure("ranks") == 0)


def test_fingerprint_that_differs_is_an_alarm_that_names_variable_and_line(served: Served) -> None:
    facts = {"deep_jit": {"deep_jit.env.NVCC_APPEND_FLAGS": "-lineinfo"}}
    with served.engine(fingerprints=facts) as client:
        served.plan(client)
        served.settled(client)
        served.until(lambda: client.stats().get("mismatches"))
    name = "fingerprint_mismatches_total{compiler=deep_jit,field=deep_jit.env.NVCC_APPEND_FLAGS}"
    assert served.figure(name) == 1
    assert "[helper_environment]: NVCC_APPEND_FLAGS = '-lineinfo'" in served.log()


def test_second_daemon_ends_with_status_2_and_the_first_goes_on(served: Served) -> None:
    second = served.command("serve")

    assert second.returncode == 2
    assert f"process {served.process.pid}" in second.stderr
    assert served.stats()["figures"]["prefetchd_ready"] == 1


def test_stats_and_top_say_that_no_daemon_runs(bench: Bench) -> None:
    with serving(bench) as served:
        served.end()
        for command in ("stats", "top"):
            done = served.command(command)
            assert (done.returncode, "prefetchd serve" in done.stderr) == (2, True)
