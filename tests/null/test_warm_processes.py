"""Two at once, interrupted, killed: what other processes see, what is left, and what the next run does."""

from __future__ import annotations

import signal

import psutil  # type: ignore[import-untyped]
import pytest
from warming import SMALL_VARIANTS, Bench, Run, ended

# How soon every process of a killed command must be gone.
END_LIMIT_S = 5


class Held:
    """A `warm` that has published all but one kernel and waits for an nvcc that never ends."""

    def __init__(self, bench: Bench) -> None:
        tell = bench.nvcc.event()
        # The next compile starts while the one before is still being published.
        published = f"until [ $(ls {bench.cache}/cache | wc -l) -eq {SMALL_VARIANTS - 1} ]; do :; done"
        bench.nvcc.behave(f"grep -q transpose_fp32 $source && {{ {published}; sleep 1000 & {tell}; wait; }}")
        self.bench = bench
        self.process = bench.start("--jobs", "1")
        bench.nvcc.wait_for_event(self.process)
        self.tree = psutil.Process(self.process.pid).children(recursive=True)
        # The helper, the job runner, nvcc and the process that nvcc started.
        assert len(self.tree) == 4

    def end(self, number: signal.Signals) -> Run:
        self.process.send_signal(number)
        return ended(self.process)

    def survivors(self) -> list[psutil.Process]:
        _, alive = psutil.wait_procs(self.tree, timeout=END_LIMIT_S)
        return list(alive)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_keeps_what_is_published_and_leaves_nothing_else(
    bench: Bench, number: signal.Signals
) -> None:
    held = Held(bench)

    done = held.end(number)

    assert done.status == 130
    assert done.err == "prefetchd: interrupted; what is published stays\n"
    assert not any(process.is_running() for process in held.tree)
    assert len(bench.entries()) == SMALL_VARIANTS - 1
    assert bench.leftovers() == []


def test_killed_command_leaves_no_process_and_the_next_run_cleans_up_and_completes(bench: Bench) -> None:
    held = Held(bench)

    held.end(signal.SIGKILL)

    assert held.survivors() == []
    assert len(bench.entries()) == SMALL_VARIANTS - 1
    assert bench.leftovers() != []
    bench.nvcc.behave()

    again = bench.warm()

    assert again.status == 0
    assert again.counts("hits", "compiled") == (SMALL_VARIANTS - 1, 1)
    assert bench.leftovers() == []


def test_two_at_once_compile_each_variant_once_and_both_succeed(bench: Bench) -> None:
    nvcc = bench.nvcc
    first, second, (wait, gate) = nvcc.event("first"), nvcc.event("second"), nvcc.gate()
    # The first compile of all goes on only when the other command has started one of its own.
    turn = f"mkdir 2>/dev/null {nvcc.directory}/turn"
    nvcc.behave(f"if {turn}.1; then {first}; {wait}; elif {turn}.2; then {second}; fi")

    one = bench.start("--jobs", "1")
    nvcc.wait_for_event(one, "first")
    other = bench.start("--jobs", "1")
    nvcc.wait_for_event(other, "second")
    gate.write_text("go\n")
    runs = [ended(one), ended(other)]

    assert [run.status for run in runs] == [0, 0]
    assert len(nvcc.compiles()) == len(bench.entries()) == SMALL_VARIANTS
    assert all(run.figures["compiled"] > 0 for run in runs)
    assert sum(run.figures["compiled"] for run in runs) == SMALL_VARIANTS
    assert all(sum(run.counts("compiled", "hits")) == SMALL_VARIANTS for run in runs)
    assert bench.leftovers() == []


def test_helper_that_is_killed_ends_the_run_with_its_requests_uncovered(bench: Bench) -> None:
    tell = bench.nvcc.event()
    # Only a trace starts nvcc with this variable set.
    bench.nvcc.behave(version_hook=f'test -n "$PREFETCHD_NVCC_MODE" && {{ {tell}; sleep 1000; }}')
    process = bench.start()
    bench.nvcc.wait_for_event(process)
    children = psutil.Process(process.pid).children()
    (helper,) = [child for child in children if "prefetchd.helper" in child.cmdline()]
    tree = helper.children(recursive=True)

    helper.kill()
    done = ended(process)

    assert done.status == 1
    assert done.figures["uncovered"] == done.figures["requests"]
    assert {problem["kind"] for problem in done.figures["problems"]} == {"crash"}
    assert "the helper ended with status -9" in done.figures["problems"][0]["text"]
    assert bench.entries() == []
    assert psutil.wait_procs(tree, timeout=END_LIMIT_S)[1] == []
    assert bench.leftovers() == []
