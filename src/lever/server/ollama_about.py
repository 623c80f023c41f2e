"""What Ollama's API says of the model that is served."""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from lever.gguf import GGUF, IMAGE_CHECKSUMS, TYPES, TensorInfo
from lever.llm import LLM
from lever.server.ollama_asked import LATEST
from lever.server.ollama_types import OllamaDetails, OllamaRunningModel, OllamaShowReply, OllamaStoredModel

NEVER = datetime(9999, 12, 31, tzinfo=UTC)  # when a model that stays leaves
TEMPLATE = "tokenizer.chat_template"


def stored(name: str, digest: str, llm: LLM) -> OllamaStoredModel:
    """As a model that can be asked."""
    return OllamaStoredModel(**_common(name, digest, llm), size=llm.gguf.size, modified_at=_modified_at(llm.gguf))


def running(name: str, digest: str, llm: LLM) -> OllamaRunningModel:
    """As a model that is loaded: the plan's memory, and none of a GPU's."""
    loaded = llm.loaded
    return OllamaRunningModel(
        **_common(name, digest, llm),
        size=loaded.plan.total,
        size_vram=0,
        context_length=loaded.shape.n_ctx,
        expires_at=NEVER,
    )


def shown(llm: LLM) -> OllamaShowReply:
    """In detail: the metadata of its file, without lists."""
    gguf = llm.gguf
    told = {key: value for key, value in gguf.metadata.items() if key != TEMPLATE}
    info = {key: value if isinstance(value, str | int | float) else None for key, value in told.items()}
    return OllamaShowReply(
        details=_details(llm),
        model_info={**info, "general.parameter_count": _n_parameters(gguf)},
        template=gguf.text(TEMPLATE, ""),
        capabilities=["completion"],
        modified_at=_modified_at(gguf),
    )


def _common(name: str, digest: str, llm: LLM) -> dict[str, Any]:
    tagged = name if ":" in name.rpartition("/")[2] else name + LATEST
    return {"name": tagged, "model": tagged, "digest": digest, "details": _details(llm)}


def _details(llm: LLM) -> OllamaDetails:
    family = llm.config.architecture
    nbytes = Counter[str]()
    for tensor in _weights(llm.gguf):
        nbytes[TYPES[tensor.type].name] += tensor.nbytes
    return OllamaDetails(
        family=family,
        families=[family],
        parameter_size=_short(_n_parameters(llm.gguf)),
        quantization_level=max(nbytes, key=lambda name: nbytes[name]),  # of most of it
    )


def _weights(gguf: GGUF) -> list[TensorInfo]:
    return [tensor for name, tensor in gguf.tensors.items() if name != IMAGE_CHECKSUMS]


def _n_parameters(gguf: GGUF) -> int:
    return sum(math.prod(tensor.shape) for tensor in _weights(gguf))


def _short(count: int) -> str:
    """As Ollama writes it: 1.5B, 494.03M, 12K."""
    for unit, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if count >= unit:
            return f"{count / unit:.{digits}f}{letter}"
    return str(count)


def _modified_at(gguf: GGUF) -> datetime:
    return datetime.fromtimestamp(max(path.stat().st_mtime for path in gguf.files), UTC)
