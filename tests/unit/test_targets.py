"""Presets, target files and the probe, which talks to a stand-in for the driver compiled here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetchd.targets import (
    ATTRIBUTES,
    MAY_BE_ZERO,
    Target,
    TargetError,
    load_target,
    preset_names,
    preset_sources,
    probe_target,
    write_target,
)

H200 = load_target("h200")
NUMBERS = [field for field in Target.__struct_fields__ if field != "name"]


def most(field: str) -> int:
    return 2**63 - 1 if field == "memory_bytes" else 2**31 - 1


# A driver that answers each attribute with its own number, so that a swapped pair cannot go unseen.
FAKE_DRIVER = """
#include <stddef.h>
#include <string.h>
#ifndef INIT
#define INIT 0
#endif
#ifndef ATTRIBUTE
#define ATTRIBUTE 0
#endif
int cuInit(unsigned flags) { return flags ? 1 : INIT; }
int cuDeviceGet(int *device, int ordinal) { if (ordinal) return 101; *device = 7; return 0; }
int cuDeviceGetName(char *name, int size, int device)
{ if (device != 7 || size < 16) return 1; strcpy(name, "Fake GPU"); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = device == 7 ? 5000000000UL : 1; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device)
{ *value = attribute == 97 ? 60 : attribute; return device == 7 ? ATTRIBUTE : 1; }
int cuGetErrorName(int code, const char **name)
{ if (code == 999) return 1; *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_OTHER"; return 0; }
"""


def fake_driver(folder: Path, *defines: str, source: str = FAKE_DRIVER) -> str:
    code, library = folder / "driver.c", folder / "libfakecuda.so"
    code.write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", *defines, "-o", str(library), str(code)], check=True)
    return str(library)


@pytest.mark.parametrize(
    ("name", "capability", "sms", "optin"),
    [
        ("h100", 90, 132, 232448),
        ("h20", 90, 78, 232448),
        ("h200", 90, 132, 232448),
        ("b200", 100, 148, 232448),
        ("gb200", 100, 152, 232448),
        ("b300", 103, 148, 232448),
        ("gb300", 103, 152, 232448),
        ("rtx-pro-6000", 120, 188, 101376),
    ],
)
def test_preset_has_what_libraries_decide_by(name: str, capability: int, sms: int, optin: int) -> None:
    target = load_target(name)

    assert (target.capability, target.sm_count, target.shared_bytes_per_block_optin) == (
        capability,
        sms,
        optin,
    )
    assert target.threads_per_sm == (1536 if capability == 120 else 2048)
    # CUDA reserves its own part of an SM's memory for each block; one block may have the rest.
    assert target.shared_bytes_per_sm - target.reserved_shared_bytes_per_block == optin


def test_presets_are_the_promised_ones() -> None:
    assert set(preset_names()) == {"h100", "h20", "h200", "b200", "gb200", "b300", "gb300", "rtx-pro-6000"}


@pytest.mark.parametrize("name", preset_names())
def test_every_number_of_a_preset_has_a_source(name: str) -> None:
    sources = preset_sources(name)

    assert set(sources) == set(Target.__struct_fields__)
    assert all(len(source.text) > 20 for source in sources.values())
    assert sources["sm_count"].confirmed


@pytest.mark.parametrize(
    ("spelling", "preset"),
    [
        ("H200", "h200"),
        ("NVIDIA H200", "h200"),
        ("rtx pro 6000", "rtx-pro-6000"),
        ("RTX_PRO_6000", "rtx-pro-6000"),
        ("nvidia-gb200", "gb200"),
    ],
)
def test_preset_name_may_be_spelt_freely(spelling: str, preset: str) -> None:
    assert load_target(spelling) == load_target(preset)


@pytest.mark.parametrize("name", ["h2000", "sm_90", "", "NVIDIA", "x" * 5000])
def test_unknown_name_lists_the_presets(name: str) -> None:
    with pytest.raises(TargetError) as caught:
        load_target(name)

    assert all(preset in str(caught.value) for preset in preset_names())


def test_unknown_name_suggests_the_closest() -> None:
    with pytest.raises(TargetError, match="did you mean 'h200'"):
        load_target("h2000")


def test_file_extends_a_preset_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "H200"\nname = "NVIDIA H200 cut"\nsm_count = 120\n')

    assert load_target(str(path)) == msgspec.structs.replace(H200, name="NVIDIA H200 cut", sm_count=120)


def test_file_extends_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('extends = "b200"\nsm_count = 140\n')
    (tmp_path / "top.toml").write_text('extends = "base.toml"\nminor = 1\n')

    found = load_target(str(tmp_path / "top.toml"))

    assert found == msgspec.structs.replace(load_target("b200"), sm_count=140, minor=1)


def test_files_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('extends = "b.toml"\n')
    (tmp_path / "b.toml").write_text('extends = "a.toml"\n')

    with pytest.raises(TargetError, match="leads back to itself"):
        load_target(str(tmp_path / "a.toml"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('extends = "h200"\nsm_cout = 3\n', ["sm_cout", "did you mean 'sm_count'"]),
        ('extends = "h200"\nzebra_crossing = 3\n', ["zebra_crossing", "known keys"]),
        ('extends = "h200"\nsm_count = "many"\n', ["sm_count = 'many'", "int"]),
        ('extends = "h200"\nsm_count = 1.5\n', ["sm_count = 1.5"]),
        ('extends = "h200"\nsm_count = true\n', ["sm_count = True"]),
        ('extends = "h200"\nsm_count = 0\n', ["sm_count = 0", "1 or more"]),
        ('extends = "h200"\npersisting_l2_bytes = -1\n', ["persisting_l2_bytes = -1", "0 or more"]),
        (
            'extends = "h200"\nshared_bytes_per_block_optin = 999999\n',
            ["999999", "shared_bytes_per_sm = 233472"],
        ),
        ('extends = "h200"\nname = ""\n', ["name = ''"]),
        ('extends = "h200"\nsm_count = 2147483648\n', ["sm_count = 2147483648", "2147483647 or less"]),
        (
            'extends = "h200"\nmemory_bytes = 9223372036854775808\n',
            ["memory_bytes", "or less"],
        ),
        ('extends = "h2"\n', ["extends = 'h2'", "neither a preset nor a file", "h200"]),
        ("extends = 3\n", ["extends = 3", "quotes"]),
        ('name = "x"\n', ["'major' is missing"]),
        ("name = \n", ["not valid TOML"]),
    ],
)
def test_bad_file_names_file_key_and_value(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)

    with pytest.raises(TargetError) as caught:
        load_target(str(path))

    assert all(word in str(caught.value) for word in [str(path), *words])


def test_missing_and_binary_files_are_errors_of_ours(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"gone\.toml: cannot be read: No such file"):
        load_target(str(tmp_path / "gone.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(TargetError, match="not UTF-8"):
        load_target(str(tmp_path / "binary.toml"))


@pytest.mark.parametrize("field", NUMBERS)
def test_target_refuses_a_negative_number(field: str) -> None:
    with pytest.raises(TargetError, match=f"{field} = -1"):
        msgspec.structs.replace(H200, **{field: -1})


@given(
    name=st.text(min_size=1).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text)),
    numbers=st.fixed_dictionaries({field: st.integers(1, most(field)) for field in NUMBERS}),
)
def test_written_target_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, name: str, numbers: dict[str, int]
) -> None:
    numbers["shared_bytes_per_block_optin"] = min(
        numbers["shared_bytes_per_block_optin"], numbers["shared_bytes_per_sm"]
    )
    target = Target(name=name, **numbers)
    path = tmp_path_factory.getbasetemp() / "written.toml"

    write_target(target, path)

    assert load_target(str(path)) == target


def test_write_leaves_the_old_file_when_it_cannot_finish(tmp_path: Path) -> None:
    path = tmp_path / "target.toml"
    write_target(H200, path)
    (tmp_path / "taken.toml").mkdir()

    with pytest.raises(OSError, match="directory"):
        write_target(H200, tmp_path / "taken.toml")

    assert load_target(str(path)) == H200
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["taken.toml", "target.toml"]


def test_probe_asks_the_driver_for_every_field(tmp_path: Path) -> None:
    found = probe_target(library=fake_driver(tmp_path))

    assert found.name == "Fake GPU"
    assert found.memory_bytes == 5000000000
    for field, number in ATTRIBUTES.items():
        assert getattr(found, field) == (60 if number == 97 else number), field
    assert {"name", "memory_bytes", *ATTRIBUTES} == set(Target.__struct_fields__)


def test_probe_without_a_driver_says_so_and_offers_presets() -> None:
    with pytest.raises(TargetError, match=r"no NVIDIA driver here.*h200"):
        probe_target(library="libprefetchd-no-such-driver.so.1")


@pytest.mark.parametrize(
    ("defines", "device", "words"),
    [
        (["-DINIT=100"], 0, ["cuInit", "100 (CUDA_ERROR_NO_DEVICE)", "CUDA_VISIBLE_DEVICES (now '3')"]),
        (["-DINIT=999"], 0, ["cuInit failed with CUDA error 999:"]),
        ([], 1, ["cuDeviceGet", "101 (CUDA_ERROR_OTHER)"]),
        (["-DATTRIBUTE=1"], 0, ["cuDeviceGetAttribute for major"]),
    ],
)
def test_probe_names_the_call_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defines: list[str], device: int, words: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    library = fake_driver(tmp_path, *defines)

    with pytest.raises(TargetError) as caught:
        probe_target(device, library)

    assert all(word in str(caught.value) for word in words)


def test_probe_refuses_a_library_that_is_no_driver(tmp_path: Path) -> None:
    library = fake_driver(tmp_path, source="int cuInit(unsigned f) { return (int)f; }")

    with pytest.raises(TargetError, match="has no cuDeviceGet: it is not an NVIDIA driver"):
        probe_target(library=library)


def test_fields_that_may_be_zero_exist() -> None:
    assert set(MAY_BE_ZERO) < set(NUMBERS)
    zeros = msgspec.structs.replace(H200, **dict.fromkeys(MAY_BE_ZERO, 0))
    assert zeros.capability == 90
