"""What a Triton record may say, and how what it may not is refused: by the field and the reason."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefetchd.compilers.base import CompilerUnavailable, NotRebuildable
from prefetchd.compilers.triton_cache import key_of
from prefetchd.compilers.triton_capture import Variant
from prefetchd.compilers.triton_keys import KeyParts
from prefetchd.compilers.triton_records import find_function, modules_of, recorded, variant_of
from prefetchd.config import compile_settings, load_settings
from prefetchd.replaying.tunings import NoTuner, tuning_of
from prefetchd.shapelog import Record
from prefetchd.winners import Winner

KEY = key_of("ab" * 32)
PARTS = KeyParts(
    version="3.8.0",
    library="ab" * 32,
    source="cd" * 32,
    backend="ptxas: release 12.9\n-90",
    architecture=90,
    options={"num_warps": "4"},
    options_digest="ef" * 32,
    environment={},
    stages_hook=False,
)
WINNER = {
    **{"gpu": "NVIDIA H200", "sm_count": 132, "triton": "3.8.0", "module": "kernels", "kernel": "scale"},
    **{"source": "ab", "key": [1], "config": {"kwargs": {}}, "timing_ms": [1.0]},
}
SPECIALIZATION: dict[str, Any] = {
    "name": "kernels.ops.scale",
    "signature": {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"},
    "constant_keys": [[2]],
    "constant_vals": [64],
    "attrs_keys": [[0], [1]],
    "attrs_vals": [[["tt.divisibility", 16]], []],
    "options": {"num_warps": 4, "arch": "sm90", "extern_libs": [["libdevice", "/elsewhere/libdevice.10.bc"]]},
    "key": "[('*fp32', 'D')]",
    "target": {"backend": "cuda", "arch": 90, "warp_size": 32},
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of an engine that has a package `kernels` which the user allows."""
    package = tmp_path / "packages" / "kernels"
    (package / "deep").mkdir(parents=True)
    # Whoever only looks for a module must not run this.
    (package / "__init__.py").write_text("raise SystemError('imported')\n")
    (package / "ops.py").write_text("")
    return {"PYTHONPATH": str(package.parent), "PREFETCHD_REPLAY_PACKAGES": "other, kernels"}


def record(variant: Mapping[str, Any] = {}, specialization: Mapping[str, Any] = {}, **fields: Any) -> Record:
    rebuild = recorded(
        Variant(
            module="kernels.ops",
            name="scale",
            specialization=json.dumps({**SPECIALIZATION, **specialization}),
            seconds=1.5,
            parts=PARTS,
        )
    )
    values = {"compiler": "triton", "key": KEY, "fingerprint": "f", "rebuild": {**rebuild, **variant}}
    return Record(**{**values, **fields})


@pytest.fixture
def rebuilt(environment: dict[str, str]) -> Callable[..., Variant]:
    def get(record: Record, **changes: str) -> Variant:
        return variant_of(record, 90, PARTS.fingerprint(), {**environment, **changes})

    return get


