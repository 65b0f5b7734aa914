import msgspec
import pytest

from prefetchd.shapelog import MAX_LINE_BYTES, Record, RecordError, decode_record, encode_record

RECORD = Record(
    compiler="deep_jit",
    key="sm90_fp8_gemm_1d2d.00",
    fingerprint="f0",
    cause="late",
    seconds=2.5,
    request={"op": "fp8_gemm_nt", "m": 129, "n": 2112, "k": 7168},
)


def test_record_survives_its_line() -> None:
    assert decode_record(encode_record(RECORD)) == RECORD


def test_field_of_a_newer_version_is_ignored() -> None:
    fields = msgspec.json.decode(encode_record(RECORD)) | {"version": 9, "weather": "fine"}

    record = decode_record(msgspec.json.encode(fields))

    assert (record.version, record.key) == (9, RECORD.key)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"compiler":"deep_jit","key":"k"}', "fingerprint"),
        (b'{"compiler":"deep_jit","key":"k","fingerprint":"f","seconds":"long"}', "seconds"),
        (b'{"compiler":"deep_j', "truncated"),
        (b"x" * (MAX_LINE_BYTES + 1), str(MAX_LINE_BYTES)),
    ],
)
def test_unreadable_line_says_what_is_wrong(line: bytes, text: str) -> None:
    with pytest.raises(RecordError, match=text):
        decode_record(line)


def test_record_no_reader_would_accept_is_not_written() -> None:
    with pytest.raises(RecordError, match="more than"):
        encode_record(msgspec.structs.replace(RECORD, key="k" * MAX_LINE_BYTES))
