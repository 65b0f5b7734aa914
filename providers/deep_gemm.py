"""DeepGEMM: which of its entry points a model calls with which shapes, and how each is called.

Engines call a handful of entry points for every linear and expert layer, and the library compiles another
kernel whenever its cost model likes another tile for the number of rows. Only the library knows when that
is, so every row count within the limits is a request. The subtle rule: activation scales that do not lie
as the library wants them make it launch a layout kernel first, keyed by K alone; one extra request a site
covers that (`rows`), whatever the engine's quantizer writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from prefetchd.profiles import GemmSite, Profile, m_for_batch, m_ranges
from prefetchd.protocol import (
    REQUEST_TYPES,
    Batch,
    MalformedRequest,
    Request,
    Sweep,
    UnknownRequest,
    expand,
    op_of,
    request_from_fields,
)
from prefetchd.provider import Limits, Provider, Unavailable

if TYPE_CHECKING:
    from .deep_gemm_ops.driver import Driver

MODULE = "prefetchd.deep_gemm_requests"
OPS = {op: kind for op, kind in REQUEST_TYPES.items() if kind.__module__ == MODULE}
# torch's switch for answering `is_available` without the CUDA runtime.
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
# How the library aligns groups unless an engine tells it otherwise.
LIBRARY_ALIGNMENT = 128
# Batches that repeat are planned once; decoding repeats a few hundred sizes.
PLANS_REMEMBERED = 4096


class DeepGemmProvider(Provider):
    """The GEMM family."""

    name: ClassVar[str] = "deep_gemm"
    compilers: ClassVar[tuple[str, ...]] = ("deep_jit",)

    def __init__(self) -> None:
        self._driver: Driver | None = None
        self._planned: tuple[Profile, Any] | None = None

    def plan(self, batch: Batch, profile: Profile) -> Iterable[Request]:
        """The requests of every site for this batch; empty for a profile whose sites it cannot serve."""
        if self._planned is None or self._planned[0] is not profile:
            self._planned = (profile, _planner(profile))
        return self._planned[1](batch)  # type: ignore[no-any-return]

    def universe(self, profile: Profile, limits: Limits) -> Iterable[Request]:
        """Every row count of every site."""
        return expand(self.universe_sweeps(profile, limits))

    def universe_sweeps(self, profile: Profile, limits: Limits) -> Iterable[Sweep]:
        """The universe, a sweep a site. Raises `ValueError` naming a site whose op or option is wrong."""
        sites = [(site, template(site, profile.alignment)) for site in profile.gemms if site.op in OPS]
        for site, request in sites:
            spans = tuple(
                (r.start, r.stop, r.step) for r in m_ranges(site, profile, limits.max_tokens) if len(r)
            )
            if not spans:
                continue
            first = _at(request, spans[0][0])
            yield Sweep(first, spans)
            yield from (Sweep(extra) for extra in _layout_requests(first, limits.target.major))

    def warm_up(self) -> None:
        """Imports torch and the library."""
        try:
            with _nothing_initialised():
                from .deep_gemm_ops import attention, dense, grouped, others  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            raise Unavailable(f"deep_gemm does not load: {error}") from error

    def run(self, request: Request) -> None:
        """One call of the library's own op."""
        if self._driver is None:
            self._driver = self._new_driver()
        if isinstance(request, UnknownRequest):
            raise Unavailable(f"this version knows no op {op_of(request)!r}")
        self._driver.run(request)

    def _new_driver(self) -> Driver:
        self.warm_up()
        from .deep_gemm_ops.driver import Driver

        return Driver()


@contextmanager
def _nothing_initialised() -> Iterator[None]:
    """Older packages ask at import whether CUDA is there; through NVML that leaves the process forkable."""
    before = os.environ.get(NVML_CHECK)
    os.environ[NVML_CHECK] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NVML_CHECK]
        else:
            os.environ[NVML_CHECK] = before


def template(site: GemmSite, alignment: int = LIBRARY_ALIGNMENT) -> Request:
    """The site's request at one row, groups aligned as given. Raises `ValueError` naming the site and what is wrong with it."""
    kind = OPS[site.op]
    known = set(kind.__struct_fields__)
    unknown = sorted(set(site.options) - known)
    if unknown:
        raise ValueError(
            f"site {site.name!r}: {site.op} has no option {unknown[0]!r}; it has {', '.join(sorted(known))}"
        )
    sizes = {"n": site.n, "k": site.k, "groups": site.groups}
    fields = {name: size for name, size in sizes.items() if name in known and size}
    if kind.sweep_field is not None:
        fields[kind.sweep_field] = 1
    if "alignment" in known and alignment != LIBRARY_ALIGNMENT:
        fields["alignment"] = alignment
    try:
        return request_from_fields({"op": site.op, **fields, **site.options})
    except MalformedRequest as error:
        raise ValueError(f"site {site.name!r}: {error}") from None


def _at(request: Request, value: int) -> Request:
    if request.sweep_field is None:
        return request
    return msgspec.structs.replace(request, **{request.sweep_field: value})


def _layout_requests(request: Request, major: int | None) -> Iterator[Request]:
    """The calls that reach the layout kernels for this site's scales; one row count is enough for each."""
    if getattr(request, "scale_layout", None) != "tma" or getattr(request, "scales", None) != "auto":
        return
    yield msgspec.structs.replace(request, scales="float32", scale_layout="rows")


def _planner(profile: Profile) -> Any:
    sites = []
    for site in profile.gemms:
        if site.op not in OPS:
            continue
        try:
            sites.append((site, template(site, profile.alignment)))
        except ValueError:
            continue

    @lru_cache(maxsize=PLANS_REMEMBERED)
    def planned(batch: Batch) -> tuple[Request, ...]:
        found = []
        for site, request in sites:
            at = [_at(request, m) for m in m_for_batch(site, profile, batch)]
            found += at
            found += [extra for one in at[:1] for extra in _layout_requests(one, None)]
        return tuple(found)

    return planned
