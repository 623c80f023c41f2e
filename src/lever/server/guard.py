"""Who may ask, and how much: Host, Origin, key, size of the body. ASGI layers that know no endpoint.

A page of another site must not reach the model: neither by a name that it lets point here (so the Host header has to be
one of ours), nor across origins (so an Origin header has to be that of the page we serve, or one that was allowed).
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lever.server.refusals import ApiError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
ANY = "*"
OPEN = ("/", "/health", "/v1/health")  # without a key: they tell nothing


def allowed_hosts(bound: str, more: Collection[str] = ()) -> frozenset[str]:
    """Names that requests may be for."""
    return frozenset(name.lower() for name in (*LOOPBACK, bound.strip("[]"), *more))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


class Guard:
    """403 for a foreign Host or Origin."""

    def __init__(self, app: ASGIApp, *, hosts: frozenset[str], origins: Sequence[str] = ()) -> None:
        """Bound to all addresses, any address may be asked for: only names can be made to point here."""
        self._app, self._hosts, self._origins = app, hosts, origins
        self._any_address = bool(hosts & {"0.0.0.0", "::"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            refusal = self._refusal(headers.get("host", ""), headers.get("origin"))
            if refusal is not None:
                await refusal.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, host: str, origin: str | None) -> ApiError | None:
        name = _name_of(host)
        if not (name in self._hosts or ANY in self._hosts or (self._any_address and _is_address(name))):
            message = f"requests for the host {host[:100]!r} are not taken: allow it with --allowed-host"
            return ApiError(403, message, type="permission_error", code="host_not_allowed")
        own = origin is None or origin.lower().partition("://")[2] == host.lower()
        if not (own or origin in self._origins or ANY in self._origins):
            message = f"requests from pages of {str(origin)[:100]!r} are not taken: allow it with --cors-origin"
            return ApiError(403, message, type="permission_error", code="origin_not_allowed")
        return None


class Keys:
    """401 for a request without one of the keys, where there are any. Each is compared in constant time."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in OPEN and not self._known(scope):
            refusal = ApiError(
                401,
                "the API key is missing or wrong",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refusal.response(scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")
        raw = given.strip().encode("latin-1")  # the bytes that came
        found = [hmac.compare_digest(raw, key) for key in self._keys]  # all of them
        return any(found)


class BodyLimit:
    """413 for a body of more than `limit` bytes, whether it says so or not; 408 for one that does not come."""

    def __init__(self, app: ASGIApp, *, limit: int, timeout_s: float) -> None:
        """Each part of a body has `timeout_s` to come."""
        self._app, self._limit, self._timeout_s = app, limit, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if not length.isdecimal() or int(length) > self._limit:
            await self._too_long().response(scope["path"])(scope, receive, send)
            return
        taken, complete = 0, False

        async def limited() -> Message:
            nonlocal taken, complete
            if complete:
                return await receive()  # the disconnect, some time
            try:
                async with asyncio.timeout(self._timeout_s):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, "the body of the request did not come", code="timeout") from None
            taken += len(message.get("body", b""))
            if taken > self._limit:
                raise self._too_long()
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, limited, send)

    def _too_long(self) -> ApiError:
        message = f"the body of the request is longer than {self._limit} bytes"
        return ApiError(413, message, code="body_too_large")


def _name_of(host: str) -> str:
    """Without its port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
