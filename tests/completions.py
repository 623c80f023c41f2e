"""llama.cpp, through the package xllamacpp, as judge of what a model says next. Knows nothing of lever."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xllamacpp

N_UBATCH = 32  # rows of one graph while llama.cpp reads a prompt


@dataclass(frozen=True)
class Drawn:
    """A token, and the natural log-probabilities of the likeliest ones at its place, best first."""

    token: int
    top: dict[int, float]


class Completions:
    """One model in llama.cpp with the plain kernels: no repacked copy of the weights, no flash attention."""

    def __init__(self, model: Path, *, n_ctx: int = 512, n_threads: int = 2) -> None:
        params: Any = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_parallel = n_ctx, n_ctx, N_UBATCH, 1
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
            "post_sampling_probs": False,  # of the raw logits, before temperature and penalties
            "cache_prompt": False,
        }
        (choice,) = self._server.handle_completions(request)["choices"]
        return [_drawn(place) for place in choice["logprobs"]["content"]]


def _drawn(place: dict[str, Any]) -> Drawn:
    return Drawn(place["id"], {other["id"]: other["logprob"] for other in place["top_logprobs"]})


def ggml_library() -> Path:
    """The file with llama.cpp's own ggml, whose symbols the package exports."""
    return Path(xllamacpp.xllamacpp.__file__)


def ggml_version() -> str:
    """The version of that ggml."""
    version = ctypes.CDLL(str(ggml_library())).ggml_version
    version.restype = ctypes.c_char_p
    text: bytes = version()
    return text.decode()
