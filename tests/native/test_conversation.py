"""Conversations with tiny models: what is kept of an answer, what the engine need not read again, and files."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from lever.conversation import Conversation, settings_to_dict, spliced, with_setting
from lever.errors import ContextOverflow, LeverError, StorageError, TemplateError, UsageError
from lever.llm import LLM, GenerationSettings
from lever.loader import ModelSettings
from lever.settings import SamplerSettings
from lever.stats import RunStats
from tests.templates import TEMPLATES
from tests.tiny import tiny_model

# A template that refuses two messages of the same role in a row, and trims what is said.
STRICT = (
    "{% for m in messages %}{% if loop.index0 % 2 != (m['role'] == 'assistant') | int %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the template of the demo."""
    template = {"tokenizer.chat_template": TEMPLATES["chatml-tools"]}
    return tiny_model(tmp_path_factory.mktemp("models") / "qwen2.gguf", arch="qwen2", metadata=template)


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, ModelSettings(dram=1 << 30, n_ctx=512, n_threads=1), name="tiny") as llm:
        yield llm


def settings(
    seed: int = 1, *, n: int | None = 12, bias: dict[int, float] | None = None, **more: Any
) -> GenerationSettings:
    sampler = SamplerSettings(seed=seed, logit_bias=bias or {}, temperature=1.5, top_k=0)
    return GenerationSettings(sampler=sampler, max_new_tokens=n, **more)


def letters(llm: LLM) -> dict[int, float]:
    """A bias under which only text of these letters comes, in tokens of one letter and of several."""
    texts = {token: llm.tokenizer.token_bytes(token) for token in range(llm.tokenizer.n_vocab)}
    return {token: 1000.0 for token, text in texts.items() if text and not text.strip(b" helordn")}


def ask(conversation: Conversation, text: str) -> RunStats:
    with conversation.asking(text) as generation:
        said = "".join(generation)
    assert conversation.turns[-1] == {"role": "assistant", "content": said}
    return generation.stats


# --- turns --------------------------------------------------------------------------------------------------


def test_the_next_question_is_asked_with_all_that_was_said(llm: LLM) -> None:
    conversation = Conversation(llm, settings(bias=letters(llm)), "Be brief.")
    ask(conversation, "one")
    first = conversation.turns[-1]["content"]
    stats = ask(conversation, "two")

    assert [message["role"] for message in conversation.messages] == ["system", *("user", "assistant") * 2]
    assert conversation.messages[:4] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "two"},
    ]
    assert stats.prompt_tokens > stats.cached_tokens > 0


def test_the_first_answer_is_that_of_a_single_question(llm: LLM) -> None:
    conversation = Conversation(llm, settings(seed=7))
    ask(conversation, "Hello")

    alone = llm.generate(llm.encode_chat([{"role": "user", "content": "Hello"}]), settings(seed=7))
    assert conversation.turns[-1]["content"] == "".join(alone)


def test_K14_what_was_said_before_a_reset_changes_nothing(llm: LLM) -> None:
    conversation = Conversation(llm, settings(seed=3))
    ask(conversation, "A")
    first = conversation.turns
    ask(conversation, "B")
    conversation.reset()
    ask(conversation, "A")

    assert conversation.turns == first[:2]


