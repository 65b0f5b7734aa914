"""FlashInfer's KDA and GDN kernels through `warm`, and an engine with FlashInfer that may not compile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("flashinfer")

from prefetchd.compilers.base import EntryState, fingerprint_id
from prefetchd.compilers.cute_dsl_flashinfer import FlashInferCute
from prefetchd.null_device import launcher
from prefetchd.shapelog import decode_record, encode_record
from prefetchd.targets import load_target

HERE = Path(__file__).parent
PREFETCHD = Path(sys.executable).with_name("prefetchd")
LIMIT_S = 900
KINDS = {"compile", "_compile_k1", "_compile_k2"}
OWN = {"gdn_blackwell_prefill", "gdn_qk_l2norm", "fused_kda_decode"}


def environment(place: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(place),
        "XDG_CACHE_HOME": str(place / "cache"),
        "FLASHINFER_WORKSPACE_BASE": str(place),
    }


def warm(place: Path, target: str, profile: Path, *options: str) -> dict[str, Any]:
    providers = ("--provider", "kda_cute", "--provider", "gdn_cute")
    command = [str(PREFETCHD), "warm", "--target", target, "--profile", str(profile), *providers]
    done = subprocess.run(
        [*command, "--max-tokens", "256", "--json", *options],
        env=environment(place), cwd=place, capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def engine(place: Path, target: str, profile: Path, *options: str) -> dict[str, Any]:
    child = launcher.environment(load_target(target), environment(place), integer_ops=True)
    script = str(HERE / "cute_flashinfer_process.py")
    done = subprocess.run(
        [sys.executable, script, "--target", target, "--profile", str(profile), *options],
        env=child, cwd=place, capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.slow
@pytest.mark.parametrize(("target", "architecture"), [("b200", "100a"), ("b300", "103a")])
def test_kda_and_gdn_are_compiled_without_a_gpu_and_served_without_a_compile(
    tmp_path: Path, target: str, architecture: str
) -> None:
    profile = HERE / "flashinfer.profile.toml"

    answer = warm(tmp_path, target, profile)
    again = warm(tmp_path, target, profile)
    served = engine(tmp_path, target, profile)

    figures = answer["providers"].values()
    assert sum(each["compiled"] for each in figures) == len(KINDS) + len(OWN)
    assert sum(each["uncovered"] + each["failed"] for each in figures) == 0
    assert sum(each["compiled"] for each in again["providers"].values()) == 0
    stored = {
        path.parent.name.rpartition("-")[0] for path in tmp_path.glob("cache/prefetchd/cute/*/kernel.o")
    }
    own = {
        path.parent.name.partition("_sm")[0] for path in tmp_path.rglob(f"{architecture}/cached_ops/*/*.o")
    }
    assert (stored, own) == (KINDS, OWN)
    assert served["failures"] == []
    assert served["counts"] == {"hit": len(KINDS)}
    # How long they take is measured by `bench/cute_load.py`.
    assert len(served["loads_ms"]) == len(KINDS)
    assert served["own_loads_ms"]


def decode_profile(place: Path) -> Path:
    """The kernel that compiles quickly."""
    head, *sites = (HERE / "flashinfer.profile.toml").read_text().split("[[kernels]]")
    profile = place / "decode.profile.toml"
    profile.write_text(head + "[[kernels]]" + next(site for site in sites if "fused_kda_decode" in site))
    return profile


@pytest.mark.slow
def test_what_flashinfer_compiled_itself_is_recorded_by_its_own_name_and_compiled_again(
    tmp_path: Path,
) -> None:
    profile = decode_profile(tmp_path)
    seen = engine(tmp_path, "b300", profile, "--observed")
    (record,) = (decode_record(line.encode()) for line in seen["records"])
    assert seen["figures"]["flashinfer_cute.compiles"] == 1
    assert "cute_dsl.compiles" not in seen["figures"]
    target, compiler = load_target("b300"), FlashInferCute(load_target("b300"), environment(tmp_path))
    assert compiler.state(record.key, compiler.cache_root()) is EntryState.PUBLISHED
    (kernel,) = tmp_path.rglob("fused_kda_decode*/*.o")
    made = kernel.read_bytes()
    shutil.rmtree(kernel.parent)
    known = {"gpu": target.name, "capability": target.capability, "sm_count": target.sm_count}
    known["fingerprint"] = fingerprint_id(compiler.fingerprint())
    log = tmp_path / "host.rank0.jsonl"
    log.write_bytes(encode_record(msgspec.structs.replace(record, **known)))

    done = subprocess.run(
        [str(PREFETCHD), "replay", str(log), "--target", "b300", "--json"], env=environment(tmp_path),
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip

    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    assert kernel.read_bytes() == made
    assert engine(tmp_path, "b300", profile)["failures"] == []


@pytest.mark.slow
@pytest.mark.ci
def test_a_module_that_flashinfer_would_throw_away_is_replaced_and_not_mixed(tmp_path: Path) -> None:
    profile = decode_profile(tmp_path)
    warm(tmp_path, "b300", profile)
    (meta,) = tmp_path.rglob("fused_kda_decode*/meta.json")
    (kernel,) = meta.parent.glob("*.o")
    good = kernel.read_bytes()
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "source_sha256": "of another version"}))

    answer = warm(tmp_path, "b300", profile)

    assert answer["providers"]["kda_cute"]["compiled"] == 1
    assert kernel.read_bytes() == good
    assert list((tmp_path / ".cache/flashinfer/.prefetchd/quarantine").iterdir())
    assert engine(tmp_path, "b300", profile)["failures"] == []
