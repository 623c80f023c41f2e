"""From the bytes of a request to a job's prompt and settings. Whatever is wrong with them is an ApiError."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from lever.chat import ChatTemplate
from lever.errors import TemplateError, UsageError
from lever.llm import LLM, GenerationSettings
from lever.server.constraints import constraint_of
from lever.server.refusals import ApiError, not_supported, overflow
from lever.server.types import ChatRequest, CompletionRequest, Message, Request, Sampling, TemplateRequest
from lever.settings import MAX_SEED, SamplerSettings

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)
MOST_NOTES = 50  # on unknown fields
COMPLETION_TOKENS = 16  # where a request for a completion says nothing
_PLACE = re.compile(r"^(.*?) - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(\w+)`")
_told_of: set[tuple[str, str]] = set()


def read(body: bytes, kind: type[T]) -> T:
    """The request. ApiError, with the field that is wrong; unknown fields are ignored, and told of once."""
    try:
        request = msgspec.json.decode(body, type=kind)
        tell_of_unknown(body, kind)
    except msgspec.ValidationError as error:
        message, param = _explained(str(error))
        raise ApiError(400, message, param=param, code="invalid_value") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    return request


def _explained(text: str) -> tuple[str, str | None]:
    """msgspec's words, and the field they are about."""
    place = _PLACE.match(text)
    message, path = (place[1], place[2]) if place else (text, "")
    missing = _MISSING.search(message)
    if missing:
        path = ".".join(filter(None, (path, missing[1])))
    return (f"{path}: {message}" if path else message), path or None


def tell_of_unknown(body: bytes | msgspec.Raw, kind: type[msgspec.Struct]) -> None:
    """Of fields that are ignored, in the log."""
    given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for name in given.keys() - set(kind.__struct_encode_fields__):
        if (kind.__name__, name) not in _told_of and len(_told_of) < MOST_NOTES:
            _told_of.add((kind.__name__, name))
            log.warning("requests have a field %r that lever does not know: ignored", name[:100])


def check_model(asked: str | None, names: tuple[str, ...]) -> None:
    """404 for a request to another model; one that names none means the one that is served."""
    if asked and asked not in names:
        raise ApiError(
            404, f"model {asked[:100]!r} is not served here, {names[0]!r} is", param="model", code="model_not_found"
        )


def chat_prompt(request: ChatRequest, llm: LLM) -> list[int]:
    """Ids of the conversation in the model's template, that leave room for an answer."""
    if request.tools or request.tool_choice not in (None, "none", "auto"):
        raise not_supported("tools are not supported: leave out tools and tool_choice", "tools")
    _template_of(llm)
    _check_messages(request.messages, llm)
    try:
        ids = llm.encode_chat([msgspec.to_builtins(message) for message in request.messages])
    except (UsageError, TemplateError) as error:
        raise ApiError(400, str(error), param="messages") from error
    return _with_room(ids, llm)


def chat_text(request: TemplateRequest, llm: LLM) -> str:
    """The conversation in the model's template."""
    template = _template_of(llm)
    _check_messages(request.messages, llm)
    messages = [msgspec.to_builtins(message) for message in request.messages]
    try:
        return template.render(messages, add_generation_prompt=request.add_generation_prompt)
    except (UsageError, TemplateError) as error:
        raise ApiError(400, str(error), param="messages") from error


def _template_of(llm: LLM) -> ChatTemplate:
    if llm.template is None:
        raise ApiError(400, "the model has no chat template: give /v1/completions the whole prompt", param="messages")
    return llm.template


