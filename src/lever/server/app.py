"""The application: which path is answered by whom, and through which gates requests come."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from lever.errors import LeverError
from lever.server import asked, metrics, ollama, openai, openapi
from lever.server.about import card, props
from lever.server.guard import BodyLimit, Guard, Keys
from lever.server.page import page
from lever.server.refusals import ApiError, api_error, not_supported
from lever.server.replies import Content, Health, ModelCard, ModelList, Prompt, TokenPiece, Tokens
from lever.server.service import NOBODY_READS, Service, reply, service_of
from lever.server.types import DetokenizeRequest, TemplateRequest, TokenizeRequest
from lever.server.worker import NotReady, Served
from lever.tokenizer import Tokenizer

BODY_LIMIT = 4 << 20  # bytes; a request is held several times over while it is read
# What other servers have: an honest answer is better than that there is nothing.
ELSEWHERE = (
    "/v1/embeddings", "/embeddings", "/embedding", "/v1/rerank", "/rerank", "/reranking", "/infill", "/v1/responses",
    "/v1/messages", "/v1/audio/transcriptions", "/v1/images/generations", "/v1/moderations", "/lora-adapters", "/slots",
    *ollama.ELSEWHERE,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """Through which requests come."""

    hosts: frozenset[str]
    origins: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    body_limit: int = BODY_LIMIT


def make_app(service: Service, gates: Gates, *, with_metrics: bool = False) -> Starlette:
    """All of it."""
    cors = Middleware(
        CORSMiddleware, allow_origins=gates.origins, allow_methods=["GET", "POST"], allow_headers=["*"], max_age=600
    )
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", openai.chat, methods=["POST"]),
            Route("/v1/completions", openai.completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{id:path}", model),
            Route("/health", health),
            Route("/v1/health", health),
            Route("/props", show_props),
            Route("/metrics", show_metrics if with_metrics else _metrics_are_off),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/apply-template", apply_template, methods=["POST"]),
            *ollama.ROUTES,
            Route("/openapi.json", describe),
            Route("/", show_page),
            *(Route(path, _elsewhere, methods=["GET", "POST", "DELETE"]) for path in ELSEWHERE),
        ],
        middleware=[
            Middleware(Guard, hosts=gates.hosts, origins=gates.origins),
            *([cors] if gates.origins else []),
            Middleware(Keys, keys=gates.keys),
            Middleware(BodyLimit, limit=gates.body_limit, timeout_s=service.timeout_s),
        ],
        exception_handlers={
            ApiError: _refused,
            LeverError: _refused,
            HTTPException: _no_such_thing,
            ClientDisconnect: _gone,
            Exception: _refused,  # and uvicorn logs it
        },
    )
    app.state.service = service
    return app


async def health(http: Request) -> Response:
    """200 once the model is ready."""
    worker = service_of(http).worker
    try:
        worker.check()
    except NotReady as error:
        if worker.state == "failed":  # for good
            raise ApiError(500, str(error), type="server_error", code="load_failed") from error
        raise
    return reply(Health())


async def models(http: Request) -> Response:
    """The only one."""
    return reply(ModelList([_card(http)]))


async def model(http: Request) -> Response:
    """The same, by its name."""
    asked.check_model(http.path_params["id"], service_of(http).names)
    return reply(_card(http))


async def show_props(http: Request) -> Response:
    """What was decided about the model."""
    service = service_of(http)
    return reply(props(service.names[0], service.fingerprint, service.worker.served))


async def tokenize(http: Request) -> Response:
    """As llama-server."""
    service = service_of(http)
    llm = service.worker.served.llm
    request = asked.read(await http.body(), TokenizeRequest)
    asked.check_text(request.content, llm)
    return reply(await service.aside(lambda: _tokens(request, llm.tokenizer)))


async def detokenize(http: Request) -> Response:
    """As llama-server."""
    service = service_of(http)
    llm = service.worker.served.llm
    request = asked.read(await http.body(), DetokenizeRequest)
    asked.check_tokens(request.tokens, llm, "tokens")
    return reply(Content(await service.aside(lambda: llm.tokenizer.decode(request.tokens))))


async def apply_template(http: Request) -> Response:
    """As llama-server."""
    service = service_of(http)
    llm = service.worker.served.llm
    request = asked.read(await http.body(), TemplateRequest)
    return reply(Prompt(await service.aside(lambda: asked.chat_text(request, llm))))


async def show_metrics(http: Request) -> Response:
    """Figures for Prometheus."""
    return Response(metrics.exposition(service_of(http).worker), headers={"Content-Type": metrics.TYPE})


async def describe(_http: Request) -> Response:
    """OpenAPI."""
    return reply(openapi.document())


async def show_page(_http: Request) -> Response:
    """One file, which fetches nothing from elsewhere."""
    shown = page()
    headers = {
        "Content-Security-Policy": shown.policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(shown.body, headers=headers, media_type="text/html")


def _card(http: Request) -> ModelCard:
    service = service_of(http)
    try:
        served: Served | None = service.worker.served
    except NotReady:
        served = None
    return card(service.names[0], service.created, served)


async def _metrics_are_off(_http: Request) -> Response:
    raise not_supported("this server shows no metrics: start it with --metrics")


async def _elsewhere(http: Request) -> Response:
    raise not_supported(f"lever does not have {http.url.path}")


async def _refused(http: Request, error: Exception) -> Response:
    return api_error(error).response(http.url.path)


async def _gone(_http: Request, _error: Exception) -> Response:
    """For a client that went away before its request was complete."""
    return Response(status_code=NOBODY_READS)


async def _no_such_thing(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: f"there is no {http.url.path[:100]}", 405: f"{http.method} is not for {http.url.path[:100]}"}
    refusal = ApiError(error.status_code, words.get(error.status_code, error.detail), headers=error.headers)
    return refusal.response(http.url.path)


def _tokens(request: TokenizeRequest, tokenizer: Tokenizer) -> Tokens:
    ids = tokenizer.encode(request.content, add_special=request.add_special, parse_special=request.parse_special)
    if not request.with_pieces:
        return Tokens([*ids])
    pieces = [tokenizer.token_bytes(token) or tokenizer.token_text(token).encode() for token in ids]
    return Tokens([TokenPiece(token, _text_or_bytes(piece)) for token, piece in zip(ids, pieces, strict=True)])


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
