from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fake_daemon import FakeDaemon

import prefetchd
from prefetchd.attaching import Handle
from prefetchd.introduction import Introduction
from prefetchd.profiles import Profile, ProfileError, profile_from_config, read_profile, write_profile
from prefetchd.profiles.codec import decode_profile, encode_profile
from prefetchd.protocol import Batch, Goodbye, Hello, Plan, Universe, decode_sweeps
from prefetchd.targets import load_target

MODEL = Path(__file__).parents[2] / "examples/models/deepseek-v3.json"
PROFILE = profile_from_config(MODEL, tp=8)
H200 = load_target("h200")
POOLS = read_profile(Path(__file__).parents[1] / "null/cute_pools.profile.toml")
DECODES = Batch(tokens=3, decodes=3)
BATCH = Batch(tokens=100, prefill_lengths=(90,), decodes=10)


@pytest.fixture
def runtime() -> Iterator[Path]:
    with TemporaryDirectory(prefix="pd") as folder:
        yield Path(folder)


@pytest.fixture
def environment(runtime: Path) -> dict[str, str]:
    return {"PREFETCHD": "1", "XDG_RUNTIME_DIR": str(runtime), "HOME": str(runtime)}


@pytest.fixture
def daemon(runtime: Path) -> Iterator[FakeDaemon]:
    (runtime / "prefetchd").mkdir(mode=0o700)
    daemon = FakeDaemon(f"ipc://{runtime}/prefetchd/daemon")
    yield daemon
    daemon.close()


def does_nothing(handle: Handle) -> bool:
    handle.on_schedule(BATCH)
    waited = handle.wait("deep_jit", "key")
    handle.close()
    return not (handle.attached or waited)


