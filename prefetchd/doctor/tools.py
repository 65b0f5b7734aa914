"""The doctor's checks of the programs and headers that a compile starts.

The subtle rule: what nvcc really uses is asked from nvcc itself. It may be a wrapper in another directory,
and its host compiler and include directories come from its own profile; a dry run, which compiles nothing,
prints both. A missing compiler is a failure only where a library that needs it is installed.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from prefetchd.compilers.base import CompilerUnavailable
from prefetchd.compilers.deep_gemm_package import Line
from prefetchd.compilers.deep_jit import LAYOUTS, Layout
from prefetchd.compilers.nvcc import Nvcc, find_nvcc
from prefetchd.doctor.facts import (
    Machine,
    ProgramFailed,
    Verdict,
    exists,
    fail,
    missing,
    ok,
    problem_and_fix,
    warn,
)
from prefetchd.doctor.libraries import LINE_NAMES, deep_gemm_directory, deep_gemm_line

# These make DeepGEMM disassemble every kernel it compiles.
DUMP_VARIABLES = ("DG_JIT_DUMP_SASS", "DG_JIT_DUMP_ASM")
# What people write for "no" in a variable that a library reads as a number.
OFF = ("", "0", "false", "no")
# Triton looks for these, in this order, when CC is unset.
C_COMPILERS = ("gcc", "clang", "cc")

INSTALL_NVCC = "install a CUDA compiler 12.9 or newer and set CUDA_HOME to its directory"
INSTALL_HOST_COMPILER = "install g++ and put it on PATH, or set NVCC_CCBIN to a C++ compiler nvcc supports"
NO_CUOBJDUMP = "none beside nvcc or on PATH"
NO_DRY_RUN = "no working nvcc to ask for its include directories"
# A directory after -I or -isystem, each argument in quotes of its own or not.
_INCLUDE = re.compile(r'"?-(?:I|isystem"? +"?)([^"\n]+?)"(?:\s|$)')
# The first command that a dry run prints is the host compiler's preprocessor.
_HOST_COMPILER = re.compile(r"^#\$ (\S+) .*-x c\+\+ ", re.MULTILINE)


def nvcc(machine: Machine) -> Verdict:
    """Which nvcc would be used, and is it new enough?"""
    try:
        compiler = _nvcc(machine)
    except CompilerUnavailable as error:
        return _lacking(machine, *problem_and_fix(error, INSTALL_NVCC))
    found = f"{compiler.path}, release {_dotted(compiler.release)}"
    installed = deep_gemm_line(machine)
    line = installed or Line.DEEP_JIT
    oldest = LAYOUTS[line].minimum_nvcc
    if compiler.release < oldest:
        advice = f"deep_gemm ({LINE_NAMES[line]}) needs {_dotted(oldest)} or newer: {INSTALL_NVCC}"
        return fail(found, advice) if installed else warn(found, advice)
    return ok(found)


def host_compiler(machine: Machine) -> Verdict:
    """Does nvcc find the C++ compiler that it preprocesses with?"""
    try:
        output = machine.run(*_dry_run(_nvcc(machine)))
    except CompilerUnavailable:
        return missing("no nvcc to ask", "see the nvcc check")
    except ProgramFailed as error:
        return _lacking(machine, str(error), _host_compiler_fix(machine))
    named = _HOST_COMPILER.search(output)
    if named is None:
        return warn("nvcc's dry run names no host compiler", "look at: nvcc -dryrun -x cu -c /dev/null")
    program = machine.which(named[1]) or named[1]
    try:
        # gcc without g++ is found by nvcc, and then fails on every kernel.
        machine.run(program, "-x", "c++", "-fsyntax-only", "/dev/null")
    except ProgramFailed as error:
        return _lacking(machine, str(error), _host_compiler_fix(machine))
    return ok(program)


def cuda_headers(machine: Machine) -> Verdict:
    """Are the runtime's headers where this nvcc looks?"""
    directories = _include_directories(machine)
    if not directories:
        return missing(NO_DRY_RUN, "see the nvcc and host compiler checks")
    where = _holding(directories, "cuda_runtime.h")
    if where is None:
        return _lacking(
            machine,
            f"no cuda_runtime.h in {', '.join(map(str, directories))}",
            "install the headers of the same CUDA release (package cuda-cudart-dev or nvidia-cuda-runtime)",
        )
    return ok(f"{where}/cuda_runtime.h")