def test_record_becomes_the_variant_it_was_without_any_place_on_the_other_machine(
    rebuilt: Callable[..., Variant],
) -> None:
    variant = rebuilt(record(seconds=2.5))

    assert (variant.module, variant.name, variant.parts, variant.seconds) == (
        *("kernels.ops", "scale"),
        PARTS,
        2.5,
    )
    assert "elsewhere" not in variant.specialization
    assert json.loads(variant.specialization) == {
        **SPECIALIZATION,
        "options": {"num_warps": 4, "arch": "sm90"},
    }
    assert "kernels" not in sys.modules


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"key": "../../etc"}, r"key: .* is no key"),
        ({"key": ""}, r"key: .* is no key"),
        ({"ok": False}, "ok: false"),
        ({"rebuild": None}, "rebuild: absent"),
        ({"rebuild": {"module": "kernels.ops"}}, "rebuild: Object missing required field `name`"),
        ({"rebuild": {**record().rebuild, "parts": 7}}, r"rebuild: Expected `object`.*`\$.parts`"),  # type: ignore[dict-item]
    ],
)
def test_record_that_is_none_names_the_field(
    rebuilt: Callable[..., Variant], fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotRebuildable, match=reason):
        rebuilt(record(**fields))


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ({"module": "os", "name": "system"}, "rebuild.module: os lies in no allowed package"),
        ({"module": "kernels_evil"}, "rebuild.module: kernels_evil lies in no allowed package"),
        ({"module": "kernels..ops"}, "rebuild.module: .* is not a plain dotted name"),
        ({"module": "kernels/../os"}, "rebuild.module: .* is not a plain dotted name"),
        ({"module": "kernels.ops\n"}, "rebuild.module: .* is not a plain dotted name"),
        ({"module": "kernels.__init__"}, "rebuild.module: .* is not a plain dotted name"),
        ({"module": "__import__('os')"}, "rebuild.module: .* is not a plain dotted name"),
        ({"module": "kernels.gone"}, "rebuild.module: kernels.gone is not installed here"),
        ({"module": "fla.gone.entirely"}, "rebuild.module: fla.gone.entirely is not installed here"),
        ({"name": "scale.__globals__"}, "rebuild.name: .* is not a plain dotted name"),
        ({"name": "__builtins__.eval"}, "rebuild.name: .* is not a plain dotted name"),
        ({"name": "eval('1')"}, "rebuild.name: .* is not a plain dotted name"),
        ({"name": ""}, "rebuild.name: '' is not a plain dotted name"),
        ({"name": "make.<locals>.scale"}, "rebuild.name: .* is defined inside a function"),
        ({"name": "scale" * 200}, r"rebuild: Expected `str` of length <= 512 - at `\$.name`"),
        ({"seconds": -1.0}, r"rebuild: Expected `float` >= 0.0 - at `\$.seconds`"),
        ({"specialization": "x" * 100_000}, "rebuild.specialization: 100000 bytes, more than 65536"),
        ({"specialization": ""}, "rebuild.specialization: empty: .* Triton 3.8.0 cannot write down"),
        ({"specialization": "[1]"}, "rebuild.specialization: Expected `object`"),
        ({"specialization": "{" * 60_000}, "rebuild.specialization: "),
    ],
)
def test_forged_name_or_field_is_refused(
    rebuilt: Callable[..., Variant], variant: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotRebuildable, match=reason):
        rebuilt(record(variant))

    assert "kernels" not in sys.modules


@pytest.mark.parametrize(
    ("specialization", "reason"),
    [
        ({"name": "kernels.ops.other"}, "specialization.name: 'kernels.ops.other', and the record is of"),
        ({"target": {"backend": "hip", "arch": 90}}, "specialization.target: .*hip"),
        # The library evaluates what follows the shape.
        ({"signature": {"x": "tensordesc<fp16[16, 16],__import__('os').system('true')>"}}, "signature.x: "),
        ({"signature": {"x": ["*fp32", "tensordesc<fp16[8],1+1>"]}}, "signature.x: .*evaluate"),
        ({"signature": {"x": [["i32"]]}}, "signature.x: "),
        ({"signature": {"x": 7}}, "signature.x: '7' is no plain type"),
        (
            {"signature": {str(n): "i32" for n in range(1025)}},
            r"object` of length <= 1024 - at `\$.signature`",
        ),
        ({"constant_vals": [1, 2]}, "constant_keys: 1 for 2 values"),
        ({"attrs_vals": [[["tt.x; evil", 1]], []]}, "Expected `str` matching regex"),
        ({"constant_vals": [{"jit_function": "os:system"}]}, "jit_function: os lies in no allowed package"),
        ({"constant_vals": [{"jit_function": "kernels.ops:f.__globals__"}]}, "is not a plain dotted name"),
        ({"options": {"ptx_options": "-o /etc/passwd"}}, "options.ptx_options: .* would be given to ptxas"),
        ({"options": {"ir_override": "/tmp/x.ptx"}}, "options.ir_override: .* is a file to be read"),
        ({"options": {"extern_libs": [["evil", "/tmp/x.bc"]]}}, "options.extern_libs: names files .evil."),
        ({"options": {"extern_libs": "/tmp/x.bc"}}, "options.extern_libs: Expected `array`"),
        ({"options": {"new_file": "/tmp/x"}}, "options.new_file: Expected `str` matching regex"),
        ({"options": {"num_warps": {"a": 1}}}, "options.num_warps: "),
        ({"key": "x"}, r"Expected `str` of length >= 2 - at `\$.key`"),
    ],
)
def test_forged_specialization_is_refused(
    rebuilt: Callable[..., Variant], specialization: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotRebuildable, match=reason):
        rebuilt(record(specialization=specialization))


def test_plain_tensor_descriptor_and_tuple_are_types(rebuilt: Callable[..., Variant]) -> None:
    signature = {"a": "tensordesc<fp16[64, 128]>", "b": ["*kbf16", "constexpr"], "c": "*fp8e4nv", "d": "u1"}

    assert rebuilt(record(specialization={"signature": signature}))


