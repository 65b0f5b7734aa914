"""What ninja keeps beside a build: its log of commands and its log of headers, moved to another directory.

Ninja builds an output again unless its log has the very command, by its hash, and no input is younger. Both
logs name absolute paths, so a directory that was built in one place and is renamed to another would be built
again from the start. The subtle rule: a hash of ours is never trusted. Before a log is rewritten, the hashes
that this ninja itself wrote are computed again by the function that is about to be used; where one differs,
this is a ninja that is not known, and nothing is moved.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

LOG, DEPENDENCIES, MANIFEST = ".ninja_log", ".ninja_deps", "build.ninja"

_MASK = (1 << 64) - 1
_SIGNATURE = b"# ninjadeps\n"
_VERSION = 4
# A record of inputs, not of a path.
_INPUTS = 1 << 31
# Asked what it would do, ninja looks at some thousand headers.
_ASK_LIMIT_S = 120.0


class UnknownNinja(ValueError):
    """This ninja keeps its logs in a way that is not known; the text says what was found."""


def up_to_date(ninja: str, directory: Path, environment: Mapping[str, str]) -> bool:
    """Whether ninja would do nothing there. Starts no compiler. Raises `OSError` where ninja cannot say.

    It looks at copies: a ninja of another version than the one that built would throw these files away.
    """
    with tempfile.TemporaryDirectory(prefix="prefetchd-ninja-") as place:
        for name in (MANIFEST, LOG, DEPENDENCIES):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(directory / name, Path(place, name))
        try:
            answer = _ask(ninja, Path(place), environment, "-n")
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{directory}: {ninja} does not say what it would do") from error
    return answer.returncode == 0 and b"no work to do" in answer.stdout


def relocate(
    ninja: str, directory: Path, environment: Mapping[str, str], old: str, new: str, stamp: int
) -> None:
    """Makes a finished build in `directory`, written for paths below `old`, one for paths below `new`.

    `stamp` (nanoseconds) becomes the time of every output: no younger than any input. Raises `UnknownNinja`
    and `OSError`.
    """
    old, new = f"{old.rstrip('/')}/", f"{new.rstrip('/')}/"
    commands = _commands(ninja, directory, environment)
    header, entries = _read_log(directory / LOG)
    digest = _hash_of(header)
    for _, _, _, output, hashed in entries:
        if output not in commands or digest(commands[output].encode()) != int(hashed, 16):
            raise UnknownNinja(f"{directory / LOG}: its hash of the command of {output} is not understood")
    lines = [header]
    for start, end, _, output, _ in entries:
        hashed = f"{digest(commands[output].replace(old, new).encode()):x}"
        lines.append("\t".join((start, end, str(stamp), output.replace(old, new), hashed)))
    dependencies = directory / DEPENDENCIES
    if dependencies.exists():
        dependencies.write_bytes(_moved_dependencies(dependencies.read_bytes(), old, new, stamp))
    (directory / LOG).write_text("\n".join(lines) + "\n")
    manifest = directory / MANIFEST
    manifest.write_text(manifest.read_text().replace(old, new))
    for path in directory.iterdir():
        os.utime(path, ns=(stamp, stamp))


def inputs_of(directory: Path) -> list[str]:
    """Every path that its log of headers names. Raises `UnknownNinja`, `OSError`."""
    dependencies = directory / DEPENDENCIES
    if not dependencies.exists():
        return []
    return [text for text, _ in _records(dependencies.read_bytes()) if text is not None]


def _ask(
    ninja: str, directory: Path, environment: Mapping[str, str], *what: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [ninja, "-C", str(directory), "-f", str(directory / MANIFEST), *what],
        env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, check=False,
        timeout=_ASK_LIMIT_S,
    )  # fmt: skip


def _commands(ninja: str, directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """By output the command that makes it, as ninja itself expands it."""
    try:
        answer = _ask(ninja, directory, environment, "-t", "compdb")
        # "ninja: Entering directory" goes before it in some versions.
        text = answer.stdout[max(answer.stdout.find(b"["), 0) :]
        return {str(edge["output"]): str(edge["command"]) for edge in json.loads(text)}
    except (ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
        raise UnknownNinja(f"{ninja} -t compdb: {error}") from error


def _read_log(path: Path) -> tuple[str, list[tuple[str, ...]]]:
    """Its first line, and of each output the last entry."""
    header, *lines = path.read_text().splitlines()
    found: dict[str, tuple[str, ...]] = {}
    for line in lines:
        fields = tuple(line.split("\t"))
        if len(fields) != 5:
            raise UnknownNinja(f"{path}: a line of {len(fields)} fields")
        found[fields[3]] = fields
    return header, list(found.values())


def _hash_of(header: str) -> Callable[[bytes], int]:
    version = header.rpartition(" v")[2]
    if version == "5":
        return murmur
    if version in ("6", "7"):
        return rapid
    raise UnknownNinja(f"a log of version {version!r}; those of 5 to 7 are known")


def _records(data: bytes) -> list[tuple[str | None, bytes]]:
    """A log of headers in its order: a path with its number's check, or the inputs of an output."""
    start = len(_SIGNATURE) + 4
    if not data.startswith(_SIGNATURE + struct.pack("<i", _VERSION)):
        raise UnknownNinja("a log of headers that does not begin as those of version 4 do")
    found: list[tuple[str | None, bytes]] = []
    while start < len(data):
        if start + 4 > len(data):
            raise UnknownNinja("a log of headers that ends within a record")
        (size,) = struct.unpack_from("<I", data, start)
        body = data[start + 4 : start + 4 + (size & ~_INPUTS)]
        if len(body) != size & ~_INPUTS or len(body) < 4:
            raise UnknownNinja("a log of headers that ends within a record")
        if size & _INPUTS:
            found.append((None, body))
        else:
            found.append((body[:-4].rstrip(b"\0").decode(), body[-4:]))
        start += 4 + len(body)
    return found