@pytest.mark.parametrize("switch", [{}, {"PREFETCHD": ""}, {"PREFETCHD": "0"}])
def test_switched_off_it_does_nothing_and_says_nothing(
    switch: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    handle = prefetchd.attach(PROFILE, environment=switch)

    assert does_nothing(handle)
    assert handle.reason == "PREFETCHD is not set"
    assert caplog.records == []


def test_attached_engine_introduces_itself_and_its_batches_become_plans(
    environment: dict[str, str], daemon: FakeDaemon
) -> None:
    handle = prefetchd.attach(
        PROFILE, engine="test", rank=3, world=8, target=H200, max_tokens=512, environment=environment
    )

    hello = daemon.next(Hello)
    assert (hello.engine, hello.rank, hello.world, hello.target) == ("test", 3, 8, H200)
    assert hello.interpreter == sys.executable
    assert hello.library_directories
    universe = daemon.next(Universe)
    assert decode_profile(universe.profile) == PROFILE
    assert (universe.providers, universe.max_tokens) == (("deep_gemm",), 512)
    handle.on_schedule(BATCH)
    assert set(daemon.next(Plan).requests) == {"deep_gemm"}
    handle.close()
    daemon.next(Goodbye)


def pools_asked(daemon: FakeDaemon) -> set[int]:
    """Of the states in the next plan's requests."""
    sweeps = daemon.next(Plan).requests["kda_cute"]
    return {sweep.request.pool for sweep in decode_sweeps(sweeps)}  # type: ignore[attr-defined]


def test_the_size_of_the_pool_of_states_is_in_the_hello_and_in_what_is_planned(
    environment: dict[str, str], daemon: FakeDaemon
) -> None:
    handle = prefetchd.attach(
        POOLS, target=H200, max_tokens=256, providers=["kda_cute"], state_slots=7, environment=environment
    )

    assert daemon.next(Hello).state_slots == 7
    assert decode_profile(daemon.next(Universe).profile) == POOLS
    handle.on_schedule(DECODES)
    assert pools_asked(daemon) == {7}
    handle.close()


def test_a_pool_that_is_known_later_is_said_in_a_hello_of_its_own_and_planned_with(
    environment: dict[str, str], daemon: FakeDaemon
) -> None:
    handle = prefetchd.attach(
        POOLS, target=H200, max_tokens=256, providers=["kda_cute"], environment=environment
    )
    assert daemon.next(Hello).state_slots == 0
    daemon.next(Universe)

    handle.use_profile(POOLS, 256, ["kda_cute"], state_slots=9)

    assert daemon.next(Hello).state_slots == 9
    # Once more, for the daemon to expand it with the new size.
    assert decode_profile(daemon.next(Universe).profile) == POOLS
    handle.on_schedule(DECODES)
    assert pools_asked(daemon) == {9}
    handle.close()


def test_pool_is_said_later_by_an_engine_that_knows_only_its_size(
    environment: dict[str, str], daemon: FakeDaemon
) -> None:
    handle = prefetchd.attach(
        POOLS, target=H200, max_tokens=256, providers=["kda_cute"], environment=environment
    )
    daemon.next(Universe)

    handle.use_state_slots(9)

    assert daemon.next(Hello).state_slots == 9
    assert daemon.next(Universe).max_tokens == 256
    handle.on_schedule(DECODES)
    assert pools_asked(daemon) == {9}
    handle.close()


def test_pool_on_which_no_kernel_depends_is_said_and_nothing_planned_anew(
    environment: dict[str, str], daemon: FakeDaemon
) -> None:
    handle = prefetchd.attach(PROFILE, target=H200, max_tokens=256, environment=environment)
    daemon.next(Universe)
    planner = handle.planner

    handle.use_state_slots(9)

    assert daemon.next(Hello).state_slots == 9
    assert handle.planner is planner
    handle.close()


def test_profile_file_and_target_of_the_settings_are_used(
    environment: dict[str, str], daemon: FakeDaemon, tmp_path: Path
) -> None:
    write_profile(PROFILE, tmp_path / "a.profile.toml")
    environment |= {"PREFETCHD_PROFILE": str(tmp_path / "a.profile.toml"), "PREFETCHD_TARGET": "b200"}

    handle = prefetchd.attach(environment=environment)

    assert daemon.next(Hello).target == load_target("b200")
    assert decode_profile(daemon.next(Universe).profile) == PROFILE
    handle.close()


EMPTY = Profile(model="empty", architecture="none", tp=1, ep=1, dp=1, quantization="none", context_tokens=1)


@pytest.mark.parametrize(
    ("profile", "changes", "reason"),
    [
        (None, {}, "PREFETCHD_PROFILE"),
        ("/nowhere/a.profile.toml", {}, "/nowhere/a.profile.toml"),
        (EMPTY, {}, "no provider serves empty"),
        (PROFILE, {"PREFETCHD_WAIT_MS": "soon"}, "PREFETCHD_WAIT_MS = 'soon'"),
        (PROFILE, {"PREFETCHD_TARGET": "h2000"}, "h2000"),
        (PROFILE, {"PREFETCHD_ENDPOINT": "somewhere"}, "somewhere"),
        (PROFILE, {"PREFETCHD_ENDPOINT": "tcp://10.0.0.1:1"}, "PREFETCHD_SERVER_KEY"),
        (
            PROFILE,
            {"PREFETCHD_ENDPOINT": "tcp://10.0.0.1:1", "PREFETCHD_SERVER_KEY": "short"},
            "server_key: b'short' is no CURVE key",
        ),
        (PROFILE, {"PREFETCHD_CONFIG": "/nowhere.toml"}, "/nowhere.toml"),
    ],
)
def test_whatever_is_wrong_the_engine_goes_on_and_one_line_says_why(
    environment: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    profile: Profile | str | None,
    changes: dict[str, str],
    reason: str,
) -> None:
    handle = prefetchd.attach(profile, environment=environment | changes)

    assert does_nothing(handle)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.getMessage()
    assert reason in handle.reason


def test_socket_directory_of_others_is_not_used(
    environment: dict[str, str], runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (runtime / "prefetchd").mkdir()
    (runtime / "prefetchd").chmod(0o777)

    assert does_nothing(prefetchd.attach(PROFILE, environment=environment))
    assert "lets others in" in caplog.text


def test_unknown_provider_is_named(environment: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    assert does_nothing(prefetchd.attach(PROFILE, providers=["typo"], environment=environment))
    assert "'typo'" in caplog.text


def test_engine_that_attached_has_neither_torch_nor_a_daemon_in_it(environment: dict[str, str]) -> None:
    script = (
        "import sys, prefetchd; from prefetchd.profiles import profile_from_config\n"
        f"handle = prefetchd.attach(profile_from_config({str(MODEL)!r}, tp=8))\n"
        "print(handle.attached, [n for n in ('torch', 'triton', 'prefetchd.daemon') if n in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )

    assert done.stdout == "True []\n"


def test_profile_that_is_none_in_a_message_is_an_error_with_its_reason() -> None:
    assert decode_profile(encode_profile(PROFILE)) == PROFILE
    for data in (b"", b"\xc1", b"\x80", encode_profile(PROFILE)[:-1]):
        with pytest.raises(ProfileError, match="a profile in a message"):
            decode_profile(data)


class TestIntroduction:
    def test_is_worked_out_once_and_anew_when_the_environment_changes(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        introduction = Introduction(engine="test", compilers=(), target=H200)
        first = introduction()
        assert introduction() is first

        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

        assert introduction() is not first

    def test_tells_the_directories_that_the_library_will_use(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        compiler = pytest.importorskip("prefetchd.compilers.deep_jit")
        monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(compiler.DeepJit, "fingerprint", lambda self: {"deep_jit.line": "test"})
        monkeypatch.setattr(compiler.DeepJit, "roots", lambda self: (tmp_path,))

        hello = Introduction(engine="test", compilers=("deep_jit",), target=H200)()

        assert hello.cache_roots == {"deep_jit": (str(tmp_path),)}
        assert hello.fingerprints == {"deep_jit": {"deep_jit.line": "test"}}

    def test_leaves_out_a_library_the_engine_has_not_imported_and_a_compiler_that_is_not_here(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delitem(sys.modules, "triton", raising=False)

        hello = Introduction(engine="test", compilers=("triton", "none"), target=H200)()

        assert (hello.fingerprints, "triton" in sys.modules) == ({}, False)

    def test_without_a_driver_the_target_is_left_out_and_said(self) -> None:
        script = (
            "from prefetchd.introduction import Introduction; print(Introduction(engine='t', compilers=())())"
        )

        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

        # On a machine with a GPU the device is found instead, in a process of its own.
        assert ("target=None" in done.stdout) == ("the device is not known: device 0" in done.stderr)
