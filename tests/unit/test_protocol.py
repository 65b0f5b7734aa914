from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetchd.protocol import (
    REQUEST_TYPES,
    MalformedRequest,
    Request,
    Sweep,
    UnknownRequest,
    decode_request,
    decode_sweeps,
    encode_request,
    encode_sweeps,
    expand,
    op_of,
    request_from_fields,
    request_to_fields,
    spans,
    sweeps,
)
from prefetchd.sweeps import apart

DENSE = {"op": "fp8_gemm_nt", "m": 129, "n": 2112, "k": 7168}


def example(kind: type[Request]) -> Request:
    """A request of this type: 64 for every required integer, the first choice for every required text."""
    fields: dict[str, Any] = {"op": op_of(kind)}
    for field in msgspec.structs.fields(kind):
        if field.required:
            fields[field.name] = "bhr,hdr->bhd" if field.name == "expr" else 64
    return request_from_fields(fields)


@pytest.mark.parametrize("kind", REQUEST_TYPES.values(), ids=REQUEST_TYPES.keys())
class TestEveryOp:
    def test_survives_the_wire(self, kind: type[Request]) -> None:
        request = example(kind)
        assert type(request) is kind
        assert decode_request(encode_request(request)) == request
        assert request_from_fields(request_to_fields(request)) == request

    def test_is_hashable_and_equal_by_value(self, kind: type[Request]) -> None:
        assert len({example(kind), example(kind)}) == 1

    def test_sweep_field_is_a_required_integer_of_it(self, kind: type[Request]) -> None:
        if kind.sweep_field is None:
            return
        field = next(f for f in msgspec.structs.fields(kind) if f.name == kind.sweep_field)
        assert field.required
        assert isinstance(getattr(example(kind), field.name), int)


class TestUnknownOps:
    def test_are_kept_with_all_they_said(self) -> None:
        fields = {"op": "fp7_gemm", "m": 3, "shape": [1, 2], "deep": {"er": None}}
        request = request_from_fields(fields)
        assert isinstance(request, UnknownRequest)
        assert op_of(request) == "fp7_gemm"
        assert request_to_fields(request) == fields
        assert msgspec.msgpack.decode(encode_request(request)) == fields

    def test_equal_ones_are_one_key(self) -> None:
        one, other = (request_from_fields({"op": "new", "x": [1]}) for _ in range(2))
        assert len({one, other}) == 1

    def test_travel_inside_other_messages(self) -> None:
        class Carrier(msgspec.Struct):
            sweep: Sweep

        carrier = Carrier(Sweep(request_from_fields({"op": "new", "x": 1})))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(carrier), type=Carrier).sweep == carrier.sweep


class TestMalformedRequests:
    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            (DENSE | {"m": 0}, "m"),
            (DENSE | {"m": "many"}, "m"),
            ({"op": "fp8_gemm_nt", "m": 1, "n": 1}, "k"),
            (DENSE | {"scales": "float16"}, "scales"),
            ({"op": "einsum", "expr": "ab,bc->ac", "groups": 1, "m": 1, "n": 1, "k": 1}, "expr"),
        ],
    )
    def test_error_names_the_op_and_the_field(self, fields: dict[str, Any], named: str) -> None:
        with pytest.raises(MalformedRequest, match=rf"{fields['op']}.*{named}"):
            request_from_fields(fields)

    @pytest.mark.parametrize("data", [b"\x93\x01\x02\x03", b"\x80", b"\xc1", b""])
    def test_what_is_no_request_at_all_is_an_error(self, data: bytes) -> None:
        with pytest.raises(MalformedRequest, match="not a request"):
            decode_request(data)

    def test_fields_of_a_newer_writer_are_tolerated(self) -> None:
        assert request_from_fields(DENSE | {"invented_later": 1}) == request_from_fields(DENSE)


requests = st.builds(
    REQUEST_TYPES["fp8_gemm_nt"],
    m=st.integers(1, 300),
    n=st.sampled_from([576, 2112]),
    k=st.just(7168),
    accumulate=st.booleans(),
) | st.builds(REQUEST_TYPES["transform_sf_into_required_layout"], mn=st.integers(1, 3), k=st.just(128))


