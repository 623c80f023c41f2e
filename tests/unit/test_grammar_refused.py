"""Schemas and grammars that cannot be obeyed, hostile ones above all, and what OpenAI's clients ask for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from lever.errors import LeverError, MissingExtra, UsageError
from lever.grammar import Grammar, Vocabulary, constraint_of
from lever.tokenizer import Tokenizer
from tests import tiny
from tests.unit.test_grammar import BPE, PERSON, PROMPT, follow
from tests.unit.test_tokenizer import header

# --- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("{", "is no JSON"),
        ("[1]", "no JSON object"),
        ("true", "no JSON object"),
        ({"a": float("nan")}, "is no JSON"),
        ({"a": object()}, "is no JSON"),
        ({"type": "thing"}, "cannot be used"),
        ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "(a)\\1"}, "backreferences"),
        ({"type": "string", "format": "no such"}, "no such"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"enum": []}, "Unsatisfiable"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"$ref": "http://127.0.0.1:9/schema.json"}, "does not fetch"),
        ({"$ref": "file:///etc/hostname"}, "does not fetch"),
        ('{"items":' * 5000 + "{}" + "}" * 5000, "nested too deeply"),
        ('{"items":' * 300 + "{}" + "}" * 300, "recursion limit"),
        ({"enum": [f"value {n}" for n in range(10_000)]}, "65536 are the most"),
        ({"properties": {f"p{n}": {} for n in range(4000)}}, "too big"),
        ({"allOf": [{"anyOf": [{"properties": {f"x{i}{j}": {}}} for j in range(4)]} for i in range(12)]}, "too large"),
        ({"allOf": [{"anyOf": [{"pattern": f"{x}{n}.*"} for x in "ab"]} for n in range(14)]}, "cannot be used"),
    ],
)
def test_a_schema_that_cannot_be_obeyed_is_refused_with_what_is_wrong(schema: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        Grammar.from_json_schema(schema)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "source",
    [
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "root ::= root",
        {"type": "integer", "multipleOf": 999_999_937},
    ],
)
def test_what_cannot_be_followed_from_the_start_is_refused_before_anything_is_drawn(source: Any) -> None:
    with pytest.raises(UsageError, match=r"nothing can follow|fuel exhausted"):
        follow(Grammar.from_text(source) if isinstance(source, str) else Grammar.from_json_schema(source))


def test_a_chain_of_definitions_does_not_end_the_process() -> None:
    """Each takes 8 KB of the stack: on that of the main thread, a chain of 1,000 was a segmentation fault."""
    source = {
        "$defs": {f"{n:x}": {"items": {"$ref": f"#/$defs/{n + 1:x}"}} for n in range(1500)} | {f"{1500:x}": {}},
        "$ref": "#/$defs/0",
    }
    before = threading.stack_size()
    with pytest.raises(UsageError, match="too big"):
        Grammar.from_json_schema(source)
    source["$defs"] = {f"{n:x}": {"items": {"$ref": f"#/$defs/{n + 1:x}"}} for n in range(1000)} | {f"{1000:x}": {}}
    constraint = follow(Grammar.from_json_schema(source))
    assert constraint.allowed(PROMPT)[BPE.encode("[", add_special=False)[0]]
    assert threading.stack_size() == before


@pytest.mark.parametrize(
    "source",
    [
        'root ::= ((("a" | "b"){1000}){1000}){1000}',
        'root ::= ("" | "a"*)*',
        'root ::= root root | "a" | "b"',
        'root ::= "a" root',
        "root ::= [a-z] root | [a-z]",
    ],
)
def test_an_endless_or_ambiguous_grammar_goes_on_or_says_that_it_cannot(source: str) -> None:
    constraint, answer = follow(Grammar.from_text(source)), list[int]()
    letters = [BPE.encode(letter, add_special=False)[0] for letter in "ab"]
    says = ""
    try:
        for n in range(300):
            found = constraint.allowed([*PROMPT, *answer])
            answer.append(next(token for token in (letters[n % 2], letters[0]) if found[token]))
    except LeverError as error:
        says = str(error)
    assert len(answer) == 300 or "too" in says.lower() or "max is" in says
    assert not constraint.complete([*PROMPT, *answer[:20]])


def test_a_vocabulary_that_cannot_write_it_is_told_before_anything_is_drawn() -> None:
    metadata: Any = tiny.bpe_vocabulary(None)
    metadata["tokenizer.ggml.token_type"][metadata["tokenizer.ggml.tokens"].index("{")] = tiny.UNUSED
    without_braces = Vocabulary(Tokenizer.from_gguf(header(metadata)))
    assert without_braces.constraint(Grammar.from_text('root ::= "a{"'), 0).allowed([]).any()
    with pytest.raises(UsageError, match="nothing can follow"):
        without_braces.constraint(Grammar.json_object(), 0)
    stuck = without_braces.constraint(Grammar.from_text('root ::= "a{"'), 0)
    with pytest.raises(LeverError, match="after 'a': nothing can follow"):
        stuck.allowed(BPE.encode("a", add_special=False))


# --- what OpenAI's clients ask for ----------------------------------------------------------------------------


def asked(schema: object) -> Mapping[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}


def test_response_format_names_a_schema_any_object_or_plain_text() -> None:
    assert constraint_of(None) is constraint_of({"type": "text"}) is None
    assert constraint_of({"type": "json_object"}) == Grammar.json_object()
    assert constraint_of(asked(PERSON)) == Grammar.from_json_schema(PERSON) != Grammar.json_object()


@pytest.mark.parametrize(
    ("response_format", "says"),
    [
        ({}, "type None"),
        ({"type": "yaml"}, "type 'yaml'"),
        ({"type": "json_schema"}, "no object json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "no object json_schema.schema"),
        (asked("{}"), "no object json_schema.schema"),
        (asked({"type": "thing"}), "cannot be used"),
    ],
)
def test_a_response_format_that_is_none_is_refused(response_format: Mapping[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        constraint_of(response_format)


def test_without_the_extra_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr("lever.grammar.find_spec", lambda _name: None)
    for ask in (Grammar.json_object, lambda: Grammar.from_text('root ::= "a"'), lambda: Vocabulary(BPE)):
        with pytest.raises(MissingExtra, match=r"pip install 'lever-llm\[grammar\]'"):
            ask()
