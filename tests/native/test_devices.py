"""Another device computes: ggml's RPC server in a second process, whose bits are those of the CPU in this one."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lever.arch import ModelConfig
from lever.errors import DeviceLost, DoesNotFit, UnsupportedModel, UsageError
from lever.far_kv import FarKVCache, far_kv_bytes
from lever.ggml import load
from lever.ggml.devices import Devices, FarDevice, Way, listed
from lever.ggml.probe import LENGTHS, WIDTH, probe, probe_on
from lever.gguf import F16, MATRIX_TYPES, read
from lever.kv_cache import KVCache
from lever.llm import LLM, Generation, GenerationSettings
from lever.loader import LoadedModel, ModelSettings
from lever.model import Model, Thinning
from lever.opening import Silent
from lever.pack import PackSettings, pack
from lever.pages import PAGE
from lever.rpc import CAPABILITIES, Command, Relay
from lever.settings import SamplerSettings
from lever.weights.embedding import EmbeddingRows
from lever.workspace import Workspace
from tests import tiny
from tests.command import SOURCES, Lever, one_line
from tests.models import TOKENS, logits_of, same_bits
from tests.native.test_steps import Nodes, layer_by_layer
from tests.native.test_tree_pass import BUSHY
from tests.rpc_process import RPCServer, rpc_server
from tests.serving import serving

SHAPES: dict[str, dict[str, Any]] = {
    "llama, F32": {"type": "F32", "rope_freqs": True},
    "llama, Q4_K, tied": {"type": {"ffn_down": "Q6_K", "*": "Q4_K"}, "tied": True},
    "qwen2, Q4_0, rows of 320": {"arch": "qwen2", "type": "Q4_0", "n_embd": 320, "n_heads": 5, "n_kv_heads": 5},
    "qwen3, Q8_0": {"arch": "qwen3", "head_dim": 128, "type": "Q8_0"},
}


@pytest.fixture(scope="module")
def server() -> Iterator[RPCServer]:
    with rpc_server() as found:
        yield found


@pytest.fixture
def device(server: RPCServer) -> Iterator[FarDevice]:
    with Devices(load()) as devices:
        yield far(devices, server)


def far(devices: Devices, server: RPCServer) -> FarDevice:
    device = devices.open(server.name)
    assert isinstance(device, FarDevice)
    return device


@pytest.fixture(scope="module", params=SHAPES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_model(tmp_path_factory.mktemp("far") / "tiny.gguf", n_layers=3, n_ff=256, **SHAPES[request.param])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_model(tmp_path_factory.mktemp("far") / "tiny.gguf", n_layers=3, n_ff=256, type="Q8_0")


def opened(path: Path, device: FarDevice | None = None, **settings: Any) -> LoadedModel:
    defaults = {"dram": 1 << 40, "n_ctx": 512, "n_logits": 8, "n_batch": 64, "pin_percent": 0}
    gguf = read(path)
    return LoadedModel(gguf, ModelConfig.from_gguf(gguf), ModelSettings(**defaults | settings), device=device)


# --- the bits of the CPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pin", [0, 50, 100])
def test_layers_on_a_device_give_the_bits_of_the_cpu(path: Path, device: FarDevice, pin: float) -> None:
    with opened(path) as plain:
        expected = logits_of(plain, TOKENS)
    with opened(path, device, pin_percent=pin) as loaded:
        assert same_bits(logits_of(loaded, TOKENS), expected)
        assert loaded.row_invariant
        layers = sum(unit.nbytes for index, unit in enumerate(loaded.units.units) if index not in loaded.plan.pinned)
        before = device.traffic.upload_bytes
        logits_of(loaded, TOKENS[:1])
        sent = device.traffic.upload_bytes - before
        assert (sent > 100_000) == (pin < 100)
        assert sent < layers + 20_000


@pytest.mark.parametrize("attention", ["exact", "masked"])
def test_trees_on_a_device_give_the_bits_of_the_cpu(path: Path, device: FarDevice, attention: str) -> None:
    """Rows, what is kept of them, what comes behind that, and rows that stop behind a middle layer."""

    def run(model: Model) -> list[Any]:
        found = []
        for start in range(0, 250, 50):
            model.forward(TOKENS[start : start + 50])
        for thinning in (None, Thinning(1, lambda: [0, 1, 4, 5, 6, 8])):
            kept = model.forward_tree(BUSHY.tokens, BUSHY.parents, thinning=thinning)
            found += [
                model.project(range(start, min(start + 8, len(kept)))).copy()
                for start in (0, 6, 8)
                if start < len(kept)
            ]
            model.keep([0, 1, 4] if thinning is None else [0, 4, 5])
            model.forward(TOKENS[:3])
            found.append(model.project([0, 1, 2]).copy())
            model.kv.truncate(model.kv.length - 4)
            model.forward(TOKENS[7:12])
            found.append(model.project([4]).copy())
        return found

    with opened(path, n_tree=24, tree_attention=attention) as plain:
        expected = run(plain.model)
    with opened(path, device, n_tree=24, tree_attention=attention) as loaded:
        assert all(same_bits(a, b) for a, b in zip(run(loaded.model), expected, strict=True))


@pytest.mark.parametrize("n_text", [1, 245])
def test_steps_of_a_draft_on_a_device_give_the_bits_of_the_cpu(path: Path, device: FarDevice, n_text: int) -> None:
    whole: dict[str, Any] = {"n_tree": 12, "n_steps": 3, "pin_percent": 100, "tree_attention": "masked"}
    with opened(path, **whole) as plain, opened(path, device, **whole) as loaded:
        here, there = Nodes(plain.model, n_text), Nodes(loaded.model, n_text)
        for n in (1, 2, 8, 4, 3):
            step, same = here.more(n), there.more(n)
            assert same_bits(there.model.step(*same), here.model.step(*step))
        step, same = here.more(8), there.more(8)
        assert same_bits(layer_by_layer(there.model, *same), layer_by_layer(here.model, *step))
        for model in (here.model, there.model):
            model.kv.gather([0, 3, 4, 5, 9, 11], 2)
        step, same = here.more(1), there.more(1)
        last = step[0], 4, [3], np.ones((1, 5), bool)
        assert same_bits(there.model.step(*last), here.model.step(*last))


def test_products_of_every_type_pass_the_probe_as_on_the_cpu(device: FarDevice) -> None:
    for kind in MATRIX_TYPES:
        assert probe_on(load(), device, kind) == probe(load(), kind)


def test_a_product_of_the_probe_is_one_question(device: FarDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = [], Relay._answer

    def counted(relay: Relay, near: socket.socket, length: int, stand_in: bytes = b"") -> None:
        asked.append(length)
        answer(relay, near, length, stand_in)

    monkeypatch.setattr(Relay, "_answer", counted)
    probe_on(load(), device, F16)
    products = len(LENGTHS) * (1 + WIDTH)
    assert products <= len(asked) < 1.2 * products


# --- rows that move -----------------------------------------------------------------------------------------


class Caches:
    """The same rows here and on a device."""

    def __init__(self, config: ModelConfig, device: FarDevice, n_nodes: int) -> None:
        self.device = device
        self.backend = device.open_backend(1)
        self.here = KVCache(load(), config, 300, n_nodes)
        self.there = FarKVCache(load(), config, 300, n_nodes, device, self.backend)
        halves = np.random.default_rng(0).integers(0, 1 << 15, self.here.nbytes // 2).astype(np.uint16)
        self.raw = np.empty_like(halves)
        device.send(self.there._all, halves.ctypes.data, halves.nbytes)
        parts = self.here._keys, self.here._values, self.here._node_keys, self.here._node_values
        rows = halves[: sum(part.size for part in parts)].reshape(config.n_layers, -1)
        at = 0
        for part in parts:
            n = part[0].size
            part[:] = rows[:, at : at + n].view(np.float16).reshape(part.shape)
            at += n

    def both(self, act: Callable[[KVCache], None]) -> None:
        act(self.here)
        act(self.there)
        assert (self.here.length, self.here.in_order) == (self.there.length, self.there.in_order)

    def same(self) -> bool:
        self.device.fetch(self.there._all, self.raw.ctypes.data, self.raw.nbytes)
        parts = self.here._keys, self.here._values, self.here._node_keys, self.here._node_values
        n_layers = len(self.here.layers)
        held = np.concatenate([part.reshape(n_layers, -1) for part in parts], axis=1)
        return np.array_equal(held.view(np.uint16).reshape(-1), self.raw[: held.size])

    def close(self) -> None:
        self.there.close()
        self.here.close()
        self.backend.close()


@contextmanager
def caches(path: Path, device: FarDevice, n_nodes: int) -> Iterator[Caches]:
    found = Caches(ModelConfig.from_gguf(read(path)), device, n_nodes)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.parametrize("n_nodes", [16, 0])
def test_rows_move_on_a_device_as_they_do_here(small: Path, device: FarDevice, n_nodes: int) -> None:
    with caches(small, device, n_nodes) as both:
        assert both.same()
        both.both(lambda kv: kv.require(200))
        both.both(lambda kv: setattr(kv, "length", 40))
        both.both(lambda kv: kv.compact([0, 1, 4, 5, 6, 9], 2))
        assert both.same()
        if n_nodes:
            both.both(lambda kv: kv.keep([0, 2, 3, 1, 15]))
            assert both.same()
        both.both(lambda kv: kv.gather([0, 1, 5, 6, 7, 3, 90], 3))
        assert both.same()
        both.both(lambda kv: kv.gather(list(range(150, 10, -1)), 1))  # one by one, over each other
        assert both.same()
        both.both(lambda kv: kv.gather([], 0))
        both.both(lambda kv: kv.truncate(30))
        assert both.same()
        assert not both.here._keys[:, 30:200].any()
        both.both(lambda kv: kv.truncate(30))
        assert both.same()
        there, config = both.there, ModelConfig.from_gguf(read(small))
        held = there._memory.nbytes + 2 * load().nelements(there._zeros) + there._allocator.nbytes
        assert held <= far_kv_bytes(config, 300, n_nodes, 140) < held + PAGE


@pytest.mark.parametrize("n_tree", [0, 24])
def test_what_a_model_on_a_device_allocates_here_is_what_was_planned(
    small: Path, device: FarDevice, n_tree: int
) -> None:
    with opened(small, device, n_tree=n_tree) as loaded:
        model, parts = loaded.model, loaded.plan.parts
        assert (parts["KV cache"], parts["way to the device"]) == (0, (8 << 20) + (1 << 20))
        assert loaded.plan.elsewhere["KV cache"] == far_kv_bytes(loaded.config, 512, n_tree, n_tree)
        embedding = EmbeddingRows.nbytes(model._embedding.table, loaded.shape.graph_rows, loaded.units.grain)
        rows = Workspace.nbytes(loaded.config, loaded.shape, on_host=False)
        # Beside these, ggml's work buffer, which it allocates itself: rows that are projected.
        work = loaded.shape.padded(loaded.shape.n_logits) * loaded.config.n_embd * 4
        assert parts["rows and buffers"] == rows + embedding + model._head_allocator.nbytes + work
        assert model._head_allocator.nbytes < model._allocator.nbytes


# --- answers ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft of its vocabulary."""
    folder = tmp_path_factory.mktemp("pair")
    shape: dict[str, Any] = {"arch": "qwen2", "n_ff": 256, "type": "Q4_0", "context_length": 1024}
    draft = tiny.tiny_model(folder / "draft.gguf", n_layers=2, **shape)
    return tiny.tiny_model(folder / "target.gguf", n_layers=4, **shape), draft


