"""Named flag sets: what a site's callers pass, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from prefetchd.profiles.flag_sets import flag_alternatives, ready_made, set_names
from prefetchd.profiles.sites import KernelSite
from prefetchd.protocol import REQUEST_TYPES

# Read by the planner, not fields of a request.
PLANNED = {"split"}


def site(op: str = "chunk_kda", **flags: Any) -> KernelSite:
    return KernelSite(name="kda.chunk", op=op, sizes={}, flags=flags)


def test_a_site_without_flags_has_one_alternative() -> None:
    assert flag_alternatives(site()) == [{}]


def test_a_set_gives_its_flags_and_single_flags_override_it() -> None:
    (found,) = flag_alternatives(site(set="vllm", g_dtype="bfloat16", cu_seqlens_cpu=True))

    assert found == {
        "g_dtype": "bfloat16",
        "beta_dtype": "float32",
        "qk_l2norm": True,
        "initial_state": True,
        "final_state": True,
        "cu_seqlens_cpu": True,
    }


def test_a_list_stands_for_each_of_its_values() -> None:
    found = flag_alternatives(site(initial_state=(True, False), index_dtype=("int32", "int64")))

    assert [(flags["initial_state"], flags["index_dtype"]) for flags in found] == [
        (True, "int32"),
        (True, "int64"),
        (False, "int32"),
        (False, "int64"),
    ]


def test_a_flag_that_is_itself_a_list_is_kept_whole() -> None:
    assert flag_alternatives(site(unaligned=("q", "k")), ["unaligned"]) == [{"unaligned": ("q", "k")}]


def test_several_sets_are_all_planned_and_equal_ones_once() -> None:
    both = flag_alternatives(site("fused_recurrent_kda", set=("vllm", "vllm-verify", "vllm")))

    assert [flags.get("per_sequence") for flags in both] == [None, 2, 3, 4, 5]


def test_unknown_set_names_the_site_and_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'kda.chunk': there is no flag set 'vlm'.*vllm, vllm-fused-gate"):
        flag_alternatives(site(set="vlm"))


def test_set_that_does_not_know_the_op_is_refused() -> None:
    with pytest.raises(ValueError, match="no flag set 'fla-layer' for fused_kda_gate"):
        flag_alternatives(site("fused_kda_gate", set="fla-layer"))


@pytest.mark.parametrize("name", sorted(ready_made()))
def test_ready_made_sets_name_existing_ops_and_fields(name: str) -> None:
    for op, flags in ready_made()[name].items():
        assert name in set_names(op)
        assert set(flags) - PLANNED <= set(REQUEST_TYPES[op].__struct_fields__), op
