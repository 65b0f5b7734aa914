"""The daemon's small window for probes and scrapers: `GET /metrics`, `/ready` and `/healthz`, no more.

It answers machines that poll, on a local port, so it reads one short request, writes one answer and closes.
Whatever a stranger sends is bounded in size and time and ends in a status code; nothing that fails here
touches the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import NamedTuple

# A request of a scraper is some hundred bytes.
MAX_REQUEST_BYTES = 8192
REQUEST_LIMIT_S = 5.0
# More than a node's probes and scrapers will ever open.
MAX_CONNECTIONS = 64
OFF = "off"


class Page(NamedTuple):
    """An answer."""

    status: HTTPStatus
    text: str
    kind: str = "text/plain; charset=utf-8"


class AddressError(ValueError):
    """The metrics address cannot be used; the text names it and the fix."""


def parse_address(text: str) -> tuple[str, int] | None:
    """Host and port of the setting; None where it is off. Raises `AddressError`."""
    if text.strip().lower() in ("", OFF):
        return None
    host, colon, port = text.strip().rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535 or not host:
        raise AddressError(
            f"metrics = {text!r}: must be host:port, as in 127.0.0.1:9464, or off; correct PREFETCHD_METRICS"
        )
    return host.strip("[]"), int(port)


@asynccontextmanager
async def window(address: tuple[str, int], pages: Mapping[str, Callable[[], Page]]) -> AsyncIterator[int]:
    """Serves the pages by path; gives the port that was bound (asked for 0, a free one).

    Raises `AddressError` for an address that cannot be had.
    """
    open_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_connections
        open_connections += 1
        try:
            if open_connections <= MAX_CONNECTIONS:
                async with asyncio.timeout(REQUEST_LIMIT_S):
                    await _answer(reader, writer, pages)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            # A peer that went away, or never finished: its own business.
            pass
        finally:
            open_connections -= 1
            writer.close()

    try:
        server = await asyncio.start_server(serve, *address, limit=MAX_REQUEST_BYTES)
    except OSError as error:
        raise AddressError(
            f"metrics = {address[0]}:{address[1]}: {error.strerror}; set PREFETCHD_METRICS to another "
            "host:port, or to off"
        ) from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await server.wait_closed()


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pages: Mapping[str, Callable[[], Page]]
) -> None:
    head = b""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        page = _page(head, pages)
    except asyncio.LimitOverrunError:
        page = Page(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request is too large\n")
    body = page.text.encode()
    lines = (
        f"HTTP/1.1 {page.status.value} {page.status.phrase}",
        f"Content-Type: {page.kind}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    writer.write("\r\n".join((*lines, "", "")).encode())
    if not head.startswith(b"HEAD "):
        writer.write(body)
    await writer.drain()


def _page(head: bytes, pages: Mapping[str, Callable[[], Page]]) -> Page:
    words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/"):
        return Page(HTTPStatus.BAD_REQUEST, "not an HTTP request\n")
    if words[0] not in ("GET", "HEAD"):
        return Page(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD\n")
    found = pages.get(words[1].partition("?")[0])
    if found is None:
        return Page(HTTPStatus.NOT_FOUND, f"pages: {', '.join(pages)}\n")
    return found()
