"""What typed lines mean: messages, commands, and entries of several lines."""

from __future__ import annotations

import pytest

from lever.cli.entry import Command, Message, entries, is_open, meaning


@pytest.mark.parametrize(
    ("entry", "means"),
    [
        ("", None),
        ("  \n ", None),
        (" Hello ", Message(" Hello ")),
        ("/help", Command("help", "")),
        (" /set  temp 1 ", Command("set", "temp 1")),
        ("/system one\ntwo", Command("system", "one\ntwo")),
        ("/etc/fstab", Message("/etc/fstab")),
        ("// a comment", Message("// a comment")),
        ("/* a comment */", Message("/* a comment */")),
        ("/", Message("/")),
        ('"""/help"""', Message("/help")),
        ('"""\none\n\ntwo\n"""', Message("one\n\ntwo")),
        ('""""""', Message("")),
        ('"""one\ntwo', Message("one\ntwo")),
    ],
)
def test_an_entry_is_a_message_or_a_command(entry: str, means: object) -> None:
    assert meaning(entry) == means


@pytest.mark.parametrize(
    ("entry", "is_begun"),
    [('"""', True), ('""""', True), ('"""""', True), ('"""one', True), (' """one"""', False), ('one """', False)],
)
def test_quotes_are_open_until_they_are_closed(entry: str, is_begun: bool) -> None:
    assert is_open(entry) == is_begun


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["one", "", "two"], ["one", "", "two"]),
        (["one\\", "two\\", "three"], ["one\ntwo\nthree"]),
        (["one\\"], ["one"]),
        (['"""one\\', "two", '"""', "three"], ['"""one\\\ntwo\n"""', "three"]),
        (['"""one', "two"], ['"""one\ntwo']),
        (["one\\", '"""', "two"], ['one\n"""', "two"]),
    ],
)
def test_lines_make_entries(lines: list[str], found: list[str]) -> None:
    assert list(entries(lines)) == found
