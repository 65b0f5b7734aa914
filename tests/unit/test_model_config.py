"""Sites of known models as engines launch them, and what a configuration must say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefetchd.profiles import Profile, ProfileError, profile_from_config

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
    assert len(keys) == len(set(keys))
    assert len(keys) >= 4 or found.kernels


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
        ({"quantization_config": FP8 | {"modules_to_not_convert": 5}}, {}, ["modules_to_not_convert = 5"]),
        (
            {"quantization_config": FP8 | {"modules_to_not_convert": "gate"}},
            {},
            ["modules_to_not_convert = 'gate'"],
        ),
        ({"architectures": [["DeepseekV3ForCausalLM"]]}, {}, ["[['DeepseekV3ForCausalLM']]"]),
        ({"hidden_size": 2**31}, {}, ["hidden_size = 2147483648"]),
    ],
)
def test_bad_configuration_names_the_key(
    changes: dict[str, Any], arguments: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ProfileError) as caught:
        profile_from_config(config("deepseek-v3", **changes), **arguments)

    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "changes",
    [{"architectures": None}, {"architectures": ["Gpt"]}, {"hidden_size": None}, {"hidden_size": "big"},
     {"quantization_config": 3}, {"quantization_config": {"quant_method": "awq"}}],
)  # fmt: skip
def test_bad_configuration_names_the_file_it_was_read_from(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "my-model.json"
    path.write_text(json.dumps(config("deepseek-v3", **changes)))

    with pytest.raises(ProfileError, match=f"^{path}: ") as caught:
        profile_from_config(path)

    assert "config.json" not in str(caught.value)


def test_nested_key_is_named_in_full() -> None:
    with pytest.raises(ProfileError, match=r"'linear_attn_config\.head_dim' is missing"):
        profile_from_config(config("kimi-linear-48b-a3b", linear_attn_config={"num_heads": 32}))


def test_no_site_left_is_an_error_with_the_reasons() -> None:
    odd = config("tiny-dense-fp8", hidden_size=100, head_dim=25, intermediate_size=100)
    with pytest.raises(ProfileError, match=r"no site is left.*attention\.qkv_proj"):
        profile_from_config(odd)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ("[]", "list"),
        ("\xff", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_unreadable_configuration_file(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")

    with pytest.raises(ProfileError, match=f"{path}.*{words}"):
        profile_from_config(path)


def test_configuration_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("tiny-dense-fp8")), encoding="utf-8-sig")

    assert profile_from_config(tmp_path).gemms == profile_from_config(MODELS / "tiny-dense-fp8.json").gemms


def kernels(profile: Profile) -> dict[str, dict[str, int]]:
    return {site.op: site.sizes for site in profile.kernels}


@pytest.mark.parametrize(("tp", "heads"), [(1, 32), (4, 8), (8, 4)])
def test_kda_heads_are_divided_and_their_width_is_not(tp: int, heads: int) -> None:
    found = profile_from_config(MODELS / "kimi-linear-48b-a3b.json", tp=tp)

    assert kernels(found) == {
        "chunk_kda": {"heads": heads, "key_dim": 128, "value_dim": 128},
        "fused_recurrent_kda": {"heads": heads, "key_dim": 128, "value_dim": 128},
        "fused_kda_gate": {"heads": heads, "key_dim": 128},
        "kda_short_conv": {"key_channels": heads * 128, "value_channels": heads * 128, "conv": 4},
        "kda_gated_norm": {"heads": heads, "dim": 128},
    }
    assert {(site.home, site.flags["set"]) for site in found.kernels} == {("fla", "vllm")}


def test_gated_delta_net_has_fewer_key_heads_than_value_heads() -> None:
    found = kernels(profile_from_config(MODELS / "qwen3-next-80b-a3b.json", tp=2))

    assert found["chunk_gated_delta_rule"] == {
        "heads": 8,
        "value_heads": 16,
        "key_dim": 128,
        "value_dim": 128,
    }
    assert found["gdn_short_conv"] == {"key_channels": 1024, "value_channels": 2048, "conv": 4}
    assert found["fused_gdn_gate"] == {"heads": 16}


@pytest.mark.parametrize(
    ("model", "tp", "sizes"),
    [
        ("nemotron-h-8b", 8, {"heads": 16, "groups": 1, "chunk": 128}),
        ("mamba2-codestral-7b", 1, {"heads": 128, "groups": 8, "chunk": 256}),
    ],
)
def test_mamba2_layers_are_listed_without_products(model: str, tp: int, sizes: dict[str, int]) -> None:
    found = profile_from_config(MODELS / f"{model}.json", tp=tp)

    expected = {"head_dim": 64, "state": 128, "conv": 4, **sizes}
    assert kernels(found) == dict.fromkeys(["mamba2_prefill", "mamba2_decode", "gated_norm"], expected)
    assert {site.home for site in found.kernels} == {"mamba_ssm"}
    assert found.gemms == ()
    assert ["causal_conv1d" in note for note in found.notes] == [True, False]
    assert "cuBLAS" in found.notes[1]


def test_quantization_unknown_to_deepgemm_is_no_obstacle_without_products() -> None:
    found = profile_from_config(config("nemotron-h-8b", quantization_config={"quant_method": "modelopt"}))

    assert found.quantization == "bf16"


def test_a_single_group_is_copied_to_every_rank() -> None:
    found = profile_from_config(config("mamba2-codestral-7b", n_groups=1), tp=4)

    assert kernels(found)["mamba2_prefill"]["groups"] == 1


@pytest.mark.parametrize(
    ("model", "changes", "tp", "words"),
    [
        ("qwen3-next-80b-a3b", {"linear_num_key_heads": 12}, 8, "linear_num_key_heads = 12"),
        ("mamba2-codestral-7b", {}, 16, "n_groups = 8 is neither 1 nor divisible by tp = 16"),
        ("mamba2-codestral-7b", {"num_heads": 100}, 8, "num_heads = 100 is not divisible by tp = 8"),
        ("nemotron-h-8b", {"mamba_head_dim": None}, 1, "'mamba_head_dim' is missing"),
        ("nemotron-h-8b", {"conv_kernel": 0}, 1, "conv_kernel = 0"),
        ("qwen3-8b-fp8", {"num_key_value_heads": 0}, 1, "num_key_value_heads = 0"),
    ],
)
def test_layer_that_cannot_be_divided_or_read_names_the_key(
    model: str, changes: dict[str, Any], tp: int, words: str
) -> None:
    with pytest.raises(ProfileError, match=words):
        profile_from_config(config(model, **changes), tp=tp)
