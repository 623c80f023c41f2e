"""The import graph of lever goes one way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lever

ROOT = Path(lever.__file__).parent
# Modules and packages by rank; a module imports only from lower ranks, or from its own package.
RANKS = (
    {"errors", "linux", "owner", "llama_cpp"},
    {
        "rpc",
        "pages",
        "cage",
        "settings",
        "memory",
        "machine",
        "stats",
        "threads",
        "gguf",
        "text",
        "tree",
        "cost",
        "choice",
        "times",
        "gbnf",
    },
    {"pass_cost", "gguf_header"},
    {"cycle_cost"},
    {"ggml", "arch", "tokenizer", "sample", "policies", "trace", "pair", "worth", "prune"},
    {"chat", "weights", "kv_cache", "lookup", "forecast", "grammar", "predictor"},
    {"transformer", "far_kv", "rpc_server"},
    {"workspace"},
    {"sizing"},
    {"steps", "scores"},
    {"model"},
    {"loader", "draft", "figures"},
    {"companion"},
    {"request", "pruner"},
    {"ahead"},
    {"guess"},
    {"engine"},
    {"llm"},
    {"models", "conversation"},
    {"pack", "profile"},
    {"doctor", "planner", "bench", "opening"},
    {"peer", "plots", "api", "server", "training"},
    {"cli"},
    {"__main__"},
)
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}


def imports(path: Path) -> Iterator[str]:
    """Names directly below `lever` that a file imports from, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module == "lever":
                yield from (alias.name for alias in node.names)
            elif node.module.startswith("lever."):
                yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("lever."))


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_every_module_has_one_rank() -> None:
    assert {name_of(path) for path in FILES} == set(RANK)
    assert len(RANK) == sum(map(len, RANKS))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_from_lower_ranks(path: Path) -> None:
    own = name_of(path)
    higher = {name for name in imports(path) if name != own and RANK[name] >= RANK[own]}
    assert not higher, f"{own} (rank {RANK[own]}) imports {higher}"
