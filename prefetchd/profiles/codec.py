"""A profile in a message: MessagePack inside the message, so that one bad profile never spoils a hello."""

from __future__ import annotations

import msgspec

from prefetchd.profiles.architectures import ProfileError
from prefetchd.profiles.sites import Profile

_decoder = msgspec.msgpack.Decoder(Profile)


def encode_profile(profile: Profile) -> bytes:
    """The profile on the wire."""
    return msgspec.msgpack.encode(profile)


def decode_profile(data: bytes) -> Profile:
    """The inverse; unknown fields are tolerated. Raises `ProfileError` naming what does not fit."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ProfileError(f"a profile in a message cannot be read: {error}") from None
