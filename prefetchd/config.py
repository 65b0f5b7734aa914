"""Every setting: its TOML key, its `PREFETCHD_*` variable, its default and its meaning. Nowhere else.

A setting comes from the environment, else from the TOML file, else from its default; all of them work
unset. The file is `$PREFETCHD_CONFIG`, else `prefetchd/prefetchd.toml` in the user's configuration
directory if it is there. A key this version does not know is an error with the nearest known one, because a
misspelt limit that is ignored in silence is found in production.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

PREFIX = "PREFETCHD_"
CONFIG_VARIABLE = "PREFETCHD_CONFIG"
# The switch of an engine: unset, empty or "0", and every `attach` does nothing.
ENABLED_VARIABLE = "PREFETCHD"

# Variables prefetchd sets for the processes it starts; a user never sets them.
NULL_VARIABLE = "PREFETCHD_NULL"  # "1" in a process on the null device
NULL_TARGET_VARIABLE = "PREFETCHD_NULL_TARGET"  # the target's fields, read by the shim
NULL_INTEGER_OPS_VARIABLE = "PREFETCHD_NULL_INTEGER_OPS"  # "1": small integer operators are computed
NULL_CALLS_VARIABLE = "PREFETCHD_NULL_CALLS"  # file or "stderr": unanswered entry points, at exit
BAKE_VARIABLE = "PREFETCHD_BAKE"  # the directory with the order of an engine that is baked
STAND_IN_MODE_VARIABLE = "PREFETCHD_NVCC_MODE"  # "capture", "forbid" or "observe", read by the nvcc stand-in
STAND_IN_MISSES_VARIABLE = "PREFETCHD_NVCC_MISSES"  # where it notes the compiles it refused
STAND_IN_SPOOL_VARIABLE = "PREFETCHD_NVCC_SPOOL"  # where it notes the compiles it passed through
STAND_IN_NESTED_VARIABLE = "PREFETCHD_NVCC_NESTED"  # the nvcc it runs, lest that leads back to it

FLASHINFER_CACHE_VARIABLE = "PREFETCHD_FLASHINFER_CACHE"  # FlashInfer's cache directory, for a helper

# The setting `real_nvcc` as a variable, which the stand-in reads too.
REAL_NVCC_VARIABLE = "PREFETCHD_REAL_NVCC"
# The setting `libcuda_dir` as a variable, which workers read.
LIBCUDA_DIR_VARIABLE = "PREFETCHD_LIBCUDA_DIR"
# The setting `replay_packages` as a variable, which the Triton compiler reads.
REPLAY_PACKAGES_VARIABLE = "PREFETCHD_REPLAY_PACKAGES"
# The settings of the CuTe DSL's store and places as variables, which helpers and engines read.
CUTE_STORE_VARIABLE = "PREFETCHD_CUTE_STORE"
CUTE_STORE_MB_VARIABLE = "PREFETCHD_CUTE_STORE_MB"
DEFAULT_CUTE_STORE_MB = 4096
CUTE_DICTS_VARIABLE = "PREFETCHD_CUTE_DICTS"
CUTE_FUNCTIONS_VARIABLE = "PREFETCHD_CUTE_FUNCTIONS"

# Every library takes M as a C int.
MOST_TOKENS = 2**31 - 1
Tokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Niceness = Annotated[int, msgspec.Meta(ge=0, le=19)]


class ConfigError(ValueError):
    """A setting cannot be used; the text names where it came from, its value and the fix."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The effective settings. The variable of a field is `PREFETCHD_` and its name in capitals."""

    # The device to compile for: a preset, a TOML file; unset, the real device is asked.
    target: str | None = None
    # The largest batch the scheduler may build, in tokens.
    max_tokens: Tokens = 8192
    # Compile processes at a time; 0 means what cgroup and affinity really allow.
    jobs: NotNegative = 0
    # nvcc takes 2-15 s for one kernel (docs/architecture.md); ten minutes means it hangs.
    job_timeout_s: Seconds = 600.0
    # Address space of one compile. nvcc's cicc needs up to 2 GB for the largest tile; far more is a runaway.
    job_memory_mb: Positive = 16384
    # Compiles give way to whatever serves requests on this machine.
    job_nice: Niceness = 10
    # The nvcc to run; unset: DG_JIT_NVCC_COMPILER, CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda in this order.
    real_nvcc: str | None = None
    # The directories in which the engine finds libcuda.so.1, in its order, separated by colons: with them
    # Triton's own module is built ahead too. On the engine's machine, `ldconfig -p` names them.
    libcuda_dir: str | None = None
    # A traced sweep that has not ended by then hangs in the library.
    trace_timeout_s: Seconds = 300.0
    # Where engines and the daemon meet: ipc:///path or tcp://host:port; unset, see `endpoint.py`.
    endpoint: str | None = None
    # How long an engine may wait for a kernel that is compiling now, before it compiles it itself.
    wait_ms: NotNegative = 0
    # The model's profile file, for engines that do not hand one to `attach`.
    profile: str | None = None
    # Whether an engine goes through its warm-up passes though all that they compile is in the cache.
    keep_warmup: bool = False
    # How long an engine's start waits for kernels under way, before its own warm-up compiles them one by one.
    warmup_wait_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    # Where shape logs lie; unset: `prefetchd` in $XDG_STATE_HOME, else in ~/.local/state.
    log_dir: str | None = None
    # A shape log stops growing there: some ten thousand records with their sources.
    log_max_mb: Positive = 64
    # Packages whose kernels a shape log or a message may name, beside those that our own providers launch.
    replay_packages: tuple[str, ...] = ()

    # Where compiled CuTe DSL kernels lie; unset: `prefetchd/cute` in $XDG_CACHE_HOME, else in ~/.cache.
    cute_store: str | None = None
    # What lies in it longest without use is removed beyond this; a kernel takes 50 to 1100 KB.
    cute_store_mb: Positive = DEFAULT_CUTE_STORE_MB
    # Where libraries keep compiled kernels, beside the places we know: module:dict (with @2 behind it where
    # place 2 of its keys is a device's number), and module:function for functions under `functools.cache`.
    cute_dicts: tuple[str, ...] = ()
    cute_functions: tuple[str, ...] = ()
    # Whether an engine loads all stored kernels of its kind in a thread beside it, not each when it is met.
    cute_preload: bool = False

    # Whether an engine's own compiles are observed and logged.
    observe: bool = True
    # What an engine compile does in the engine: nothing, a line in its log, or an exception (for CI).
    on_engine_compile: Literal["ignore", "warn", "error"] = "ignore"
    # Since when: the engine's start, or its call of `mark_serving`.
    on_engine_compile_from: Literal["start", "serving"] = "start"
    # Variables by which other libraries find nvcc (PYTORCH_NVCC, FLASHINFER_NVCC), to observe theirs too. Not
    # by default: both write the program into their build files, so that what they have built is built anew.
    observe_nvcc: tuple[str, ...] = ()

    # Where the daemon shows its metrics and its readiness: host:port; "off": nowhere.
    metrics: str = "127.0.0.1:9464"
    # A second door of the daemon, for other nodes: tcp://host:port. Needs `keygen` and `allow_peers`.
    listen: str | None = None
    # Where this node's CURVE keys lie, the daemon's and its engines'; unset: `prefetchd/keys` in the user's
    # configuration directory.
    keys: str | None = None
    # The public key of the daemon at a tcp:// endpoint, for engines that attach to another node's.
    server_key: str | None = None
    # Public keys of the peers that may connect by TCP.
    allow_peers: tuple[str, ...] = ()
    # Cache directories that engines may name although they are not ours alone (links, another owner).
    allow_cache_roots: tuple[str, ...] = ()
    # Interpreters that helpers may be started with, beside the daemon's own.
    allow_interpreters: tuple[str, ...] = ()
    # Package directories that helpers may import from, beside those of the interpreter.
    allow_library_directories: tuple[str, ...] = ()
    # Variables that helpers and compiles get beside the daemon's own environment; only from the file.
    helper_environment: dict[str, str] = {}
    # A helper for every rank, also for ranks of equal target and fingerprint.
    helper_per_rank: bool = False
    # Traces at a time in one helper; 0: half of the cores, at least one.
    helper_traces_at_once: NotNegative = 0
    # A helper is replaced after so many traces, or above this size: libraries leak, and nobody would notice.
    helper_max_traces: Positive = 2000
    helper_max_rss_mb: Positive = 8192
    # How long the daemon lets running compiles finish when it is asked to end.
    stop_timeout_s: Seconds = 10.0
    # Whether the daemon compiles for new engines what earlier ones had to compile themselves, by their logs.
    replay: bool = True
    # The daemon ends after so long without a peer and without work; 0: never.
    idle_exit_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    # Peers known at a time; beyond it the longest silent one must introduce itself again.
    max_peers: Positive = 4096


