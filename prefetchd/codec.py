"""Requests as bytes and as plain fields.

Unknown fields are tolerated, so that an older reader survives a newer writer; an unknown op decodes to
`UnknownRequest` and leaves again exactly as it came. A malformed message of a known op is a
`MalformedRequest` that names the op and the field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, cast

import msgspec

from prefetchd.request import Request, UnknownRequest

# The request families: importing one adds its ops to `REQUEST_TYPES`.
from prefetchd.requests import deep_gemm, deep_gemm_mega, gdn, kda, mamba  # noqa: F401


class MalformedRequest(ValueError):
    """A message of a known op that does not fit its type; the text names the op and the field."""


def _leaves(kind: type[Request]) -> Iterator[type[Request]]:
    children = kind.__subclasses__()
    if not children:
        yield kind
    for child in children:
        yield from _leaves(child)


def op_of(request: Request | type[Request]) -> str:
    """The op's name: the library's own for a known request, the sender's for an unknown one."""
    if isinstance(request, UnknownRequest):
        return str(request.raw.get("op", "?"))
    return cast(str, request.__struct_config__.tag)


# Every known op: the leaves of the type tree, since what has children only shares fields.
REQUEST_TYPES: dict[str, type[Request]] = {
    op_of(kind): kind for kind in _leaves(Request) if kind is not UnknownRequest
}


class _OpOnly(msgspec.Struct):
    op: str


if TYPE_CHECKING:
    AnyRequest = Request
else:
    # As a field's type in another message: any of the ops, or an unknown one that this process decoded.
    AnyRequest = reduce(or_, REQUEST_TYPES.values(), UnknownRequest)

_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(AnyRequest)
_op_decoder = msgspec.msgpack.Decoder(_OpOnly)
_encoder = msgspec.msgpack.Encoder()


def encode_request(request: Request) -> bytes:
    """The request on the wire; an unknown one leaves as it came."""
    return _encoder.encode(request.raw if isinstance(request, UnknownRequest) else request)


def decode_request(data: bytes | msgspec.Raw) -> Request:
    """The request of a message. Raises `MalformedRequest`, naming the field that does not fit its op."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        reason = str(error)
    try:
        op = _op_decoder.decode(data).op
    except msgspec.MsgspecError as error:
        raise MalformedRequest(f"not a request: {error}; a request is a map with a text field `op`") from None
    if op in REQUEST_TYPES:
        raise MalformedRequest(f"request {op!r}: {reason}")
    try:
        return UnknownRequest(raw=msgspec.msgpack.decode(data))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # The op alone was read; what stands beside it is read only now.
        raise MalformedRequest(f"request {op!r}: {error}") from None


def request_to_fields(request: Request) -> dict[str, Any]:
    """The request as plain values, `op` first, for JSON, TOML and people."""
    if isinstance(request, UnknownRequest):
        return dict(request.raw)
    return cast(dict[str, Any], msgspec.to_builtins(request))


def request_from_fields(fields: Mapping[str, Any]) -> Request:
    """The inverse of `request_to_fields`; raises `MalformedRequest` as `decode_request` does."""
    return decode_request(_encoder.encode(dict(fields)))
