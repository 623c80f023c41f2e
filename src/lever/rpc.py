"""The way to a ggml RPC server, through a relay in this process. Understands messages, not what they are about.

ggml's own client ends the process when its server goes away. So it is not let near the network: it talks to a thread
here, which passes messages on, bounds every wait, and when the far end is lost answers what ggml still asks with zeros
of the right length and keeps the reason (`Relay.lost`). Whoever uses the device looks at that after each call.

A request is a byte that names it, its length in 8 bytes, and so many bytes; an answer is a length and bytes. Numbers
are little-endian. Protocol 5 of ggml-rpc.cpp, which the pinned version of ggml has.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from enum import IntEnum

from lever.errors import DeviceLost
from lever.owner import Owner

MAJOR = 5  # of the protocol
CONNECT_S = 5.0  # for a connection, and for the greeting: a server that has another client does not answer
# Without a byte either way while one is waited for. Between two answers lies at most a layer of a wide pass.
SILENCE_S = 120.0
PIECE = 1 << 20  # bytes that are passed on at once
CAPABILITIES = 24  # bytes in a greeting: none of them set is TCP


class Command(IntEnum):
    """enum rpc_cmd of ggml-rpc.cpp, as far as it has an answer."""

    ALLOC_BUFFER = 0
    GET_ALIGNMENT = 1
    GET_MAX_SIZE = 2
    BUFFER_GET_BASE = 3
    FREE_BUFFER = 4
    BUFFER_CLEAR = 5
    SET_TENSOR_HASH = 7
    GET_TENSOR = 8
    COPY_TENSOR = 9
    GET_DEVICE_MEMORY = 11
    INIT_TENSOR = 12
    GET_ALLOC_SIZE = 13
    HELLO = 14
    DEVICE_COUNT = 15
    MEMSET_TENSOR = 17


_NUMBER = struct.Struct("<Q")
_NONZERO = _NUMBER.pack(1 << 12)  # where ggml makes sure that an address or an alignment is one
# What ggml is told when there is nobody to ask: a result of the right length. That of GET_TENSOR is as long as the
# request says in its last 8 bytes.
STAND_INS: Mapping[int, bytes] = {
    Command.ALLOC_BUFFER: bytes(16),  # no buffer
    Command.GET_ALIGNMENT: _NONZERO,
    Command.GET_MAX_SIZE: _NONZERO,
    Command.BUFFER_GET_BASE: _NONZERO,
    Command.FREE_BUFFER: b"",
    Command.BUFFER_CLEAR: b"",
    Command.SET_TENSOR_HASH: bytes(1),
    Command.COPY_TENSOR: bytes(1),
    Command.GET_DEVICE_MEMORY: bytes(16),
    Command.INIT_TENSOR: b"",
    Command.GET_ALLOC_SIZE: bytes(8),
    Command.DEVICE_COUNT: bytes(4),
    Command.MEMSET_TENSOR: b"",
}


class Relay(Owner):
    """One connection to a server. ggml connects to `endpoint` as often as it likes, until `shut_the_door`."""

    def __init__(self, host: str, port: int) -> None:
        """DeviceLost when nobody is there, or no RPC server of this protocol, or one that is busy."""
        self.name = f"rpc:{host}:{port}"
        self.lost: str | None = None  # why, once the far end is
        self._far = self._connect(host, port)
        try:
            self._greeting = self._greet()
            self._door = socket.create_server(("127.0.0.1", 0), backlog=1)
        except BaseException:
            self._far.close()
            raise
        self._far.settimeout(SILENCE_S)
        self.endpoint = f"127.0.0.1:{self._door.getsockname()[1]}"
        self._memory = memoryview(bytearray(PIECE))
        self._thread = threading.Thread(target=self._serve, name="lever-rpc", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return len(self._memory)

    def shut_the_door(self) -> None:
        """Nobody else may connect: what is connected now stays so."""
        with suppress(OSError):  # it was shut before
            self._door.shutdown(socket.SHUT_RDWR)  # a thread that waits at it wakes up
        self._door.close()

    def check(self) -> None:
        """DeviceLost, with the reason, if the far end is."""
        if self.lost is not None:
            raise DeviceLost(f"{self.name}: {self.lost}")

    def close(self) -> None:
        """End the connection; ggml has freed what it had there."""
        self.shut_the_door()
        self._thread.join(CONNECT_S)
        self._far.close()

    # --- before ggml comes ----------------------------------------------------------------------------------

    def _connect(self, host: str, port: int) -> socket.socket:
        try:
            far = socket.create_connection((host, port), timeout=CONNECT_S)
        except TimeoutError as error:
            raise DeviceLost(f"{self.name}: nobody answers there") from error
        except OSError as error:
            raise DeviceLost(f"{self.name}: {error.strerror or error}; start lever rpc-serve there") from error
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return far

    def _greet(self) -> bytes:
        """The server's answer to HELLO, which is given to ggml whenever it says that."""
        request = struct.pack("<BQ", Command.HELLO, CAPABILITIES) + bytes(CAPABILITIES)
        try:
            self._far.sendall(request)
            length = _NUMBER.unpack(_received(self._far, _NUMBER.size))[0]
            if length != 4 + CAPABILITIES:
                raise DeviceLost(f"{self.name}: what answers there is no RPC server of ggml's protocol {MAJOR}")
            answer = _received(self._far, length)
        except TimeoutError as error:
            raise DeviceLost(f"{self.name}: it is busy with another client, or no RPC server") from error
        except OSError as error:
            raise DeviceLost(f"{self.name}: it hung up: no RPC server of ggml's protocol {MAJOR}") from error
        major, minor, patch = answer[:3]
        if (major, minor) != (MAJOR, 0):
            raise DeviceLost(f"{self.name}: it speaks protocol {major}.{minor}.{patch}, this ggml {MAJOR}.0")
        return answer[:4] + bytes(CAPABILITIES)

    # --- the thread -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._door.accept()
            except OSError:
                return
            with near:
                near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    while True:
                        self._pass_on(near)
                except OSError:
                    pass  # ggml has hung up

    def _pass_on(self, near: socket.socket) -> None:
        """One request, and its answer if it has one. OSError when ggml has hung up."""
        head = _received(near, 9)
        command, length = struct.unpack("<BQ", head)
        if command == Command.HELLO:  # the server has been greeted, and takes a second one for nonsense
            _received(near, length)
            near.sendall(_NUMBER.pack(len(self._greeting)) + self._greeting)
            return
        end = self._request(near, head, length)
        if command == Command.GET_TENSOR:
            self._answer(near, _NUMBER.unpack(end)[0])
        elif command in STAND_INS:
            self._answer(near, len(STAND_INS[command]), STAND_INS[command])

    def _request(self, near: socket.socket, head: bytes, length: int) -> bytes:
        """Pass on a request of `length` bytes behind its head; its last 8 bytes, if it is not longer than a piece."""
        filled = len(head)
        self._memory[:filled] = head
        left = length
        while True:
            n = min(left, PIECE - filled)
            _receive_into(near, self._memory[filled : filled + n])
            left -= n
            self._tell(self._memory[: filled + n])
            if not left:
                return bytes(self._memory[max(filled + n - _NUMBER.size, 0) : filled + n])
            filled = 0

    def _answer(self, near: socket.socket, length: int, stand_in: bytes = b"") -> None:
        """Pass on an answer of `length` bytes; what does not come is as in `stand_in`, or zeros."""
        said = self._memory[: _NUMBER.size]
        if self._hear(said) and _NUMBER.unpack(said)[0] != length:
            self.lost = "it answered with another length than was asked for"
        said[:] = _NUMBER.pack(length)
        filled, left = len(said), length
        while True:
            n = min(left, PIECE - filled)
            piece = self._memory[filled : filled + n]
            if not self._hear(piece):
                piece[:] = stand_in or bytes(n)
            near.sendall(self._memory[: filled + n])
            left -= n
            if not left:
                return
            filled = 0

    def _tell(self, data: memoryview) -> None:
        """Send to the far end, unless it is lost."""
        if self.lost is None:
            try:
                self._far.sendall(data)
            except OSError as error:
                self._lose(error)

    def _hear(self, into: memoryview) -> bool:
        """Receive from the far end; whether it came, all of it."""
        if self.lost is None:
            try:
                _receive_into(self._far, into)
            except OSError as error:
                self._lose(error)
        return self.lost is None

    def _lose(self, error: OSError) -> None:
        if isinstance(error, TimeoutError):
            self.lost = f"nothing came from it for {SILENCE_S:g} s: it is lost, with all that it held"
        else:
            self.lost = "the connection was lost, and with it all that it held; start lever again"


def _received(source: socket.socket, n: int) -> bytes:
    data = bytearray(n)
    _receive_into(source, memoryview(data))
    return bytes(data)


def _receive_into(source: socket.socket, memory: memoryview) -> None:
    """Fill all of it; ConnectionError at an end before that."""
    filled = 0
    while filled < len(memory):
        n = source.recv_into(memory[filled:])
        if not n:
            raise ConnectionError("the other side has hung up")
        filled += n
