"""The variables: what is accepted, what is refused and how the refusal reads."""

from __future__ import annotations

import pytest

from vllm_overlay.settings import SettingsError, is_enabled, parse_layers, read_settings


def test_defaults() -> None:
    settings = read_settings({"VLLM_OVERLAY": "1"})
    assert settings.enabled
    assert settings.capture is None
    assert (settings.layers, settings.tokens, settings.sample, settings.policy) == ("eagle3", "all", 1.0, "strict")
    assert settings.dtype == "auto"


@pytest.mark.parametrize("value", ["", "0"])
def test_off(value: str) -> None:
    assert not is_enabled({"VLLM_OVERLAY": value})
    assert not is_enabled({})


def test_a_switch_that_is_neither_on_nor_off_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"VLLM_OVERLAY='yes' is neither 1 \(on\) nor 0 \(off\)"):
        is_enabled({"VLLM_OVERLAY": "yes"})


def test_an_unknown_variable_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(SettingsError, match="unknown variable VLLM_OVERLAY_LAYER: did you mean VLLM_OVERLAY_LAYERS"):
        read_settings({"VLLM_OVERLAY_LAYER": "1"})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("VLLM_OVERLAY_TOKENS", "some", "is not one of all, prompt, last"),
        ("VLLM_OVERLAY_POLICY", "lax", "is not one of strict, warn"),
        ("VLLM_OVERLAY_DTYPE", "int4", "VLLM_OVERLAY_DTYPE='int4' is not one of auto, fp8"),
        ("VLLM_OVERLAY_SAMPLE", "1.5", "is not a fraction between 0 and 1"),
        ("VLLM_OVERLAY_SAMPLE", "nan", "is not a fraction between 0 and 1"),
        ("VLLM_OVERLAY_SAMPLE", "x", "is not a fraction between 0 and 1"),
        ("VLLM_OVERLAY_LAYERS", "2,x", "VLLM_OVERLAY_LAYERS: layers '2,x' are neither"),
        ("VLLM_OVERLAY_LAYERS", "-1", "negative"),
        ("VLLM_OVERLAY_LAYERS", "2,2", "name an id twice"),
    ],
)
def test_values_out_of_range_name_the_variable(name: str, value: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_settings({name: value})


@pytest.mark.parametrize("tokens", ["all", "prompt", "last"])
def test_which_rows_are_kept(tokens: str) -> None:
    assert read_settings({"VLLM_OVERLAY_TOKENS": tokens}).tokens == tokens


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_what_rows_are_stored_in(dtype: str) -> None:
    assert read_settings({"VLLM_OVERLAY_DTYPE": dtype}).dtype == dtype


def test_layers_keep_the_order_asked_for() -> None:
    assert parse_layers("27,2, 15") == (27, 2, 15)
