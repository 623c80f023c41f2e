"""Clients that go away, come at once, or come often: the engine's thread serves them one by one and holds nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from lever.memory import rss_bytes
from lever.server.worker import Served
from tests.fakes import FakeDevice, wait_until
from tests.serving import Serving, read_until, serving

LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
SLOW_S = 0.002  # of a read: no answer may be whole before its client has gone, however fast the machine
AHEAD = 8  # passes that the ring may have read the layers of before storage was held up, with room to spare


@pytest.fixture
def served(model: Path) -> Iterator[Serving]:
    with serving(model, queue=2) as found:
        yield found


def has_text(stream: bytes) -> bool:
    """Whether some of the answer is there."""
    return b'"content":' in stream.replace(b'"content":""', b"")


@contextmanager
def deaf_client(served: Serving, path: str, body: bytes) -> Iterator[None]:
    """One that asks and does not listen."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", served.port))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        yield


# --- clients that go away -----------------------------------------------------------------------------------


def test_K1_a_client_that_goes_away_while_text_comes_ends_its_answer(served: Serving) -> None:
    served.device.delay_s = SLOW_S
    with served.asked(**LONG, stream=True) as connection:
        read_until(connection, has_text)
        served.device.gate.clear()
    wait_until(lambda: served.given_up, seconds=30)
    served.device.gate.set()
    served.wait_for(running=False)

    assert served.worker.totals.new_tokens < LONG["max_tokens"]
    assert served.chat(max_tokens=3).status == 200


def test_K1_a_client_of_a_whole_answer_that_goes_away_ends_it(served: Serving) -> None:
    served.device.gate.clear()
    with served.asked(**LONG):
        served.wait_for(running=True)
    wait_until(lambda: served.given_up, seconds=30)
    served.device.gate.set()
    served.wait_for(running=False)

    assert served.worker.totals.new_tokens <= AHEAD
    assert served.chat(max_tokens=3).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_K1_a_client_that_goes_away_while_its_prompt_is_read_ends_that(served: Serving, stream: bool) -> None:
    fresh = served.chat("x " * 100, max_tokens=5, seed=1).json
    served.device.gate.clear()
    with served.asked("y " * 100, **LONG, stream=stream):
        served.wait_for(running=True)
    wait_until(lambda: served.given_up, seconds=30)
    served.device.gate.set()
    served.wait_for(running=False)

    again = served.chat("x " * 100, max_tokens=5, seed=1).json  # and the cache is whole
    assert again["choices"] == fresh["choices"]
    assert served.worker.totals.new_tokens <= 2 * 5 + AHEAD


@pytest.mark.parametrize("stream", [False, True])
def test_K1_a_client_that_goes_away_in_the_queue_makes_room(served: Serving, stream: bool) -> None:
    served.device.gate.clear()
    with served.asked(max_tokens=2) as first:
        served.wait_for(running=True)
        with served.asked(**LONG, stream=stream), served.asked(**LONG):
            served.wait_for(running=True, waiting=2)
            assert served.chat().status == 429
        wait_until(lambda: all(job.cancelled for job in served.worker._waiting), seconds=30)
        with served.asked(max_tokens=2) as last:
            served.wait_for(running=True, waiting=1)
            served.device.gate.set()
            assert first.recv(4096).startswith(b"HTTP/1.1 200 ")
            assert last.recv(4096).startswith(b"HTTP/1.1 200 ")
    served.wait_for(running=False)
    assert served.worker.totals.requests == 2


def test_K2_a_client_that_goes_away_while_trees_are_checked_ends_its_answer(model: Path) -> None:
    with serving(model, draft=model, draft_name="itself", policy="chain-sd") as served:
        with served.asked(**LONG, temperature=0, stream=True) as connection:
            read_until(connection, has_text)
            served.device.gate.clear()
        wait_until(lambda: served.given_up or not served.worker.running, seconds=30)
        served.device.gate.set()
        served.wait_for(running=False)

        assert served.chat(max_tokens=3, temperature=0).status == 200