def load_settings(environment: Mapping[str, str] | None = None, file: Path | None = None) -> Settings:
    """The settings from environment, file and defaults. Raises `ConfigError`."""
    environment = os.environ if environment is None else environment
    path = file or _default_file(environment)
    values: dict[str, Any] = _read_file(path) if path else {}
    for field in Settings.__struct_fields__:
        text = environment.get(PREFIX + field.upper())
        if text:
            values[field] = _converted(field, text, f"variable {PREFIX}{field.upper()}")
    return msgspec.convert(values, Settings)


def compile_settings(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with those settings that compilers read from it, wherever a user wrote them."""
    chosen = {
        REAL_NVCC_VARIABLE: settings.real_nvcc,
        LIBCUDA_DIR_VARIABLE: settings.libcuda_dir,
        REPLAY_PACKAGES_VARIABLE: ",".join(settings.replay_packages),
        CUTE_STORE_VARIABLE: settings.cute_store,
        CUTE_STORE_MB_VARIABLE: (
            str(settings.cute_store_mb) if settings.cute_store_mb != DEFAULT_CUTE_STORE_MB else None
        ),
        CUTE_DICTS_VARIABLE: ",".join(settings.cute_dicts),
        CUTE_FUNCTIONS_VARIABLE: ",".join(settings.cute_functions),
    }
    return {**environment, **{name: value for name, value in chosen.items() if value}}


def _default_file(environment: Mapping[str, str]) -> Path | None:
    named = environment.get(CONFIG_VARIABLE)
    if named:
        return Path(named)
    home = environment.get("HOME")
    base = environment.get("XDG_CONFIG_HOME") or (f"{home}/.config" if home else None)
    if base is None:
        return None
    candidate = Path(base) / "prefetchd" / "prefetchd.toml"
    return candidate if candidate.is_file() else None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"settings file {path}: {error.strerror}; correct {CONFIG_VARIABLE} or unset it"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"settings file {path}: not TOML: {error}") from error
    for key in table:
        if key not in Settings.__struct_fields__:
            known = Settings.__struct_fields__
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
            raise ConfigError(f"settings file {path}: unknown key {key!r}{hint}")
        table[key] = _converted(key, table[key], f"settings file {path}: key {key!r}")
    return table


def _converted(field: str, value: object, where: str) -> Any:
    (info,) = (f for f in msgspec.structs.fields(Settings) if f.name == field)
    if isinstance(value, str) and info.type == tuple[str, ...]:
        # A variable holds several separated by commas, which neither CURVE keys nor sane paths contain.
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return msgspec.convert(value, info.type, strict=not isinstance(value, str))
    except msgspec.ValidationError as error:
        known = _choices(info.type)
        hint = f"; one of {', '.join(known)}" if known else ""
        raise ConfigError(f"{where} = {value!r}: {error}{hint}") from error


def _choices(kind: object) -> tuple[str, ...]:
    """What a setting of this type may be, where that is a few words."""
    if kind is bool:
        return ("true", "false", "1", "0")
    return get_args(kind) if get_origin(kind) is Literal else ()
