"""The doctor's checks of the Python libraries whose kernels are compiled.

Nothing is imported: versions come from the packages' metadata, the CUDA version from the files themselves.
What cannot be seen this way is whether a binary built against another torch loads; `prefetchd warm` says so.
"""

from __future__ import annotations

import re
from pathlib import Path

from prefetchd.compilers.base import CompilerUnavailable
from prefetchd.compilers.deep_gemm_package import Line, Package, find_package
from prefetchd.doctor.facts import Machine, Verdict, fail, missing, numbers, ok, problem_and_fix, warn

# The distributions that may bring the package `deep_gemm`.
DEEP_GEMM_DISTRIBUTIONS = ("sgl-deep-gemm", "tokenspeed-deepgemm", "deep-gemm")
# Engines that carry a copy of their own inside their package.
VENDORED_DEEP_GEMM = ("vllm/third_party/deep_gemm", "tensorrt_llm/deep_gemm")
# Releases before these were never tried with prefetchd.
OLDEST_TRIED = {"torch": "2.11", "triton": "3.6", "nvidia-cutlass-dsl": "4.4"}
# The libraries among which a broken pin shows as a load error or as other cache keys.
KERNEL_LIBRARIES = (
    "torch",
    "triton",
    *DEEP_GEMM_DISTRIBUTIONS,
    "apache-tvm-ffi",
    "nvidia-cutlass-dsl",
    "flashinfer-python",
    "fla-core",
    "mamba-ssm",
    "vllm",
    "sglang",
)
# `name==1.2`, `name (==1.2)` or `name~=1.2` at the start of a requirement; a range never breaks in silence.
_PIN = re.compile(r"^([A-Za-z0-9._-]+)\s*\(?(==|~=)\s*([^\s;,)]+)")
_NEEDED_RUNTIME = re.compile(rb"libcudart\.so\.(\d+)")
_TORCH_CUDA = re.compile(r"^cuda\b.*=\s*'([\d.]+)'", re.MULTILINE)


# What a person calls the two lines.
LINE_NAMES = {Line.DEEP_JIT: "DeepJIT line", Line.OLDER: "older line"}


def deep_gemm(machine: Machine) -> Verdict:
    """Which deep_gemm would be imported, of which line, and has it the torch it needs?"""
    directory = deep_gemm_directory(machine)
    if directory is None:
        copies = ", ".join(map(str, _vendored(machine)))
        found = f"not installed by itself; an engine's own copy: {copies}" if copies else "not installed"
        return missing(found, "only needed for its own kernels: pip install 'prefetchd[deep-gemm]'")
    try:
        package = find_package(directory)
    except CompilerUnavailable as error:
        return fail(*problem_and_fix(error, "install sgl-deep-gemm instead"))
    found = f"{_deep_gemm_origin(machine, package)}, {LINE_NAMES[package.line]}, {directory}"
    if machine.package("torch") is None:
        return fail(f"{found}; torch is not installed", "install torch's CUDA build beside it")
    return ok(found)


def torch(machine: Machine) -> Verdict:
    """Is torch there, and does it carry CUDA?"""
    package = machine.package("torch")
    if package is None:
        return missing(
            "not installed", "needed for every kernel library; an extra such as [triton] brings it"
        )
    version = machine.version("torch") or "of unknown version"
    cuda = torch_cuda(package)
    if cuda is None:
        found = f"{version} at {package} is a build without CUDA (no lib/libtorch_cuda.so)"
        advice = "install torch's CUDA build, which needs no GPU: deep_gemm cannot load on this one"
        return fail(found, advice) if deep_gemm_directory(machine) else warn(found, advice)
    return _tried("torch", version, f"{version}, CUDA {cuda}, {package}")


def triton(machine: Machine) -> Verdict:
    """Which Triton would compile KDA, GDN and Mamba kernels?"""
    return _versioned(machine, "triton", "pip install 'prefetchd[triton]'")


def cutlass_dsl(machine: Machine) -> Verdict:
    """Which CuTe DSL would compile?"""
    return _versioned(machine, "nvidia-cutlass-dsl", "pip install 'prefetchd[cute]'")


