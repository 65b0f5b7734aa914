"""From a Hugging Face `config.json` to the profile of one rank.

`architectures.py` knows a model's matrices; this module decides which of them engines give to DeepGEMM, in
which precision, and under which op. What engines give to another kernel is left out with a note in the
profile, so that a reader sees the whole model; what no engine could run is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from prefetchd.profiles.architectures import ARCHITECTURES, Gemm, ProfileError, Sizes, no_products
from prefetchd.profiles.layer_kernels import MAMBA, MAMBA_NOTE, Kernel
from prefetchd.profiles.model_sizes import ConfigError
from prefetchd.profiles.sites import Flag, GemmSite, KernelSite, Profile

# vLLM bounds the context it expands at once by a workspace of 64 Ki tokens; longer contexts go in pieces.
CONTEXT_TOKENS = 64 * 1024

# N and K must be multiples of these for an engine to choose DeepGEMM; otherwise it falls back to another
# kernel. FP8: activation scales cover 128 columns of K, weight scales 128 x 128, of which vLLM allows half a
# block in N for a dense weight. BF16: a tensor map's stride is a multiple of 16 bytes.
MULTIPLES = {
    ("fp8", False): (64, 128),
    ("fp8", True): (128, 128),
    ("bf16", False): (8, 8),
    ("bf16", True): (8, 8),
}

OPS = {
    "tokens": "{}_gemm_nt",
    "context": "{}_gemm_nt",
    "routed": "m_grouped_{}_gemm_nt_contiguous",
    "expected": "m_grouped_{}_gemm_nt_masked",
}


def profile_from_config(
    source: str | Path | Mapping[str, Any],
    *,
    tp: int = 1,
    ep: int = 1,
    dp: int = 1,
    quantization: str | None = None,
    context_tokens: int | None = None,
) -> Profile:
    """The profile of a Hugging Face configuration: its `config.json`, the folder of one, or its content.

    `quantization` ("fp8" or "bf16") overrides what the configuration says. `dp` ranks of attention send their
    tokens to the same experts. Raises `ProfileError`.
    """
    for what, value in (("tp", tp), ("ep", ep), ("dp", dp)):
        if value < 1:
            raise ProfileError(f"{what} = {value}: must be 1 or more")
    model, place, config = _config(source)
    try:
        return _profile(model, config, tp, ep, dp, quantization, context_tokens)
    except ConfigError as error:
        raise ProfileError(f"{place}: {error}") from error


def _profile(
    model: str,
    config: Mapping[str, Any],
    tp: int,
    ep: int,
    dp: int,
    quantization: str | None,
    context_tokens: int | None,
) -> Profile:
    name = _architecture(config)
    family = ARCHITECTURES[name]
    without_products = family.gemms is no_products
    # Where DeepGEMM has no part, a quantization that it cannot run is no obstacle.
    precision = "bf16" if without_products else _quantization(config, quantization)
    sizes = Sizes(config, tp=tp, ep=ep, quantized=precision == "fp8")
    # Overridden quantization means the weights were made anew, so the configuration's exceptions are gone.
    kept = _unconverted(config) if precision == "fp8" and quantization is None else frozenset[str]()
    sites, notes = _sites(family.gemms(sizes), precision, kept)
    kernels = tuple(_kernel_site(kernel) for kernel in family.kernels(sizes))
    if without_products:
        notes += [MAMBA_NOTE] if any(site.home == MAMBA for site in kernels) else []
        notes.append("matrix products are left out: engines run this architecture's by cuBLAS, not DeepGEMM")
    if not sites and not kernels:
        raise ProfileError(
            f"{model}: no site is left for DeepGEMM at tp = {tp}, ep = {ep}: {'; '.join(notes)}"
        )
    return Profile(
        model=model,
        architecture=name,
        tp=tp,
        ep=ep,
        dp=dp,
        quantization=precision,
        top_k=sizes.size(family.top_k_key) if family.top_k_key else 0,
        context_tokens=CONTEXT_TOKENS if context_tokens is None else context_tokens,
        notes=tuple(notes),
        gemms=_merged(sites),
        kernels=kernels,
    )


def _kernel_site(kernel: Kernel) -> KernelSite:
    flags: dict[str, Flag | tuple[Flag, ...]] = {"set": kernel.flag_set} if kernel.flag_set else {}
    return KernelSite(name=kernel.name, op=kernel.op, home=kernel.home, sizes=kernel.sizes, flags=flags)


def _config(source: str | Path | Mapping[str, Any]) -> tuple[str, str, Mapping[str, Any]]:
    """A model's name for people, where its configuration stands, and that."""
    if isinstance(source, Mapping):
        model = str(source.get("_name_or_path") or source.get("model_type") or "model")
        return model, f"configuration of {model}", source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as problem:
        raise ProfileError(
            f"{path}: cannot be read: {problem.strerror}; give a model's config.json"
        ) from problem
    except RecursionError:
        raise ProfileError(f"{path}: is nested too deeply; give a model's config.json") from None
    except ValueError as problem:
        raise ProfileError(f"{path}: is not JSON: {problem}; give a model's config.json") from problem
    if not isinstance(config, dict):
        raise ProfileError(
            f"{path}: holds a {type(config).__name__}, not an object; give a model's config.json"
        )
    return path.resolve().parent.name if path.name == "config.json" else path.stem, str(path), config


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ConfigError("the key 'architectures' is missing; add the model's class name as a list")
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            return name
    raise ConfigError(
        f"architectures = {names!r} is not known; known: {', '.join(sorted(ARCHITECTURES))}. For another "
        "model write a profile by hand: start from one of a known model, save it as NAME.profile.toml, and "
        "list your model's own matrices under [[gemms]] (name, op, n, k, m and, for experts, groups)"
    )


