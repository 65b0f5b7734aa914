from __future__ import annotations

from collections.abc import Callable

import pytest

from prefetchd.client import Client
from prefetchd.protocol import Event, Hello, Universe, request_from_fields

REQUEST = request_from_fields({"op": "fp8_gemm_nt", "m": 1, "n": 512, "k": 512})
UNIVERSE = Universe(profile=b"", providers=("deep_gemm",), max_tokens=8)
EVENT = Event(what="hit", compiler="triton", key="k")

CALLS: dict[str, Callable[[Client], object]] = {
    "start": lambda client: client.start(),
    "wake": lambda client: client.wake(),
    "add_source": lambda client: client.add_source(lambda: False),
    "plan": lambda client: client.plan({"deep_gemm": [REQUEST]}),
    "universe": lambda client: client.universe(UNIVERSE),
    "event": lambda client: client.event(EVENT),
    "is_published": lambda client: client.is_published("a", "b"),
    "wait": lambda client: client.wait("a", "b", ms=1000),
    "wanted": lambda client: client.wanted,
    "stats": lambda client: client.stats(),
    "forget_parent": lambda client: client.forget_parent(),
    "close": lambda client: client.close(),
}


class Broken:
    """Fails whatever is done with it."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(f"broken: {name}")


def parts_of(client: Client) -> list[str]:
    return [name for name in vars(client) if name != "guard"]


@pytest.mark.parametrize("call", CALLS)
def test_no_exception_leaves_a_call_whatever_part_of_the_client_fails(call: str, address: str) -> None:
    for part in parts_of(Client(address, lambda: Hello(engine="", pid=0, generation=""))):
        client = Client(address, lambda: Hello(engine="", pid=0, generation=""))
        setattr(client, part, Broken())

        CALLS[call](client)
        CALLS[call](client)

        client.closed = True
