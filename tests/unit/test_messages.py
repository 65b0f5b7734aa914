from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetchd.messages import KINDS, MAX_NAME, MAX_TEXT
from prefetchd.protocol import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Answer,
    Event,
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
    Plan,
    Priority,
    Published,
    Query,
    Refused,
    Settled,
    State,
    Stats,
    StatsQuery,
    Universe,
    UnknownMessage,
    Welcome,
    decode,
    encode,
)
from prefetchd.targets import load_target

KEY = KeyName("deep_jit", "kernel.0123")
EXAMPLES: list[Message] = [
    Hello(
        engine="vllm",
        pid=7,
        generation="g",
        rank=3,
        world=8,
        target=load_target("h200"),
        fingerprints={"triton": {"triton.version": "3.8"}},
        cache_roots={"triton": ("/root/.triton/cache",)},
        interpreter="/usr/bin/python3",
        library_directories=("/usr/lib/python3/dist-packages",),
        cpus=(0, 1, 2),
    ),
    Welcome(instance="i", pid=1),
    Refused(text="no"),
    HelloWanted(instance="i"),
    Mismatch(compiler="triton", field="triton.version", engine="3.8", helper="3.6", fix="install 3.6"),
    Universe(profile=b"p", providers=("kda",), max_tokens=8192),
    Plan(id=1, requests={"kda": b"r"}, priority=Priority.URGENT, deadline_s=0.5),
    Settled(plans=(1, 2)),
    Published(compiler="triton", key="k", root="/c"),
    Failed(compiler="triton", key="k", root="/c", text="ptxas"),
    Event(
        what="ended", compiler="triton", key="k", digest="d", seconds=1.5, ok=False, request=b"r", site="a:1"
    ),
    Query(id=1, keys=(KEY,), requests={"kda": b"r"}, priority=Priority.URGENT, deadline_s=0.1),
    Answer(id=1, keys=(State.PUBLISHED,), requests={"kda": (State.QUEUED, State.FAILED)}),
    StatsQuery(id=1),
    Stats(id=1, instance="i", figures={"hits": 3, "wait_seconds": 0.5}, tables={"ranks": [{"rank": 0}]}),
    Heartbeat(sequence=1, figures={"dropped": 0}),
    HeartbeatAnswer(sequence=1, instance="i", figures={"queue": 4}),
    Goodbye(text="done"),
]


def raw(kind: str, **fields: Any) -> bytes:
    return msgspec.msgpack.encode({"type": kind, **fields})


def problem_of(frame: bytes) -> MalformedMessage:
    with pytest.raises(MalformedMessage) as caught:
        decode(frame)
    return caught.value


def test_there_is_an_example_of_every_kind() -> None:
    assert {type(message) for message in EXAMPLES} == set(KINDS.values())


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_fields_of_a_newer_version_are_left_out(message: Message) -> None:
    fields = msgspec.msgpack.decode(encode(message)) | {"of_tomorrow": [1, {"deep": None}]}

    assert decode(msgspec.msgpack.encode(fields)) == message


def test_message_of_an_unknown_type_is_kept_whole() -> None:
    frame = raw("of tomorrow", field=[1, 2])

    message = decode(frame)

    assert message == UnknownMessage(type="of tomorrow", frame=frame)
    assert encode(message) == frame


def test_hello_of_another_version_says_both_versions_whatever_else_it_holds() -> None:
    other = PROTOCOL_VERSION + 1
    fitting = msgspec.msgpack.encode(
        msgspec.msgpack.decode(encode(EXAMPLES[0])) | {"protocol": other},
    )
    for frame in (fitting, raw("hello", protocol=other), raw("hello", protocol=other, pid="seven")):
        error = problem_of(frame)

        assert error.problem == "version"
        assert f"protocol = {other}" in str(error)
        assert f"speaks {PROTOCOL_VERSION}" in str(error)


def test_oversized_frame_is_refused_unread_and_unsent() -> None:
    error = problem_of(b"\xc1" * (MAX_MESSAGE_BYTES + 1))

    assert error.problem == "oversized"
    with pytest.raises(MalformedMessage, match=str(MAX_MESSAGE_BYTES)):
        encode(Plan(id=1, requests={"kda": bytes(MAX_MESSAGE_BYTES)}))


@pytest.mark.parametrize(
    ("frame", "named"),
    [
        (b"", "not a message"),
        (b"\x91" * 100_000, "not a message"),
        (b"\x82\xa4type\xa3new\xa1x" + b"\x91" * 100_000, "not a message"),
        (msgspec.msgpack.encode([1, 2]), "not a message"),
        (msgspec.msgpack.encode({"no": "type"}), "type"),
        (raw("hello"), "hello"),
        (raw("published", compiler=1, key="k", root="/"), "compiler"),
        (raw("plan", id=-1, requests={}), "id"),
        (raw("plan", id=1, requests={}, priority=9), "priority"),
        (raw("plan", id=1, requests={}, deadline_s=-1.0), "deadline_s"),
        (raw("refused", text="x" * (MAX_TEXT + 1)), "text"),
        (raw("published", compiler="c" * (MAX_NAME + 1), key="k", root="/"), "compiler"),
        (raw("query", id=1, keys=[["a", "b"]] * 5000), "keys"),
        (raw("hello", engine="e", pid=1, generation="g", target={"name": "x"}), "target"),
        (raw("x" * (MAX_NAME + 1)), "type"),
    ],
)
def test_what_does_not_fit_is_malformed_and_named(frame: bytes, named: str) -> None:
    error = problem_of(frame)

    assert error.problem == "malformed"
    assert named in str(error)


def test_target_that_cannot_be_is_malformed() -> None:
    fields = msgspec.msgpack.decode(encode(EXAMPLES[0]))
    fields["target"]["sm_count"] = 0

    assert "sm_count" in str(problem_of(msgspec.msgpack.encode(fields)))


def ends_well(frame: bytes) -> None:
    try:
        message: Message | None = decode(frame)
    except MalformedMessage:
        message = None
    assert message is None or isinstance(message, Message)


@given(st.binary(max_size=512))
def test_random_bytes_end_in_a_message_or_in_the_one_error(frame: bytes) -> None:
    ends_well(frame)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted({field for kind in KINDS.values() for field in kind.__struct_fields__})


@given(st.sampled_from([*KINDS, "other"]), st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=6))
def test_known_fields_of_any_content_end_in_a_message_or_in_the_one_error(
    kind: str, fields: dict[str, Any]
) -> None:
    ends_well(raw(kind, **fields))


@settings(max_examples=500)
@given(
    st.sampled_from([encode(message) for message in EXAMPLES]),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 10_000),
)
def test_mutated_messages_end_in_a_message_or_in_the_one_error(
    frame: bytes, changes: list[tuple[int, int]], cut: int
) -> None:
    mutated = bytearray(frame)
    for place, value in changes:
        mutated[place % len(mutated)] = value

    ends_well(bytes(mutated))
    ends_well(bytes(mutated[: cut % len(mutated)]))
