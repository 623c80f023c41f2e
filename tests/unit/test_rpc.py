"""The relay to an RPC server, with sockets in the place of ggml's client and of the server."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lever.errors import DeviceLost
from lever.rpc import PIECE, STAND_INS, Command, Relay

GREETING = bytes([5, 0, 0, 0]) + bytes(24)
HELLO = struct.pack("<BQ", Command.HELLO, 24) + bytes(24)
GRAPH_COMPUTE, SET_TENSOR = 10, 6

Serve = Callable[[socket.socket], None]


def received(source: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = source.recv(n - len(data))
        assert part, f"it hung up after {len(data)} of {n} bytes"
        data += part
    return data


def request(command: int, data: bytes = b"") -> bytes:
    return struct.pack("<BQ", command, len(data)) + data


def answer(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def greet(client: socket.socket, greeting: bytes = GREETING) -> None:
    assert received(client, len(HELLO)) == HELLO
    client.sendall(answer(greeting))


@contextmanager
def server(serve: Serve) -> Iterator[int]:
    """The port of a server for one client."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            client, _ = door.accept()
            client.settimeout(10)
            with client:
                serve(client)
        except BaseException as error:  # noqa: BLE001  told in the test's own thread
            failures.append(error)

    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(10)
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield door.getsockname()[1]
        finally:
            thread.join(10)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


@contextmanager
def near(relay: Relay) -> Iterator[socket.socket]:
    """In the place of ggml's client."""
    with socket.create_connection(("127.0.0.1", int(relay.endpoint.split(":")[1])), timeout=10) as client:
        client.sendall(HELLO)
        assert received(client, 8 + len(GREETING)) == answer(GREETING)
        yield client


def test_messages_go_through_as_they_are_and_the_server_is_greeted_once() -> None:
    data = bytes(range(256)) * (PIECE // 64)  # several pieces
    wanted = bytes(304) + struct.pack("<QQ", 0, len(data))

    def serve(client: socket.socket) -> None:
        greet(client)
        for _ in range(2):
            assert received(client, 9) == request(Command.DEVICE_COUNT)
            client.sendall(answer(struct.pack("<I", 3)))
        assert received(client, 9 + len(data)) == request(SET_TENSOR, data)
        assert received(client, 9 + len(wanted)) == request(Command.GET_TENSOR, wanted)
        client.sendall(answer(data))

    with server(serve) as port, Relay("127.0.0.1", port) as relay:
        for _ in range(2):
            with near(relay) as client:
                client.sendall(request(Command.DEVICE_COUNT))
                assert received(client, 12) == answer(struct.pack("<I", 3))
        with near(relay) as client:
            relay.shut_the_door()
            client.sendall(request(SET_TENSOR, data) + request(Command.GET_TENSOR, wanted))
            assert received(client, 8 + len(data)) == answer(data)
        relay.check()


@pytest.mark.parametrize("command", STAND_INS)
def test_what_is_asked_of_a_lost_server_has_an_answer_of_the_right_length(command: int) -> None:
    with server(greet) as port, Relay("127.0.0.1", port) as relay, near(relay) as client:
        for _ in range(2):
            client.sendall(request(command))
            assert received(client, 8 + len(STAND_INS[command])) == answer(STAND_INS[command])
        with pytest.raises(DeviceLost, match=rf"^rpc:127.0.0.1:{port}: the connection was lost"):
            relay.check()


def test_a_server_that_is_lost_in_the_middle_of_an_answer_leaves_zeros() -> None:
    wanted = bytes(304) + struct.pack("<QQ", 0, 3 * PIECE)

    def serve(client: socket.socket) -> None:
        greet(client)
        received(client, 9 + len(wanted))
        client.sendall(struct.pack("<Q", 3 * PIECE) + b"x" * PIECE)

    with server(serve) as port, Relay("127.0.0.1", port) as relay, near(relay) as client:
        client.sendall(request(Command.GET_TENSOR, wanted))
        found = received(client, 8 + 3 * PIECE)
        assert found[:8] == struct.pack("<Q", 3 * PIECE)
        assert found.endswith(bytes(2 * PIECE))
        assert relay.lost is not None
        client.sendall(request(GRAPH_COMPUTE, bytes(5 * PIECE)) + request(Command.GET_TENSOR, wanted))
        assert received(client, 8 + 3 * PIECE) == answer(bytes(3 * PIECE))


def test_an_answer_of_another_length_is_the_end_of_a_server() -> None:
    def serve(client: socket.socket) -> None:
        greet(client)
        received(client, 9)
        client.sendall(answer(bytes(5)))

    with server(serve) as port, Relay("127.0.0.1", port) as relay, near(relay) as client:
        client.sendall(request(Command.DEVICE_COUNT))
        assert received(client, 12) == answer(bytes(4))
        with pytest.raises(DeviceLost, match="another length"):
            relay.check()


def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lever.rpc.SILENCE_S", 0.2)
    done = threading.Event()

    def serve(client: socket.socket) -> None:
        greet(client)
        done.wait(10)

    with server(serve) as port, Relay("127.0.0.1", port) as relay, near(relay) as client:
        started = time.monotonic()
        client.sendall(request(Command.DEVICE_COUNT))
        assert received(client, 12) == answer(bytes(4))
        assert 0.15 < time.monotonic() - started < 5
        with pytest.raises(DeviceLost, match=r"nothing came from it for 0\.2 s"):
            relay.check()
        done.set()


# --- who is there -------------------------------------------------------------------------------------------


def says(text: bytes) -> Serve:
    def serve(client: socket.socket) -> None:
        received(client, len(HELLO))
        client.sendall(text)

    return serve


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        (says(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "no RPC server of ggml's protocol 5"),
        (says(b""), "no RPC server of ggml's protocol 5"),
        (says(answer(bytes([3, 6, 1]))), "no RPC server of ggml's protocol 5"),
        (says(answer(bytes([4, 0, 0, 0]) + bytes(24))), r"speaks protocol 4\.0\.0, this ggml 5\.0"),
        (says(answer(bytes([5, 1, 0, 0]) + bytes(24))), r"speaks protocol 5\.1\.0, this ggml 5\.0"),
    ],
)
def test_others_than_rpc_servers_of_this_protocol_are_refused(serve: Serve, message: str) -> None:
    with server(serve) as port, pytest.raises(DeviceLost, match=message):
        Relay("127.0.0.1", port)


def test_nobody_there_is_told_with_what_would_help() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    with pytest.raises(DeviceLost, match=rf"rpc:127.0.0.1:{port}: Connection refused; start lever rpc-serve there"):
        Relay("127.0.0.1", port)


def test_a_server_that_does_not_greet_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lever.rpc.CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as door, pytest.raises(DeviceLost, match="busy with another client"):
        Relay("127.0.0.1", door.getsockname()[1])
