"""Proof that this process is on the null device and on nothing else.

A broken preload fails in the worst way: the program runs on a real GPU that belongs to somebody else, or
finds none and fails far from the cause. So the launcher runs this file as a program under the environment
it has built, before the user's program starts, and helpers call `require_null_device` before and after
importing torch. It asks the dynamic linker rather than the environment: which libraries do the names lead
to, and which are mapped.

Only the standard library is imported: the interpreter under test need not have prefetchd installed.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

LIBRARIES = Path(__file__).resolve().parent / "lib"
CUDA = LIBRARIES / "libcuda.so.1"
NVML = LIBRARIES / "libnvidia-ml.so.1"
# Whatever starts like these in /proc/self/maps is a driver: the real files carry the driver's version at
# the end.
DRIVER_NAMES = ("libcuda.so", "libnvidia-ml.so")
TARGET_VARIABLE = "PREFETCHD_NULL_TARGET"
ABI_VERSION = 1

# The target's numbers as CUdevice_attribute numbers.
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
    "persisting_l2_bytes": 108,
}


class NullDeviceBroken(RuntimeError):
    """The null device is not what this process would use; the text says what was found and what to do."""


def require_null_device() -> None:
    """Returns if the CUDA driver and NVML of this process are ours and answer as the target; else raises."""
    shim = _preloaded_shim()
    _check_same_library(shim)
    _check_mappings()
    _check_target(shim)


def _preloaded_shim() -> ctypes.CDLL:
    """The global namespace, in which the preloaded marker has to resolve."""
    namespace = ctypes.CDLL(None)
    try:
        version = ctypes.c_int.in_dll(namespace, "prefetchd_null_device").value
    except ValueError:
        raise NullDeviceBroken(
            f"the null device is not preloaded: LD_PRELOAD is {os.environ.get('LD_PRELOAD', '')!r} and "
            f"should begin with {CUDA}; CUDA calls would reach a real driver. Start the program by "
            "`prefetchd null`, and see that nothing between removes LD_PRELOAD"
        ) from None
    if version != ABI_VERSION:
        raise NullDeviceBroken(
            f"the preloaded null device has version {version}, this prefetchd needs {ABI_VERSION}; "
            "reinstall prefetchd"
        )
    return namespace


def _check_same_library(shim: ctypes.CDLL) -> None:
    """The names that programs open must lead to our two objects, libcuda to the very instance preloaded."""
    for name, marker in (
        ("libcuda.so.1", "prefetchd_null_device"),
        ("libnvidia-ml.so.1", "prefetchd_null_nvml"),
    ):
        try:
            opened = ctypes.CDLL(name)
        except OSError as error:
            raise NullDeviceBroken(
                f"{name} does not load ({error}); LD_LIBRARY_PATH should begin with {LIBRARIES}"
            ) from None
        try:
            found = ctypes.c_int.in_dll(opened, marker)
        except ValueError:
            raise NullDeviceBroken(
                f"{name} leads to a library that is not the null device's; mapped are "
                f"{', '.join(mapped_drivers())}; LD_LIBRARY_PATH should begin with {LIBRARIES}"
            ) from None
        if marker == "prefetchd_null_device":
            preloaded = ctypes.c_int.in_dll(shim, marker)
            if ctypes.addressof(found) != ctypes.addressof(preloaded):
                raise NullDeviceBroken(
                    f"{name} leads to a second copy of the null device, beside the preloaded one"
                )


def mapped_drivers() -> list[str]:
    """Every driver library and NVIDIA device file that is mapped into this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:  # noqa: PTH123
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if line.count("/")}
    drivers = (path for path in paths if os.path.basename(path).startswith(DRIVER_NAMES))  # noqa: PTH119
    return sorted({*drivers, *(path for path in paths if path.startswith("/dev/nvidia"))})


def _check_mappings() -> None:
    foreign = [path for path in mapped_drivers() if not path.startswith(f"{LIBRARIES}/")]
    if foreign:
        raise NullDeviceBroken(
            f"a driver that is not the null device's is loaded: {', '.join(foreign)}; the program could "
            "reach a real GPU. Something opens it by its path, or preloads it"
        )


def _check_target(shim: ctypes.CDLL) -> None:
    """The device must answer with the numbers of the environment, or keys would be made for another GPU."""
    expected = dict(
        entry.split("=", 1) for entry in os.environ.get(TARGET_VARIABLE, "").split(";") if "=" in entry
    )
    if shim.cuInit(0) != 0:
        raise NullDeviceBroken(
            f"the null device does not start: {TARGET_VARIABLE} is {os.environ.get(TARGET_VARIABLE)!r}"
        )
    for field, value in _reported(shim).items():
        if value != expected.get(field):
            raise NullDeviceBroken(
                f"the null device reports {field} = {value}, the target says {expected.get(field)}; another "
                "library answers for it"
            )


def _reported(shim: ctypes.CDLL) -> dict[str, str | None]:
    """What the driver says of the device, in the form of the environment; None where it refuses to answer."""
    name = ctypes.create_string_buffer(256)
    memory = ctypes.c_size_t()
    reported: dict[str, str | None] = {"name": None, "memory_bytes": None}
    if shim.cuDeviceGetName(name, len(name), 0) == 0:
        reported["name"] = name.value.decode(errors="replace")
    if shim.cuDeviceTotalMem_v2(ctypes.byref(memory), 0) == 0:
        reported["memory_bytes"] = str(memory.value)
    for field, number in ATTRIBUTES.items():
        value = ctypes.c_int()
        refused = shim.cuDeviceGetAttribute(ctypes.byref(value), number, 0)
        reported[field] = None if refused else str(value.value)
    return reported


def main() -> int:
    """The probe: exit status 0, or 1 with the reason on standard output."""
    try:
        require_null_device()
    except NullDeviceBroken as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
