"""`prefetchd bake` on a whole vLLM: everything the engine launches, made and proved with no GPU."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from cuda_toolkit import CudaToolkit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; make test-vllm"),
]
if find_spec("vllm") is not None:
    from vllm_engine import PROMPTS, STEPS
    from vllm_place import Place
    from vllm_results import baked, note_model, start_of

MODELS = ("kimi-linear", "deepseek-v3-fp8")
if os.environ.get("PREFETCHD_TEST_VLLM_ALL"):
    MODELS = (*MODELS, "nemotron-h", "qwen3-next")
# Whose routers vLLM multiplies by kernels of the CuTe DSL.
WITH_CUTE = {("kimi-linear", "h200"), ("deepseek-v3-fp8", "h200")}
WITH_FLASHINFER = pytest.mark.skipif(
    not os.environ.get("PREFETCHD_TEST_VLLM_ALL"), reason="one of FlashInfer's modules takes minutes"
)


@pytest.mark.parametrize("target", ["h200", "b200"])
@pytest.mark.parametrize("model", MODELS)
def test_baked_engine_starts_and_serves_without_compiling(tmp_path: Path, model: str, target: str) -> None:
    place = Place(tmp_path / "home", model, target)

    manifest = place.bake(*map(str, PROMPTS))

    assert manifest["problems"] == []
    # A second start of the engine, in which compiling was forbidden.
    assert manifest["proved"]
    made = {artifact["compiler"] for artifact in manifest["artifacts"]}
    assert made >= {"triton", "cute_dsl"} if (model, target) in WITH_CUTE else made >= {"triton"}
    facts = baked(manifest)
    if target == "h200":
        # And a third one, counted from outside; what differs for the other target is in the manifest.
        served = place.serve(daemon=False, VLLM_DEEP_GEMM_WARMUP="skip")
        assert served.tokens == [STEPS] * 5
        assert served.compiles() == []
        assert served.new_entries == 0
        facts["start"] = start_of(served)
    note_model("bake", place, **facts)
    print(f"{model} on {target}: {facts}")


@WITH_FLASHINFER
def test_flashinfers_sampler_is_baked_and_the_served_engine_starts_no_nvcc(tmp_path: Path) -> None:
    cuda = CudaToolkit(tmp_path / "cuda")
    sampler = {"VLLM_USE_FLASHINFER_SAMPLER": "1", "CUDA_HOME": str(cuda.place)}
    place = Place(tmp_path / "home", "kimi-linear", **sampler)

    manifest = place.bake(*map(str, PROMPTS))

    assert manifest["problems"] == []
    assert manifest["proved"]
    modules = [each for each in manifest["artifacts"] if each["compiler"] == "flashinfer_modules"]
    assert [each["key"].split("/")[-1].partition("@")[0] for each in modules] == ["sampling"]
    compiles = cuda.compiles
    assert compiles > 0
    served = place.serve(daemon=False)
    assert served.tokens == [STEPS] * 5
    assert served.compiles() == []
    assert cuda.compiles == compiles
