from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from prefetchd.endpoint import MAX_SOCKET_PATH, EndpointError, find_endpoint


def test_runtime_directory_of_the_user_comes_first(tmp_path: Path) -> None:
    endpoint = find_endpoint({"XDG_RUNTIME_DIR": "/run/user/7", "TMPDIR": str(tmp_path)})

    assert endpoint.address == "ipc:///run/user/7/prefetchd/daemon"
    assert endpoint.lock_path == Path("/run/user/7/prefetchd/daemon.lock")


def test_without_one_it_is_a_directory_of_the_users_own_in_the_temporary_one() -> None:
    assert find_endpoint({}).address == f"ipc:///tmp/prefetchd-{os.getuid()}/daemon"
    # A relative directory would be another one for each process.
    assert find_endpoint({"XDG_RUNTIME_DIR": "run"}) == find_endpoint({})


def test_path_too_long_for_a_socket_becomes_a_short_one_the_same_for_everybody() -> None:
    long = {"XDG_RUNTIME_DIR": "/scratch/" + "x" * 100}
    other = {"XDG_RUNTIME_DIR": "/scratch/" + "y" * 100}

    endpoint = find_endpoint(long)

    assert len(os.fsencode(str(endpoint.socket_path))) <= MAX_SOCKET_PATH
    assert endpoint == find_endpoint(dict(long))
    assert endpoint != find_endpoint(other)


def test_longest_path_that_fits_is_kept() -> None:
    room = MAX_SOCKET_PATH - len("/prefetchd/daemon")
    fits, too_long = "/" + "x" * (room - 1), "/" + "x" * room

    assert find_endpoint({"XDG_RUNTIME_DIR": fits}).address == f"ipc://{fits}/prefetchd/daemon"
    assert too_long not in find_endpoint({"XDG_RUNTIME_DIR": too_long}).address


def test_named_endpoint_is_used_as_it_is() -> None:
    endpoint = find_endpoint({"XDG_RUNTIME_DIR": "/run/user/7"}, "ipc:///shared/socket")

    assert (endpoint.address, endpoint.directory) == ("ipc:///shared/socket", Path("/shared"))
    assert find_endpoint({}, "tcp://10.0.0.1:5555").directory is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("/run/prefetchd", "must start with ipc:// or tcp://"),
        ("ipc://relative/path", "must be absolute"),
        ("ipc:///" + "x" * 120, "121 bytes"),
    ],
)
def test_named_endpoint_that_cannot_be_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(EndpointError, match=reason):
        find_endpoint({}, text)


def test_prepared_directory_is_for_this_user_alone(tmp_path: Path) -> None:
    endpoint = find_endpoint({"XDG_RUNTIME_DIR": str(tmp_path)})

    endpoint.prepare()
    endpoint.prepare()

    assert stat.S_IMODE((tmp_path / "prefetchd").stat().st_mode) == 0o700
    endpoint.check()


def test_directory_that_is_not_there_yet_is_no_problem_for_an_engine(tmp_path: Path) -> None:
    find_endpoint({"XDG_RUNTIME_DIR": str(tmp_path)}).check()


def test_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prefetchd").mkdir()
    (tmp_path / "prefetchd").chmod(0o755)
    endpoint = find_endpoint({"XDG_RUNTIME_DIR": str(tmp_path)})

    for use in (endpoint.check, endpoint.prepare):
        with pytest.raises(EndpointError, match="lets others in"):
            use()


def test_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "prefetchd").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(EndpointError, match="is not a directory"):
        find_endpoint({"XDG_RUNTIME_DIR": str(tmp_path)}).prepare()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prefetchd").mkdir(mode=0o700)
    os.chown(tmp_path / "prefetchd", 12345, 12345)

    with pytest.raises(EndpointError, match="belongs to user 12345"):
        find_endpoint({"XDG_RUNTIME_DIR": str(tmp_path)}).check()


def test_place_that_cannot_be_written_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(EndpointError, match="PREFETCHD_ENDPOINT"):
        find_endpoint({"XDG_RUNTIME_DIR": str(tmp_path / "file")}).prepare()
