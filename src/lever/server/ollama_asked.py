"""From a request of Ollama's API to a job's prompt and settings: said in OpenAI's words, then read as those are."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from lever.llm import LLM, GenerationSettings
from lever.server import asked
from lever.server.ollama_types import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
)
from lever.server.refusals import ApiError
from lever.server.types import ChatRequest, JsonSchema, Message, ResponseFormat, Sampling

R = TypeVar("R", bound=OllamaRequest)

LATEST = ":latest"  # a tag that goes without saying
TOP_P, MIN_P = 0.9, 0.0  # Ollama's defaults, where they are not lever's


class _Given(msgspec.Struct):
    """The options as they came."""

    options: msgspec.Raw = msgspec.Raw(b"null")


def read(body: bytes, kind: type[R], names: tuple[str, ...]) -> R:
    """The request. ApiError for one that is wrong, or for another model; unknown options are told of once."""
    request = asked.read(body, kind)
    if request.options is not None:
        asked.tell_of_unknown(msgspec.json.decode(body, type=_Given).options, OllamaOptions)
    check_model(request.model, names)
    return request


def check_model(model: str, names: tuple[str, ...]) -> None:
    """404 for a model that is not the one that is served."""
    if model not in names and model.removesuffix(LATEST) not in names:
        raise ApiError(404, f"model '{model[:100]}' not found", param="model", code="model_not_found")


def is_load(request: OllamaRequest) -> bool:
    """Whether nothing is asked but that the model be there."""
    if isinstance(request, OllamaChatRequest):
        return not request.messages
    return not request.prompt


def check(request: OllamaRequest, llm: LLM) -> None:
    """ApiError for what lever has not, in Ollama's words where it has some."""
    if request.think:
        raise _unable(request, "thinking")
    if isinstance(request, OllamaChatRequest):
        if request.tools:
            raise _unable(request, "tools")
        if any(message.images for message in request.messages or ()):
            raise _unable(request, "images")
    else:
        _check_generate(request)
    n_ctx, wanted = llm.loaded.shape.n_ctx, _options(request).num_ctx
    if wanted is not None and wanted > n_ctx:
        raise ApiError(
            400, f"num_ctx is {wanted}, and the model is served with {n_ctx}: ask for less, or serve with more by -c"
        )


def _check_generate(request: OllamaGenerateRequest) -> None:
    if request.suffix:
        raise _unable(request, "insert")
    if request.images:
        raise _unable(request, "images")
    if request.raw and (request.template or request.system or request.context):
        raise ApiError(400, "raw mode does not support template, system, or context")
    if request.template:
        raise ApiError(400, "template is not taken from requests: leave it out, or give raw and the whole prompt")
    if request.context:
        raise ApiError(400, "context is not supported: leave it out, or give the conversation to /api/chat")


def _unable(request: OllamaRequest, what: str) -> ApiError:
    return ApiError(400, f'"{request.model}" does not support {what}')


def prompt_and_settings(request: OllamaRequest, llm: LLM) -> tuple[list[int], GenerationSettings]:
    """Ids of what is to be answered, and how. A long text, or a schema, may take a second."""
    prompt = _prompt(request, llm)
    return prompt, _generation_settings(request, len(prompt), llm)


def _prompt(request: OllamaRequest, llm: LLM) -> list[int]:
    """ApiError for a prompt that leaves no room in num_ctx."""
    ids = _encoded(request, llm)
    n_ctx = _options(request).num_ctx
    if n_ctx is not None and len(ids) >= n_ctx:
        raise ApiError(400, f"the prompt has {len(ids)} tokens and num_ctx is {n_ctx}: shorten it or ask for more")
    return ids


def _encoded(request: OllamaRequest, llm: LLM) -> list[int]:
    if isinstance(request, OllamaChatRequest):
        return asked.chat_prompt(ChatRequest(messages=[_message(m) for m in request.messages or ()]), llm)
    text = request.prompt or ""
    if request.raw or (llm.template is None and not request.system):
        return asked.raw_prompt(text, llm)
    system = [Message(role="system", content=request.system)] if request.system else []
    return asked.chat_prompt(ChatRequest(messages=[*system, Message(role="user", content=text)]), llm)


def _message(message: OllamaMessage) -> Message:
    return Message(
        role=message.role,
        content=message.content or "",
        name=message.tool_name,
        reasoning_content=message.thinking,
        tool_calls=message.tool_calls,
    )


def _generation_settings(request: OllamaRequest, n_prompt: int, llm: LLM) -> GenerationSettings:
    options = _options(request)
    sampling = {name: getattr(options, name) for name in Sampling.__struct_fields__}
    if options.top_p is None:
        sampling["top_p"] = TOP_P
    if options.min_p is None:
        sampling["min_p"] = MIN_P
    in_openai_s = ChatRequest(
        messages=[],
        **sampling,
        seed=options.seed,
        stop=options.stop,
        max_tokens=_most_tokens(options, n_prompt),
        response_format=_response_format(request),
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
    )
    return asked.generation_settings(in_openai_s, llm)


def _options(request: OllamaRequest) -> OllamaOptions:
    return request.options or OllamaOptions()


def _most_tokens(options: OllamaOptions, n_prompt: int) -> int:
    limits = [] if options.num_ctx is None else [options.num_ctx - n_prompt]
    if options.num_predict is not None and options.num_predict >= 0:
        limits.append(options.num_predict)
    return min(limits, default=-1)


def _response_format(request: OllamaRequest) -> ResponseFormat | None:
    if isinstance(request.format, dict):
        return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=request.format))
    return ResponseFormat(type="json_object") if request.format else None
