"""How many kernels `warm` names for real models with linear attention or state-space layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from warming import ROOT

LIMIT_S = 300


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "tp", "target", "provider", "op", "variants"),
    [
        # 110 for a prefill of an H200 (104 on a B200), and 25 for each further bucket of tokens x heads.
        pytest.param("kimi-linear-48b-a3b", 1, "h200", "kda", "chunk_kda", 185, marks=pytest.mark.ci),
        ("kimi-linear-48b-a3b", 1, "b200", "kda", "chunk_kda", 179),
        ("kimi-linear-48b-a3b", 4, "h200", "kda", "chunk_kda", 110),
        ("kimi-linear-48b-a3b", 8, "h200", "kda", "chunk_kda", 110),
        ("kimi-linear-48b-a3b", 8, "b200", "kda", "chunk_kda", 104),
        ("qwen3-next-80b-a3b", 1, "h200", "gdn", "chunk_gated_delta_rule", 84),
        # Chunks of 256 and of 128 tokens have lists of their own, with as many classes.
        ("mamba2-codestral-7b", 1, "h200", "mamba", "mamba2_prefill", 177),
        ("nemotron-h-8b", 1, "h200", "mamba", "mamba2_prefill", 177),
    ],
)
def test_dry_run_names_as_many_variants_as_were_measured(
    model: str, tp: int, target: str, provider: str, op: str, variants: int, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "prefetchd", "warm", "--dry-run", "--json", "--target", target),
            *("--model", str(ROOT / f"examples/models/{model}.json"), "--tp", str(tp)),
            *("--provider", provider),
        ],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )

    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["providers"][provider]
    sites = [each for each in figures["requests_detail"] if each["request"].split()[0] == op]
    assert [each["variants"] for each in sites] == [variants]
    # Nothing is compiled or kept by counting.
    assert not list(tmp_path.rglob("*.cubin"))
    assert not list(tmp_path.rglob("*.autotune.json"))