def maths_headers(machine: Machine) -> Verdict:
    """Are the headers there that FlashInfer's own ops include?"""
    directories = _include_directories(machine)
    where = _holding(directories, "curand.h")
    if where is not None:
        return ok(f"{where}/curand.h")
    if not directories:
        return missing(NO_DRY_RUN, "see the nvcc and host compiler checks")
    return warn(
        "no curand.h where nvcc looks",
        "only FlashInfer's own ops include it: install libcurand-dev, or set CPATH to its directory",
    )


def cuobjdump(machine: Machine) -> Verdict:
    """Is the disassembler there that some DeepGEMM builds start?"""
    try:
        beside = _nvcc(machine).path.with_name("cuobjdump")
    except CompilerUnavailable:
        beside = None
    found = str(beside) if beside and exists(beside) else machine.which("cuobjdump")
    if found:
        return ok(found)
    install = "install cuda-cuobjdump (package nvidia-cuda-cuobjdump) beside nvcc"
    for variable in DUMP_VARIABLES:
        if machine.environment.get(variable, "").lower() not in OFF:
            return fail(f"{NO_CUOBJDUMP}, and {variable} needs it", f"unset {variable}, or {install}")
    return missing(NO_CUOBJDUMP, f"only some older DeepGEMM builds need it at load: {install}")


def c_compiler(machine: Machine) -> Verdict:
    """Is there a C compiler, for Triton's launchers and for installing prefetchd from source?"""
    named = machine.environment.get("CC", "")
    program = shlex.split(named)[0] if named else ""
    if program and not machine.which(program):
        return fail(f"CC is {named!r}, no program here", "correct CC, or unset it to use gcc or clang")
    found = machine.which(program) if program else next(filter(None, map(machine.which, C_COMPILERS)), None)
    if found:
        return ok(found)
    advice = "Triton compiles its launchers with it, in the engine: install gcc or clang"
    absent = f"none of {', '.join(C_COMPILERS)} on PATH, CC is unset"
    return fail(absent, advice) if machine.version("triton") else missing(absent, advice)


def nvrtc(machine: Machine) -> Verdict:
    """Is DeepGEMM told to compile inside the engine's process?"""
    value = machine.environment.get("DG_JIT_USE_NVRTC", "")
    if value.lower() in OFF:
        return ok("DG_JIT_USE_NVRTC is not set, DeepGEMM compiles with nvcc")
    return fail(
        f"DG_JIT_USE_NVRTC={value}: DeepGEMM compiles inside its own process, where nothing can be captured",
        "unset DG_JIT_USE_NVRTC for prefetchd and for the engine",
    )


def _nvcc(machine: Machine) -> Nvcc:
    """Whatever its release, so that an old one is named. Raises `CompilerUnavailable`."""
    layout: type[Layout] = LAYOUTS[deep_gemm_line(machine) or Line.DEEP_JIT]
    return find_nvcc(machine.environment, minimum=(0, 0), compiler_variables=layout.compiler_variables)


def _host_compiler_fix(machine: Machine) -> str:
    # gcc then finds none of its own parts, whatever is installed.
    unset = (
        "PATH is not set, which alone explains it: set PATH; else "
        if "PATH" not in machine.environment
        else ""
    )
    return unset + INSTALL_HOST_COMPILER


def _dotted(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def _dry_run(compiler: Nvcc) -> tuple[str, ...]:
    return (str(compiler.path), "-dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null")


def _include_directories(machine: Machine) -> list[Path]:
    """Where nvcc looks for headers, and what the environment adds; empty without a working nvcc."""
    try:
        output = machine.run(*_dry_run(_nvcc(machine)))
    except (CompilerUnavailable, ProgramFailed):
        return []
    named = [Path(text).resolve() for text in _INCLUDE.findall(output)]
    added = [Path(text) for text in machine.environment.get("CPATH", "").split(":") if text]
    return list(dict.fromkeys([*named, *added]))


def _holding(directories: list[Path], header: str) -> Path | None:
    return next((directory for directory in directories if exists(directory / header)), None)


def _lacking(machine: Machine, found: str, advice: str) -> Verdict:
    """Something DeepGEMM compiles with is absent: a failure only where deep_gemm is installed."""
    return fail(found, advice) if deep_gemm_directory(machine) else missing(found, advice)
