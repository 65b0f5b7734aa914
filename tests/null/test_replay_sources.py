"""Every kernel that DeepGEMM generates, by both lines, is rebuilt from its record and under its own key."""

from __future__ import annotations

import asyncio
import os

import msgspec
import pytest
from deep_gemm_tracing import LINES
from test_deep_gemm_ops import SHAPES

from prefetchd.compilers.base import Job, fingerprint_id
from prefetchd.compilers.deep_gemm_package import find_package
from prefetchd.compilers.deep_jit import DeepJit
from prefetchd.compilers.deep_jit_payload import payload_of
from prefetchd.protocol import Sweep, request_from_fields
from prefetchd.shapelog import Record, decode_record, encode_record
from prefetchd.targets import load_target
from prefetchd.tracer import Tracer

SWEEPS = [Sweep(request_from_fields({"op": op, **fields})) for op, fields in SHAPES.items()]
SELDOM = (pytest.mark.slow, pytest.mark.ci)
# So many variants the shapes come to at least; the library has fewer kernels for sm_120.
FEWEST = {"h200": 21, "b200": 21, "rtx-pro-6000": 19}
TARGETS = ["h200", *(pytest.param(name, marks=SELDOM) for name in ("b200", "rtx-pro-6000"))]


async def traced(target: str, environment: dict[str, str]) -> list[Job]:
    async with Tracer(load_target(target), ("deep_gemm",), environment, parallel=2) as tracer:
        reports = await asyncio.gather(*(tracer.trace("deep_gemm", sweep, "capture") for sweep in SWEEPS))
    return list({job.key: job for report in reports for job in report.jobs}.values())


def as_record(job: Job, fingerprint: str) -> Record:
    """As an observer writes it and a reader finds it."""
    payload = payload_of(job)
    record = Record(
        compiler=job.compiler,
        key=job.key,
        fingerprint=fingerprint,
        rebuild={**msgspec.to_builtins(payload), "op": "", "call": ""},
    )
    return decode_record(encode_record(record))


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("target", TARGETS)
def test_traced_job_and_rebuilt_job_are_the_same(line: str, target: str) -> None:
    environment = dict(os.environ)
    older = LINES[line]
    if older is not None:
        environment["PYTHONPATH"] = f"{older}:{environment.get('PYTHONPATH', '')}"
    package = find_package(None if older is None else older / "deep_gemm").directory
    compiler = DeepJit(load_target(target), environment, package_directory=package)
    fingerprint = fingerprint_id(compiler.fingerprint())

    jobs = asyncio.run(traced(target, environment))

    assert len(jobs) >= FEWEST[target]
    for job in jobs:
        assert compiler.rebuild(as_record(job, fingerprint)) == job
