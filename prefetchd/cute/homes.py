"""Where libraries keep their compiled CuTe kernels: which dicts, which functions, and whose sources.

A *site* is one place where a library looks before it compiles. The subtle rule is the key's completeness:
a site's key may leave out constants of the kernel's source, so `sources` names the packages whose text
belongs to it, and a place at which an integer is a device's number is named, because there the number must
not count. More sites come from the settings `cute_dicts` and `cute_functions`; a site of kind `call` is
listed nowhere: any function of an allowed package that has something compiled is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Literal, NamedTuple

SiteKind = Literal["dict", "function", "call"]


class Site(NamedTuple):
    """A dict or a function of a module, by its attribute."""

    kind: SiteKind
    module: str
    attribute: str
    sources: tuple[str, ...]
    # Places of a dict's key, a tuple, that hold a device's number.
    devices_at: tuple[int, ...] = ()

    @property
    def namespace(self) -> str:
        """The site's name in keys, records and messages."""
        return f"{self.module}:{self.attribute}"


class SiteError(ValueError):
    """A site of the settings cannot be read; the text shows the value and the form."""


def _functions(module: str, *names: str, sources: tuple[str, ...]) -> tuple[Site, ...]:
    return tuple(Site("function", module, name, sources) for name in names)


def _dicts(module: str, sources: tuple[str, ...] = (), **devices_at: tuple[int, ...]) -> tuple[Site, ...]:
    where = sources or (_package(module),)
    return tuple(Site("dict", module, name, where, at) for name, at in devices_at.items())


def _package(module: str) -> str:
    """The package a module lies in, whose other modules its kernels are made of; itself where it has none."""
    return module.rpartition(".")[0] or module


_KDA = ("flashinfer.kda_kernels", "flashinfer.version")
_TRT = "tensorrt_llm._torch.custom_ops.cute_dsl_kimi_k3_custom_ops"
_TRT_SOURCES = (_TRT, "tensorrt_llm._torch.attention.kernels.blackwell.kimi_k3_kda")

# Kernels that FlashInfer keeps on disk itself are not here: those are warmed in its own directory.
KNOWN: tuple[Site, ...] = (
    *_functions("flashinfer.kda_kernels.kda_chunked_bt16", "compile", sources=_KDA),
    *_functions(
        "flashinfer.kda_kernels.kda_chunked_bt16_small_bh", "_compile_k1", "_compile_k2", sources=_KDA
    ),
    *_functions("flashinfer.kda_kernels.packed_kda_decode_cute", "_get_compiled", sources=_KDA),
    *_functions("flashinfer.kda_kernels.recurrent_kda", "_get_compiled_kernel", sources=_KDA),
    # The device's number stands third in the keys of the first two, first in that of the third.
    *_dicts(_TRT, _TRT_SOURCES, _fused_k123_cache=(2,), _akk_inv_cache=(2,), _k4p_cache=(0,)),
    *_dicts("cula.ops.kda.decode.cute", ("cula.ops.kda",), _compiled_kernels=()),
    *_dicts("sglang.jit_kernel.cutedsl_gdn", _compiled_kernels=()),
    # Of its GDN for Hopper and of the prefills with context parallelism, which hand it their kernels.
    *_dicts(
        "flashinfer.gdn_kernels.delta_rule_dsl.custom_compile_cache",
        ("flashinfer.gdn_kernels", "flashinfer.version"),
        _in_mem_compile_cache=(),
    ),
)


# Kernel libraries of which parts are traced into the kernels of others, where they are installed.
COMPANIONS = ("quack",)


def calling(module: str, function: str) -> Site:
    """The site of a function that has kernels compiled. Which modules its kernels are made of nobody says, so
    its whole package is their source.
    """
    companions = tuple(name for name in COMPANIONS if find_spec(name) is not None)
    return Site("call", module, function, (module.partition(".")[0], *companions))


def sites(dicts: Iterable[str] = (), functions: Iterable[str] = ()) -> tuple[Site, ...]:
    """The known sites and those of the settings. Raises `SiteError`.

    The form is `module:attribute`, for a dict with the places of device numbers behind it: `module:cache@2`.
    """
    named = [_parse("dict", text) for text in dicts] + [_parse("function", text) for text in functions]
    return (*KNOWN, *named)


def _parse(kind: SiteKind, text: str) -> Site:
    name, _, places = text.partition("@")
    module, _, attribute = name.partition(":")
    valid = all(part.isidentifier() for part in (*module.split("."), attribute))
    try:
        devices_at = tuple(int(place) for place in places.split("+") if place)
    except ValueError:
        valid, devices_at = False, ()
    if not valid or (places and kind == "function"):
        raise SiteError(
            f"cute_{kind}s: {text!r} should be module:attribute"
            + (
                ", or module:attribute@2 when place 2 of the key is a device's number"
                if kind == "dict"
                else ""
            )
        )
    return Site(kind, module, attribute, (_package(module),), devices_at)