def answer(llm: LLM, n: int = 40, prompt: str = "hello world a b a b a b") -> Generation:
    sampler = SamplerSettings(temperature=0.0, seed=1)
    found = llm.generate(
        llm.encode_raw(prompt), GenerationSettings(sampler=sampler, max_new_tokens=n, ignore_eos=True, n_logprobs=0)
    )
    for _ in found:
        pass
    return found


def settings(device: str, draft_device: str) -> ModelSettings:
    return ModelSettings(dram=1 << 30, pin_percent=0, device=device, draft_device=draft_device)


@pytest.mark.parametrize("policy", ["lever", "chain-sd", "opt-tree", "edgellm"])
@pytest.mark.parametrize("devices", ["here here", "far here", "here far", "far far"])
def test_the_text_is_the_same_wherever_target_and_draft_are(
    pair: tuple[Path, Path], server: RPCServer, devices: str, policy: str
) -> None:
    """edgellm's draft goes on beside the target's pass, on the same connection if both are far."""
    target, draft = pair
    names = [server.name if where == "far" else "cpu" for where in devices.split()]
    with LLM(target, ModelSettings(dram=1 << 30, pin_percent=0)) as llm:
        plain = answer(llm)
    with LLM(target, settings(*names), draft=draft, policy=policy) as llm:
        for _ in range(2):  # the second one goes back in what the caches hold
            found = answer(llm)
            assert (found.tokens, found.logprobs) == (plain.tokens, plain.logprobs)
        stats = found.stats
        assert (stats.device, stats.draft_device, stats.exact) == (*names, True)
        assert (stats.upload_bytes > 0, stats.upload_s > 0) == ("far" in devices, "far" in devices)
        assert stats.drafted > 0 or policy == "lever"  # which leaves a draft that is of no use
        assert (llm.loaded.plan.parts["KV cache"] == 0) == (names[0] != "cpu")


