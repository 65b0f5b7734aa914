"""Which packages a shape log or a message may name kernels in: the known homes', and what the settings add.

A log is a stranger's file, a message a peer's, and a module that is imported runs. So neither a recorded
function nor the home of a request is looked for outside of packages that somebody here has allowed by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from prefetchd.config import REPLAY_PACKAGES_VARIABLE

# Where the kernels live that our own providers launch: the homes' packages. A list of its own, since a replay
# needs no provider.
HOME_PACKAGES = ("fla", "mamba_ssm", "vllm", "sglang")
# Homes of other compile systems, which stand for their providers' own lists of functions.
NAMED_HOMES = ("flashinfer", "tensorrt_llm")
# In front of a home that is a module's path, as CuTe DSL kernels have it.
MODULE_PREFIX = "cute:"


def allowed_packages(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The known homes' packages, then those of the setting `replay_packages`."""
    named = environment.get(REPLAY_PACKAGES_VARIABLE, "").split(",")
    return (*HOME_PACKAGES, *(package.strip() for package in named if package.strip()))


def lies_in(module: str, packages: tuple[str, ...]) -> bool:
    """Whether the module is one of the packages, or within one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def home_problem(home: object, packages: tuple[str, ...]) -> str:
    """Why a request of this home is not run: a provider would import it. Empty where it may be."""
    if not isinstance(home, str) or home in NAMED_HOMES:
        return ""
    if lies_in(home.removeprefix(MODULE_PREFIX), packages):
        return ""
    return (
        f"request.home: {home[:100]!r} lies in no allowed package ({', '.join(packages)}); if you trust it, "
        "add its package to the setting replay_packages"
    )