def _check_messages(messages: Sequence[Message], llm: LLM) -> None:
    """As `check_text`; any message has a token of its own, such as the one that ends it."""
    _check_least(len(messages) + sum(map(_n_characters, messages)) // llm.tokenizer.longest, llm)


def _n_characters(message: Message) -> int:
    if isinstance(message.content, str):
        return len(message.content)
    return sum(len(part.text or "") for part in message.content or ())


def check_text(text: str, llm: LLM) -> None:
    """Refuse what is too long for the context whatever its tokens are: to count them takes minutes, and memory."""
    _check_least(len(text) // llm.tokenizer.longest, llm)


def _check_least(n_tokens: int, llm: LLM) -> None:
    n_ctx = llm.loaded.shape.n_ctx
    if n_tokens >= n_ctx:
        raise overflow(n_tokens, n_ctx, counted="at least")


def completion_prompt(request: CompletionRequest, llm: LLM) -> list[int]:
    """Ids of the bare text, or those that were given, that leave room for an answer."""
    for name in ("echo", "suffix"):
        if getattr(request, name):
            raise not_supported(f"{name} is not supported: leave it out", name)
    prompt = _only_one(request.prompt)
    try:
        if isinstance(prompt, str):
            return raw_prompt(prompt, llm)
        ids = [token for token in prompt if isinstance(token, int)]
        if len(ids) < len(prompt):
            raise ApiError(400, "one prompt at a time: give one text, or one list of token ids", param="prompt")
        check_tokens(ids, llm, "prompt")
    except UsageError as error:
        raise ApiError(400, str(error), param="prompt") from error
    return _with_room(ids, llm)


def raw_prompt(text: str, llm: LLM) -> list[int]:
    """Ids of the bare text, that leave room for an answer."""
    check_text(text, llm)
    return _with_room(llm.encode_raw(text), llm)


def _only_one(prompt: str | Sequence[str | int | list[int]]) -> str | Sequence[str | int | list[int]]:
    """The prompt in a list of one."""
    if len(prompt) == 1 and isinstance(prompt[0], str | list):
        return prompt[0]
    return prompt


def check_tokens(ids: Sequence[int], llm: LLM, param: str) -> None:
    """Whether there are such tokens."""
    outside = next((token for token in ids if token >= llm.config.n_vocab), None)
    if outside is not None:
        raise ApiError(400, f"token {outside}: the vocabulary ends at {llm.config.n_vocab - 1}", param=param)


def _with_room(prompt: list[int], llm: LLM) -> list[int]:
    """The prompt, if there is something to answer, and room for it."""
    n_ctx = llm.loaded.shape.n_ctx
    if not prompt:
        raise ApiError(400, "the prompt is empty: there is nothing to go on from", param="prompt")
    if len(prompt) >= n_ctx:
        raise overflow(len(prompt), n_ctx)
    return prompt


def generation_settings(request: ChatRequest | CompletionRequest, llm: LLM) -> GenerationSettings:
    """How it is to be answered; what is left out is as on the command line, the seed is drawn.

    A schema may take a second.
    """
    stop = request.stop
    return GenerationSettings(
        sampler=sampler_settings(request, llm),
        max_new_tokens=_most_tokens(request),
        stops=[] if stop is None else [stop] if isinstance(stop, str) else stop,
        ignore_eos=bool(request.ignore_eos),
        n_logprobs=_n_logprobs(request),
        constraint=constraint_of(request.response_format, llm),
    )


def sampler_settings(request: Request, llm: LLM) -> SamplerSettings:
    """How tokens are drawn."""
    given = {name: value for name in Sampling.__struct_fields__ if (value := getattr(request, name)) is not None}
    if request.seed is not None and request.seed > MAX_SEED:
        raise ApiError(400, f"seed: it must be at most {MAX_SEED}", param="seed", code="invalid_value")
    seed = secrets.randbits(32) if request.seed in (None, -1) else request.seed
    assert seed is not None
    return SamplerSettings(**given, logit_bias=_logit_bias(request, llm), seed=seed)


def _logit_bias(request: Request, llm: LLM) -> dict[int, float]:
    biases = request.logit_bias or {}
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) < 12 and int(key) < llm.config.n_vocab):
            message = f"logit_bias: {key[:40]!r} is no token id from 0 to {llm.config.n_vocab - 1}"
            raise ApiError(400, message, param="logit_bias", code="invalid_value")
    return {int(key): bias for key, bias in biases.items()}


def _most_tokens(request: ChatRequest | CompletionRequest) -> int | None:
    most = request.max_tokens
    if isinstance(request, ChatRequest):
        most = request.max_completion_tokens if request.max_completion_tokens is not None else most
    elif most is None:
        most = COMPLETION_TOKENS
    return None if most == -1 else most


def _n_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs: it needs logprobs to be true", param="top_logprobs", code="invalid_value")
    return (request.top_logprobs or 0) if request.logprobs else None
