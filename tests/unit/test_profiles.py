"""Profiles as values and as files that people edit: what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetchd.profiles import (
    GemmSite,
    KernelSite,
    Profile,
    ProfileError,
    profile_from_config,
    read_profile,
    write_profile,
)

MODELS = Path(__file__).parents[2] / "examples/models"


def site(**changes: Any) -> GemmSite:
    values: dict[str, Any] = {"name": "s", "op": "fp8_gemm_nt", "n": 512, "k": 512, "m": "tokens"}
    return GemmSite(**values | changes)


def kernel(**changes: Any) -> KernelSite:
    values: dict[str, Any] = {"name": "kda.chunk", "op": "chunk_kda", "sizes": {"heads": 4}}
    return KernelSite(**values | changes)


def profile(*gemms: GemmSite, **changes: Any) -> Profile:
    values: dict[str, Any] = dict(
        model="m", architecture="a", tp=1, ep=1, dp=1, quantization="fp8", top_k=8, context_tokens=65536
    )
    return Profile(**values | changes, gemms=gemms)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "name is empty"),
        ({"op": ""}, "op is empty"),
        ({"n": 0}, "n = 0"),
        ({"k": -1}, "k = -1"),
        ({"groups": -1}, "groups = -1"),
        ({"n": 2**31}, "n = 2147483648: must be 2147483647 or less"),
        ({"m": "1..99999999999"}, "1..99999999999"),
        ({"m": "routed"}, "groups = 0"),
        ({"m": "expected"}, "groups = 0"),
    ],
)
def test_impossible_site_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        site(**changes)


@pytest.mark.parametrize(
    ("gemms", "changes", "words"),
    [
        ([site(), site()], {}, "'s': the name occurs twice"),
        ([site(m="routed", groups=2)], {"top_k": 0}, "top_k = 0"),
        ([], {"tp": 0}, "tp = 0"),
        ([], {"alignment": 0}, "alignment = 0"),
        ([], {"top_k": -1}, "top_k = -1"),
        ([], {"version": 2}, "version = 2"),
    ],
)
def test_impossible_profile_is_refused(gemms: list[GemmSite], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        profile(*gemms, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "name is empty"),
        ({"op": ""}, "op is empty"),
        ({"home": ""}, "home is empty"),
        ({"sizes": {"heads": 4, "key_dim": 0}}, "'kda.chunk': key_dim = 0"),
    ],
)
def test_impossible_kernel_site_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        kernel(**changes)


def test_a_kernel_may_not_have_the_name_of_a_product() -> None:
    with pytest.raises(ProfileError, match="'s': the name occurs twice"):
        profile(site(), kernels=(kernel(name="s"),))


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.json")), ids=lambda path: path.stem)
def test_written_model_reads_back_equal(tmp_path: Path, path: Path) -> None:
    made = profile_from_config(path, ep=2 if "experts" in path.read_text() else 1)

    write_profile(made, tmp_path / "x.profile.toml")

    assert read_profile(tmp_path / "x.profile.toml") == made


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
sites = st.builds(
    GemmSite,
    name=texts,
    op=texts,
    n=st.integers(1, 2**31 - 1),
    k=st.integers(1, 2**31 - 1),
    groups=st.integers(1, 512),
    m=st.sampled_from(["tokens", "routed", "expected", "context", "1..9, 64..128/16"]),
    options=st.dictionaries(texts, st.one_of(st.booleans(), st.integers(-(2**40), 2**40), texts), max_size=3),
)


flags = st.one_of(st.booleans(), st.integers(-(2**40), 2**40), texts)
kernels = st.builds(
    KernelSite,
    name=texts,
    op=texts,
    home=texts,
    sizes=st.dictionaries(texts, st.integers(1, 2**31 - 1), max_size=3),
    flags=st.dictionaries(texts, st.one_of(flags, st.lists(flags, max_size=3).map(tuple)), max_size=3),
)


@given(
    found=st.lists(kernels, max_size=4, unique_by=lambda site: site.name),
)
def test_any_written_kernel_sites_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, found: list[KernelSite]
) -> None:
    made = profile(kernels=tuple(found))
    path = tmp_path_factory.getbasetemp() / "kernels.profile.toml"

    write_profile(made, path)

    assert read_profile(path) == made


@given(
    gemms=st.lists(sites, max_size=4, unique_by=lambda gemm: gemm.name),
    words=st.lists(texts, max_size=3),
    name=texts,
)
def test_any_written_profile_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, gemms: list[GemmSite], words: list[str], name: str
) -> None:
    made = profile(*gemms, model=name, notes=tuple(words))
    path = tmp_path_factory.getbasetemp() / "any.profile.toml"

    write_profile(made, path)

    assert read_profile(path) == made


def test_profile_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "mine.profile.toml"
    path.write_text(
        'model = "mine"\narchitecture = "Mine"\ntp = 1\nep = 1\ndp = 1\nquantization = "fp8"\n'
        'context_tokens = 1024\n[[gemms]]\nname = "proj"\nop = "fp8_gemm_nt"\nn = 64\nk = 128\n'
        'm = "1..64"\noptions = { out = "float", compiled = true, split = 2 }\n'
    )

    found = read_profile(path)

    assert found.gemms == (
        site(name="proj", n=64, k=128, m="1..64", options={"out": "float", "compiled": True, "split": 2}),
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("quantization", "quantisation"), ["unknown key 'quantisation'", "did you mean 'quantization'"]),
        (("groups", "group"), ["gemms number 9 (experts.gate_up_proj.routed)", "did you mean 'groups'"]),
        (("n = 2112", 'n = "2112"'), ["gemms number 1 (attention.fused_qkv_a_proj)", "n = '2112'"]),
        (('m = "context"', 'm = "contxt"'), ["attention.kv_b_proj", "'contxt'", "tokens, routed"]),
        (("n = 2112\n", ""), ["gemms number 1", "'n' is missing"]),
        (("tp = 8\n", ""), ["'tp' is missing"]),
        (("top_k = 8", "top_k = 0"), ["experts.gate_up_proj.routed", "top_k = 0"]),
        (("n = 2112", "n = 2112 2"), ["not valid TOML"]),
        (("version = 1", "version = 9"), ["version = 9"]),
        (("[[gemms]]", "[gems]"), ["not valid TOML"]),
    ],
)
def test_edited_profile_with_a_mistake_names_it(
    tmp_path: Path, change: tuple[str, str], words: list[str]
) -> None:
    path = tmp_path / "x.profile.toml"
    write_profile(profile_from_config(MODELS / "deepseek-v3.json", tp=8), path)
    path.write_text(path.read_text().replace(*change))

    with pytest.raises(ProfileError) as caught:
        read_profile(path)

    assert all(word in str(caught.value) for word in [str(path), *words])


def test_kernel_sites_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "mine.profile.toml"
    path.write_text(
        'model = "mine"\narchitecture = "Mine"\ntp = 1\nep = 1\ndp = 1\nquantization = "bf16"\n'
        'context_tokens = 1024\n[[kernels]]\nname = "a"\nop = "chunk_kda"\n[kernels.sizes]\nheads = 4\n'
        '[kernels.flags]\nset = ["vllm", "fla-layer"]\nindex_dtype = "int64"\n'
        '[[kernels]]\nname = "b"\nop = "chunk_kda"\nhome = "my.engine.kda"\nsizes = { heads = 8 }\n'
    )

    found = read_profile(path)

    assert found.gemms == ()
    assert found.kernels == (
        kernel(name="a", flags={"set": ("vllm", "fla-layer"), "index_dtype": "int64"}),
        kernel(name="b", home="my.engine.kda", sizes={"heads": 8}),
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('home = "fla"', 'hom = "fla"'), ["kernels number 1 (kda.chunk)", "did you mean 'home'"]),
        (('"heads" = 4', '"heads" = "4"'), ["kernels number 1 (kda.chunk)", "sizes ="]),
        (('"heads" = 4', '"heads" = 0'), ["kda.chunk", "heads = 0"]),
        (('"set" = "vllm"', '"set" = 1.5'), ["kernels number 1 (kda.chunk)", "flags ="]),
        (('op = "chunk_kda"\n', ""), ["kernels number 1", "'op' is missing"]),
    ],
)
def test_edited_kernel_site_with_a_mistake_names_it(
    tmp_path: Path, change: tuple[str, str], words: list[str]
) -> None:
    path = tmp_path / "x.profile.toml"
    write_profile(profile_from_config(MODELS / "kimi-linear-48b-a3b.json", tp=8), path)
    assert change[0] in path.read_text()
    path.write_text(path.read_text().replace(*change))

    with pytest.raises(ProfileError) as caught:
        read_profile(path)

    assert all(word in str(caught.value) for word in [str(path), *words])


def test_kernels_must_be_a_list_of_tables(tmp_path: Path) -> None:
    path = tmp_path / "x.profile.toml"
    path.write_text("kernels = 3\n")

    with pytest.raises(ProfileError, match=r"begin each site with a line \[\[kernels\]\]"):
        read_profile(path)


def test_gemms_must_be_a_list_of_tables(tmp_path: Path) -> None:
    path = tmp_path / "x.profile.toml"
    path.write_text("gemms = 3\n")

    with pytest.raises(ProfileError, match=r"begin each site with a line \[\[gemms\]\]"):
        read_profile(path)


def test_profile_needs_its_ending_and_an_existing_file(tmp_path: Path) -> None:
    made = profile_from_config(MODELS / "tiny-dense-fp8.json")

    with pytest.raises(ProfileError, match=r"ends in \.profile\.toml"):
        write_profile(made, tmp_path / "x.toml")
    with pytest.raises(ProfileError, match="cannot be read"):
        read_profile(tmp_path / "gone.profile.toml")


def test_profile_survives_the_wire() -> None:
    made = profile_from_config(MODELS / "deepseek-v3.json", tp=8)

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Profile) == made
