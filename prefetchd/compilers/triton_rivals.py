"""Which recorded variants are candidates that lost: an engine that finds the result compiles none of them.

A log holds every candidate that a tuner compiled to measure it, and does not say for which tuning each was
one. So variants of a kernel that differ in nothing but what its tuner varies are taken together, and put to
the tunings whose kernel, dtypes and named values are theirs. The subtle rule: in doubt a variant stays. Only
where such a tuning's result is known, and the chosen variant is among those taken together, are the others
left out; a candidate that was left out wrongly would be compiled by an engine while requests wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from prefetchd.compilers.triton_capture import Variant
from prefetchd.winners import Configuration, Tuning, canonical, configuration

# A tensor's dtype as tuning keys name it, by the library's name of it in a signature.
DTYPES = {
    **{"i1": "bool", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64"},
    **{"u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64"},
    **{"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"},
    **{"fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2", "fp8e4b8": "float8_e4m3fnuz"},
}
TORCH = "torch."


class Answered(NamedTuple):
    """A tuning whose result the engine will find: the candidate of that index."""

    tuning: Tuning
    choice: int


class _Text(msgspec.Struct):
    """Of the library's JSON what is compared here."""

    signature: dict[str, Any]
    constant_keys: list[list[int]]
    constant_vals: list[Any]
    options: dict[str, Any]
    attrs_keys: list[Any] = []
    attrs_vals: list[Any] = []


class _Candidate(NamedTuple):
    """A variant as a tuner sees it."""

    key: str
    constants: dict[str, Any]
    dtypes: list[str]
    text: _Text

    def has(self, config: Configuration) -> bool:
        """Whether it was compiled in this configuration."""
        options = {name: self.text.options.get(name) for name in ("num_warps", "num_stages", "num_ctas")}
        wanted = {"num_warps": config.num_warps, "num_stages": config.num_stages, "num_ctas": config.num_ctas}
        return (
            options == wanted
            and self.text.options.get("maxnreg") == config.maxnreg
            and all(
                name in self.constants and canonical(self.constants[name]) == canonical(value)
                for name, value in config.kwargs.items()
            )
        )

    def beside(self, varied: set[str]) -> bytes:
        """All of it but what a tuner varies: equal for the candidates of one call."""
        constants = {name: value for name, value in self.constants.items() if name not in varied}
        options = {
            name: value
            for name, value in self.text.options.items()
            if name not in ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
        }
        attributes = sorted(zip(map(canonical, self.text.attrs_keys), self.text.attrs_vals, strict=False))
        return msgspec.json.encode([self.text.signature, constants, options, attributes], order="sorted")

    def fits(self, tuning: Tuning) -> bool:
        """Whether a call of that tuning could have launched it, as far as its key tells."""
        dtypes = [each for each in tuning.key if isinstance(each, str) and each.startswith(TORCH)]
        if sorted(dtypes) != sorted(self.dtypes):
            return False
        values = tuning.key[: len(tuning.key) - len(dtypes)]
        if len(tuning.names) != len(values):
            return True
        return all(
            name not in self.constants or canonical(self.constants[name]) == canonical(value)
            for name, value in zip(tuning.names, values, strict=True)
        )


def rivals(variants: Mapping[str, Variant], answered: Iterable[Answered]) -> set[str]:
    """Of these variants, by their keys, those that no engine which finds these results compiles."""
    by_kernel: dict[tuple[str, str], list[Answered]] = {}
    for each in answered:
        by_kernel.setdefault((each.tuning.module, each.tuning.kernel), []).append(each)
    recorded: dict[tuple[str, str], dict[str, Variant]] = {}
    for key, variant in variants.items():
        recorded.setdefault((variant.module, variant.name), {})[key] = variant
    found: set[str] = set()
    for kernel, results in by_kernel.items():
        configs = [configuration(fields) for each in results for fields in each.tuning.candidates]
        varied = {name for config in configs for name in config.kwargs}
        together: dict[bytes, list[_Candidate]] = {}
        for candidate in _candidates(recorded.get(kernel, {})):
            together.setdefault(candidate.beside(varied), []).append(candidate)
        for group in together.values():
            found |= _losers(group, [each for each in results if group[0].fits(each.tuning)])
    return found


def _losers(group: list[_Candidate], results: list[Answered]) -> set[str]:
    chosen = [configuration(each.tuning.candidates[each.choice]) for each in results]
    winners = {one.key for one in group if any(one.has(config) for config in chosen)}
    if not winners:
        return set()
    measured = [configuration(fields) for each in results for fields in each.tuning.candidates]
    return {one.key for one in group if any(one.has(config) for config in measured)} - winners


def _candidates(variants: Mapping[str, Variant]) -> Iterator[_Candidate]:
    for key, variant in variants.items():
        try:
            text = msgspec.json.decode(variant.specialization, type=_Text)
        except msgspec.DecodeError:
            continue
        names = list(text.signature)
        constants = {
            names[place[0]]: value
            for place, value in zip(text.constant_keys, text.constant_vals, strict=False)
            if len(place) == 1 and 0 <= place[0] < len(names)
        }
        pointers = [type_[1:].lstrip("k") for type_ in text.signature.values() if str(type_).startswith("*")]
        dtypes = [f"{TORCH}{DTYPES.get(each, each)}" for each in pointers]
        yield _Candidate(key, constants, dtypes, text)
