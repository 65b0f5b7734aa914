"""From a call of a deep_gemm entry point back to the request that a provider would have made of it.

Asked once for a variant that the engine had to compile, while the call's tensors are still at hand. It looks
at shapes, strides and types only and imports neither torch nor the library. The subtle rule: a request is
either exactly what the call was, or there is none. An op whose arguments are not understood, groups of
unequal size, or a value no field can hold give None; `describe_call` then tells people what was passed.

What a device takes by itself is left at "auto", as planners ask for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from prefetchd.codec import MalformedRequest, request_from_fields, request_to_fields

# By the spellings under which packages export one op.
ALIASES = {"fp8_m_grouped_gemm_nt_masked": "m_grouped_fp8_gemm_nt_masked"}
# Scales of float32 in blocks of so many.
BLOCK = 128
# Four UE8M0 exponents in a word, rows padded to 16 bytes.
PACKED = 4
LIBRARY_ALIGNMENT = 128
# A call has some twenty arguments; what people are shown of it stays a line.
MAX_DESCRIPTION = 1000

Fields = dict[str, Any]


class NotARequest(Exception):
    """The call is none of those that a request can say."""


class Library:
    """What the library and its device are set to at the moment of a call, asked only then."""

    def __init__(self, module: Any, major: Callable[[], int], sm_count: Callable[[], int]) -> None:
        self._module, self._major, self._sm_count = module, major, sm_count

    @property
    def major(self) -> int:
        """The device's major compute capability."""
        return self._major()

    def sms(self) -> int:
        """The SMs that the engine told the library to use; 0 is all of them."""
        found = self._number("get_num_sms", 0)
        return 0 if found == self._sm_count() else found

    def alignment(self) -> int:
        """What the engine told it to align groups to; 0 is its own value."""
        found = self._number("get_mk_alignment_for_contiguous_layout", LIBRARY_ALIGNMENT)
        return 0 if found == LIBRARY_ALIGNMENT else found

    def deterministic(self) -> bool:
        """Whether it may not use cuBLASLt."""
        return bool(self._number("get_deterministic_algorithms", 0))

    def newer_form(self) -> bool:
        """Whether the logits have the newer form (see the provider)."""
        return not hasattr(self._module, "fp8_mqa_logits")

    def _number(self, name: str, default: int) -> int:
        function = getattr(self._module, name, None)
        return default if function is None else int(function())


def request_of_call(op: str, arguments: Mapping[str, Any], library: Library) -> Fields | None:
    """The request's wire fields; None for a call that no request says. `arguments` are by parameter name."""
    try:
        op = _by_operands(ALIASES.get(op, op), arguments)
        read = _READERS.get(op)
        if read is None:
            return None
        fields = read(op, arguments, library)
        if sms := library.sms():
            fields["sms"] = sms
        return request_to_fields(request_from_fields({"op": op, **fields}))
    except (NotARequest, MalformedRequest, LookupError, TypeError, ValueError, AttributeError):
        return None


def describe_call(op: str, arguments: Mapping[str, Any]) -> str:
    """For people: the op with types, shapes and small values of its arguments."""
    texts = [f"{name}={_shown(value)}" for name, value in arguments.items() if value is not None]
    return f"{op}({', '.join(texts)})"[:MAX_DESCRIPTION]


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(_shown(one) for one in value[:8])})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{_dtype(value)}{list(value.shape)}"
    return repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).rpartition(".")[2]


def _pair(value: Any) -> tuple[Any, Any]:
    data, scales = value
    return data, scales


def _is_fp4(tensor: Any) -> bool:
    return _dtype(tensor) == "int8"


