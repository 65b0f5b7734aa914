"""A daemon for `prefetchd run` to start: real lock, real socket, and its argument says how it answers.

`answer` serves until it is ended, `silent` never answers, `die` says why and ends. What it was given is
written beside the socket.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from fake_daemon import FakeDaemon

from prefetchd.endpoint import find_endpoint
from prefetchd.messages import Hello
from prefetchd.node.lock import sole_daemon


def main(mode: str) -> None:
    endpoint = find_endpoint(named=os.environ.get("PREFETCHD_ENDPOINT"))
    assert endpoint.directory is not None
    if mode == "die":
        sys.exit("prefetchd: a setting is wrong")
    with sole_daemon(endpoint):
        given = {"environment": dict(os.environ), "pid": os.getpid(), "session": os.getsid(0)}
        (endpoint.directory / "given.json").write_text(json.dumps(given))
        if mode == "silent":
            signal.pause()
        daemon = FakeDaemon(endpoint.address)
        while True:
            daemon.next(Hello)


if __name__ == "__main__":
    main(sys.argv[1])