def _moved_dependencies(data: bytes, old: str, new: str, stamp: int) -> bytes:
    parts = [_SIGNATURE, struct.pack("<i", _VERSION)]
    for path, body in _records(data):
        if path is not None:
            text = path.replace(old, new).encode()
            text += b"\0" * (-len(text) % 4)
            parts.append(struct.pack("<I", len(text) + 4) + text + body)
        else:
            moved = body[:4] + struct.pack("<Q", stamp) + body[12:]
            parts.append(struct.pack("<I", len(moved) | _INPUTS) + moved)
    return b"".join(parts)


def murmur(data: bytes) -> int:
    """MurmurHash64A with ninja's seed."""
    factor = 0xC6A4A7935BD1E995
    found = 0xDECAFBADDECAFBAD ^ (len(data) * factor & _MASK)
    whole = len(data) & ~7
    for (word,) in struct.iter_unpack("<Q", data[:whole]):
        mixed = word * factor & _MASK
        mixed ^= mixed >> 47
        found = (found ^ (mixed * factor & _MASK)) * factor & _MASK
    if rest := data[whole:]:
        found = (found ^ int.from_bytes(rest, "little")) * factor & _MASK
    found = (found ^ found >> 47) * factor & _MASK
    return found ^ found >> 47


_SECRET = (0x2D358DCCAA6C78A5, 0x8BB84B93962EACC9, 0x4B33A62ED433D4A3)
_SEED = 0xBDD89AA982704029
# Read in three lanes of sixteen bytes.
_BLOCK = 48
# Shorter texts are hashed in another way; no compiler's command is one.
_SHORTEST = 17


def rapid(data: bytes) -> int:
    """The first version of rapidhash with its usual seed. Raises `UnknownNinja` for what is no command."""
    first, second, third = _SECRET
    size = len(data)
    if size < _SHORTEST:
        raise UnknownNinja(f"a command of {size} bytes")
    seed = _SEED ^ _mix(_SEED ^ first, second) ^ size
    at, lanes = 0, [seed, seed, seed]
    # A text that is one block is read as a rest, the last block of a longer one is not.
    while size > _BLOCK and size - at >= _BLOCK:
        for lane, secret in enumerate(_SECRET):
            place = at + 16 * lane
            lanes[lane] = _mix(_word(data, place) ^ secret, _word(data, place + 8) ^ lanes[lane])
        at += _BLOCK
    if at:
        seed = lanes[0] ^ lanes[1] ^ lanes[2]
    if size - at > 16:
        seed = _mix(_word(data, at) ^ third, _word(data, at + 8) ^ seed ^ second)
        if size - at > 32:
            seed = _mix(_word(data, at + 16) ^ third, _word(data, at + 24) ^ seed)
    low, high = _word(data, size - 16), _word(data, size - 8)
    product = (low ^ second) * (high ^ seed)
    return _mix(product & _MASK ^ first ^ size, product >> 64 ^ second)


def _mix(one: int, other: int) -> int:
    product = one * other
    return product & _MASK ^ product >> 64


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")
