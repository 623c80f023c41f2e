"""Settings as frozen data, checked once where they are made. Knows no command line and draws nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_type_hints

from lever.errors import UsageError

MAX_SEED = 2**64 - 1
AUTO, NONE, LOOKUP = "auto", "none", "lookup"  # in the place of a draft's name
CPU = "cpu"  # the device that there always is

# How the rows of a tree attend. "exact": path by path, each row over the slots of plain decoding, with its bits.
# "masked": all at once, a mask showing each its ancestors, so that most sums have their terms in another order.
TreeAttention = Literal["exact", "masked"]

# Rows of a tree that go on behind a middle layer, where there is a predictor. "auto": as many as bring the most tokens
# a second, all where that saves no time. "paper": by the paper's rule, always. "off": all.
Prune = Literal["auto", "paper", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """How a token is drawn from logits; the defaults are llama.cpp's. The seed has none: the caller picks it.

    temperature <= 0 is greedy. Off: top_k <= 0, top_p >= 1, min_p <= 0, repeat_penalty 1, repeat_last_n 0,
    presence_penalty and frequency_penalty 0. repeat_last_n -1 looks at the whole context. A bias of -inf bans
    its token.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int

    def __post_init__(self) -> None:
        # NaN fails each of these, because it compares false with everything.
        allowed = {
            "temperature": (math.isfinite(self.temperature), "a finite number (0 is greedy)"),
            "top_p": (self.top_p >= 0, "at least 0 (1 is off)"),
            "min_p": (self.min_p <= 1, "at most 1 (0 is off)"),
            "repeat_penalty": (0 < self.repeat_penalty < math.inf, "above 0 (1 is off)"),
            "repeat_last_n": (self.repeat_last_n >= -1, "a count of tokens (0 is off, -1 the whole context)"),
            "presence_penalty": (math.isfinite(self.presence_penalty), "a finite number (0 is off)"),
            "frequency_penalty": (math.isfinite(self.frequency_penalty), "a finite number (0 is off)"),
            "seed": (0 <= self.seed <= MAX_SEED, f"an integer from 0 to {MAX_SEED}"),
        }
        for name, (holds, range_) in allowed.items():
            if not holds:
                raise UsageError(f"{name} is {getattr(self, name)}: it must be {range_}")
        for token, bias in self.logit_bias.items():
            if not (token >= 0 and bias < math.inf):
                raise UsageError(f"logit_bias {token}: {bias} is not a token id and a finite number or -inf")
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))


# Of SamplerSettings all but the bias: names, with float or int.
SAMPLING_NUMBERS: Mapping[str, type] = {
    name: kind for name, kind in get_type_hints(SamplerSettings).items() if kind in (float, int)
}