class TestSweeps:
    @given(st.lists(requests))
    def test_grouping_keeps_exactly_the_set_of_requests(self, asked: list[Request]) -> None:
        grouped = sweeps(asked)
        again = list(expand(grouped))
        assert set(again) == set(asked)
        assert len(again) == len(set(asked)) == sum(map(len, grouped))

    @given(st.lists(requests))
    def test_wire_form_is_lossless(self, asked: list[Request]) -> None:
        grouped = sweeps(asked)
        assert decode_sweeps(encode_sweeps(grouped)) == grouped

    @given(st.sets(st.integers(1, 10_000)))
    def test_spans_are_ascending_and_exact(self, values: set[int]) -> None:
        assert [v for span in spans(values) for v in range(*span)] == sorted(values)

    def test_equal_sets_give_equal_sweeps(self) -> None:
        kind = REQUEST_TYPES["bf16_gemm_nt"]
        ascending = [kind(m=m, n=64, k=64) for m in range(1, 50)]
        assert sweeps(ascending) == sweeps(reversed(ascending))

    def test_steps_are_found(self) -> None:
        assert spans([*range(1, 129), *range(256, 1025, 128)]) == ((1, 129, 1), (256, 1025, 128))

    def test_label_says_the_op_what_is_special_and_the_range(self) -> None:
        kind = REQUEST_TYPES["fp8_gemm_nt"]
        (sweep,) = sweeps(kind(m=m, n=2112, k=7168) for m in range(1, 8193))
        assert sweep.label() == "fp8_gemm_nt n=2112 k=7168 m=1..8192"
        assert Sweep(kind(m=3, n=1, k=2, scale_layout="rows")).label() == (
            "fp8_gemm_nt m=3 n=1 k=2 scale_layout=rows"
        )

    def test_one_request_has_one_form(self) -> None:
        kind = REQUEST_TYPES["fp8_gemm_nt"]
        single = Sweep(kind(m=7, n=64, k=64))
        assert sweeps([single.request]) == [single]
        assert decode_sweeps(encode_sweeps([Sweep(kind(m=1, n=64, k=64), ((7, 8, 1),))])) == [single]

    def test_few_requests_are_taken_apart_and_many_are_not(self) -> None:
        kind = REQUEST_TYPES["fp8_gemm_nt"]
        few, single = sweeps(kind(m=m, n=64, k=64) for m in (2, 3, 9)), Sweep(kind(m=1, n=1, k=1))
        larger = sweeps(kind(m=m, n=256, k=64) for m in range(1, 5))
        assert list(apart([*few, *larger, single], 3, 100)) == [
            *(Sweep(kind(m=m, n=64, k=64)) for m in (2, 3, 9)),
            *larger,
            single,
        ]

    def test_only_so_many_are_taken_apart_in_all(self) -> None:
        kind = REQUEST_TYPES["fp8_gemm_nt"]
        few = sweeps(kind(m=m, n=n, k=64) for n in (64, 128) for m in (2, 3, 9))
        assert list(apart(few, 3, 5)) == [*(Sweep(kind(m=m, n=64, k=64)) for m in (2, 3, 9)), few[1]]

    def test_unknown_requests_are_sweeps_of_one(self) -> None:
        request = request_from_fields({"op": "new", "x": 1})
        (sweep,) = sweeps([request, request])
        assert (len(sweep), list(sweep.expand()), sweep.label()) == (1, [request], "new x=1")

    @pytest.mark.parametrize("span", [(0, 4, 1), (4, 4, 1), (1, 4, 0), (5, 4, 1)])
    def test_what_is_no_range_is_refused(self, span: tuple[int, int, int]) -> None:
        with pytest.raises(MalformedRequest, match="no range"):
            decode_sweeps(encode_sweeps([Sweep(request_from_fields(DENSE), (span,))]))

    def test_an_op_without_a_sweep_field_is_not_swept(self) -> None:
        request = request_from_fields({"op": "transform_sf_into_required_layout", "mn": 1, "k": 1})
        with pytest.raises(MalformedRequest, match="no field to sweep"):
            decode_sweeps(encode_sweeps([Sweep(request, ((1, 2, 1),))]))

    def test_a_hundred_thousand_requests_group_and_travel_in_less_than_a_second(self) -> None:
        kind = REQUEST_TYPES["fp8_gemm_nt"]
        asked = [kind(m=m, n=n, k=7168) for n in range(128, 1728, 128) for m in range(1, 8193)]
        begun = time.thread_time()
        grouped = sweeps(asked)
        encoded = encode_sweeps(grouped)
        elapsed = time.thread_time() - begun
        assert len(asked) > 100_000
        assert len(encoded) < 4096
        assert elapsed < 1.0
