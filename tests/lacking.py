"""What a machine may lack: there a test is skipped, but not where everything has to be proved (CI is set)."""

from __future__ import annotations

import importlib
import os
from typing import Any, NoReturn

import pytest


def lacking(what: str) -> NoReturn:
    """Skip this test, or the file that is read, saying why; where CI is set, fail."""
    if os.environ.get("CI"):
        pytest.fail(f"{what}: where CI is set no test may be left out")
    pytest.skip(what, allow_module_level=True)


def needs(module: str) -> Any:
    """A package of an extra."""
    try:
        return importlib.import_module(module)
    except ImportError:
        lacking(f"the package {module} is not installed")
