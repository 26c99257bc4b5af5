"""Published sizes made small: every kind of layer stays, what must divide divides, and odd flags are not touched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.check.conftest import LLAMA
from vllm_overlay.model_shape import ATTENTION_HEADS, HIDDEN, KV_HEADS, LAYERS, ConfigError, find_text_config, read_size
from vllm_overlay.rehearsal.depth import MOST_LAYERS, choose_layers, list_fields, map_layer_ids
from vllm_overlay.rehearsal.shrink import shrink

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FIRST_FOUR = (0, 1, 2, 3)

# The layers that are kept, and a few fields of the small text model, by what they must be.
EXPECTED: Mapping[str, tuple[tuple[int, ...], Mapping[str, Any]]] = {
    "kimi_k25": (FIRST_FOUR, {"first_k_dense_replace": 1, "n_routed_experts": 8, "kv_lora_rank": 512}),
    "deepseek_v3": (FIRST_FOUR, {"first_k_dense_replace": 3, "n_group": 2, "topk_group": 1, "hidden_size": 256}),
    "llama": (FIRST_FOUR, {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "mixtral": (FIRST_FOUR, {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1792}),
    "gpt2": (FIRST_FOUR, {"n_embd": 256, "n_head": 4, "n_positions": 1024}),
    "qwen3_moe": (FIRST_FOUR, {"head_dim": 128, "hidden_size": 256, "moe_intermediate_size": 128}),
    "qwen3_next": (FIRST_FOUR, {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}),
    "gemma3": (tuple(range(6)), {"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "sliding_window": 64}),
    "qwen2_vl": (FIRST_FOUR, {"hidden_size": 512}),
    "gpt_oss": (FIRST_FOUR, {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    # Attention first comes at the tenth layer; an index list is of the layers that are kept.
    "bamba": (tuple(range(10)), {"attn_layer_indices": [9], "mamba_n_heads": 16}),
    # Attention every eighth layer, experts every second: the periods stay.
    "jamba": (tuple(range(8)), {"attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2}),
    # The first 10 are sparse, the last 15 of 35 share the cache of earlier ones: the first of each kind is taken.
    "gemma3n": (
        (0, 4, 10, 14, 20, 24),
        {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3},
    ),
    "zamba2": (tuple(range(7)), {"hybrid_layer_ids": [6], "attention_hidden_size": 640}),
}


def read(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return config


def test_every_published_shape_is_expected() -> None:
    assert {file.stem for file in CONFIGS.glob("*.json")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_layers_and_sizes(name: str) -> None:
    small = shrink(read(name))
    text = find_text_config(small.config)[1]
    layers, fields = EXPECTED[name]
    assert small.layers == layers
    assert read_size(text, LAYERS) == len(layers)
    assert {field: text[field] for field in fields} == fields


@pytest.mark.parametrize("name", EXPECTED)
def test_each_kind_of_layer_is_kept_in_order(name: str) -> None:
    whole = read(name)
    small = shrink(whole)
    text, small_text = find_text_config(whole)[1], find_text_config(small.config)[1]
    for before, after in zip(
        list_fields(text, read_size(text, LAYERS) or 0), list_fields(small_text, len(small.layers)), strict=False
    ):
        if len(set(before.kinds)) <= 6 and not before.path[-1].endswith("_size"):
            assert list(dict.fromkeys(after.kinds)) == list(dict.fromkeys(before.kinds)), before.path


@pytest.mark.parametrize("name", EXPECTED)
def test_what_must_divide_divides(name: str) -> None:
    """By two ranks too."""
    text = find_text_config(shrink(read(name)).config)[1]
    hidden, heads = read_size(text, HIDDEN), read_size(text, ATTENTION_HEADS)
    assert hidden is not None and heads is not None
    kv_heads = read_size(text, KV_HEADS) or heads
    assert hidden % 64 == 0 and heads % 2 == 0 and heads % kv_heads == 0
    assert kv_heads == 1 or kv_heads % 2 == 0
    experts = next((text[one] for one in ("n_routed_experts", "num_experts", "num_local_experts") if one in text), 8)
    groups, top_groups = text.get("n_group", 1), text.get("topk_group", 1)
    assert experts % groups == 0 and top_groups <= groups
    assert text.get("num_experts_per_tok", 1) <= experts // groups * top_groups


@pytest.mark.parametrize("name", EXPECTED)
def test_tokens_keep_their_meanings_apart(name: str) -> None:
    def list_tokens(config: Mapping[str, Any]) -> list[tuple[str, int]]:
        found = []
        for field, value in config.items():
            if isinstance(value, dict):
                found += list_tokens(value)
            elif field.endswith(("_token_id", "_token_index")):
                found += [(field, one) for one in (value if isinstance(value, list) else [value])]
        return found

    whole = read(name)
    small = shrink(whole)
    before, after = list_tokens(whole), list_tokens(small.config)
    vocabulary = find_text_config(small.config)[1]["vocab_size"]
    assert [field for field, _ in before] == [field for field, _ in after]
    assert all(0 <= token < vocabulary for _, token in after)
    renamed = {(old, new) for (_, old), (_, new) in zip(before, after, strict=True)}
    assert len({old for old, _ in renamed}) == len({new for _, new in renamed}) == len(renamed)
    assert {new for _, new in renamed} <= set(small.special_ids)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_small_model_is_small_enough(name: str) -> None:
    small = shrink(read(name)).config
    assert shrink(small).config == small


def test_flags_of_kimi_k25_are_not_touched() -> None:
    whole, small = read("kimi_k25"), shrink(read("kimi_k25"))
    changed = {change.path for change in small.changes}
    text, small_text = whole["text_config"], small.config["text_config"]
    kept = {name for name in text if f"text_config.{name}" not in changed}
    assert {"scoring_func", "topk_method", "routed_scaling_factor", "rope_scaling", "qk_rope_head_dim"} <= kept
    assert {name: text[name] for name in kept} == {name: small_text[name] for name in kept}
    assert small.quantised == ("compressed-tensors",)
    assert "quantization_config" not in small_text
    assert small.config["vision_config"]["mm_hidden_size"] == small_text["hidden_size"] == 448
    assert small.config["vision_config"]["num_hidden_layers"] == 2
    assert small.config["vision_config"]["hidden_size"] == 1152
    assert whole == read("kimi_k25")


def test_what_changed_is_told() -> None:
    changes = {change.path: (change.old, change.new) for change in shrink(read("gpt2")).changes}
    assert changes == {
        "vocab_size": (50257, 512),
        "n_embd": (768, 256),
        "n_layer": (12, 4),
        "n_head": (12, 4),
        "bos_token_id": (50256, 511),
        "eos_token_id": (50256, 511),
    }


def test_lists_of_layers_that_count_from_1() -> None:
    """As Kimi-Linear's do."""
    text = {
        **read("llama"),
        "num_hidden_layers": 8,
        "linear_attn_config": {"kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8], "num_heads": 32},
    }
    small = shrink(text)
    assert small.layers == FIRST_FOUR
    assert small.config["linear_attn_config"] == {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4}


def test_a_pattern_of_characters() -> None:
    """As Nemotron-H's is."""
    pattern = "M-M-M-M*-M-M-M-M*-M-M"
    states = {"expand": 2, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8}
    whole = {**read("llama"), **states, "num_hidden_layers": len(pattern), "hybrid_override_pattern": pattern}
    small = shrink(whole).config
    assert small["hybrid_override_pattern"] == "M-M-M-M*"
    assert small["num_hidden_layers"] == 8
    assert (small["hidden_size"], small["num_attention_heads"], small["expand"]) == (512, 4, 2)
    assert (small["mamba_num_heads"], small["mamba_head_dim"], small["n_groups"]) == (16, 64, 2)


def test_heads_of_a_model_of_states_only() -> None:
    """As Mamba 2's are: they fill twice the hidden size."""
    whole = {"hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64, "expand": 2, "n_groups": 8}
    small = shrink(whole).config
    assert small["num_heads"] * small["head_dim"] == small["expand"] * small["hidden_size"] == 512
    assert small["n_groups"] == 2


@given(
    st.lists(st.sampled_from(["full", "sliding", "linear"]), min_size=1, max_size=80),
    st.integers(0, 10),
    st.integers(1, 6),
)
def test_no_kind_is_lost(types: list[str], dense: int, frequency: int) -> None:
    count = len(types)
    text = {"layer_types": types, "first_k_dense_replace": dense, "moe_layer_freq": frequency}
    kept = choose_layers(text, count)
    kinds = [(one, index < dense, index % frequency) for index, one in enumerate(types)]
    assert [kinds[index] for index in kept][: len(kept)] == [kinds[index] for index in sorted(set(kept))]
    assert list(dict.fromkeys(kinds[index] for index in kept)) == list(dict.fromkeys(kinds))
    if frequency > 1:
        assert kept == tuple(range(len(kept)))
    elif kept != tuple(range(len(kept))):
        assert len(kept) <= MOST_LAYERS


@given(st.text("abcdefg_", min_size=1, max_size=12), st.integers(-5, 10**9) | st.booleans() | st.floats(0, 1))
def test_unknown_fields_stay(name: str, value: Any) -> None:
    whole = {**read("llama"), f"odd_{name}_flag": value}
    assert shrink(whole).config[f"odd_{name}_flag"] == value


@pytest.mark.parametrize(
    ("fields", "layers", "expected"),
    [
        # As ERNIE 4.5's: experts from the ninth layer on, to the last or the last but two.
        ({"moe_layer_start_index": 8}, 9, {"moe_layer_start_index": 8}),
        (
            {"moe_layer_start_index": 1, "moe_layer_end_index": 29},
            4,
            {"moe_layer_start_index": 1, "moe_layer_end_index": 2},
        ),
        ({"moe_layer_end_index": -1}, 4, {"moe_layer_end_index": -1}),
        ({"dense_mlp_idx": 6}, 7, {"dense_mlp_idx": 6}),
        # As LFM2's.
        ({"full_attn_idxs": [5, 8, 10]}, 6, {"full_attn_idxs": [5]}),
        # Three more, of the layers that predict further tokens.
        (
            {"num_nextn_predict_layers": 3, "layer_types": ["full", *["sliding"] * 31, *["full"] * 3]},
            4,
            {"layer_types": ["full", *["sliding"] * 3, *["full"] * 3]},
        ),
        # As Gemma 3n's, whose last layers are not sparse.
        (
            {"activation_sparsity_pattern": [0.95] * 10 + [0.0] * 22},
            11,
            {"activation_sparsity_pattern": [0.95] * 10 + [0.0]},
        ),
    ],
)
def test_fields_that_say_kinds(fields: Mapping[str, Any], layers: int, expected: Mapping[str, Any]) -> None:
    small = shrink({**read("llama"), **fields})
    assert len(small.layers) == layers
    assert {name: small.config[name] for name in expected} == expected


def test_objects_by_the_number_of_their_layer() -> None:
    """As transformers 5.19 saves Gemma 4's."""
    whole = {f"{layer:02d}": {"attention_k_eq_v": layer == 5, "head_dim": 256} for layer in range(0, 32, 5)}
    small = shrink({**read("llama"), "per_layer_config": whole})
    assert small.layers == tuple(range(6))
    assert small.config["per_layer_config"] == {
        "00": {"attention_k_eq_v": False, "head_dim": 256},
        "05": {"attention_k_eq_v": True, "head_dim": 256},
    }


def test_labels_are_of_no_layer() -> None:
    labels = {str(label): f"LABEL_{label}" for label in range(6)}
    small = shrink({**read("llama"), "id2label": labels})
    assert (small.layers, small.config["id2label"]) == (FIRST_FOUR, labels)


def test_blocks_that_are_each_another() -> None:
    """As DeciLM's: each has a width of its own, some no attention, and heads in a group that are not more than all."""

    def make(layer: int) -> dict[str, Any]:
        attention = {"n_heads_in_group": None if layer == 4 else 8, "no_op": layer == 4}
        return {"attention": attention, "ffn": {"ffn_mult": 1 + layer / 8, "no_op": False}}

    small = shrink(
        {**read("llama"), "num_key_value_heads": None, "block_configs": [make(layer) for layer in range(32)]}
    )
    assert small.layers == tuple(range(5))
    blocks = small.config["block_configs"]
    assert [block["attention"]["n_heads_in_group"] for block in blocks] == [2, 2, 2, 2, None]
    assert [block["ffn"]["ffn_mult"] for block in blocks] == [1.0, 1.125, 1.25, 1.375, 1.5]


def test_groups_of_experts_hold_as_many_as_are_chosen() -> None:
    """As OpenPangu's router has them: of each group an equal share is taken."""
    fields = {"n_routed_experts": 512, "num_experts_per_tok": 8, "router_n_groups": 8}
    small = shrink({**read("llama"), **fields}).config
    assert {name: small[name] for name in fields} == {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "router_n_groups": 2,
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"n_group": "8", "topk_group": 4},
        {"linear_num_key_heads": "16", "linear_num_value_heads": 32},
        {"mamba_n_heads": "128"},
        {"mamba_n_heads": 128, "mamba_d_head": -1},
        {"image_token_ids": list(range(1000, 1600))},
        {"hidden_size": None},
    ],
)
def test_what_is_no_size_is_refused(fields: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        shrink({**read("llama"), **fields})


@pytest.mark.parametrize(
    ("name", "size"), [("vocab_size", 249), ("max_position_embeddings", 255), ("n_positions", 255)]
)
def test_a_model_that_is_too_small_for_the_prompts_is_refused(name: str, size: int) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is {size}, and the rehearsal's prompts need {size + 1}"):
        shrink({**LLAMA, name: size})
    assert shrink({**LLAMA, name: size + 1}).config[name] <= size + 1


@pytest.mark.parametrize(
    "fields",
    [
        {"mamba_n_heads": 0, "mamba_d_ssm": 4096},
        {"linear_num_key_heads": 0, "linear_num_value_heads": 32},
        {"n_group": None, "topk_group": 1},
    ],
)
def test_sizes_that_say_that_there_is_none_stay(fields: Mapping[str, Any]) -> None:
    small = shrink({**read("llama"), **fields}).config
    assert {name: small[name] for name in fields} == fields


def test_an_expansion_that_is_not_said() -> None:
    small = shrink({**read("llama"), "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_expand": None}).config
    assert small["mamba_n_heads"] * small["mamba_d_head"] == 2 * small["hidden_size"]


@pytest.mark.parametrize(
    ("ids", "count", "kept", "expected"),
    [
        ((2, 30, 58, 61), 61, 4, (1, 2, 3, 4, 0)),
        ((61, 0, 30), 61, 4, (4, 0, 1, 2, 3)),
        ((0, 1, 2, 3, 4), 4, 4, (0, 1, 2, 3, 4)),
        # More between the ends than there are: the ends, and then all.
        ((5, 6, 7, 8, 12), 12, 4, (4, 0, 1, 2, 3)),
    ],
)
def test_ids_are_mapped_in_their_order(ids: tuple[int, ...], count: int, kept: int, expected: tuple[int, ...]) -> None:
    assert map_layer_ids(ids, count, kept) == expected