# --- what goes wrong ----------------------------------------------------------------------------------------


def test_a_server_that_is_killed_in_the_middle_of_a_pass_is_an_error_and_the_process_lives(small: Path) -> None:
    with rpc_server() as server, Devices(load()) as devices, opened(small, far(devices, server)) as loaded:
        model = loaded.model
        model.forward(TOKENS[:50])

        def kill(layer: int) -> None:
            if layer == 1:
                server.process.kill()
                server.process.wait()

        with pytest.raises(DeviceLost, match=rf"^{server.name}: the connection was lost"):
            model.forward(TOKENS[50:100], kill)
        assert model.kv.length == 50
        with pytest.raises(DeviceLost):
            model.forward(TOKENS[:1])
        for length in (10, 0):
            with pytest.raises(DeviceLost):
                model.kv.truncate(length)


@pytest.mark.parametrize("which", ["target", "draft"])
def test_an_engine_whose_device_is_lost_ends_each_answer_with_an_error(pair: tuple[Path, Path], which: str) -> None:
    target, draft = pair
    with rpc_server() as server:
        names = (server.name, "cpu") if which == "target" else ("cpu", server.name)
        with LLM(target, settings(*names), draft=draft, policy="chain-sd") as llm:
            answer(llm)
            server.process.kill()
            for prompt in ("hello world", "self"):
                with pytest.raises(DeviceLost, match="the connection was lost"):
                    answer(llm, prompt=prompt)


