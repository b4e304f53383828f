"""Conversations: what a template is given, the date it sees, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_support import random_weights
from test_text import byte_level

import kvlab
from kvlab.model import LlamaConfig, hf
from kvlab.model.checkpoint import save_folder
from kvlab.model.tokenizer import ByteTokenizer, HFTokenizer, dated
from kvlab.types import UserError
from kvlab.workload.prompt_file import parse_line

TRIMS = "{% for m in messages %}[{{ m.role }}]{{ m['content'] | trim }}{% endfor %}[assistant]"
DATED = "\n Today Date: {{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
REFUSES = "{% if messages[0].role != 'user' %}{{ raise_exception('Conversations must begin with user') }}{% endif %}x"
HI = [{"role": "user", "content": "Hi"}]


def tokenizer(folder: Path, template: Any) -> HFTokenizer:
    folder.mkdir(exist_ok=True)
    byte_level([("<|end|>", True)]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}), encoding="utf-8")
    return HFTokenizer(folder)


def said(tokenizer: Any, messages: Any) -> str:
    text: str = tokenizer.decode(tokenizer.apply_chat(messages))
    return text


@pytest.mark.parametrize("content", ["Hi", [{"type": "text", "text": "Hi"}], [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}],
                                     ({"text": "Hi"},), ["Hi"]])  # fmt: skip
def test_parts_of_text_are_one_text(tmp_path: Path, content: Any) -> None:
    messages = [{"role": "user", "content": content}]
    assert said(tokenizer(tmp_path, TRIMS), messages) == "[user]Hi[assistant]"
    assert said(ByteTokenizer(), messages) == "user: Hi\nassistant: "
    assert kvlab.LLM("tiny", num_blocks=8).chat(messages)[0].prompt_token_ids[1:] == tuple(b"user: Hi\nassistant: ")
    assert parse_line("f, line 1", json.dumps({"messages": messages})).content == HI


@pytest.mark.parametrize("template", [
    "{% for m in messages %}{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endfor %}",
    "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% set content = m['content'] %}{% for part in content %}{{ part.text }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% endif %}{% endfor %}",
])  # fmt: skip
def test_a_template_that_knows_parts_only_is_given_parts(tmp_path: Path, template: str) -> None:
    for content in ("Hi", [{"type": "text", "text": "Hi"}]):
        assert said(tokenizer(tmp_path, template), [{"role": "user", "content": content}]) == "Hi"


WRONG = {
    "content = None is not allowed": [{"role": "user", "content": None}],
    "content = 3 is not allowed": [{"role": "user", "content": 3}],
    "content = b'Hi' is not allowed": [{"role": "user", "content": b"Hi"}],
    "content = {'text': 'Hi'} is not allowed": [{"role": "user", "content": {"text": "Hi"}}],
    "part 0 is {'type': 'image_url'": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    "part 1 is None": [{"role": "user", "content": ["Hi", None]}],
    "part 0 is {'type': 'text', 'text': 5}": [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    "role = None is not allowed": [{"role": None, "content": "Hi"}],
    "role = '' is not allowed": [{"role": "", "content": "Hi"}],
    "message 1 is {'role': 'user'}": [*HI, {"role": "user"}],
    "message 0 is 'Hi'": ["Hi"],
    "not str": "Hi",
    "not NoneType": None,
    "not dict": {"role": "user", "content": "Hi"},
    "the conversation is empty": [],
}


@pytest.mark.parametrize("message", WRONG)
def test_messages_that_are_none_are_refused_at_every_door(tmp_path: Path, message: str) -> None:
    wrong: Any = WRONG[message]
    llm = kvlab.LLM("tiny", num_blocks=8)
    doors = [tokenizer(tmp_path, TRIMS).apply_chat, ByteTokenizer().apply_chat, llm.chat]
    if "b'" not in message:  # (JSON has no bytes)
        doors.append(lambda messages: parse_line("f, line 1", json.dumps({"messages": messages})))
    for door in doors:
        with pytest.raises(UserError) as caught:
            door(wrong)
        assert message in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1


def test_a_call_of_a_tool_needs_no_content(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ (m.tool_calls or []) | length }}{{ m.name }}{% endfor %}"
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}, {"role": "tool", "name": "f", "content": "7"}]
    assert said(tokenizer(tmp_path, template), messages) == "[assistant]1[tool]70f"


def test_the_date_of_a_prompt_is_a_setting(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, DATED)
    assert said(ours, HI) == "\n Today Date: 26 Jul 2024Hi"
    assert said(dated(ours, "2031-02-03"), HI) == "\n Today Date: 03 Feb 2031Hi"
    assert said(ours, HI) == "\n Today Date: 26 Jul 2024Hi"
    many = tokenizer(tmp_path / "many", "{{ strftime_now('%A %-d.%-m.%y, day %j; %Y-%m-%d %H:%M:%S 100%% %%d') }}")
    assert said(many, HI) == "Friday 26.7.24, day 208; 2024-07-26 00:00:00 100% %d"
    ask = "{% if strftime_now is defined %}{% set d = strftime_now('%Y') %}{% else %}{% set d = '?' %}{% endif %}{{ d }}"
    asks = tokenizer(tmp_path / "asks", ask)
    assert said(asks, HI) == "2024"
    for wrong in ("yesterday", "", None, 20240726, "2024-13-01"):
        with pytest.raises(UserError, match="chat_date = .* is not allowed: a date as YYYY-MM-DD"):
            dated(ours, wrong)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose chat template writes the date."""
    folder = tmp_path_factory.mktemp("dated")
    config = LlamaConfig(vocab_size=320, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8)
    save_folder(folder, config, {name: tensor.float() for name, tensor in random_weights(config, seed=0).items()})
    tokenizer(folder, DATED)
    return folder


