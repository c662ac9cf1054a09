"""Write files that `data.path` and `data.tokenizer` name."""

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'nobody' %}{{ raise_exception('Unknown role') }}{% endif %}"
    "{{ '<' + message.role + '>' + message.content }}{% if 'tool_calls' in message %}(a tool){% endif %}"
    "{% endfor %}"
)


def write_tokenizer(folder, words, chat_template=None):
    """Write a tokenizer of these words."""
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    made.pre_tokenizer = Whitespace()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)


def write_rows(path, rows):
    """Write rows as the suffix says: JSON lines, Parquet, or an Arrow stream as `datasets` writes it."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=2)
        return
    with ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)


def write_saved_dataset(folder, shards):
    """Write the files of `Dataset.save_to_disk`, and one that `Dataset.map` leaves there."""
    folder.mkdir(exist_ok=True)
    names = [f"data-{number:05}-of-{len(shards):05}.arrow" for number in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        write_rows(folder / name, rows)
    write_rows(folder / "cache-6046094acb57897c.arrow", [{"text": "mapped"}])
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
