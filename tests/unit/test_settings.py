"""Settings of the sampler are checked where they are made."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from lever.errors import UsageError
from lever.settings import MAX_SEED, SamplerSettings


def test_the_defaults_are_those_of_llama_cpp() -> None:
    settings = SamplerSettings(seed=1)
    assert (settings.temperature, settings.top_k, settings.top_p, settings.min_p) == (0.8, 40, 0.95, 0.05)
    assert (settings.repeat_penalty, settings.repeat_last_n) == (1.0, 64)
    assert (settings.presence_penalty, settings.frequency_penalty, dict(settings.logit_bias)) == (0, 0, {})


def test_a_seed_has_to_be_given() -> None:
    with pytest.raises(TypeError, match="seed"):
        SamplerSettings()  # type: ignore[call-arg]  # the missing argument is the test


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", -0.1),
        ("top_p", math.nan),
        ("min_p", 1.01),
        ("min_p", math.nan),
        ("repeat_penalty", 0.0),
        ("repeat_penalty", math.inf),
        ("repeat_penalty", math.nan),
        ("repeat_last_n", -2),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("logit_bias", {-1: 0.5}),
        ("logit_bias", {3: math.inf}),
        ("logit_bias", {3: math.nan}),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    given: dict[str, Any] = {"seed": 1, name: value}
    with pytest.raises(UsageError, match=name) as caught:
        SamplerSettings(**given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", -1.0),
        ("top_k", 0),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("min_p", 1),
        ("min_p", -1.0),
        ("repeat_last_n", -1),
        ("logit_bias", {0: -math.inf}),
        ("seed", MAX_SEED),
    ],
)
def test_a_value_at_the_edge_is_taken(name: str, value: object) -> None:
    given: dict[str, Any] = {"seed": 1, name: value}
    assert getattr(SamplerSettings(**given), name) == value


def test_settings_do_not_change_with_what_they_were_made_of() -> None:
    bias = {3: 1.0}
    settings = SamplerSettings(seed=1, logit_bias=bias)
    bias[4] = 2.0
    assert settings.logit_bias == {3: 1.0}
    with pytest.raises(TypeError):
        settings.logit_bias[4] = 2.0  # type: ignore[index]  # that it cannot be done is the test
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.seed = 2  # type: ignore[misc]  # likewise
    assert dataclasses.replace(settings, seed=2).logit_bias == {3: 1.0}