def test_the_date_is_pinned_in_generation(folder: Path) -> None:
    def prompt(**settings: Any) -> str:
        llm = kvlab.LLM(hf(path=str(folder)), num_blocks=16, **settings)
        assert llm.tokenizer is not None
        return llm.tokenizer.decode(llm.chat(HI)[0].prompt_token_ids).strip()

    assert prompt() == "Today Date: 26 Jul 2024Hi"
    assert prompt(chat_date="2025-01-31") == "Today Date: 31 Jan 2025Hi"
    with pytest.raises(UserError, match="chat_date = '31.1.2025' is not allowed"):
        prompt(chat_date="31.1.2025")


def test_the_date_is_part_of_a_run(folder: Path, tmp_path: Path) -> None:
    """It stands in the run's config.yaml and identity, and the prompt follows it."""
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": HI, "max_tokens": 1}) + "\n", encoding="utf-8")

    def run(name: str, *settings: str) -> Any:
        return kvlab.run(kvlab.compose("model=hf", f"model.path={folder}", "workload=prompts", f"workload.path={tmp_path}/chats.jsonl",
                                       "kv_cache_tokens=512", *settings), folder=tmp_path / name)  # fmt: skip

    first, other = run("first"), run("other", "chat_date=2025-12-31")
    assert (first.config["chat_date"], other.config["chat_date"]) == ("2024-07-26", "2025-12-31")
    identities = [json.loads((run.folder / "status.json").read_text(encoding="utf-8"))["identity"] for run in (first, other)]
    assert identities[0] != identities[1]
    with pytest.raises(UserError, match="chat_date = 'today' is not allowed: a date as YYYY-MM-DD"):
        run("wrong", "chat_date=today")


def test_what_a_template_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, REFUSES)
    assert said(ours, HI) == "x"
    with pytest.raises(UserError, match="chat template refuses these messages: Conversations must begin with user"):
        ours.apply_chat([{"role": "system", "content": "Hi"}])


@pytest.mark.parametrize(("template", "message"), [
    ("{% for m in messages %}", "refuses these messages: Unexpected end of template"),
    ("{{ messages[5].content }}", "refuses these messages: .*has no element 5"),
    ("{{ 1 // 0 }}", "refuses these messages: .*division"),
    ([{"name": "a", "template": "x"}, {"name": "b", "template": "y"}], r"several chat templates \(a, b\) and none called default"),
    (None, "no chat template"),
])  # fmt: skip
def test_a_template_that_can_not_be_used_is_a_sentence(tmp_path: Path, template: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tokenizer(tmp_path, template).apply_chat(HI)


def test_of_several_templates_the_default_counts(tmp_path: Path) -> None:
    assert said(tokenizer(tmp_path, [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]), HI) == "d"
