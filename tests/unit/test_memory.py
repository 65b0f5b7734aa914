"""Unused memory is given back, seldom enough, and where the C library cannot, nothing fails."""

from __future__ import annotations

from types import SimpleNamespace

from prefetchd.node.memory import ARENAS, TRIM_EVERY_S, Allocator


def test_memory_is_given_back_at_once_and_then_now_and_again() -> None:
    trims: list[int] = []
    allocator = Allocator(SimpleNamespace(malloc_trim=trims.append))

    found = [allocator.give_back(now) for now in (5.0, 5.0 + TRIM_EVERY_S / 2, 5.0 + TRIM_EVERY_S)]

    assert found == [True, False, True]
    assert trims == [0, 0]


def test_few_heaps_are_asked_for() -> None:
    asked: list[tuple[int, int]] = []
    allocator = Allocator(SimpleNamespace(mallopt=lambda *option: asked.append(option)))

    allocator.use_few_heaps()

    assert [count for _, count in asked] == [ARENAS]


def test_library_that_can_do_neither_is_left_alone() -> None:
    allocator = Allocator(SimpleNamespace())

    allocator.use_few_heaps()

    assert not allocator.give_back(0.0)


def test_the_library_here_takes_both_calls() -> None:
    allocator = Allocator()
    allocator.use_few_heaps()
    allocator.give_back(0.0)
