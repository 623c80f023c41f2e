"""Answers that obey a JSON schema or a grammar: which tokens may come next. Draws nothing and runs no model.

What may follow is worked out by the library llguidance (the extra `grammar`, imported when first needed), from bytes:
every token counts that goes on with a text of the language, however it cuts it. Where the library would choose among
the tokens that spell the same bytes, it is told not to.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from lever.errors import LeverError, MissingExtra, UsageError
from lever.gbnf import to_lark
from lever.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

T = TypeVar("T")

# Others write schemas: what is compiled is bounded in size, so in time (a second or so) and in memory.
MOST_CHARACTERS = 64 << 10  # of a schema or a grammar
# The library goes down chains of definitions by recursion, about 8 KB at a step, and what exceeds a stack ends the
# process: chains as long as MOST_CHARACTERS allows take a quarter of this. Only what is used becomes memory.
STACK = 64 << 20
MOST_SAID = 300  # characters of what the library finds wrong
MOST_SYMBOLS = 20_000  # of a compiled grammar
MOST_STATES = 10_000  # that are remembered of its regular expressions, about 700 bytes each
MOST_FUEL = 300_000  # of the library's own measure of work, for the regular expressions of a grammar
# Measured with 152 k tokens. While the tree is built it takes a third more, but then no grammar is followed.
BYTES_PER_TOKEN = 160
BYTES_PER_GRAMMAR = 24 << 20  # of a large one and the library itself; usual ones take 5 MB

# As llama.cpp allows it: enough to indent, and no endless run of blanks where a model would rather say nothing.
WHITESPACE = r" |\n{1,2}[ \t]{0,20}"
_ANY_TOKENS = '\n%llguidance {"no_forcing": true}'


def is_installed() -> bool:
    """Whether the library is there."""
    return find_spec("llguidance") is not None


def nbytes(n_vocab: int) -> int:
    """Bytes that following grammars takes, with such a vocabulary."""
    return BYTES_PER_TOKEN * n_vocab + BYTES_PER_GRAMMAR


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language, checked and ready for any vocabulary. Two are equal when they were written the same way.

    Making one raises UsageError for what is no grammar, or too large, and MissingExtra without the library.
    """

    kind: Literal["grammar", "JSON schema"]
    source: str  # for the library

    def __post_init__(self) -> None:
        """Have the library say what is wrong with it."""
        _require_library()
        from llguidance import LLMatcher

        error = _with_deep_stack(lambda: LLMatcher.validate_grammar(self.source, None, limits=_limits()))
        if error:
            raise UsageError(f"the {self.kind} cannot be used: {_in_a_line(error)}")

    @classmethod
    def from_json_schema(cls, schema: Mapping[str, object] | str) -> Grammar:
        """JSON that fits the schema, given as such or as its text. Properties come in the schema's order.

        What the library does not know of JSON Schema is refused, not left out.
        """
        # The schema's own key may say otherwise.
        value = {"x-guidance": {"whitespace_pattern": WHITESPACE}, **_schema_of(schema)}
        start = {"lark_grammar": f"start: @schema{_ANY_TOKENS}"}
        return cls("JSON schema", json.dumps({"grammars": [start, {"name": "schema", "json_schema": value}]}))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.from_json_schema({"type": "object"})

    @classmethod
    def from_text(cls, text: str) -> Grammar:
        """What the rule `root` of a grammar says, in llama.cpp's notation (GBNF)."""
        _check_size(text)
        return cls("grammar", json.dumps({"grammars": [{"lark_grammar": to_lark(text) + _ANY_TOKENS}]}))


def constraint_of(response_format: Mapping[str, object] | None) -> Grammar | None:
    """What OpenAI's `response_format` asks for; None for plain text. Errors as of `Grammar`."""
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json_object()
    if kind == "json_schema":
        given = response_format.get("json_schema")
        schema = given.get("schema") if isinstance(given, Mapping) else None
        if not isinstance(schema, Mapping):
            raise UsageError("response_format has no object json_schema.schema")
        return Grammar.from_json_schema(schema)
    raise UsageError(f"response_format is of type {kind!r}: it must be text, json_object or json_schema")