def _by_operands(op: str, arguments: Mapping[str, Any]) -> str:
    """The library has one function for FP8 and FP4 under several names; the operands say which op it is."""
    if not re.search("fp8_(fp4_)?gemm|^fp4_gemm", op) or "a" not in arguments or op.startswith("k_grouped"):
        return op
    (a, _), (b, _) = _pair(arguments["a"]), _pair(arguments["b"])
    kind = "fp4" if _is_fp4(a) else "fp8_fp4" if _is_fp4(b) else "fp8"
    return re.sub("fp8_fp4|fp8|fp4", kind, op, count=1)


def _output(tensor: Any) -> str:
    name = _dtype(tensor)
    if name not in ("bfloat16", "float32"):
        raise NotARequest(name)
    return name


def _scales(scales: Any, library: Library) -> str:
    packed = _dtype(scales) in ("int32", "uint8", "float8_e8m0fnu")
    if packed == (library.major >= 10):
        return "auto"
    return "ue8m0" if packed else "float32"


def _scale_layout(scales: Any) -> str:
    """How the last two dimensions lie; where several are the same bytes, the one that TMA wants."""
    rows, width = scales.shape[-2:]
    row, column = scales.stride()[-2:]
    if row == 1 and (width == 1 or column == -(-rows // PACKED) * PACKED):
        return "tma"
    if row == 1 and column == rows:
        return "columns"
    if column == 1 and row == width:
        return "tma" if rows == 1 else "rows"
    raise NotARequest("scales with another layout")


def _weight_block(scales: Any, n: int) -> int:
    if _dtype(scales) != "float32":
        return BLOCK
    rows = scales.shape[-2]
    if rows == -(-n // BLOCK):
        return BLOCK
    if rows == n:
        return 1
    raise NotARequest("weights with another scale block")


def _compiled_dims(arguments: Mapping[str, Any]) -> Fields:
    # Given only where the engine's call named them (`bound_arguments` leaves defaults out).
    found = arguments.get("compiled_dims")
    return {} if found is None else {"compiled_dims": found}


def _dense(op: str, arguments: Mapping[str, Any]) -> Fields:
    d = arguments["d"]
    m, n = d.shape
    return {
        "m": m,
        "n": n,
        "output": _output(d),
        "accumulate": arguments.get("c") is not None,
        **_compiled_dims(arguments),
    }


def _fp8_dense(op: str, arguments: Mapping[str, Any], library: Library) -> Fields:
    (a, sfa), (_, sfb) = _pair(arguments["a"]), _pair(arguments["b"])
    fields = _dense(op, arguments)
    transposed_a, transposed_b = op[-2] == "t", op[-1] == "n"
    sfa, sfb = (sfa.T if transposed_a else sfa), (sfb.T if transposed_b else sfb)
    return {
        **fields,
        "k": a.shape[0] if transposed_a else a.shape[1],
        "scales": _scales(sfa, library),
        "scale_layout": _scale_layout(sfa),
        "weight_block": _weight_block(sfb, fields["n"]),
    }


def _fp4_dense(op: str, arguments: Mapping[str, Any], library: Library) -> Fields:
    (_, sfa), (b, _) = _pair(arguments["a"]), _pair(arguments["b"])
    found = {
        **_dense(op, arguments),
        "k": b.shape[1] * 2,
        "scales": _scales(sfa, library),
        "scale_layout": _scale_layout(sfa),
    }
    if op == "fp8_fp4_gemm_nt":
        found["gran_k"] = _gran_k(arguments)
    return found


def _gran_k(arguments: Mapping[str, Any]) -> int:
    recipe = arguments.get("recipe_a") or arguments.get("recipe")
    return int(recipe[-1]) if recipe else BLOCK


def _bf16_dense(op: str, arguments: Mapping[str, Any], library: Library) -> Fields:
    a = arguments["a"]
    return {
        **_dense(op, arguments),
        "k": a.shape[0] if op[-2] == "t" else a.shape[1],
        "deterministic": library.deterministic(),
    }


def _contiguous(arguments: Mapping[str, Any], library: Library, a: Any, b: Any) -> Fields:
    m, n = arguments["d"].shape
    return {
        "groups": b.shape[0],
        "m": m,
        "n": n,
        "k": a.shape[1],
        "psum": bool(arguments.get("use_psum_layout")),
        "expected_m": arguments.get("expected_m_for_psum_layout") or 0,
        "alignment": library.alignment(),
        **_compiled_dims(arguments),
    }


def _fp8_contiguous(op: str, arguments: Mapping[str, Any], library: Library) -> Fields:
    (a, sfa), (b, _) = _pair(arguments["a"]), _pair(arguments["b"])
    return {
        **_contiguous(arguments, library, a, b),
        "scales": _scales(sfa, library),
        "scale_layout": _scale_layout(sfa),
    }


def _fp8_fp4_contiguous(op: str, arguments: Mapping[str, Any], library: Library) -> Fields:
    (a, sfa), (b, _) = _pair(arguments["a"]), _pair(arguments["b"])
    return {
        **_contiguous(arguments, library, a, b),
        "gran_k": _gran_k(arguments),
        "scales": _scales(sfa, library),
        "scale_layout": _scale_layout(sfa),
    }


def _bf16_contiguous(op: str, arguments: Mapping[str, Any], library: Library) -> Fields:
    return _contiguous(arguments, library, arguments["a"], arguments["b"])


def _masked(arguments: Mapping[str, Any], a: Any) -> Fields:
    """Without the rows reserved for a group: no kernel is chosen by them."""
    groups, _, n = arguments["d"].shape
    return {
        "groups": groups,
        "expected_m": arguments["expected_m"],
        "n": n,
        "k": a.shape[-1],
        **_compiled_dims(arguments),
    }


def _fp8_masked(op: str, arguments: Mapping[str, Any], library: Library) -> Fields:
    (a, sfa), (b, _) = _pair(arguments["a"]), _pair(arguments["b"])
    return {
        **_masked(arguments, a),
        **({"gran_k": _gran_k(arguments)} if _is_fp4(b) else {}),
        "scales": _scales(sfa, library),
        "scale_layout": _scale_layout(sfa),
    }


def _bf16_masked(op: str, arguments: Mapping[str, Any], library: Library) -> Fields:
    return _masked(arguments, arguments["a"])


def _k_grouped(op: str, arguments: Mapping[str, Any], library: Library) -> Fields:
    groups, m, n = arguments["d"].shape
    sizes = {int(size) for size in arguments["ks"]}
    if len(sizes) != 1:
        raise NotARequest("groups of unequal size")
    found: Fields = {
        "groups": groups,
        "m": m,
        "n": n,
        "k": sizes.pop(),
        "accumulate": arguments.get("c") is not None,
        "psum": bool(arguments.get("use_psum_layout")),
        **_compiled_dims(arguments),
    }
    if op == "k_grouped_fp8_gemm_tn_contiguous":
        found["gran_k"] = _gran_k(arguments)
    return found


# The letters of each expression that stand for the batch, the rows, the columns and the sum.
_ROLES = {
    "bhr,hdr->bhd": ("h", "b", "d", "r"),
    "bhd,hdr->bhr": ("h", "b", "r", "d"),
    "bhd,bhr->hdr": ("h", "d", "r", "b"),
    "bmk,bnk->mn": ("b", "m", "n", "k"),
}


def _product(arguments: Mapping[str, Any], a: Any, b: Any) -> Fields:
    expr, d = arguments["expr"], arguments["d"]
    left, right = expr.partition("->")[0].split(",")
    sizes = {**dict(zip(left, a.shape, strict=True)), **dict(zip(right, b.shape, strict=True))}
    names = ("groups", "m", "n", "k")
    return {
        "expr": expr,
        **{name: sizes[letter] for name, letter in zip(names, _ROLES[expr], strict=True)},
        "output": _output(d),
        "accumulate": arguments.get("c") is not None,
    }


def _einsum(op: str, arguments: Mapping[str, Any], library: Library) -> Fields:
    found = _product(arguments, arguments["a"], arguments["b"])
    return {**found, "deterministic": library.deterministic()}


def _fp8_einsum(op: str, arguments: Mapping[str, Any], library: Library) -> Fields:
    (a, sfa), (b, sfb) = _pair(arguments["a"]), _pair(arguments["b"])
    found = _product(arguments, a, b)
    # Handed over in the expression's order; the library lays scales out for the batched product.
    if found["expr"] == "bhd,bhr->hdr":
        sfa, sfb = sfa.permute(1, 2, 0), sfb.permute(1, 2, 0)
    else:
        sfa = sfa.permute(1, 0, 2)
        sfb = sfb.mT if found["expr"] == "bhd,hdr->bhr" else sfb
    return {
        **found,
        "scales": _scales(sfa, library),
        "scale_layout": _scale_layout(sfa),
        "weight_block": _weight_block(sfb, found["n"]),
    }


def _skip_head_mid(op: str, arguments: Mapping[str, Any], library: Library) -> Fields:
    (a, sfa), (b, _) = _pair(arguments["a"]), _pair(arguments["b"])
    left, middle, right = arguments["head_splits"]
    return {
        "m": a.shape[0],
        "n": b.shape[0],
        "k": a.shape[1],
        "left": left,
        "middle": middle,
        "right": right,
        "scales": _scales(sfa, library),
        "scale_layout": _scale_layout(sfa),
    }


def _hc_prenorm(op: str, arguments: Mapping[str, Any], library: Library) -> Fields:
    m, k = arguments["a"].shape
    return {"m": m, "n": arguments["b"].shape[0], "k": k, "splits": arguments.get("num_splits") or 0}


def _transform_scales(op: str, arguments: Mapping[str, Any], library: Library) -> Fields:
    block, gran_k = arguments["recipe"]
    return {
        "mn": arguments["mn"],
        "k": arguments["k"],
        "groups": arguments.get("num_groups") or 0,
        "block": block,
        "gran_k": gran_k,
    }


_READERS: dict[str, Callable[[str, Mapping[str, Any], Library], Fields]] = {
    **dict.fromkeys((f"fp8_gemm_{letters}" for letters in ("nt", "nn", "tn", "tt")), _fp8_dense),
    **dict.fromkeys((f"bf16_gemm_{letters}" for letters in ("nt", "nn", "tn", "tt")), _bf16_dense),
    **dict.fromkeys(("fp8_fp4_gemm_nt", "fp4_gemm_nt"), _fp4_dense),
    "m_grouped_fp8_gemm_nt_contiguous": _fp8_contiguous,
    "m_grouped_fp8_gemm_nn_contiguous": _fp8_contiguous,
    "m_grouped_fp8_fp4_gemm_nt_contiguous": _fp8_fp4_contiguous,
    "m_grouped_bf16_gemm_nt_contiguous": _bf16_contiguous,
    "m_grouped_bf16_gemm_nn_contiguous": _bf16_contiguous,
    "m_grouped_fp8_gemm_nt_masked": _fp8_masked,
    "m_grouped_fp8_fp4_gemm_nt_masked": _fp8_masked,
    "m_grouped_bf16_gemm_nt_masked": _bf16_masked,
    "k_grouped_fp8_gemm_tn_contiguous": _k_grouped,
    "k_grouped_fp8_gemm_nt_contiguous": _k_grouped,
    "k_grouped_fp4_gemm_nt_contiguous": _k_grouped,
    "k_grouped_bf16_gemm_tn_contiguous": _k_grouped,
    "einsum": _einsum,
    "fp8_einsum": _fp8_einsum,
    "fp8_gemm_nt_skip_head_mid": _skip_head_mid,
    "tf32_hc_prenorm_gemm": _hc_prenorm,
    "transform_sf_into_required_layout": _transform_scales,
}
