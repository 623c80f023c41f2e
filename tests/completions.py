"""llama.cpp, through the package xllamacpp, as judge of what a model says next. Knows nothing of lever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xllamacpp


@dataclass(frozen=True)
class Drawn:
    """A token, and the natural log-probabilities of the likeliest ones at its place, best first."""

    token: int
    top: dict[int, float]


class Completions:
    """One model in llama.cpp, with the plain kernels: no repacked copy of the weights, no flash attention."""

    def __init__(self, model: Path, *, n_ctx: int = 1024, n_batch: int = 64, n_threads: int = 2) -> None:
        params: Any = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx, params.n_batch, params.n_parallel = n_ctx, 64, 1
        params.n_ubatch = n_batch
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = n_threads
        params.no_extra_bufts = True
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.warmup, params.fit_params, params.verbosity = False, False, -1
        self._server: Any = xllamacpp.Server(params)

    def greedy(self, prompt: Sequence[int], n_tokens: int, *, n_top: int = 5) -> list[Drawn]:
        """The likeliest token at each place after a prompt; fewer than asked for when the model ends its answer."""
        request = {
            "prompt": list(prompt),
            "n_predict": n_tokens,
            "temperature": 0,
            "n_probs": n_top,
            "post_sampling_probs": False,  # of the raw logits
            "cache_prompt": False,
        }
        answer = self._server.handle_completions(request)
        (choice,) = answer["choices"]
        return [_drawn(place) for place in choice["logprobs"]["content"]]


def _drawn(place: dict[str, Any]) -> Drawn:
    return Drawn(place["id"], {other["id"]: other["logprob"] for other in place["top_logprobs"]})
