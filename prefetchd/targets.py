"""The device a kernel is compiled for.

A target holds every property that a JIT library asks its device for before it decides what to compile. A
wrong number here does not fail: it makes a library choose another variant, and the engine then compiles
again. So presets (`presets.toml`) carry the source of each number and say which could not be confirmed, and
on a serving host what the engine's real device reports (`probe_target`) always wins over a preset.
"""

from __future__ import annotations

import ctypes
import difflib
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from prefetchd.toml_files import build, check_keys, format_table, read_toml, write_text

PRESETS = Path(__file__).parent / "presets.toml"

# Fields that a real device may report as 0; every other number is at least 1.
MAY_BE_ZERO = (
    "minor",
    "reserved_shared_bytes_per_block",
    "persisting_l2_bytes",
    "clock_khz",
    "memory_clock_khz",
)

# What the driver's API can carry: a size_t for the memory (of which a signed number is asked here and there),
# an int for every attribute.
MOST_BYTES = 2**63 - 1
MOST = 2**31 - 1

# CUdevice_attribute numbers from cuda.h, stable since the attribute appeared. The two clocks are typical
# values of the model, not what the device runs at now.
ATTRIBUTES = {
    "major": 75,
    "minor": 76,
    "sm_count": 16,
    "l2_bytes": 38,
    "shared_bytes_per_block": 8,
    "shared_bytes_per_block_optin": 97,
    "shared_bytes_per_sm": 81,
    "reserved_shared_bytes_per_block": 111,
    "registers_per_block": 12,
    "registers_per_sm": 82,
    "threads_per_block": 1,
    "threads_per_sm": 39,
    "blocks_per_sm": 106,
    "warp_size": 10,
    "clock_khz": 13,
    "memory_clock_khz": 36,
    "memory_bus_bits": 37,
    "persisting_l2_bytes": 108,
}


class TargetError(ValueError):
    """A target that cannot be had: unknown name, bad file or value, no device. The text names the fix."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One device model. Sizes are bytes, clocks kHz, the bus width bits."""

    name: str
    major: int
    minor: int
    sm_count: int
    memory_bytes: int
    l2_bytes: int
    shared_bytes_per_block: int = 49152
    shared_bytes_per_block_optin: int
    shared_bytes_per_sm: int
    reserved_shared_bytes_per_block: int = 1024
    registers_per_block: int = 65536
    registers_per_sm: int = 65536
    threads_per_block: int = 1024
    threads_per_sm: int = 2048
    blocks_per_sm: int = 32
    warp_size: int = 32
    clock_khz: int
    memory_clock_khz: int
    memory_bus_bits: int
    persisting_l2_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.name:
            raise TargetError("name = '': the device name is empty; give the name the driver reports")
        for field in self.__struct_fields__[1:]:
            value, least = getattr(self, field), 0 if field in MAY_BE_ZERO else 1
            if value < least:
                raise TargetError(f"{field} = {value}: must be {least} or more; correct the value")
            if value > (most := MOST_BYTES if field == "memory_bytes" else MOST):
                raise TargetError(f"{field} = {value}: must be {most} or less; correct the value")
        if self.shared_bytes_per_block_optin > self.shared_bytes_per_sm:
            raise TargetError(
                f"shared_bytes_per_block_optin = {self.shared_bytes_per_block_optin}: a block cannot have "
                f"more than its SM, shared_bytes_per_sm = {self.shared_bytes_per_sm}; correct one of the two"
            )

    @property
    def capability(self) -> int:
        """Compute capability as the two digits of `sm_90`."""
        return self.major * 10 + self.minor


class Source(msgspec.Struct, frozen=True):
    """Where preset numbers come from; `confirmed` is False for what was derived and not seen on a device."""

    fields: tuple[str, ...]
    text: str
    confirmed: bool = True


@cache
def _presets() -> dict[str, dict[str, Any]]:
    return read_toml(PRESETS, TargetError)


def preset_names() -> tuple[str, ...]:
    """The names `load_target` knows, in the order of `presets.toml`."""
    return tuple(name for name in _presets() if not name.startswith("sm_"))


def preset_sources(name: str) -> dict[str, Source]:
    """Where each number of a preset comes from, by field."""
    table = _presets()[_preset_called(name) or _unknown(name)]
    found: dict[str, Source] = {}
    for part in (_presets()[table["extends"]], table):
        for entry in part["sources"]:
            source = build(Source, entry, f"{PRESETS}: sources", TargetError)
            found |= dict.fromkeys(source.fields, source)
    return found