def test_a_client_that_takes_nothing_is_not_waited_for_forever(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = b'{"prompt":"x","max_tokens":-1,"ignore_eos":true,"stream":true,"logprobs":20,"return_cycles":true}'
    slow = FakeDevice(delay_s=SLOW_S)
    with (
        serving(model, timeout_s=0.2, send_buffer=4096, device=slow) as served,
        deaf_client(served, "/v1/completions", body),
    ):
        served.wait_for(running=True)
        served.wait_for(running=False)

        assert served.worker.totals.new_tokens < 400  # of the 511 that it asked for
        wait_until(lambda: not served.server.server_state.connections, seconds=30)
        assert served.chat(max_tokens=3).status == 200
    assert not caplog.records


def test_a_client_that_does_not_take_a_whole_reply_is_let_go(model: Path) -> None:
    body = json.dumps({"content": "x" * 3000, "with_pieces": True}).encode()
    with serving(model, timeout_s=0.2, send_buffer=4096) as served, deaf_client(served, "/tokenize", body):
        wait_until(lambda: served.server.server_state.total_requests == 1, seconds=30)
        wait_until(lambda: not served.server.server_state.connections, seconds=30)


# --- several at once ----------------------------------------------------------------------------------------


def test_a_full_queue_says_when_to_come_again(served: Serving) -> None:
    served.device.gate.clear()
    with served.asked(max_tokens=2), served.asked(max_tokens=2), served.asked(max_tokens=2):
        served.wait_for(running=True, waiting=2)
        for stream in (False, True):
            reply = served.chat(stream=stream)
            assert (reply.status, reply.error["code"]) == (429, "queue_full")
            assert int(reply.headers["Retry-After"]) > 0
        assert served.ask("/health").status == 200
        served.device.gate.set()
        served.wait_for(running=False)


def test_with_no_queue_one_request_is_answered_after_the_other(model: Path) -> None:
    with serving(model, queue=0) as served:
        assert [served.chat(max_tokens=2).status for _ in range(5)] == [200] * 5


def test_K13_the_same_request_gives_the_same_text_whoever_else_asks(model: Path) -> None:
    with serving(model) as served, ThreadPoolExecutor(5) as pool:
        asked = [{"text": "Hello", "seed": 5, "max_tokens": 12}] * 4 + [{"text": "other", "max_tokens": 9}] * 4
        replies = [reply.json for reply in pool.map(lambda more: served.chat(**more), asked)]

    assert len({reply["choices"][0]["message"]["content"] for reply in replies[:4]}) == 1
    assert len({reply["system_fingerprint"] for reply in replies}) == 1


def test_two_clients_stream_at_once(served: Serving) -> None:
    async def text_of(client: Any, seed: int) -> str:
        messages: Any = [{"role": "user", "content": "Hello"}]
        chunks = await client.chat.completions.create(
            model="tiny", messages=messages, seed=seed, max_tokens=20, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def both() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            first, second = await asyncio.gather(text_of(client, 1), text_of(client, 2))
        return first, second

    alone = tuple(served.chat(seed=seed, max_tokens=20).json["choices"][0]["message"]["content"] for seed in (1, 2))
    assert asyncio.run(both()) == alone


# --- one after the other ------------------------------------------------------------------------------------


def test_K14_an_answer_is_the_same_after_another_request(served: Serving) -> None:
    asked: dict[str, Any] = {"seed": 3, "max_tokens": 16, "logprobs": True, "top_logprobs": 5}
    first = served.chat("tell me", **asked).json["choices"]
    served.chat("something else that is longer", max_tokens=30)

    assert served.chat("tell me", **asked).json["choices"] == first


def test_what_the_last_prompt_has_in_common_is_not_read_again(served: Serving) -> None:
    def cached(text: str) -> tuple[int, int]:
        usage = served.chat(text, max_tokens=4).json["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

    nothing, n_tokens = cached("one two three")
    again, _ = cached("one two three")
    common, _ = cached("one two FOUR")
    assert nothing == 0
    assert again == n_tokens - 1  # the last one is read for its logits
    assert 0 < common < again


def test_a_server_that_stops_ends_its_streams_with_an_error(model: Path) -> None:
    with serving(model) as served:
        served.device.gate.clear()
        with served.asked(**LONG, stream=True) as running, served.asked(**LONG) as waiting:
            served.wait_for(running=True, waiting=1)
            served.server.stop()
            served.device.gate.set()
            received = running.recv(1 << 16)
            while part := running.recv(1 << 16):
                received += part
            assert b"event: error\n" in received
            assert b"[DONE]" not in received
            assert waiting.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        served.thread.join(30)
        assert served.worker.state == "stopped"


def test_many_requests_leave_nothing_behind(model: Path) -> None:
    """500 of them; memory may grow by less than 1 kB for each once everything has been used."""
    with serving(model) as served:
        kinds: list[dict[str, Any]] = [{}, {"stream": True}, {"temperature": -1}, {"logprobs": True, "top_logprobs": 2}]

        def ask(count: int) -> None:
            for number in range(count):
                served.chat("Hello", max_tokens=2, **kinds[number % len(kinds)])

        ask(150)
        gc.collect()
        before = rss_bytes()
        ask(500)
        gc.collect()

        assert rss_bytes() - before < 500 * 1000
        assert (served.worker.running, served.worker.waiting) == (False, 0)


# --- the thread ---------------------------------------------------------------------------------------------


def test_what_goes_wrong_beside_an_answer_ends_the_server_and_is_told_to_all_who_wait(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that had died in silence would let every later request wait for ever."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("learning is broken")

    monkeypatch.setattr("lever.server.worker.learn", fail)
    served.worker._served = Served(served.llm, tuning=object())  # type: ignore[arg-type]  # nobody looks at it
    served.device.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: served.chat(max_tokens=2))
        served.wait_for(running=True)
        second = pool.submit(lambda: served.chat(max_tokens=2))
        served.wait_for(running=True, waiting=1)
        served.device.gate.set()

        assert first.result(60).status == 200  # it was complete
        refused = second.result(60)
    assert (refused.status, served.worker.state) == (503, "failed")
    assert "learning is broken" in refused.json["error"]["message"]
    served.thread.join(30)
    assert not served.thread.is_alive()
