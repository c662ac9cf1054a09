"""Documents of rows: texts and chats, in JSON lines and in tables."""

import json

import pytest

from bench.config import ConfigError
from bench.training.text import read_beginning, read_documents
from tests.support.text_data import CHAT_TEMPLATE, write_rows, write_tokenizer

CHAT = [{"role": "user", "content": "to be"}, {"role": "assistant", "content": "or not"}]
RENDERED = "<user>to be<assistant>or not"
SUFFIXES = (".jsonl", ".parquet", ".arrow")


@pytest.fixture
def tokenizer(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_tokenizer(folder, ["?", "to", "be"], CHAT_TEMPLATE)
    return str(folder)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (r'{"text": "a \ud83d"}', "surrogate"),
        (r'{"text": "\ude00 b"}', "surrogate"),
        ('{"content": "a", "id": 1}', "has no key `text`.*content, id"),
        ('{"text": 1}', "not a string"),
        ('{"text": "a', "Invalid control character"),
    ],
)
def test_a_bad_row_far_down_is_refused_by_line(tmp_path, row, reason):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "good"}\n' * 9000 + row + "\n")
    with pytest.raises(ConfigError, match=rf"rows\.jsonl:9001: .*{reason}"):
        read_beginning(str(path), None)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"text": "a"}] * 300 + [{"text": None}], "row 300: its `text` is not a string"),
        ([{"content": "a", "id": 1}], "row 0: has no key `text`.*; its keys: content, id"),
    ],
)
def test_a_bad_row_of_a_table_is_refused_by_number(tmp_path, suffix, rows, reason):
    write_rows(tmp_path / f"rows{suffix}", rows)
    with pytest.raises(ConfigError, match=rf"rows\{suffix} {reason}"):
        read_beginning(str(tmp_path), None)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_bytes_of_a_table_that_are_not_utf8_are_refused(tmp_path, suffix):
    write_rows(tmp_path / f"rows{suffix}", [{"text": text} for text in ("good", "worse", "caf@")])
    content = (tmp_path / f"rows{suffix}").read_bytes()
    (tmp_path / f"rows{suffix}").write_bytes(content.replace(b"caf@", b"caf\xe9"))
    with pytest.raises(ConfigError, match=rf"rows\{suffix} row 2: 'utf-8' codec can't decode"):
        read_beginning(str(tmp_path), None)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_chats_are_rendered_by_the_template(tmp_path, tokenizer, suffix, key):
    called = [{"role": "assistant", "content": None, "tool_calls": "y"}]
    write_rows(tmp_path / f"chats{suffix}", [{"id": 1, key: CHAT}, {"id": 2, key: called}])
    path = str(tmp_path / f"chats{suffix}")
    assert [*read_documents(path, tokenizer)] == [RENDERED, "<assistant>(a tool)"]
    assert read_beginning(path, tokenizer) == RENDERED


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_text_of_a_row_wins_over_its_chat(tmp_path, tokenizer, suffix):
    write_rows(tmp_path / f"rows{suffix}", [{"messages": CHAT, "text": "a"}])
    assert [*read_documents(str(tmp_path / f"rows{suffix}"), tokenizer)] == ["a"]


FUNCTION = {"name": "w", "arguments": '{"place": "Köln"}'}
CALLS = [{"type": "function", "function": FUNCTION}]
CALLED = f"assistant: {json.dumps(CALLS, ensure_ascii=False)}"


@pytest.mark.parametrize(
    ("message", "rendered", "plain"),
    [
        ({"content": None, "tool_calls": CALLS}, "<assistant>(a tool)", CALLED),
        ({"tool_calls": CALLS}, "<assistant>(a tool)", CALLED),
        ({"content": None, "function_call": FUNCTION}, "<assistant>(a tool)", CALLED),
        (
            {"content": [{"type": "text", "text": "to "}, {"text": "be"}]},
            "<assistant>to be",
            "assistant: to be",
        ),
        ({"content": "b", "reasoning_content": "a"}, "<assistant>b", "assistant: a\nb"),
        ({"thinking": "a"}, "<assistant>", "assistant: a"),
        ({"content": "", "tool_calls": None}, "<assistant>", "assistant: "),
    ],
)
def test_messages_with_tool_calls_parts_or_reasoning_are_read(tmp_path, tokenizer, message, rendered, plain):
    write_rows(tmp_path / "chats.jsonl", [{"messages": [CHAT[0], {"role": "assistant", **message}]}])
    assert [*read_documents(str(tmp_path / "chats.jsonl"), tokenizer)] == [f"<user>to be{rendered}"]
    assert [*read_documents(str(tmp_path / "chats.jsonl"), None)] == [f"user: to be\n{plain}"]


def test_chats_need_the_template_of_a_tokenizer(tmp_path):
    path = tmp_path / "chats.jsonl"
    write_rows(path, [{"messages": CHAT}])
    write_tokenizer(tmp_path, ["?", "to"])
    with pytest.raises(ConfigError, match=r"data\.tokenizer=.*: has no chat template"):
        read_beginning(str(path), str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"a":')
    with pytest.raises(ConfigError, match=r"data\.tokenizer=.*: cannot be used"):
        read_beginning(str(path), f"{tmp_path}/.")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"from": "human", "value": "a"}], "no string `role` in message 1; its keys: from, value"),
        ([*CHAT, {"role": "user"}], "no string `content` in message 3; its keys: role"),
        (
            [*CHAT, {"role": "user", "content": None}],
            "no string `content` in message 3; its keys: role, content",
        ),
        ([{"role": "user", "content": ["a"]}], "a part without `text` in message 1: a"),
        (
            [{"role": "user", "content": [{"text": "a"}, {"type": "image", "text": None}]}],
            "message 1: .*'image'",
        ),
        (["to be"], "no string `role` in message 1; its keys: none"),
        ("to be", "is no list of messages"),
        ([], "is no list of messages"),
        ([{"role": "nobody", "content": "a"}], "fails in the tokenizer's chat template: Unknown role"),
    ],
)
def test_a_bad_message_is_refused_by_its_place(tmp_path, tokenizer, messages, reason):
    write_rows(tmp_path / "chats.jsonl", [{"messages": CHAT}, {"messages": messages}])
    with pytest.raises(ConfigError, match=rf"chats\.jsonl:2: its `messages` .*{reason}"):
        read_beginning(str(tmp_path / "chats.jsonl"), tokenizer)
    write_rows(tmp_path / "chats.parquet", [{"messages": messages}])
    with pytest.raises(ConfigError, match=r"chats\.parquet row 0: its `messages` "):
        read_beginning(str(tmp_path / "chats.parquet"), tokenizer)
