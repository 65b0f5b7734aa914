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

from prefetchd.doctor import caches, libraries, own, tools
from prefetchd.doctor.facts import Check, Machine, State, Verdict, this_machine

__all__ = ["CHECKS", "Check", "Findings", "examine", "render"]

# In the order a person would repair them: what prefetchd is, what it compiles with, for whom, and where to.
CHECKS: Mapping[str, Callable[[Machine], Verdict]] = {
    "null device": own.null_device,
    "job runner": own.job_runner,
    "settings": own.settings,
    "variables": own.variables,
    "cores": own.cores,
    "GPU": own.gpu,
    "nvcc": tools.nvcc,
    "NVRTC": tools.nvrtc,
    "host compiler": tools.host_compiler,
    "CUDA headers": tools.cuda_headers,
    "maths headers": tools.maths_headers,
    "cuobjdump": tools.cuobjdump,
    "C compiler": tools.c_compiler,
    "deep_gemm": libraries.deep_gemm,
    "torch": libraries.torch,
    "triton": libraries.triton,
    "CuTe DSL": libraries.cutlass_dsl,
    "library pairs": libraries.library_pairs,
    "HOME": caches.home,
    "user": caches.user,
    "DeepGEMM cache": caches.deep_gemm_cache,
    "Triton cache": caches.triton_cache,
    "mount": caches.mounts,
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
