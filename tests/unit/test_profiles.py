"""Sites of known models as engines launch them, the rules for M, and profile files edited by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetchd.profiles import (
    GemmSite,
    Profile,
    ProfileError,
    m_for_batch,
    m_ranges,
    profile_from_config,
    read_profile,
    write_profile,
)
from prefetchd.protocol import Batch

MODELS = Path(__file__).parents[2] / "examples/models"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def config(model: str, **changes: Any) -> dict[str, Any]:
    """A model's configuration; a change to None takes the key away."""
    merged = json.loads((MODELS / f"{model}.json").read_text()) | changes
    return {key: value for key, value in merged.items() if value is not None}


def shapes(profile: Profile) -> set[tuple[str, int, int, int, str]]:
    return {(site.op, site.groups, site.n, site.k, site.m) for site in profile.gemms}


def dense(kind: str, *sizes: str) -> set[tuple[str, int, int, int, str]]:
    """`4096x512 context` as the tuple of a dense site."""
    found = set()
    for text in sizes:
        size, _, rule = text.partition(" ")
        n, k = size.split("x")
        found.add((f"{kind}_gemm_nt", 0, int(n), int(k), rule or "tokens"))
    return found


def grouped(kind: str, groups: int, *sizes: str) -> set[tuple[str, int, int, int, str]]:
    """Both layouts of each grouped size."""
    found = set()
    for text in sizes:
        n, k = (int(part) for part in text.split("x"))
        found.add((f"m_grouped_{kind}_gemm_nt_contiguous", groups, n, k, "routed"))
        found.add((f"m_grouped_{kind}_gemm_nt_masked", groups, n, k, "expected"))
    return found


def site(**changes: Any) -> GemmSite:
    return GemmSite(**{"name": "s", "op": "fp8_gemm_nt", "n": 512, "k": 512, "m": "tokens"} | changes)


def profile(*gemms: GemmSite, **changes: Any) -> Profile:
    values: dict[str, Any] = dict(
        model="m", architecture="a", tp=1, ep=1, dp=1, quantization="fp8", top_k=8, context_tokens=65536
    )
    return Profile(**values | changes, gemms=gemms)


def numbers(ranges: tuple[range, ...]) -> set[int]:
    return {m for part in ranges for m in part}


# --- models ---------------------------------------------------------------------------------------------

DEEPSEEK_TP8 = dense(
    "fp8",
    "2112x7168",
    "3072x1536",
    "4096x512 context",
    "7168x2048",
    "4608x7168",
    "7168x2304",
    "512x7168",
    "7168x256",
)


def test_deepseek_v3_on_eight_ranks_without_expert_parallelism() -> None:
    found = profile_from_config(MODELS / "deepseek-v3.json", tp=8)

    assert shapes(found) == DEEPSEEK_TP8 | grouped("fp8", 256, "512x7168", "7168x256")
    assert len(found.gemms) == 12
    assert (found.quantization, found.top_k, found.alignment, found.context_tokens) == ("fp8", 8, 128, 65536)
    assert (found.model, found.architecture, found.notes) == ("deepseek-v3", "DeepseekV3ForCausalLM", ())


def test_expert_parallelism_divides_the_experts_and_not_their_width() -> None:
    found = profile_from_config(MODELS / "deepseek-v3.json", tp=8, ep=8)

    assert shapes(found) == DEEPSEEK_TP8 | grouped("fp8", 32, "4096x7168", "7168x2048")


def test_kimi_k2_is_read_as_deepseek_v3() -> None:
    found = profile_from_config(MODELS / "kimi-k2.json", tp=16, ep=16)

    assert grouped("fp8", 24, "4096x7168", "7168x2048") < shapes(found)
    assert dense("fp8", "2112x7168", "768x1536", "1024x512 context", "7168x512") < shapes(found)