def test_ptxas_options_of_the_engines_own_environment_are_its_own(rebuilt: Callable[..., Variant]) -> None:
    given = record(specialization={"options": {"ptx_options": "-v"}})

    assert rebuilt(given, PTXAS_OPTIONS="-v")
    with pytest.raises(NotRebuildable, match="ptx_options"):
        rebuilt(given, PTXAS_OPTIONS="-w")


def test_record_of_another_architecture_names_both(environment: dict[str, str]) -> None:
    with pytest.raises(NotRebuildable, match="sm_90, and this target is sm_100"):
        variant_of(record(), 100, PARTS.fingerprint(), environment)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": "3.6.0"}, "triton.version: recorded '3.8.0', here '3.6.0'"),
        ({"backend": "ptxas: release 13.4\n-90"}, "triton.backend: recorded 'ptxas: release 12.9"),
        ({"environment": {"DISABLE_PTXAS_OPT": "true"}}, "DISABLE_PTXAS_OPT: recorded unset, here 'true'"),
    ],
)
def test_record_of_another_fingerprint_names_the_field(
    environment: dict[str, str], changes: dict[str, Any], reason: str
) -> None:
    here = msgspec.structs.replace(PARTS, **changes)

    with pytest.raises(NotRebuildable, match=reason):
        variant_of(record(), 90, here.fingerprint(), environment)


def test_nothing_is_replayed_from_where_we_are(
    rebuilt: Callable[..., Variant], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(environment["PYTHONPATH"])
    monkeypatch.setattr(sys, "path", ["", environment["PYTHONPATH"], *sys.path])

    with pytest.raises(NotRebuildable, match=r"kernels\.ops is not installed here"):
        rebuilt(record(), PYTHONPATH="")
    with pytest.raises(NotRebuildable, match=r"PYTHONPATH = '\.:/x': '\.' depends on the working directory"):
        rebuilt(record(), PYTHONPATH=".:/x")


def test_package_is_allowed_by_the_setting_alone(rebuilt: Callable[..., Variant], tmp_path: Path) -> None:
    file = tmp_path / "prefetchd.toml"
    file.write_text('replay_packages = ["kernels", "more"]\n')
    settings = load_settings({}, file)

    chosen = compile_settings(settings, {})

    assert chosen["PREFETCHD_REPLAY_PACKAGES"] == "kernels,more"
    assert rebuilt(record(), **chosen)
    with pytest.raises(NotRebuildable, match="add its package to the setting replay_packages"):
        rebuilt(record(), PREFETCHD_REPLAY_PACKAGES="")


def test_modules_of_functions_compiled_in_are_imported_too(rebuilt: Callable[..., Variant]) -> None:
    variant = rebuilt(record(specialization={"constant_vals": [{"jit_function": "kernels:helper"}]}))

    assert modules_of(variant) == {"kernels.ops", "kernels"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("os.system", "'os' leads out of its module"),
        ("gone", "cannot be found"),
        ("plain", "cannot be found"),
        ("borrowed", "is elsewhere.origin here"),
    ],
)
def test_worker_follows_no_name_out_of_the_kernels_module(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    (tmp_path / "elsewhere.py").write_text(
        "import triton\n\n@triton.jit\ndef origin(x):\n    pass\n",
    )
    (tmp_path / "lured.py").write_text(
        "import os\nfrom elsewhere import origin as borrowed\n\ndef plain():\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    variant = Variant(module="lured", name=name, specialization="{}", seconds=1.0, parts=PARTS)

    with pytest.raises(CompilerUnavailable, match=reason):
        find_function(variant)


def test_winners_name_leads_into_no_other_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    # A module that imports more as soon as an attribute of it is looked at, as some libraries do.
    (tmp_path / "lazy.py").write_text("def __getattr__(name):\n    raise SystemExit('it ran')\n")
    (tmp_path / "tempting.py").write_text("import lazy\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = {"PREFETCHD_REPLAY_PACKAGES": "tempting", "PYTHONPATH": str(tmp_path)}
    named = {**WINNER, "module": "tempting", "kernel": "lazy.bomb"}

    with pytest.raises(NoTuner, match="'lazy' leads out of its module"):
        tuning_of(msgspec.convert(named, Winner), environment)


def test_constant_that_json_cannot_write_is_the_librarys_own(rebuilt: Callable[..., Variant]) -> None:
    variant = rebuilt(record(specialization={"constant_vals": [float("-inf")]}))

    assert json.loads(variant.specialization)["constant_vals"] == [float("-inf")]
