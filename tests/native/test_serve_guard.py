"""Who may ask a server, and how much: Host, Origin, keys, bodies that are too long. On a real socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lever.server.guard import allowed_hosts, is_loopback
from tests.fakes import wait_until
from tests.serving import GATES, Serving, serving, with_keys

BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
UTF_8 = "sécond".encode().decode("latin-1")  # as the client writes its bytes
CHAT = "/v1/chat/completions"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Serving]:
    with serving(model, gates=replace(GATES, body_limit=10_000), timeout_s=0.5) as found:
        yield found


@pytest.fixture(scope="module")
def locked(model: Path) -> Iterator[Serving]:
    with serving(model, gates=with_keys("first", "sécond")) as found:
        yield found


# --- Host and Origin ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.test", "evil.test:80", "localhost.evil.test", "192.168.0.1", "", "[::2]:80"])
def test_K11_a_foreign_host_is_refused(served: Serving, host: str) -> None:
    reply = served.ask(CHAT, BODY, Host=host)

    assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8080", "[::1]:8080"])
def test_K11_names_of_this_machine_are_taken(served: Serving, host: str) -> None:
    assert served.ask("/health", Host=host).status == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.test", "null", "http://[", "", "http://127.0.0.1:1", "http://localhost"]
)
def test_K11_a_page_of_another_site_is_refused_before_anything_is_done(served: Serving, origin: str) -> None:
    reply = served.ask(CHAT, BODY, Origin=origin)

    assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")
    assert "Access-Control-Allow-Origin" not in reply.headers


def test_K11_the_page_that_is_served_may_ask(served: Serving) -> None:
    assert served.ask(CHAT, BODY, Origin=served.url).status == 200


def test_an_origin_that_is_allowed_is_told_so(model: Path) -> None:
    with serving(model, gates=replace(with_keys("k"), origins=("https://mine.test",))) as served:
        asked = {"Origin": "https://mine.test", "Access_Control_Request_Method": "POST"}
        before = served.ask(CHAT, method="OPTIONS", Access_Control_Request_Headers="authorization", **asked)
        reply = served.ask(CHAT, BODY, Origin="https://mine.test", Authorization="Bearer k")

        assert before.status == reply.status == 200
        assert before.headers["Access-Control-Allow-Origin"] == reply.headers["Access-Control-Allow-Origin"]
        assert served.ask(CHAT, BODY, Origin="https://evil.test", Authorization="Bearer k").status == 403


def test_a_name_can_be_allowed_and_addresses_where_all_are_listened_on(model: Path) -> None:
    with serving(model, gates=replace(GATES, hosts=allowed_hosts("0.0.0.0", ["My-Box"]))) as served:
        statuses = {name: served.ask("/health", Host=name).status for name in ("my-box:80", "10.0.0.1", "evil.test")}

    assert statuses == {"my-box:80": 200, "10.0.0.1": 200, "evil.test": 403}


def test_which_hosts_are_loopback() -> None:
    hosts = ("localhost", "127.0.0.1", "127.8.8.8", "::1", "0.0.0.0", "::", "192.168.0.1", "example.org")

    assert [is_loopback(host) for host in hosts] == [True] * 4 + [False] * 4


# --- keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}, {"X_API_Key": ""}]
)
def test_K11_without_a_key_nothing_is_answered(locked: Serving, headers: dict[str, str]) -> None:
    for path, body in ((CHAT, BODY), ("/v1/models", None), ("/props", None), ("/metrics", None), ("/nothing", None)):
        reply = locked.ask(path, body, **headers)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer first"}, {"X_API_Key": "first"}, {"X_API_Key": UTF_8}])
def test_any_of_the_keys_opens(locked: Serving, headers: dict[str, str]) -> None:
    assert locked.ask(CHAT, BODY, **headers).status == 200


def test_health_and_the_page_need_no_key(locked: Serving) -> None:
    assert [locked.ask(path).status for path in ("/health", "/v1/health", "/")] == [200] * 3


# --- bodies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [10_001, 20_000_000])
def test_a_body_that_says_it_is_too_long_is_refused(served: Serving, nbytes: int) -> None:
    reply = served.ask(CHAT, b"x" * nbytes)  # whose sender hears so, though it writes to the end before it listens

    assert (reply.status, reply.error["code"]) == (413, "body_too_large")


def test_a_body_that_turns_out_too_long_is_not_read_to_its_end(served: Serving) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"2000\r\n" + b"x" * 0x2000 + b"\r\n" + b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
        received = connection.recv(1 << 16)

    assert received.startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_come_is_not_waited_for(served: Serving) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nxx")
        received = connection.recv(1 << 16)

    assert received.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("raw", [b"", b"GET /hea", HEALTH + b"GET /hea", HEALTH])
def test_a_client_that_asks_for_nothing_is_let_go(served: Serving, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(raw)
        while connection.recv(1 << 16):
            pass

    assert not served.server.server_state.connections


def test_a_client_may_take_its_time_between_two_bytes(served: Serving) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        for byte in HEALTH:
            connection.sendall(bytes([byte]))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_goes_away_within_its_body_is_no_fault_of_ours(
    served: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nxx")
        wait_until(lambda: bool(served.server.server_state.tasks), seconds=30)
    wait_until(lambda: not served.server.server_state.tasks, seconds=30)

    assert not caplog.records


@pytest.mark.parametrize(
    "raw",
    [b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n"],
)
def test_what_is_no_http_is_refused_without_a_word(
    served: Serving, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(raw)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 4")
    assert not caplog.records
    assert served.ask("/health").status == 200