def test_attention_without_a_query_latent_has_two_input_projections() -> None:
    found = profile_from_config(config("deepseek-v3", q_lora_rank=None), tp=8)

    assert dense("fp8", "3072x7168", "576x7168") < shapes(found)
    assert not dense("fp8", "2112x7168") & shapes(found)


def test_kimi_linear_lists_delta_attention_beside_latent_attention() -> None:
    found = profile_from_config(MODELS / "kimi-linear-48b-a3b.json", tp=2)

    assert shapes(found) == grouped("bf16", 256, "1024x2304", "2304x512") | dense(
        "bf16",
        "3072x2304",
        "576x2304",
        "4096x512 context",
        "2304x2048",
        "2048x2304",
        "6416x2304",
        "128x2304",
        "2048x128",
        "16x2304",
        "9216x2304",
        "2304x4608",
        "1024x2304",
        "2304x512",
    )
    names = [gemm.name for gemm in found.gemms]
    assert "kda.q_proj + kda.k_proj + kda.v_proj" in names
    assert "attention.o_proj + kda.o_proj" in names


def test_quantized_delta_attention_fuses_only_q_k_v() -> None:
    found = profile_from_config(MODELS / "kimi-linear-48b-a3b.json", tp=2, quantization="fp8")

    assert dense("fp8", "6144x2304") < shapes(found)
    assert not any(gemm.n == 6416 for gemm in found.gemms)
    # b_proj is one column a head: engines run it elsewhere, and the profile says so.
    assert any(note.startswith("kda.b_proj: 16x2304 is left out") for note in found.notes)


def test_qwen3_next_gates_attention_and_fuses_the_delta_net() -> None:
    found = profile_from_config(MODELS / "qwen3-next-80b-a3b.json", tp=1)

    assert shapes(found) == grouped("bf16", 512, "1024x2048", "2048x512") | dense(
        "bf16", "9216x2048", "2048x4096", "12288x2048", "64x2048", "1024x2048", "2048x512"
    )
    assert found.top_k == 10


def test_qwen3_next_without_an_output_gate() -> None:
    found = profile_from_config(config("qwen3-next-80b-a3b", attn_output_gate=False))

    assert dense("bf16", "5120x2048") < shapes(found)


def test_cached_heads_fewer_than_ranks_are_copied() -> None:
    found = profile_from_config(MODELS / "qwen3-next-80b-a3b.json", tp=4)

    assert dense("bf16", "2560x2048") < shapes(found)  # (2 x 4 + 2 x 1) heads of 256


def test_dense_models() -> None:
    llama = profile_from_config(MODELS / "llama-3.1-8b.json", tp=2)
    qwen = profile_from_config(MODELS / "qwen3-8b-fp8.json")

    assert shapes(llama) == dense("bf16", "3072x4096", "4096x2048", "14336x4096", "4096x7168")
    assert shapes(qwen) == dense("fp8", "6144x4096", "4096x4096", "24576x4096", "4096x12288")
    assert llama.top_k == 0


def test_qwen3_moe_lists_a_dense_mlp_only_where_layers_are_dense() -> None:
    plain = profile_from_config(MODELS / "qwen3-30b-a3b-fp8.json")
    mixed = profile_from_config(config("qwen3-30b-a3b-fp8", mlp_only_layers=[0]))

    assert shapes(plain) == dense("fp8", "5120x2048", "2048x4096") | grouped(
        "fp8", 128, "1536x2048", "2048x768"
    )
    assert shapes(mixed) - shapes(plain) == dense("fp8", "12288x2048", "2048x6144")


def test_modules_kept_in_bf16_are_planned_in_both_precisions() -> None:
    kept = {"modules_to_not_convert": ["model.layers.0.self_attn.q_proj", "lm_head"]}
    found = profile_from_config(config("qwen3-8b-fp8", quantization_config=FP8 | kept))

    added = {gemm.name: gemm.op for gemm in found.gemms if gemm.op.startswith("bf16")}
    assert added == {"attention.qkv_proj.bf16": "bf16_gemm_nt"}
    assert dense("fp8", "6144x4096") < shapes(found)


