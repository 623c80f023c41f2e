"""What the documentation says is what there is."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_page_of_commands_is_what_the_command_line_says() -> None:
    spec = importlib.util.spec_from_file_location("make_commands", ROOT / "docs" / "make_commands.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    is_now = (ROOT / "docs" / "commands.md").read_text()
    assert is_now == made.document(), "run python docs/make_commands.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_verb_is_in_the_readme() -> None:
    verbs = re.findall(r"^## lever (\S+)", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE)
    readme = (ROOT / "README.md").read_text()
    assert len(verbs) >= 10
    assert [verb for verb in verbs if f"`{verb}`" not in readme and f"lever {verb}" not in readme] == []
