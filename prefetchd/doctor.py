"""`prefetchd doctor`: each thing that must be right on this machine, what was found, and what to do.

It answers on any machine, with nothing installed but the base package. The subtle rule: no check may raise or
hide another; a check that breaks is itself a finding. Nothing is changed and no library is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefetchd import doctor_caches, doctor_libraries, doctor_self, doctor_tools
from prefetchd.doctor_facts import Check, Machine, State, Verdict, this_machine

__all__ = ["CHECKS", "Check", "Findings", "examine", "render"]

# In the order a person would repair them: what prefetchd is, what it compiles with, for whom, and where to.
CHECKS: Mapping[str, Callable[[Machine], Verdict]] = {
    "null device": doctor_self.null_device,
    "job runner": doctor_self.job_runner,
    "settings": doctor_self.settings,
    "variables": doctor_self.variables,
    "cores": doctor_self.cores,
    "GPU": doctor_self.gpu,
    "nvcc": doctor_tools.nvcc,
    "NVRTC": doctor_tools.nvrtc,
    "host compiler": doctor_tools.host_compiler,
    "CUDA headers": doctor_tools.cuda_headers,
    "maths headers": doctor_tools.maths_headers,
    "cuobjdump": doctor_tools.cuobjdump,
    "C compiler": doctor_tools.c_compiler,
    "deep_gemm": doctor_libraries.deep_gemm,
    "torch": doctor_libraries.torch,
    "triton": doctor_libraries.triton,
    "CuTe DSL": doctor_libraries.cutlass_dsl,
    "library pairs": doctor_libraries.library_pairs,
    "HOME": doctor_caches.home,
    "user": doctor_caches.user,
    "DeepGEMM cache": doctor_caches.deep_gemm_cache,
    "Triton cache": doctor_caches.triton_cache,
    "mount": doctor_caches.mounts,
}

_COLOURS: Mapping[State, str] = {"ok": "green", "warn": "yellow", "fail": "bold red", "missing": "dim"}


class Findings(msgspec.Struct, frozen=True):
    """The result of every check, in a fixed order."""

    checks: list[Check]

    @property
    def ok(self) -> bool:
        """True unless something installed or configured will not work; absence alone is no fault."""
        return all(check.state != "fail" for check in self.checks)


def examine(environment: Mapping[str, str]) -> Findings:
    """Checks this machine as a process with that environment would find it. Raises nothing."""
    machine = this_machine(environment)
    return Findings([_run(name, check, machine) for name, check in CHECKS.items()])


def render(findings: Findings, console: Console) -> None:
    """Prints one line a check, its advice below it, and what to do first."""
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in findings.checks:
        text = Text(check.found)
        if check.advice:
            text.append(f"\n-> {check.advice}", style="italic")
        table.add_row(Text(check.state, style=_COLOURS[check.state]), Text(check.name), text)
    console.print(table)
    console.print(Text(_summary(findings)))


def _run(name: str, check: Callable[[Machine], Verdict], machine: Machine) -> Check:
    try:
        verdict = check(machine)
    except Exception as error:  # whatever a strange machine makes it raise is a finding, not an end
        text = f"this check broke: {type(error).__name__}: {error}"
        return Check(name, "fail", text, "the other checks still hold; please report it with this line")
    return Check(name, verdict.state, verdict.found, verdict.advice)


def _summary(findings: Findings) -> str:
    failed = [check.name for check in findings.checks if check.state == "fail"]
    if failed:
        return f"Not right: {', '.join(failed)}."
    return "Nothing is wrong. What is missing is only needed by who uses it."