class Vocabulary:
    """All tokens as a tree of their bytes, for any number of grammars. Takes `nbytes` with one of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        texts = [b"" if n in tokenizer.eog_ids else tokenizer.token_bytes(n) for n in range(tokenizer.n_vocab)]
        self._has_text = np.fromiter(map(bool, texts), dtype=np.bool_, count=len(texts))
        self._ends = np.fromiter(sorted(tokenizer.eog_ids), dtype=np.intp)
        _require_library()
        from llguidance import LLTokenizer, TokenizerWrapper

        # Trees of parts of the vocabulary (slices) would save milliseconds in texts of limited length, and double it.
        self.native = LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, texts)), slices=[])

    def constraint(self, grammar: Grammar, n_prompt: int) -> GrammarConstraint:
        """What the grammar allows behind a prompt of so many tokens.

        UsageError if nothing can ever follow, or no token of this vocabulary can.
        """
        constraint = GrammarConstraint(self, grammar, n_prompt)
        constraint.check()
        return constraint

    def allowed(self, bits: bytes) -> NDArray[np.bool_]:
        """[n_vocab] from the library's bits, of which the one behind the vocabulary says that the text may end.

        Only end tokens end it: whatever else has no text, such as a control token, is never allowed.
        """
        unpacked = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)
        n_vocab = len(self._has_text)
        allowed: NDArray[np.bool_] = unpacked[:n_vocab] & self._has_text
        allowed[self._ends] = unpacked[n_vocab]
        return allowed


class GrammarConstraint:
    """A `lever.sample.Constraint`: follows one answer after the other to the same prompt, each from its beginning."""

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar, n_prompt: int) -> None:
        self._vocabulary, self._grammar, self._n_prompt = vocabulary, grammar, n_prompt
        self._matcher = _compile(grammar.source, vocabulary.native)
        self._followed: list[int] = []

    def check(self) -> None:
        """UsageError if it allows nothing from the start."""
        self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise UsageError(f"the {self._grammar.kind} cannot be used: {_in_a_line(self._matcher.get_error())}")

    def allowed(self, tokens: Sequence[int]) -> NDArray[np.bool_]:
        """Which tokens [n_vocab] may follow these, the prompt's too. LeverError if the library finds no answer."""
        matcher = self._behind(tokens)
        bits = matcher.compute_bitmask()
        if matcher.is_error():  # it may remember too much of what came before: a new one has room
            matcher = self._behind(tokens)
            bits = matcher.compute_bitmask()
        if matcher.is_error():
            raise self._lost(tokens)
        return self._vocabulary.allowed(bits)

    def complete(self, tokens: Sequence[int]) -> bool:
        """Whether nothing may follow but the end."""
        return self._behind(tokens).is_stopped()

    def _behind(self, tokens: Sequence[int]) -> LLMatcher:
        """The matcher behind these tokens, or a new one there if it has failed."""
        answer, n = list(tokens[self._n_prompt :]), len(self._followed)
        if answer[:n] != self._followed:
            self._matcher.reset()
            n = 0
        if not self._matcher.consume_tokens(answer[n:]):
            self._matcher = _compile(self._grammar.source, self._vocabulary.native)
            if not self._matcher.consume_tokens(answer):
                raise self._lost(tokens)
        self._followed = answer
        return self._matcher

    def _lost(self, tokens: Sequence[int]) -> LeverError:
        written = self._vocabulary.tokenizer.decode(tokens[self._n_prompt :])[-40:]
        error = _in_a_line(self._matcher.get_error())
        return LeverError(f"the {self._grammar.kind} does not know how to go on after {written!r}: {error}")


class _Tokens:
    """What the library asks of a tokenizer: all tokens, and ids of a text."""

    bos_token_id = None
    eos_token_id = None  # it then adds one behind the vocabulary, which stands for all that end a text

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[bytes]) -> None:
        self.tokens, self._tokenizer = tokens, tokenizer

    def __call__(self, text: str) -> list[int]:
        """Of ordinary text; what looks like a control token is none."""
        return self._tokenizer.encode(text, add_special=False, parse_special=False)


def _compile(source: str, vocabulary: LLTokenizer) -> LLMatcher:
    """Of a grammar; it says itself if it is none."""
    from llguidance import LLMatcher

    return _with_deep_stack(lambda: LLMatcher(vocabulary, source, log_level=0, limits=_limits()))


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_grammar_size=MOST_SYMBOLS,
        max_lexer_states=MOST_STATES,
        initial_lexer_fuel=MOST_FUEL,
        verbose_errors=False,
    )


def _require_library() -> None:
    if not is_installed():
        raise MissingExtra(
            "answers that obey a schema or a grammar need the package llguidance: install it with "
            "pip install 'lever-llm[grammar]', or uv sync --extra grammar in a checkout"
        )


def _with_deep_stack(act: Callable[[], T]) -> T:
    """What it returns, from a thread of its own."""
    pool = ThreadPoolExecutor(1, "lever-grammar")
    with pool:
        before = threading.stack_size(STACK)
        try:
            found = pool.submit(act)  # starts the thread
        finally:
            threading.stack_size(before)
        return found.result()


def _schema_of(schema: Mapping[str, object] | str) -> Mapping[str, object]:
    """The schema, small enough; UsageError for what is none."""
    try:
        if isinstance(schema, str):
            _check_size(schema)
            schema = json.loads(schema)
        if not isinstance(schema, Mapping):
            raise UsageError("the JSON schema is no JSON object")
        _check_size(json.dumps(schema, allow_nan=False))
    except RecursionError:
        raise UsageError("the JSON schema is nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise UsageError(f"the JSON schema is no JSON: {error}") from None
    return schema


def _check_size(text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise UsageError(f"a schema or grammar of {len(text)} characters: {MOST_CHARACTERS} are the most")


def _in_a_line(error: str) -> str:
    """What the library says, as far as it says anything."""
    said = " ".join(error.partition("\n<non-verbose/>")[0].split())
    return "nothing can follow" if said == "NoExtensionBias" else said[:MOST_SAID]
