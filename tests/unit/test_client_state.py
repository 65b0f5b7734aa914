from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefetchd.client.state import Variants, Wanted
from prefetchd.protocol import KeyName


def unsent(wanted: Wanted) -> list[bytes]:
    found = []
    while (frame := wanted.next_unsent()) is not None:
        found.append(frame)
        wanted.sent()
    return found


def test_settled_plans_are_not_sent_again() -> None:
    wanted = Wanted()
    for plan in (1, 2, 3):
        wanted.add(plan, bytes([plan]))
    assert unsent(wanted) == [b"\1", b"\2", b"\3"]

    wanted.settle([2, 77])
    wanted.rewind()

    assert unsent(wanted) == [b"\1", b"\3"]


def test_oldest_plans_give_way_and_are_counted() -> None:
    wanted = Wanted(max_plans=2)

    for plan in (1, 2, 3):
        wanted.add(plan, bytes([plan]))

    assert (unsent(wanted), wanted.forgotten) == ([b"\2", b"\3"], 1)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 60)),
        st.tuples(st.just("settle"), st.integers(0, 30)),
        st.tuples(st.just("send"), st.integers(1, 3)),
        st.tuples(st.just("rewind"), st.just(0)),
    )
)


@given(STEPS)
def test_plans_are_bounded_and_none_is_lost_uncounted(steps: list[tuple[str, int]]) -> None:
    wanted, added, settled = Wanted(max_plans=5, max_bytes=100), 0, set[int]()
    for step, number in steps:
        match step:
            case "add":
                added += 1
                wanted.add(added, bytes([added]) * number)
            case "settle" if 1 <= number <= added:
                before = len(wanted)
                wanted.settle([number])
                settled |= {number} if len(wanted) < before else set()
            case "send" if wanted.next_unsent() is not None:
                wanted.sent()
            case "rewind":
                wanted.rewind()
        assert len(wanted) <= 5
        assert len(wanted) + len(settled) + wanted.forgotten == added

    wanted.rewind()
    frames = unsent(wanted)
    assert sum(map(len, frames)) <= 100
    assert [frame[0] for frame in frames] == sorted({frame[0] for frame in frames} - settled)
    assert len(frames) == len(wanted)


def test_published_variants_are_bounded_and_the_newest_stay() -> None:
    variants = Variants(max_published=2)
    names = [KeyName("triton", str(number)) for number in range(3)]

    for name in names:
        variants.published(name)

    assert [variants.is_published(name) for name in names] == [False, True, True]


def test_everybody_who_waits_for_a_variant_goes_on_and_nobody_else() -> None:
    variants = Variants()
    name, other = KeyName("triton", "a"), KeyName("triton", "b")
    first, second, third = variants.waiter(name), variants.waiter(name), variants.waiter(other)

    variants.published(name)

    assert (first.wait(0), second.wait(0), third.wait(0)) == (True, True, False)


def test_nobody_waits_for_a_daemon_that_is_gone() -> None:
    variants = Variants()
    name = KeyName("triton", "a")
    waiter = variants.waiter(name)

    variants.nothing_is_coming()

    assert waiter.wait(60) is False
    variants.leave(name, waiter)
    variants.leave(name, waiter)