def test_a_device_that_is_silent_for_too_long_is_lost(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lever.rpc.SILENCE_S", 0.5)
    with rpc_server() as server, Devices(load()) as devices, opened(small, far(devices, server)) as loaded:
        loaded.model.forward(TOKENS[:5])
        server.process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(DeviceLost, match=r"nothing came from it for 0\.5 s"):
            loaded.model.forward(TOKENS[:5])
        assert time.monotonic() - started < 5


def test_a_busy_server_is_told_and_free_again_when_its_client_has_gone(
    server: RPCServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lever.rpc.CONNECT_S", 0.5)
    with Devices(load()) as first, Devices(load()) as second:
        far(first, server)
        assert far(first, server).way is far(first, server).way
        with pytest.raises(DeviceLost, match="busy with another client"):
            second.open(server.name)
        first.close()
        second.open(server.name)


def test_devices_of_a_server_that_are_left_aside_are_told_of(
    server: RPCServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Devices(load()) as devices:
        devices.open(server.name)
    assert not caplog.records
    monkeypatch.setattr(load(), "backend_reg_dev_count", lambda _registry: 3)
    with Devices(load()) as devices:
        devices.open(server.name)
    assert f"{server.name} has 3 devices, of which lever uses the first" in caplog.text


@pytest.mark.parametrize("name", ["vulkan7", "rpc", "gpu", ""])
def test_an_unknown_device_is_refused_with_a_list_of_those_there_are(name: str) -> None:
    with Devices(load()) as devices, pytest.raises(UsageError, match=r"this ggml has cpu, rpc:HOST:PORT"):
        devices.open(name)
    assert "cpu" in listed(load())


@pytest.mark.parametrize("name", ["rpc:", "rpc:host", "rpc:host:", "rpc::50052", "rpc:host:0", "rpc:host:port"])
def test_a_server_without_host_or_port_is_refused(name: str) -> None:
    with Devices(load()) as devices, pytest.raises(UsageError, match="write it as rpc:HOST:PORT"):
        devices.open(name)


def test_settings_know_the_cpu_in_any_case() -> None:
    assert ModelSettings(dram=1, device="CPU", draft_device="Cpu").all_on_cpu
    assert ModelSettings(dram=1, device="RPC:Host:1").device == "rpc:host:1"
    with pytest.raises(UsageError, match="repacked"):
        ModelSettings(dram=1, layout="repacked", device="Vulkan0")


def test_the_name_of_a_device_may_be_in_any_case(server: RPCServer) -> None:
    with Devices(load()) as devices:
        assert devices.open("CPU").on_host
        assert devices.open(server.name.upper()).name == server.name


def test_more_than_the_device_has_is_refused_with_numbers(
    small: Path, device: FarDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(small, device, pin_percent=None) as loaded:
        parts = loaded.plan.elsewhere
        assert loaded.plan.pinned_share == 1.0
    need = sum(parts.values())
    monkeypatch.setattr(Way, "free_bytes", lambda _way: need - 1)
    with opened(small, device, pin_percent=None) as loaded:
        assert 0 < loaded.plan.pinned_share < 1
    with pytest.raises(DoesNotFit, match=rf"of the device {device.name}, which has .* free: KV cache .*pinned layers"):
        opened(small, device, pin_percent=100)
    monkeypatch.setattr(Way, "free_bytes", lambda _way: 200)
    with pytest.raises(DoesNotFit, match=rf"of the device {device.name}, which has 200 B free"):
        opened(small, device, pin_percent=None)


def test_memory_that_the_device_does_not_give_is_refused(small: Path, device: FarDevice) -> None:
    with pytest.raises(DoesNotFit, match=r"gave no .* of its memory"):
        device.allocate(1 << 55)
    with opened(small, device) as loaded:
        loaded.model.forward(TOKENS[:3])


def test_what_is_packed_for_this_cpu_is_refused_elsewhere(tmp_path: Path, device: FarDevice) -> None:
    source = tiny.tiny_model(tmp_path / "tiny.gguf", n_ff=256, type="Q4_0")
    header = read(source)
    images = {layout: tmp_path / f"{layout}.gguf" for layout in ("auto", "plain")}
    for layout, out in images.items():
        made = PackSettings(layout=layout, dram=1 << 30)  # type: ignore[arg-type]
        pack(header, ModelConfig.from_gguf(header), out, made, name="tiny", sha256=lambda: "0" * 64, progress=Silent())
    with opened(source) as plain:
        expected = logits_of(plain, TOKENS[:20])
    with opened(images["plain"], device) as loaded:
        assert same_bits(logits_of(loaded, TOKENS[:20]), expected)
    with pytest.raises(UnsupportedModel, match="lever pack --layout plain"):
        opened(images["auto"], device)
    with pytest.raises(UsageError, match="leave out --layout repacked"):
        ModelSettings(dram=1 << 30, layout="repacked", device=device.name)


# --- signals ------------------------------------------------------------------------------------------------

# Argument: a device, whose server is stopped and goes on when SIGUSR2 and SIGCHLD have come, again and again.
SIGNALLED = """
import os, signal, sys, threading, time
import numpy as np
from lever.ggml import load
from lever.ggml.devices import Devices

seen = set()
for number in (signal.SIGUSR2, signal.SIGCHLD):
    signal.signal(number, lambda number, _frame: seen.add(number))
main, server = threading.main_thread().ident, int(sys.argv[2])

def disturb():
    for _ in range(50):
        signal.pthread_kill(main, signal.SIGUSR2)
        signal.pthread_kill(main, signal.SIGCHLD)
        time.sleep(0.01)
    os.kill(server, signal.SIGCONT)

with Devices(load()) as devices:
    way = devices.open(sys.argv[1]).way
    os.kill(server, signal.SIGSTOP)
    thread = threading.Thread(target=disturb)
    thread.start()
    free = way.free_bytes()
    thread.join()
assert free and seen == {signal.SIGUSR2, signal.SIGCHLD}, (free, seen)
"""


def test_signals_with_handlers_wait_for_a_call_that_waits() -> None:
    """ggml's client would take a call that one interrupts for the loss of its server, and end the process."""
    with rpc_server() as server:
        done = subprocess.run(
            [sys.executable, "-c", SIGNALLED, server.name, str(server.process.pid)],
            env=os.environ | {"PYTHONPATH": SOURCES},
            capture_output=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_handler_that_raises_leaves_no_signal_blocked(device: FarDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    real = signal.pthread_sigmask

    def interrupted(how: int, mask: Iterable[int]) -> set[Any]:
        found: set[Any] = real(how, mask)
        if how == signal.SIG_BLOCK and set(mask):  # Python calls handlers here, when the mask is set
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(signal, "pthread_sigmask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        device.way.free_bytes()
    monkeypatch.undo()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert device.way.free_bytes()


# --- the commands -------------------------------------------------------------------------------------------

WORDS = ("--temp", "0", "--raw", "-n", "8", "--no-profile", "--ignore-eos", "--pin", "0")


def test_run_writes_the_same_text_and_says_what_computed(
    lever: Lever, pair: tuple[Path, Path], server: RPCServer
) -> None:
    target, draft = pair
    here = lever.json("run", target, "hello", *WORDS)
    there = lever.json(
        "run", target, "hello", *WORDS, "--device", server.name, "-md", draft, "--draft-device", server.name
    )
    assert there["tokens"] == here["tokens"]
    assert (there["stats"]["device"], there["stats"]["draft_device"]) == (server.name, server.name)
    assert there["stats"]["upload_bytes"] > 100_000 > here["stats"]["upload_bytes"] == 0


def test_run_ends_with_one_line_and_1_where_nobody_computes(lever: Lever, small: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    done = lever("run", small, "hello", *WORDS, "--device", f"rpc:127.0.0.1:{port}")
    assert (done.returncode, done.stdout) == (1, b"")
    assert "start lever rpc-serve there" in one_line(done.stderr)


def test_run_ends_with_one_line_and_1_when_the_server_is_killed(lever: Lever, small: Path) -> None:
    with rpc_server() as server:
        words = ("run", small, "hello", "--raw", "-n", "-1", "--no-profile", "--ignore-eos", "-q", "-c", "512")
        with lever.started(*words, "--device", server.name) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            server.process.send_signal(signal.SIGSTOP)  # the text cannot end before it is killed
            server.process.kill()
            _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "the connection was lost" in one_line(err)


def wait_until_idle(pid: int) -> None:
    """Until no thread of a process has run for a tenth of a second."""
    before, since = "", time.monotonic()
    end = since + 10
    while (now := time.monotonic()) < end:
        switches = "".join(
            line
            for status in sorted(Path(f"/proc/{pid}/task").glob("*/status"))
            for line in status.read_text().splitlines()
            if "ctxt_switches" in line
        )
        if switches != before:
            before, since = switches, now
        if now - since > 0.1:
            return
        time.sleep(0.01)
    raise AssertionError("it never waits")


def test_ctrl_c_ends_a_run_on_a_device_as_it_ends_others(lever: Lever, pair: tuple[Path, Path]) -> None:
    """ggml's client would take a call that a signal interrupts for the loss of its server, and end the process."""
    target, draft = pair
    with rpc_server() as server:
        words = ("run", target, "hello", "--raw", "-n", "-1", "--no-profile", "--ignore-eos", "-q", "-c", "1000")
        more = ("--pin", "0", "-md", draft, "--device", server.name, "--draft-device", server.name)
        with lever.started(*words, *more) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            server.process.send_signal(signal.SIGSTOP)
            wait_until_idle(process.pid)  # for an answer
            process.send_signal(signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
            server.process.send_signal(signal.SIGCONT)
            _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (130, b"")


def test_a_request_to_a_lost_device_ends_with_an_error_and_the_server_goes_on(small: Path) -> None:
    with rpc_server() as server, serving(small, settings=settings(server.name, "cpu")) as served:
        assert served.chat(max_tokens=3).status == 200
        server.process.kill()
        for _ in range(2):
            assert served.chat(max_tokens=3).status == 500
        assert served.ask("/health").status == 200


def test_rpc_serve_says_that_it_computes_when_it_takes_connections() -> None:
    with rpc_server() as server, socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(struct.pack("<BQ", Command.HELLO, CAPABILITIES) + bytes(CAPABILITIES))
        assert client.recv(8) == struct.pack("<Q", 4 + CAPABILITIES)


def test_rpc_serve_ends_with_0_at_ctrl_c() -> None:
    with rpc_server() as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 0


def test_rpc_serve_listens_for_others_only_if_it_is_told_to(lever: Lever, server: RPCServer) -> None:
    done = lever("rpc-serve", "--host", "0.0.0.0", "--port", str(server.port))
    assert (done.returncode, done.stdout) == (2, b"")
    assert "say --allow-remote if all of them may use this process's memory" in one_line(done.stderr)
    done = lever("rpc-serve", "--host", "0.0.0.0", "--port", str(server.port), "--allow-remote")
    assert (done.returncode, done.stdout) == (1, b"")
    warning, error = done.stderr.decode().splitlines()
    assert "no authentication and no encryption: anybody who reaches" in warning
    assert "cannot listen on 0.0.0.0" in error
