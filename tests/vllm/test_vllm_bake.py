"""`prefetchd bake` on a whole vLLM: everything the engine launches, made and proved with no GPU."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("target", ["h200", "b200"])
@pytest.mark.parametrize("model", MODELS)
def test_baked_engine_starts_and_serves_without_compiling(tmp_path: Path, model: str, target: str) -> None:
    place = Place(tmp_path / "home", model, target)

    manifest = place.bake(*map(str, PROMPTS))

    assert manifest["problems"] == []
    # A second start of the engine, in which compiling was forbidden.
    assert manifest["proved"]
    assert {artifact["compiler"] for artifact in manifest["artifacts"]} >= {"triton"}
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