def test_equal_products_are_listed_once_and_keep_the_wider_rule() -> None:
    # kv_b_proj is 512x512 here, as is o_proj: the context rule covers what o_proj needs.
    small = config(
        "tiny-deepseek-fp8", num_attention_heads=4, kv_lora_rank=512, v_head_dim=64, qk_nope_head_dim=64
    )
    found = profile_from_config(small | {"hidden_size": 512}, tp=1)

    same = [gemm for gemm in found.gemms if (gemm.op, gemm.n, gemm.k) == ("fp8_gemm_nt", 512, 512)]
    assert [gemm.m for gemm in same] == ["context"]
    assert "attention.kv_b_proj + " in same[0].name


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.json")), ids=lambda path: path.stem)
def test_every_example_model_gives_distinct_sites(path: Path) -> None:
    found = profile_from_config(path)

    keys = [(gemm.op, gemm.n, gemm.k, gemm.groups) for gemm in found.gemms]
    assert len(keys) == len(set(keys)) >= 4


def test_source_may_be_a_folder_or_a_mapping(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config("tiny-dense-fp8")))

    assert profile_from_config(folder).model == "My-Model"
    assert profile_from_config(str(folder / "config.json")).model == "My-Model"
    assert profile_from_config(config("tiny-dense-fp8")).model == "qwen3"


def test_overriding_quantization_and_context() -> None:
    found = profile_from_config(MODELS / "deepseek-v3.json", tp=8, quantization="bf16", context_tokens=131072)

    assert {gemm.op for gemm in found.gemms} == {
        "bf16_gemm_nt",
        "m_grouped_bf16_gemm_nt_contiguous",
        "m_grouped_bf16_gemm_nt_masked",
    }
    assert found.context_tokens == 131072


def test_width_below_the_scale_block_is_left_out_with_a_note() -> None:
    found = profile_from_config(MODELS / "qwen3-30b-a3b-fp8.json", tp=4)

    # 768 / 4 = 192 wide experts: down's K is no multiple of 128.
    assert grouped("fp8", 128, "384x2048") < shapes(found)
    assert found.notes == ("experts.down_proj: 2048x192 is left out: fp8 needs N in 128s and K in 128s",)


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({"architectures": None}, {}, ["'architectures' is missing"]),
        (
            {"architectures": ["GptForCausalLM"]},
            {},
            ["GptForCausalLM", "DeepseekV3ForCausalLM", ".profile.toml"],
        ),
        ({"hidden_size": None}, {}, ["'hidden_size' is missing"]),
        ({"kv_lora_rank": None}, {}, ["'kv_lora_rank' is missing"]),
        ({"num_experts_per_tok": None}, {}, ["'num_experts_per_tok' is missing"]),
        ({"hidden_size": "big"}, {}, ["hidden_size = 'big'"]),
        ({"hidden_size": 0}, {}, ["hidden_size = 0"]),
        ({"hidden_size": True}, {}, ["hidden_size = True"]),
        ({}, {"tp": 3}, ["num_attention_heads = 128", "tp = 3"]),
        ({}, {"ep": 3}, ["n_routed_experts = 256", "ep = 3"]),
        ({}, {"tp": 0}, ["tp = 0"]),
        ({}, {"dp": -1}, ["dp = -1"]),
        ({}, {"quantization": "int4"}, ["quantization = 'int4'", "fp8 or bf16"]),
        ({}, {"context_tokens": 0}, ["context_tokens = 0"]),
        ({"quantization_config": {"quant_method": "awq"}}, {}, ["'awq'", "quantization = fp8 or bf16"]),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, ["weight_block_size = None"]),
        ({"quantization_config": 3}, {}, ["quantization_config = 3"]),
    ],
)
def test_bad_configuration_names_the_key(
    changes: dict[str, Any], arguments: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ProfileError) as caught:
        profile_from_config(config("deepseek-v3", **changes), **arguments)

    assert all(word in str(caught.value) for word in words)


