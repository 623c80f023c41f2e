"""What is no grammar in llama.cpp's notation, and what is said of it. What sound ones mean: `test_grammar.py`."""

from __future__ import annotations

import contextlib
import time

import pytest

from lever.errors import UsageError
from lever.gbnf import MOST_PARENTHESES, MOST_RULES_DEEP, to_lark


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no rule root"),
        ('answer ::= "a"', "no rule root"),
        ('root ::= "a" name', "root of the grammar refers to name"),
        ('root ::= "a"\nroot ::= "b"', "line 2 .*root is there twice"),
        ("root", "line 1 .*::= is missing"),
        ('root = "a"', "line 1 .*not understood"),
        ('root ::= "a', "line 1 .*not understood"),
        ('root ::= "a" "\n', "not understood"),
        ("root ::= [a", "not understood"),
        ("root ::= <think>", "not understood"),
        ('root ::= ("a"', r"\) is missing"),
        ('root ::= "a")', "end of the line is missing"),
        ('root ::= "a"\n\n  | "b"', "line 3 .*name of a rule is missing"),
        ("root ::= *", "is missing"),
        ('root ::= "a"++', "is missing"),
        ('root ::= "a"{3,2}', "no range"),
        ("root ::= [z-a]", "z-a is no range"),
        ("root ::= []", "holds no character"),
        (r'root ::= "\q"', "is none of"),
        (r'root ::= "\x4"', "is none of"),
        (r'root ::= "\uD800"', "U\\+D800 is no character"),
        (r'root ::= "\U00110000"', "U\\+110000 is no character"),
        ('root ::= "\udc80"', "no character"),
        ("root ::= [" + "".join(map(chr, range(0x4E00, 0x4E00 + 1001))) + "]", "more than 1000 characters"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_line(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        to_lark(text)


def test_only_so_many_parentheses_and_rules_may_lie_in_each_other() -> None:
    """The library would go down by recursion, and end the process where the stack ends."""

    def parentheses(n: int) -> str:
        return "root ::= " + "(" * n + '"a"' + ")" * n

    def chain(n: int) -> str:
        return "root ::= r1\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(1, n)) + f'r{n} ::= "a"'

    to_lark(parentheses(MOST_PARENTHESES))
    to_lark(chain(MOST_RULES_DEEP - 1))
    with pytest.raises(UsageError, match="parentheses in each other"):
        to_lark(parentheses(MOST_PARENTHESES + 1))
    with pytest.raises(UsageError, match="rules of the grammar lie in each other"):
        to_lark(chain(MOST_RULES_DEEP))


@pytest.mark.parametrize("unit", ['"', "[", "(", "a ", "\\", "#", "\n", "|", '"\\', "root ::= ", "{1,"])
def test_time_does_not_grow_with_the_square_of_a_hostile_text(unit: str) -> None:
    def seconds(n: int) -> float:
        started = time.process_time()
        with contextlib.suppress(UsageError):
            to_lark("root ::= " + unit * n)
        return time.process_time() - started

    assert seconds(60_000) < 0.5 + 100 * seconds(6_000)  # 10 if linear
