"""What `prefetchd run` adds to an engine's environment, and what the daemon beside it is started with.

The subtle rule: nothing that a user has set is changed (but that an nvcc which was named runs behind our
stand-in), and nothing is moved. A cache directory is set to the
very place where the library would look without us, so that no kernel made earlier is lost; that alone keeps
torch's Inductor from re-pointing Triton's in mid-run, and a relative default from meaning another place in
each process. What enters a kernel's key must be the same for engine and daemon, so the daemon gets it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from prefetchd.compilers.base import CompilerUnavailable
from prefetchd.compilers.deep_gemm_package import find_package
from prefetchd.compilers.deep_jit import CACHE_VARIABLE as DEEP_GEMM_VARIABLE
from prefetchd.compilers.deep_jit import LAYOUTS
from prefetchd.compilers.triton import CACHE_VARIABLE as TRITON_VARIABLE
from prefetchd.compilers.triton import HOME_VARIABLE, find_root
from prefetchd.config import ENABLED_VARIABLE, REAL_NVCC_VARIABLE, Settings
from prefetchd.observing.nvcc_variables import stand_in_variables, uses_nvrtc

SITE = Path(__file__).resolve().parent / "engine_site"

# These choose a directory for DeepGEMM themselves when its variable is unset; setting it would move theirs.
OWN_DEEP_GEMM_CACHE = ("vllm", "sglang", "tensorrt_llm")
# For the one process that a service manager started: the daemon must not report an engine's readiness.
OF_THE_MANAGER = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
IDLE_EXIT_VARIABLE = "PREFETCHD_IDLE_EXIT_S"
# A daemon that nobody started knowingly, nobody will stop: it ends so long after its last engine. An engine
# that is restarted is back within it.
IDLE_EXIT_S = 600


class Addition(NamedTuple):
    """A variable that was unset, and why it is set."""

    name: str
    value: str
    reason: str


def key_additions(environment: Mapping[str, str]) -> list[Addition]:
    """What engine and daemon must agree about: where kernels lie, and that measured choices are kept."""
    found = [
        Addition("TRITON_CACHE_AUTOTUNING", "1", "Triton keeps what its tuners measured"),
        Addition(DEEP_GEMM_VARIABLE, _deep_gemm_default(environment), "deep_gemm's own default"),
        Addition(TRITON_VARIABLE, _triton_default(environment), "Triton's own default, for Inductor too"),
    ]
    return [one for one in found if one.value and one.name not in environment]


def observed_additions(environment: Mapping[str, str], settings: Settings) -> list[Addition]:
    """What has nvcc's stand-in started in the engine, for its compiles to be seen. Raises `NotObservable`."""
    libraries = ("deep_gemm", *OWN_DEEP_GEMM_CACHE)
    if not settings.observe_nvcc and not any(map(_is_installed, libraries)):
        return []
    if not settings.observe or uses_nvrtc(environment):
        return []
    given = (
        environment if settings.real_nvcc is None else {**environment, REAL_NVCC_VARIABLE: settings.real_nvcc}
    )
    found = stand_in_variables(given, settings.observe_nvcc)
    return [
        Addition(name, value, _why(name, environment.get(name)))
        for name, value in found.items()
        if environment.get(name) != value
    ]


def _why(name: str, before: str | None) -> str:
    if before:
        return f"to see what nvcc compiles; {before} runs behind it"
    return "the nvcc that runs behind it" if name == REAL_NVCC_VARIABLE else "to see what nvcc compiles"


def engine_environment(environment: Mapping[str, str], additions: list[Addition]) -> dict[str, str]:
    """The engine's: with the additions, switched on, and our `sitecustomize` in front of PYTHONPATH."""
    child = {**environment, **{one.name: one.value for one in additions}}
    child.setdefault(ENABLED_VARIABLE, "1")
    child["PYTHONPATH"] = ":".join([str(SITE), *_without_ours(environment)])
    return child


def daemon_environment(environment: Mapping[str, str], additions: list[Addition]) -> dict[str, str]:
    """The daemon's: the same but for what makes a process an engine or a manager's service."""
    child = {**environment, **{one.name: one.value for one in additions}}
    for name in (ENABLED_VARIABLE, *OF_THE_MANAGER):
        child.pop(name, None)
    if "PYTHONPATH" in child:
        child["PYTHONPATH"] = ":".join(_without_ours(environment))
    return child


def _is_installed(name: str) -> bool:
    """Any directory of that name on the path is a package to Python, but one that has no file of its own."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def _without_ours(environment: Mapping[str, str]) -> list[str]:
    # An empty entry would be the working directory, which no list without ours contains by itself.
    return [entry for entry in environment.get("PYTHONPATH", "").split(":") if entry and entry != str(SITE)]


def _deep_gemm_default(environment: Mapping[str, str]) -> str:
    if any(map(_is_installed, OWN_DEEP_GEMM_CACHE)):
        return ""
    try:
        layout = LAYOUTS[find_package().line]
    except CompilerUnavailable:
        return ""
    if any(name in environment for name in layout.cache_variables):
        return ""
    return str((Path(environment.get("HOME", "")) / layout.default_directory).absolute())


def _triton_default(environment: Mapping[str, str]) -> str:
    if TRITON_VARIABLE in environment or find_spec("triton") is None:
        return ""
    try:
        return str(find_root(environment))
    except CompilerUnavailable:
        # As the library has it: `~` stays where there is no home to put there.
        home = environment.get(HOME_VARIABLE, environment.get("HOME", "~"))
        return str((Path(home) / ".triton" / "cache").absolute())
