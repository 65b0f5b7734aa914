"""DeepGEMM: which of its entry points a model calls with which shapes, and how each is called.

Engines call a handful of entry points for every linear and expert layer, and the library compiles another
kernel whenever its cost model likes another tile for the number of rows. Only the library knows when that
is, so every row count within the limits is a request. The subtle rule: activation scales that do not lie
as the library wants them make it launch a layout kernel first, keyed by K alone; one extra request for
each K covers that, whatever the engine's quantizer writes.

Not driven: `nvfp4_mega_moe` and what writes into a mega kernel's buffer (`mega_moe_pre_dispatch`), and the
cuBLASLt products (`cublaslt_*`, `batched_syrk`, `batched_symm`), which compile nothing. Mega-MoE kernels of
the newer package raise on sm_103, where it first measures how the device's SMs lie.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from prefetchd.compilers.deep_gemm_package import import_package
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
from prefetchd.requests.deep_gemm import DeepGemmRequest

if TYPE_CHECKING:
    from .deep_gemm_ops.driver import Driver

OPS = {op: kind for op, kind in REQUEST_TYPES.items() if issubclass(kind, DeepGemmRequest)}
# torch's switch for answering `is_available` without the CUDA runtime.
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
# How the library aligns groups unless an engine tells it otherwise.
LIBRARY_ALIGNMENT = 128


class DeepGemmProvider(Provider):
    """The GEMM family."""

    name: ClassVar[str] = "deep_gemm"
    compilers: ClassVar[tuple[str, ...]] = ("deep_jit",)

    def __init__(self) -> None:
        self._driver: Driver | None = None
        self._planned: tuple[Profile, Callable[[Batch], Iterator[Request]]] | None = None

    def plan(self, batch: Batch, profile: Profile) -> Iterable[Request]:
        """The requests of every site for this batch; a site it cannot serve asks for nothing."""
        if self._planned is None or self._planned[0] is not profile:
            self._planned = (profile, _planner(profile))
        return self._planned[1](batch)

    def batch_keys(self, batch: Batch, profile: Profile) -> tuple[int, int]:
        """All tokens, and (negative, to tell them apart) those of prefill: no rule for M mixes the two."""
        return batch.tokens, -sum(batch.prefill_lengths)

    def universe(self, profile: Profile, limits: Limits) -> Iterable[Request]:
        """Every row count of every site."""
        return expand(self.universe_sweeps(profile, limits))

    def universe_sweeps(self, profile: Profile, limits: Limits) -> Iterable[Sweep]:
        """The universe: one sweep a site, then the calls that reach the layout kernels.

        A site whose op nobody knows stays in it as an unknown request, so that it is reported.
        """
        unknown = [site for site in profile.gemms if site.op not in REQUEST_TYPES]
        found = [
            Sweep(_at(request, ranges[0].start), tuple((r.start, r.stop, r.step) for r in ranges))
            for site, request in _templates(profile)
            if (ranges := sorted(m_ranges(site, profile, limits.max_tokens), key=attrgetter("start")))
        ]
        return [
            *found,
            *(Sweep(UnknownRequest(raw=msgspec.to_builtins(site))) for site in unknown),
            *(Sweep(request) for request in layout_requests(profile)),
            *(Sweep(request) for request in packing_requests(profile) if limits.target.major >= 10),
        ]

    def warm_up(self) -> None:
        """Imports torch and the library."""
        try:
            with _nothing_initialised():
                import_package()
                from .deep_gemm_ops import attention, dense, grouped, mega, others  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            raise Unavailable(f"deep_gemm does not load: {error}") from error

    def run(self, request: Request) -> None:
        """One call of the library's own op."""
        if not isinstance(request, DeepGemmRequest):
            raise Unavailable(f"this version of prefetchd knows no DeepGEMM op {op_of(request)!r}")
        if self._driver is None:
            self._driver = self._new_driver()
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
    """The site's request at one row. Raises `ValueError` naming the site and the option that is wrong."""
    kind = OPS[site.op]
    known = set(kind.__struct_fields__)
    # The site says these itself; a second value would win over what a reader sees.
    options = known - {"n", "k", "groups", kind.sweep_field}
    unknown = sorted(set(site.options) - options)
    if unknown:
        raise ValueError(
            f"site {site.name!r}: {site.op} has no option {unknown[0]!r}; it has {', '.join(sorted(options))}"
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


def layout_requests(profile: Profile) -> list[Request]:
    """The calls with float32 scales one row after another, as some engines pass them; one for each K.

    They reach the kernels that transpose scales (sm_90) or pack them (sm_100, also used when weights are
    loaded), which are keyed by K alone.
    """
    found: dict[int, Request] = {}
    for request in _scaled(profile):
        k: int = request.k  # type: ignore[attr-defined]
        if k not in found:
            found[k] = _replace(request, scales="float32", scale_layout="rows")
    return list(found.values())


def packing_requests(profile: Profile) -> list[Request]:
    """One call with float32 scales in unpadded columns: on sm_100 one kernel packs those, whatever the shape.

    It takes over where the rows are a multiple of four; other row counts are packed by torch.
    """
    dense = [request for request in _scaled(profile) if request.sweep_field == "m"]
    return [_replace(request, scales="float32", scale_layout="columns", m=128) for request in dense[:1]]


def _scaled(profile: Profile) -> Iterator[Request]:
    """Each site whose scales the engine may lay out in several ways, at its smallest row count."""
    for site, request in _templates(profile):
        default = getattr(request, "scales", None) == "auto" and not hasattr(request, "gran_k")
        if default and (ranges := m_ranges(site, profile, 1)):
            yield _at(request, ranges[0].start)


def _templates(profile: Profile) -> list[tuple[GemmSite, Request]]:
    return [(site, template(site, profile.alignment)) for site in profile.gemms if site.op in OPS]


def _replace(request: Request, **changes: Any) -> Request:
    return msgspec.structs.replace(request, **changes)


def _at(request: Request, value: int) -> Request:
    return _replace(request, **{request.sweep_field: value}) if request.sweep_field else request


def _planner(profile: Profile) -> Callable[[Batch], Iterator[Request]]:
    try:
        sites, layouts = _templates(profile), layout_requests(profile)
    except ValueError:
        # `universe` says what is wrong with the profile; beside the scheduler nothing may raise.
        sites, layouts = [], []

    def planned(batch: Batch) -> Iterator[Request]:
        # One by one and none kept: experts ask for thousands a batch, and the reader pauses between them.
        for site, request in sites:
            yield from (_at(request, m) for m in m_for_batch(site, profile, batch))
        yield from layouts

    return planned