def test_a_cancelled_answer_is_the_text_so_far(llm: LLM) -> None:
    conversation = Conversation(llm, settings(n=None, bias=letters(llm)))
    with conversation.asking("Hello") as generation:
        pieces = iter(generation)
        said = next(pieces)
        generation.cancel()
        said += "".join(pieces)

    assert conversation.turns == [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": said}]
    assert ask(conversation, "and?").cached_tokens > 0


def test_a_question_that_nothing_came_of_is_taken_back(llm: LLM) -> None:
    conversation = Conversation(llm, settings())
    ask(conversation, "one")
    before = conversation.turns
    with conversation.asking("two") as generation:
        generation.cancel()
        assert list(generation) == []

    assert conversation.turns == before
    assert ask(conversation, "two").new_tokens == 12


def test_a_failure_while_it_is_read_takes_the_question_back(llm: LLM) -> None:
    def fail(_n_tokens: int) -> None:
        raise StorageError("the card was pulled")

    conversation = Conversation(llm, settings())
    with pytest.raises(StorageError), conversation.asking("two", lambda _n: fail) as generation:
        list(generation)

    assert conversation.turns == []


def test_an_answer_of_nothing_is_one_when_the_model_ended_it(llm: LLM) -> None:
    end = min(llm.tokenizer.eog_ids)
    conversation = Conversation(llm, settings(bias={end: 1e4}))
    ask(conversation, "Hello")

    assert conversation.turns[-1] == {"role": "assistant", "content": ""}


def test_another_answer_takes_the_place_of_the_last(llm: LLM) -> None:
    conversation = Conversation(llm, settings(seed=1))
    ask(conversation, "one")
    first = conversation.turns[-1]["content"]
    conversation.settings = settings(seed=2)
    with conversation.asking_again() as generation:
        second = "".join(generation)

    assert first != second
    assert [turn["content"] for turn in conversation.turns] == ["one", second]
    assert generation.stats.cached_tokens == generation.stats.prompt_tokens - 1  # the prompt is the same


def test_another_answer_that_nothing_came_of_leaves_the_one_there_was(llm: LLM) -> None:
    conversation = Conversation(llm, settings())
    with pytest.raises(UsageError, match="no message yet"), conversation.asking_again():
        pass
    ask(conversation, "one")
    before = conversation.turns
    with conversation.asking_again() as generation:
        generation.cancel()
        list(generation)

    assert conversation.turns == before


def test_a_text_that_is_refused_leaves_the_conversation_as_it_was(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "strict.gguf", arch="qwen2", metadata={"tokenizer.chat_template": STRICT})
    with LLM(path, ModelSettings(dram=1 << 30, n_ctx=512, n_threads=1)) as llm:
        conversation = Conversation(llm, settings())
        conversation.turns = [{"role": "user", "content": "unanswered"}]
        with pytest.raises(TemplateError, match="must alternate"), conversation.asking("another"):
            pass
        assert conversation.turns == [{"role": "user", "content": "unanswered"}]
        with conversation.asking_again() as generation:
            said = "".join(generation)
        assert [turn["content"] for turn in conversation.turns] == ["unanswered", said]


# --- the context --------------------------------------------------------------------------------------------


def test_K4_a_conversation_that_outgrows_the_context_says_both_numbers_and_stays(llm: LLM) -> None:
    conversation = Conversation(llm, settings())
    ask(conversation, "short")
    before = conversation.turns
    with (
        pytest.raises(ContextOverflow, match=r"the conversation has 6\d\d tokens and the context 512: /reset .* -c"),
        conversation.asking("x" * 600),
    ):
        pass

    assert conversation.turns == before
    ask(conversation, "shorter")


def test_a_context_that_fills_up_is_told_of_before_it_is_full(llm: LLM) -> None:
    conversation = Conversation(llm, settings(n=2))
    ask(conversation, "x" * 100)
    assert conversation.shortage is None
    ask(conversation, "x" * 330)
    assert conversation.shortage is not None
    assert "nearly full, 4" in conversation.shortage
    conversation.settings = settings(n=None, bias=letters(llm), ignore_eos=True)
    with conversation.asking_again() as generation:
        list(generation)
    assert generation.finish_reason == "length"
    assert (
        conversation.shortage
        == "the context is full, 512 of 512 tokens: /reset begins anew, and a larger -c holds more"
    )


# --- what is not read again ---------------------------------------------------------------------------------


def common(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def test_the_rows_of_an_answer_are_never_read_again_though_its_text_has_other_tokens(llm: LLM) -> None:
    """In 20 conversations with the demo's template. What the tokenizer makes of an answer's text would keep them in
    few: this model draws at random, and its letters often make longer tokens together.
    """
    by_text = 0
    for seed in range(20):
        conversation = Conversation(llm, settings(seed=seed, bias=letters(llm)))
        with conversation.asking("Hello, world") as generation:
            list(generation)
        prompt = llm.encode_chat(conversation.messages[:1])
        held = [*prompt, *generation.tokens[:-1]]  # the row of the last token is never computed
        stats = ask(conversation, "and the other?")
        again = llm.encode_chat(conversation.messages[:3])

        assert stats.cached_tokens == len(held)
        by_text += common(held, again) == len(held)

    assert by_text < 10


def test_spliced_keeps_old_tokens_as_far_as_both_spell_the_same(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    h, e, ell, o, he = (tokenizer.encode(text)[0] for text in ("h", "e", "l", "o", "he"))
    (hello,) = tokenizer.encode("hello")
    start = tokenizer.control_texts["<|im_start|>"]

    assert spliced([h, e, ell, ell, o], [hello, o], tokenizer) == ([h, e, ell, ell, o, o], 5)
    assert spliced([he, ell, ell], [hello, o], tokenizer) == ([hello, o], 0)  # no border of both
    assert spliced([start, h], [start, o], tokenizer) == ([start, o], 1)
    assert spliced([], [start, o], tokenizer) == ([start, o], 0)
    assert spliced([start, h, e], [start, he], tokenizer) == ([start, h, e], 3)
    written = tokenizer.encode("<|im_start|>")  # as a text, it is not the token
    assert spliced(written, [start, o], tokenizer) == ([start, o], 0)
    assert spliced([start, o], [*written, o], tokenizer) == ([*written, o], 0)


def test_an_answer_that_the_template_writes_otherwise_is_read_as_it_writes_it(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "strict.gguf", arch="qwen2", metadata={"tokenizer.chat_template": STRICT})
    with LLM(path, ModelSettings(dram=1 << 30, n_ctx=512, n_threads=1)) as llm:
        (space,) = llm.tokenizer.encode(" ")
        conversation = Conversation(llm, settings(n=3, bias={space: 1e4}))
        ask(conversation, "one")
        assert conversation.turns[-1]["content"] == "   "
        n_first = len(llm.encode_chat(conversation.messages[:1]))
        stats = ask(conversation, "two")

        assert stats.prompt_tokens == len(llm.encode_chat(conversation.messages[:3]))
        assert stats.cached_tokens == n_first


def test_a_character_that_was_not_finished_is_read_as_what_stands_for_it(llm: LLM) -> None:
    (half,) = llm.tokenizer.encode("\udce9")
    conversation = Conversation(llm, settings(n=1, bias={half: 1e4}))
    ask(conversation, "one")
    stats = ask(conversation, "two")

    assert conversation.turns[1]["content"] == "\ufffd"
    assert stats.prompt_tokens == len(llm.encode_chat(conversation.messages[:3]))


# --- files --------------------------------------------------------------------------------------------------


def test_a_conversation_comes_back_from_its_file(llm: LLM, tmp_path: Path) -> None:
    bias = {65: 2.5, 66: -float("inf")}
    wanted = settings(seed=9, bias=bias, stops=["END"], ignore_eos=True, n=5)
    conversation = Conversation(llm, wanted, "Say é \udcff.")
    ask(conversation, "one\nand a half")
    file = tmp_path / "chat.json"
    conversation.save(file)
    conversation.save(file)  # once more: it is one of ours
    other = Conversation(llm, settings())
    other.turns = [{"role": "user", "content": "gone"}]

    assert other.load(file) == "tiny"
    assert other.messages == conversation.messages
    assert other.settings == wanted
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]
    ask(other, "two")


def test_a_saved_conversation_has_the_form_of_a_request(llm: LLM, tmp_path: Path) -> None:
    conversation = Conversation(llm, settings(seed=9, n=None))
    ask(conversation, "one")
    conversation.save(tmp_path / "chat.json")
    document = json.loads((tmp_path / "chat.json").read_bytes())

    assert document.keys() == {"model", "messages", *settings_to_dict(settings(n=None))}
    assert (document["temperature"], document["top_k"], document["seed"]) == (1.5, 0, 9)
    assert document["messages"][0] == {"role": "user", "content": "one"}


def test_a_request_of_others_is_a_conversation(llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "assistant", "content": "Hi!", "refusal": None, "annotations": []},
        {"role": "user", "content": "one"},
    ]
    file = tmp_path / "request.json"
    file.write_text(json.dumps({"messages": messages, "temperature": 0, "stream": True, "max_tokens": None}))
    conversation = Conversation(llm, settings())

    assert conversation.load(file) is None
    assert conversation.system == "Be\nbrief."
    assert conversation.settings.sampler.temperature == 0
    assert conversation.settings.max_new_tokens is None
    assert "knows nothing of stream" in caplog.text
    with conversation.asking_again() as generation:
        list(generation)
    assert [turn["role"] for turn in conversation.turns] == ["assistant", "user", "assistant"]


def broken(**more: object) -> str:
    return json.dumps({"messages": [], **more})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[]", "no list of messages"),
        ('{"messages": {}}', "no list of messages"),
        (broken(messages=[1]), "message 0 has no role"),
        (broken(messages=[{"role": "tool", "content": "x"}]), "message 0 is of the role 'tool'"),
        (broken(messages=[{"role": "user"}, {"role": "system"}]), "message 1 is of the role 'system'"),
        (broken(messages=[{"role": "user", "content": 1}]), "message 0 is neither text"),
        (broken(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "'image_url': lever reads only text"),
        (broken(messages=[{"role": "assistant", "tool_calls": [{"id": "1"}]}]), "message 0 has tool_calls"),
        (broken(temperature="hot"), "temperature is 'hot': it must be a number"),
        (broken(temperature=True), "temperature is True: it must be a number"),
        (broken(temperature=10**400), "not as large"),
        (broken(top_p=-1), "top_p is -1.0: it must be at least 0"),
        (broken(top_k=1.5), "top_k is 1.5: it must be a whole number"),
        (broken(seed=-1), "seed is -1"),
        (broken(max_tokens=-2), "max-tokens is -2"),
        (broken(stop=[1]), "a text or a list of texts"),
        (broken(stop=""), "a stop string is empty"),
        (broken(ignore_eos=1), "true or false"),
        (broken(logit_bias={"a": 1}), "a number for each token's id"),
        (broken(logit_bias={"1": "x"}), "logit_bias 1 is 'x'"),
    ],
)
def test_a_file_that_is_no_conversation_says_why_and_changes_nothing(
    llm: LLM, tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)
    conversation = Conversation(llm, settings(), "stays")
    conversation.turns = [{"role": "user", "content": "stays"}]
    before = (conversation.messages, conversation.settings)

    with pytest.raises(UsageError) as caught:
        conversation.load(file)
    assert says in str(caught.value)
    assert str(caught.value).startswith(str(file))
    assert (conversation.messages, conversation.settings) == before