def test_nested_key_is_named_in_full() -> None:
    with pytest.raises(ProfileError, match=r"'linear_attn_config\.head_dim' is missing"):
        profile_from_config(config("kimi-linear-48b-a3b", linear_attn_config={"num_heads": 32}))


def test_no_site_left_is_an_error_with_the_reasons() -> None:
    odd = config("tiny-dense-fp8", hidden_size=100, head_dim=25, intermediate_size=100)
    with pytest.raises(ProfileError, match=r"no site is left.*attention\.qkv_proj"):
        profile_from_config(odd)


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot be read"), ("{", "not JSON"), ("[]", "list"), ("\xff", "not JSON")]
)
def test_unreadable_configuration_file(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")

    with pytest.raises(ProfileError, match=f"{path}.*{words}"):
        profile_from_config(path)


# --- M --------------------------------------------------------------------------------------------------


@given(st.integers(1, 20000))
def test_tokens_and_expected_are_every_m_up_to_the_limit(limit: int) -> None:
    plain, masked = site(), site(name="e", m="expected", groups=4)

    assert m_ranges(plain, profile(plain), limit) == (range(1, limit + 1),)
    assert m_ranges(masked, profile(masked), limit) == (range(1, limit + 1),)


def test_routed_is_every_multiple_of_the_alignment_up_to_full_padding() -> None:
    routed = site(m="routed", groups=256)

    assert m_ranges(routed, profile(routed), 8192) == (range(128, 8192 * 8 + 256 * 127 + 1, 128),)


@given(
    counts=st.lists(st.integers(0, 300), min_size=1, max_size=16),
    top_k=st.integers(1, 8),
    alignment=st.sampled_from([1, 16, 128]),
    ep=st.sampled_from([1, 2]),
)
def test_routed_holds_every_layout_of_the_experts_rows(
    counts: list[int], top_k: int, alignment: int, ep: int
) -> None:
    # Rows of each local expert; with one rank all of a batch's rows are here, otherwise some are elsewhere.
    tokens = -(-sum(counts) // top_k)
    counts = [*counts[:-1], counts[-1] + (tokens * top_k - sum(counts) if ep == 1 else 0)]
    routed = site(m="routed", groups=len(counts))
    of = profile(routed, top_k=top_k, alignment=alignment, ep=ep)
    laid_out = sum(-(-count // alignment) * alignment for count in counts)

    if tokens:
        assert laid_out == 0 or laid_out in m_for_batch(routed, of, Batch(tokens=tokens))
        assert laid_out == 0 or laid_out in numbers(m_ranges(routed, of, tokens))


@given(tokens=st.integers(1, 600), limit=st.integers(600, 9000), groups=st.sampled_from([1, 32, 256]))
def test_buffer_sized_without_counts_is_in_the_universe(tokens: int, limit: int, groups: int) -> None:
    routed = site(m="routed", groups=groups)
    buffer = -(-(limit * 8 + groups * 127) // 128) * 128

    assert buffer in numbers(m_ranges(routed, profile(routed), limit))
    assert set(m_for_batch(routed, profile(routed), Batch(tokens=tokens))) <= numbers(
        m_ranges(routed, profile(routed), limit)
    )


def test_data_parallel_ranks_send_their_tokens_to_the_same_experts() -> None:
    routed = site(m="routed", groups=2)

    assert m_ranges(routed, profile(routed, dp=2, top_k=1), 128) == (range(128, 513, 128),)


@given(limit=st.integers(1, 3000), context=st.integers(1, 5000))
def test_context_meets_every_window_of_sixteen_rows(limit: int, context: int) -> None:
    expand = site(m="context")
    found = m_ranges(expand, profile(expand, context_tokens=context), limit)

    assert set(range(1, limit + 1)) <= numbers(found)
    windows = {(m - 1) // 16 for m in numbers(found)}
    assert windows == {(m - 1) // 16 for m in range(1, max(limit, context) + 1)}
    assert max(numbers(found)) == max(limit, context)
    # Disjoint parts: nothing is traced twice.
    assert sum(len(part) for part in found) == len(numbers(found))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1..4096", (range(1, 4097),)),
        ("64..1024/64, 2048", (range(64, 1025, 64), range(2048, 2049))),
        (" 7 ", (range(7, 8),)),
        ("1 .. 9 / 4,16", (range(1, 10, 4), range(16, 17))),
    ],
)
def test_listed_ranges_stand_whatever_the_limit(text: str, expected: tuple[range, ...]) -> None:
    listed = site(m=text)

    assert m_ranges(listed, profile(listed), 16) == expected


@pytest.mark.parametrize(
    "text", ["", "token", "1..", "9..1", "0..4", "1..9/0", "1,,2", "1.5", "-3", "1..2..3"]
)
def test_bad_rule_names_site_and_text(text: str) -> None:
    with pytest.raises(ProfileError) as caught:
        site(name="attention.o_proj", m=text)

    assert "attention.o_proj" in str(caught.value)
    assert f"m = {text!r}" in str(caught.value)


def test_limit_below_one_is_refused() -> None:
    with pytest.raises(ProfileError, match="max_tokens = 0"):
        m_ranges(site(), profile(site()), 0)


@pytest.mark.parametrize(
    ("changes", "batch", "expected"),
    [
        ({}, Batch(tokens=300), (300,)),
        ({}, Batch(tokens=0), ()),
        ({"m": "routed", "groups": 4}, Batch(tokens=0), ()),
        ({"m": "context"}, Batch(tokens=300, prefill_lengths=(200, 90), decodes=10), (290, 300)),
        ({"m": "context"}, Batch(tokens=8, decodes=8), (8,)),
        # 16 tokens x 8 in 4 experts: 32 each; or 33; 48 with a margin of a half; 16 as the bound.
        ({"m": "expected", "groups": 4}, Batch(tokens=16), (16, 32, 33, 48)),
        ({"m": "routed", "groups": 2}, Batch(tokens=16), (128, 256, 384)),
        ({"m": "8..64/8, 256"}, Batch(tokens=9), (16,)),
        ({"m": "8..64/8, 256"}, Batch(tokens=65), (256,)),
        ({"m": "8..64/8, 256"}, Batch(tokens=257), ()),
        ({"m": "256, 8..64/8"}, Batch(tokens=1), (8,)),
    ],
)
def test_batch_gives_the_ms_of_its_step(
    changes: dict[str, Any], batch: Batch, expected: tuple[int, ...]
) -> None:
    one = site(**changes)

    assert m_for_batch(one, profile(one), batch) == expected


@given(
    tokens=st.integers(1, 512),
    rule=st.sampled_from(["tokens", "routed", "context", "3..600/7"]),
    prefills=st.lists(st.integers(1, 40), max_size=5),
)
def test_what_a_batch_asks_for_is_in_the_universe(tokens: int, rule: str, prefills: list[int]) -> None:
    one = site(m=rule, groups=8 if rule == "routed" else 0)
    batch = Batch(tokens=max(tokens, sum(prefills)), prefill_lengths=tuple(prefills))

    asked = m_for_batch(one, profile(one), batch)

    assert set(asked) <= numbers(m_ranges(one, profile(one), 512))
    assert list(asked) == sorted(set(asked))


# --- structs and files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "name is empty"),
        ({"op": ""}, "op is empty"),
        ({"n": 0}, "n = 0"),
        ({"k": -1}, "k = -1"),
        ({"groups": -1}, "groups = -1"),
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
    n=st.integers(1, 2**40),
    k=st.integers(1, 2**40),
    groups=st.integers(1, 512),
    m=st.sampled_from(["tokens", "routed", "expected", "context", "1..9, 64..128/16"]),
    options=st.dictionaries(texts, st.one_of(st.booleans(), st.integers(-(2**40), 2**40), texts), max_size=3),
)


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