def library_pairs(machine: Machine) -> Verdict:
    """Do the installed libraries fit each other, as far as their metadata and binaries tell?"""
    problems = [*_broken_pins(machine), *_other_cuda(machine)]
    if problems:
        return fail("; ".join(problems), "install the versions named, in the environment the engine runs in")
    installed = [f"{name} {version}" for name in KERNEL_LIBRARIES if (version := machine.version(name))]
    if not installed:
        return missing("no kernel library is installed")
    return ok(f"no contradiction among {', '.join(installed)}")


def deep_gemm_directory(machine: Machine) -> Path | None:
    """The directory that `import deep_gemm` would load from."""
    return machine.package("deep_gemm")


def deep_gemm_line(machine: Machine) -> Line | None:
    """The line of the installed deep_gemm; None if there is none, or none that can be used."""
    directory = deep_gemm_directory(machine)
    try:
        return find_package(directory).line if directory else None
    except CompilerUnavailable:
        return None


def torch_cuda(package: Path) -> str | None:
    """The CUDA version torch was built with; None for a build without CUDA."""
    if not (package / "lib" / "libtorch_cuda.so").exists():
        return None
    found = _TORCH_CUDA.search((package / "version.py").read_text())
    return found.group(1) if found else None


def _deep_gemm_origin(machine: Machine, package: Package) -> str:
    """Distribution and version, as a person writes them."""
    for name in DEEP_GEMM_DISTRIBUTIONS:
        if version := machine.version(name):
            return f"{name} {version}"
    return f"deep_gemm {package.version} of no known distribution"


def _vendored(machine: Machine) -> list[Path]:
    places = [Path(root) / inner for root in machine.packages for inner in VENDORED_DEEP_GEMM]
    return [place for place in places if place.is_dir()]


def _versioned(machine: Machine, distribution: str, install: str) -> Verdict:
    version = machine.version(distribution)
    if version is None:
        return missing("not installed", f"only needed for its own kernels: {install}")
    return _tried(distribution, version, version)


def _tried(distribution: str, version: str, found: str) -> Verdict:
    oldest = OLDEST_TRIED[distribution]
    if numbers(version) < numbers(oldest):
        return warn(found, f"older than {oldest}, the first release prefetchd was tried with")
    return ok(found)


def _broken_pins(machine: Machine) -> list[str]:
    """Exact requirements of one installed kernel library that another installed one does not meet."""
    broken = []
    for name in KERNEL_LIBRARIES:
        found = machine.distribution(name)
        for requirement in (found.requires or []) if found else []:
            pin = _PIN.match(requirement)
            if pin is None or "extra ==" in requirement or pin[1].lower() not in KERNEL_LIBRARIES:
                continue
            installed = machine.version(pin[1])
            if installed and not _meets(installed, pin[2], pin[3]):
                broken.append(f"{name} requires {pin[1]}{pin[2]}{pin[3]}, {installed} is installed")
    return broken


def _meets(installed: str, operator: str, wanted: str) -> bool:
    """`==1.2` compares all but the local part, `==1.2.*` and `~=1.2.0` the series."""
    public = installed if "+" in wanted else installed.partition("+")[0]
    if operator == "==" and not wanted.endswith(".*"):
        return public == wanted
    prefix = wanted.split(".")[:-1]
    same_series = public.split(".")[: len(prefix)] == prefix
    return same_series and (operator == "==" or numbers(installed) >= numbers(wanted))


def _other_cuda(machine: Machine) -> list[str]:
    """A deep_gemm linked against another CUDA runtime than torch's, which the loader will not find."""
    package, torch_package = deep_gemm_directory(machine), machine.package("torch")
    binary = package / "_C.so" if package else None
    cuda = torch_cuda(torch_package) if torch_package else None
    if binary is None or cuda is None or not binary.is_file():
        return []
    needed = _NEEDED_RUNTIME.search(binary.read_bytes())
    if needed is None or needed[1].decode() == cuda.partition(".")[0]:
        return []
    return [f"{binary} needs libcudart.so.{needed[1].decode()}, torch brings CUDA {cuda}"]