def _quantization(config: Mapping[str, Any], wanted: str | None) -> str:
    if wanted is not None:
        if wanted not in ("fp8", "bf16"):
            raise ProfileError(f"quantization = {wanted!r}: must be fp8 or bf16")
        return wanted
    found = config.get("quantization_config")
    if not found:
        return "bf16"
    if not isinstance(found, Mapping):
        raise ConfigError(f"quantization_config = {found!r}: must be an object")
    method, block = found.get("quant_method"), found.get("weight_block_size")
    if method == "fp8" and block == [128, 128]:
        return "fp8"
    raise ConfigError(
        f"quantization_config: quant_method = {method!r} with weight_block_size = {block!r} does not run on "
        "DeepGEMM, which takes FP8 in blocks of [128, 128]; give quantization = fp8 or bf16 to plan for that "
        "nevertheless"
    )


def _unconverted(config: Mapping[str, Any]) -> frozenset[str]:
    """Last names of the modules that the checkpoint keeps in BF16, in some layers or in all."""
    listed = config["quantization_config"].get("modules_to_not_convert") or []
    if not isinstance(listed, list):
        raise ConfigError(f"quantization_config.modules_to_not_convert = {listed!r}: must be a list of names")
    return frozenset(str(path).rpartition(".")[2] for path in listed)


def _sites(gemms: Iterable[Gemm], precision: str, kept: frozenset[str]) -> tuple[list[GemmSite], list[str]]:
    """The sites DeepGEMM serves, and a note for each matrix it does not."""
    sites: list[GemmSite] = []
    notes: list[str] = []
    for gemm in gemms:
        # A name is too little to tell which layers are meant, so both precisions are planned: one too many.
        for used in (precision, "bf16") if gemm.module in kept else (precision,):
            of_n, of_k = MULTIPLES[used, bool(gemm.groups)]
            if gemm.n % of_n or gemm.k % of_k:
                size = f"{gemm.n}x{gemm.k}"
                notes.append(f"{gemm.name}: {size} is left out: {used} needs N in {of_n}s and K in {of_k}s")
                continue
            name = f"{gemm.name}.{gemm.rule}" if gemm.groups else gemm.name
            name = name if used == precision else f"{name}.{used}"
            op = OPS[gemm.rule].format(used)
            sites.append(GemmSite(name=name, op=op, n=gemm.n, k=gemm.k, groups=gemm.groups, m=gemm.rule))
    return sites, list(dict.fromkeys(notes))


def _merged(sites: Iterable[GemmSite]) -> tuple[GemmSite, ...]:
    """Equal products once, under joined names; "context" holds every M of "tokens", so it stays."""
    merged: dict[tuple[str, int, int, int], GemmSite] = {}
    for site in sites:
        key = (site.op, site.n, site.k, site.groups)
        if key in merged:
            name = f"{merged[key].name} + {site.name}"
            rule = "context" if "context" in (merged[key].m, site.m) else site.m
            site = msgspec.structs.replace(site, name=name, m=rule)
        merged[key] = site
    return tuple(merged.values())
