"""The memory cage itself, and a tiny model in it: what the real runs in a cage rest on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cage import Caged, caged_or_skipped
from tests.tiny import CONTROL, NORMAL, byte_letters, tiny_model

MIB = 1 << 20
LEVER = "from lever.cli import main; main()"


def caged(limit_bytes: int, *code_and_arguments: str) -> Caged:
    return caged_or_skipped([sys.executable, "-c", *code_and_arguments], limit_bytes)


def test_a_command_within_its_limit_ends_as_usual() -> None:
    run = caged(200 * MIB, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    assert (run.process.returncode, run.process.stdout, run.process.stderr) == (7, "out\n", "err\n")
    assert run.oom_kills == 0


def test_a_command_beyond_its_limit_is_killed() -> None:
    run = caged(100 * MIB, "print(len(bytearray(200 << 20).replace(b'x', b'y')))")
    assert run.process.returncode != 0
    assert run.oom_kills == 1
    assert run.process.stdout == ""


def test_page_cache_counts_and_gives_way(tmp_path: Path) -> None:
    write = "import sys; file = open(sys.argv[1], 'wb')\nfor _ in range(150): file.write(bytes(1 << 20))"
    roomy = caged(400 * MIB, write, str(tmp_path / "a"))
    assert roomy.peak_bytes is None or roomy.peak_bytes > 150 * MIB
    tight = caged(100 * MIB, write, str(tmp_path / "b"))
    assert (tight.process.returncode, tight.oom_kills) == (0, 0)


def test_an_automatic_budget_is_a_share_of_what_the_cage_leaves(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model.gguf")
    run = caged(400 * MIB, LEVER, "run", str(model), "hello", "--json", "-n", "2", "--temp", "0")
    assert run.process.returncode == 0, run.process.stderr
    stats = json.loads(run.process.stdout)["stats"]
    assert 200 * MIB < stats["dram_budget_bytes"] < 300 * MIB  # 75 % of 400 MiB, less what the process held already
    assert stats["peak_rss_bytes"] < stats["dram_budget_bytes"]


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose vocabulary is large: all pairs of letters, and many of three."""
    letters = byte_letters()
    pairs = [(a, b) for a in letters for b in letters]
    merges = [*pairs, *((a + b, c) for a, b in pairs[:1000] for c in letters[:80])]
    tokens = [*letters, *map("".join, merges), "<|im_end|>"]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * (len(tokens) - 1) + [CONTROL],
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.ggml.padding_token_id": len(tokens) - 1,
    }
    path = tmp_path_factory.mktemp("wordy") / "model.gguf"
    return tiny_model(path, n_vocab=len(tokens), tied=True, metadata=metadata)


def run_wordy(model: Path, mib: int) -> Caged:
    """In a cage of its budget and a twentieth."""
    words = ["run", str(model), "hello", "--json", "-n", "2", "--temp", "0", "--dram", f"{mib}MiB"]
    return caged(mib * MIB * 21 // 20, LEVER, *words)


@pytest.mark.parametrize("mib", [70, 100, 120, 140])
def test_D8_a_budget_that_cannot_hold_the_tokenizer_while_it_is_built_is_refused(wordy: Path, mib: int) -> None:
    run = run_wordy(wordy, mib)
    assert (run.process.returncode, run.oom_kills) == (3, 0)
    assert f"but the budget is {mib} MiB: Python " in run.process.stderr
    assert "--dram" in run.process.stderr
    assert "\n" not in run.process.stderr.strip()


def test_a_budget_that_can_hold_the_tokenizer_while_it_is_built_is_not_exceeded(wordy: Path) -> None:
    run = run_wordy(wordy, 200)
    assert run.process.returncode == 0, run.process.stderr
    assert json.loads(run.process.stdout)["stats"]["peak_rss_bytes"] < 200 * MIB


def test_D2_a_run_is_one_process(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model.gguf")
    # Children that are alive, and page faults of those that have ended: every process has some.
    at_exit = (
        "import atexit, resource\nfrom pathlib import Path\n"
        "children = lambda: ''.join(path.read_text() for path in Path('/proc/self/task').glob('*/children'))\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt\n"
        "atexit.register(lambda: print([children(), faults()], end=''))\n"
    )
    words = ["run", str(model), "hello", "-n", "2", "--temp", "0", "-t", "2", "--dram", "400MiB"]
    run = subprocess.run([sys.executable, "-c", at_exit + LEVER, *words], capture_output=True, text=True, check=True)
    assert run.stdout.endswith("['', 0]")