def test_A5_a_save_that_fails_leaves_what_was_there(llm: LLM, tmp_path: Path) -> None:
    conversation = Conversation(llm, settings())
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")

    def refused(path: Path) -> str:
        with pytest.raises(LeverError) as caught:
            conversation.save(path)
        return f"{type(caught.value).__name__}: {caught.value}"

    assert "nothing is written over it" in refused(notes)
    assert notes.read_text() == "mine"
    assert refused(tmp_path / "nowhere/chat.json").startswith("StorageError: cannot write")
    assert refused(tmp_path).startswith("StorageError: cannot read")
    assert refused(tmp_path / ("x" * 300)).startswith("StorageError: cannot write")
    assert list(tmp_path.iterdir()) == [notes]
    with pytest.raises(StorageError, match="No such file"):
        conversation.load(tmp_path / "nowhere.json")


def test_a_link_to_a_conversation_stays_one(llm: LLM, tmp_path: Path) -> None:
    conversation = Conversation(llm, settings())
    conversation.save(tmp_path / "chat.json")
    link = tmp_path / "link.json"
    link.symlink_to("chat.json")
    conversation.system = "new"
    conversation.save(link)

    assert link.is_symlink()
    assert "new" in (tmp_path / "chat.json").read_text()


# --- settings by name ---------------------------------------------------------------------------------------


def test_a_setting_by_its_name_and_an_unknown_one_with_what_may_be_meant() -> None:
    assert with_setting(settings(), "temperature", 1).sampler.temperature == 1.0
    assert with_setting(settings(), "max_tokens", -1).max_new_tokens is None
    assert with_setting(settings(), "stop", "END").stops == ["END"]
    assert with_setting(settings(stops=["END"]), "stop", None).stops == []
    with pytest.raises(UsageError, match="no setting 'temprature': did you mean temperature"):
        with_setting(settings(), "temprature", 1)


def test_every_setting_goes_through_its_json() -> None:
    wanted = settings(bias={1: -float("inf")}, stops=["a"], ignore_eos=True)
    found = settings(seed=99, n=None)
    for name, value in json.loads(json.dumps(settings_to_dict(wanted), allow_nan=False)).items():
        found = with_setting(found, name, value)
    assert found == wanted