def load_target(name_or_path: str) -> Target:
    """A preset by name (`rtx pro 6000` is `rtx-pro-6000`), or a TOML file that may extend a preset or a file.

    Raises `TargetError`.
    """
    if preset := _preset_called(name_or_path):
        table = _presets()[preset]
        family = _presets()[table["extends"]]
        values = {k: v for k, v in (family | table).items() if k not in ("extends", "sources")}
        return build(Target, values, f"preset {preset}", TargetError)
    path = Path(name_or_path)
    # Not `is_file`, which raises for a name that is too long to be one.
    if path.suffix == ".toml" or len(path.parts) > 1 or os.path.isfile(path):  # noqa: PTH113
        return build(Target, _file_values(path, ()), str(path), TargetError)
    _unknown(name_or_path)


def write_target(target: Target, path: str | Path) -> None:
    """Writes a file that `load_target` reads back to an equal target. Raises `OSError`."""
    header = '# A prefetchd target. `extends = "h200"` takes what is not given here from a preset.\n'
    write_text(Path(path), header + format_table(msgspec.structs.asdict(target)))


def _preset_called(name: str) -> str | None:
    """The preset meant by a name, whatever its case, spaces, dashes or vendor prefix."""

    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum()).removeprefix("nvidia")

    return next((preset for preset in preset_names() if plain(preset) == plain(name)), None)


def _unknown(name: str) -> NoReturn:
    close = difflib.get_close_matches(name.lower(), preset_names(), n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise TargetError(
        f"target {name!r} is neither a preset nor a file; {hint}presets: {', '.join(preset_names())}; "
        "another device is described by a .toml file"
    )


def _file_values(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The file's values over those of what it extends; a relative path is looked up beside the file."""
    table = read_toml(path, TargetError)
    check_keys(table, ("extends", *Target.__struct_fields__), str(path), TargetError)
    base = table.pop("extends", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise TargetError(
            f"{path}: extends = {base!r}: must be the name of a preset or file; put it in quotes"
        )
    if _preset_called(base):
        return msgspec.structs.asdict(load_target(base)) | table
    parent, seen = path.parent / base, (*seen, path.resolve())
    if parent.resolve() in seen:
        raise TargetError(f"{path}: extends = {base!r} leads back to itself; end the chain in a preset")
    if not parent.is_file():
        raise TargetError(
            f"{path}: extends = {base!r} is neither a preset nor a file beside it; presets: "
            f"{', '.join(preset_names())}"
        )
    return _file_values(parent, seen) | table


def probe_target(device: int = 0, library: str = "libcuda.so.1") -> Target:
    """What the driver reports about a real device, asked through the driver API alone (no torch, no context).

    Raises `TargetError` where there is no driver or no such device.
    """
    try:
        driver = ctypes.CDLL(library)
    except OSError as problem:
        raise TargetError(
            f"no NVIDIA driver here: {library} does not load ({problem}); name a preset "
            f"({', '.join(preset_names())}) or a target file instead"
        ) from problem
    handle, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    _call(driver, "cuInit", 0)
    _call(driver, "cuDeviceGet", ctypes.byref(handle), device)
    _call(driver, "cuDeviceGetName", name, len(name), handle)
    _call(driver, "cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
    values: Mapping[str, int] = {
        field: _attribute(driver, field, number, handle) for field, number in ATTRIBUTES.items()
    }
    text = name.value.decode("utf-8", "replace")
    return build(
        Target, {"name": text, "memory_bytes": memory.value, **values}, f"device {device}", TargetError
    )


def _attribute(driver: ctypes.CDLL, field: str, number: int, handle: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _call(driver, "cuDeviceGetAttribute", ctypes.byref(value), number, handle, what=f" for {field}")
    return value.value


def _call(driver: ctypes.CDLL, function: str, *arguments: object, what: str = "") -> None:
    try:
        entry: Callable[..., int] = getattr(driver, function)
    except AttributeError as problem:
        raise TargetError(
            f"{driver._name} has no {function}: it is not an NVIDIA driver library"
        ) from problem
    if code := entry(*arguments):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = "unset" if visible is None else repr(visible)
        raise TargetError(
            f"{function}{what} failed with CUDA error {code}{_error_name(driver, code)}: no usable GPU; "
            f"check nvidia-smi and CUDA_VISIBLE_DEVICES (now {shown}), or name a preset or a target file"
        )


def _error_name(driver: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    lookup = getattr(driver, "cuGetErrorName", None)
    if lookup is None or lookup(code, ctypes.byref(text)) or not text.value:
        return ""
    return f" ({text.value.decode('ascii', 'replace')})"
