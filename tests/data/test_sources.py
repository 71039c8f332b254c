"""Files, tables, folders and the Hub give the same rows, and bad ones cost themselves only."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from drafthead.data.conversations import Conversation, Message, read_conversations
from drafthead.data.embedded import data_path
from drafthead.data.sources import content_of, entries

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
EXCHANGE = (Message("user", "Hi"), Message("assistant", "Hello"))
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
OTHER = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, 3]}}}


def chat(*messages: object, **more: object) -> dict[str, object]:
    return {"messages": list(messages), **more}


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_table(path: Path, *rows: dict[str, object]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def messages(source: Path) -> list[tuple[Message, ...]]:
    found, skips = read_conversations(source)
    assert not skips.total, skips.summary()
    return [tuple(row.messages) for row in found if isinstance(row, Conversation)]


def test_nulls_that_a_table_fills_in_are_absent_keys(tmp_path: Path) -> None:
    rows = [
        chat(USER, ANSWER, finish="length", tools=None),
        chat(
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "Dry", "tool_call_id": "c1"},
            {"role": "assistant", "tool_calls": [OTHER]},
            tools=[{"name": "weather"}],
        ),
    ]
    table, lines = write_table(tmp_path / "a.parquet", *rows), tmp_path / "a.jsonl"
    merged = pq.read_table(table).to_pylist()
    assert merged[0]["messages"][0]["tool_calls"] is None  # the table did fill in
    assert merged[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]["b"] is None
    assert read_conversations(table) == read_conversations(write_lines(lines, *rows))
    # Lines that were written from a table hold its nulls.
    assert messages(write_lines(lines, *merged[:1])) == [EXCHANGE]


def test_tables_of_other_schemas_in_one_folder_are_read_one_by_one(tmp_path: Path) -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    write_table(tmp_path / "a.parquet", chat(USER, ANSWER))
    write_table(tmp_path / "b.parquet", chat(asked, {"role": "assistant", "content": parts}))
    write_table(tmp_path / "c.parquet", {"prompt": "Hi", "completion": "Hello", "n": 1.5})
    write_lines(tmp_path / "d.jsonl", chat(USER, ANSWER))
    write_table(tmp_path / ".e.parquet", chat(USER))
    (tmp_path / "README.md").write_text("words")
    found, skips = read_conversations(tmp_path)
    assert [row.id for row in found] == ["a-1", "b-1", "c-1", "d-1"]
    assert messages(tmp_path) == [EXCHANGE] * 4
    assert messages(tmp_path / "[ab].parquet") == [EXCHANGE] * 2
    assert not skips.total


def test_a_bad_row_of_a_table_is_named_and_skipped(tmp_path: Path) -> None:
    rows = [chat(USER, ANSWER), chat(USER), chat(USER, ANSWER)]
    path = write_table(tmp_path / "a.parquet", *rows)
    found, skips = read_conversations(path)
    assert [row.id for row in found] == ["a-1", "a-3"]
    assert skips.rows == {"no assistant message": ["a.parquet:row 2"]}
    with pytest.raises(ValueError, match=r"a\.parquet:row 2: no assistant message$"):
        read_conversations(path, strict=True)


def test_a_text_that_is_no_utf8_costs_its_row_only(tmp_path: Path) -> None:
    raw = pa.array([b"Hi", b"\xff\xfe", b"Hi"], pa.binary()).view(pa.string())
    table = pa.table({"prompt": raw, "completion": ["Hello"] * 3})
    pq.write_table(table, tmp_path / "a.parquet")
    found, skips = read_conversations(tmp_path / "a.parquet")
    assert [row.id for row in found] == ["a-1", "a-3"]
    assert skips.rows == {"not UTF-8 text": ["a.parquet:row 2"]}


@pytest.mark.parametrize("saved", [True, False], ids=["folder", "parquet"])
def test_messages_that_datasets_stores_as_json_are_messages(tmp_path: Path, saved: bool) -> None:
    parts = [{"type": "text", "text": "Hello"}]
    rows = [
        [{"role": "user", "content": "42"}, {"role": "assistant", "content": parts}],
        [USER, {"role": "assistant", "content": None, "tool_calls": [CALL, OTHER]}],
    ]
    dataset = Dataset.from_dict({"messages": rows}, on_mixed_types="use_json")
    assert "Json" in str(dataset.features)
    path = tmp_path / ("saved" if saved else "a.parquet")
    dataset.save_to_disk(path) if saved else dataset.to_parquet(path)
    assert messages(path) == [
        (Message("user", "42"), Message("assistant", "Hello")),
        (Message("user", "Hi"), Message("assistant", "", (CALL, OTHER))),
    ]


def test_content_of_mixed_types_in_a_column_of_json_is_text(tmp_path: Path) -> None:
    contents = ["42", "true", "Hi", '"quoted"', json.dumps([{"type": "text", "text": "Hi"}])]
    content = pa.ExtensionArray.from_storage(pa.json_(), pa.array(contents))
    message = pa.StructArray.from_arrays([pa.array(["user"] * 5), content], ["role", "content"])
    asked = pa.ListArray.from_arrays(list(range(6)), message)
    table = pa.table({"prompt": asked, "completion": ["Hello"] * 5})
    pq.write_table(table, tmp_path / "a.parquet")
    asked_texts = [exchange[0].content for exchange in messages(tmp_path / "a.parquet")]
    assert asked_texts == ["42", "true", "Hi", "quoted", "Hi"]


def test_a_folder_that_datasets_saved_reads_as_its_rows(tmp_path: Path) -> None:
    rows = [chat(USER, ANSWER, id=f"r{i}") for i in range(150)]
    train, test = Dataset.from_list(rows), Dataset.from_list(rows[:3])
    train.save_to_disk(tmp_path / "one", num_shards=2)
    DatasetDict(train=train, test=test).save_to_disk(tmp_path / "both")
    DatasetDict(test=test).save_to_disk(tmp_path / "single")
    found, _ = read_conversations(data_path(str(tmp_path / "one")))
    assert [row.id for row in found] == [f"r{i}" for i in range(150)]
    assert messages(tmp_path / "both" / "test") == messages(tmp_path / "single") == [EXCHANGE] * 3
    with pytest.raises(ValueError, match=r"holds 2 splits; name one: .*both/test, .*both/train$"):
        read_conversations(tmp_path / "both")
    (tmp_path / "one" / "data-00001-of-00002.arrow").write_bytes(b"no table")
    with pytest.raises(ValueError, match=r"both/train: damaged|one: damaged folder") as error:
        list(entries(tmp_path / "both" / ".." / "one"))
    assert "\n" not in str(error.value)


def test_a_folder_that_would_mix_splits_is_refused(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write_table(tmp_path / f"{name}.parquet", chat(USER, ANSWER))
    with pytest.raises(ValueError, match=r"several splits \(test, train\); name .*/train\*'"):
        read_conversations(tmp_path)
    assert len(messages(data_path(str(tmp_path / "train*")))) == 2
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"none: holds no \.parquet, \.jsonl"):
        read_conversations(tmp_path / "none")


def test_files_that_are_no_tables_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but not really PAR1")
    whole = write_table(tmp_path / "b.parquet", chat(USER, ANSWER)).read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[:-20])
    for name in ("a", "b"):
        with pytest.raises(ValueError, match=rf"{name}\.parquet: damaged or no parquet") as error:
            read_conversations(tmp_path / f"{name}.parquet")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["hub:one", "hub:a/b/c/d", "hub:a/b:", "hub:../b@"])
def test_a_name_that_is_none_of_the_hub_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="write hub:ORG/NAME"):
        read_conversations(name)


def test_a_data_set_out_of_reach_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    path = data_path("hub:nobody/nothing/small@main:test[:10]")
    with pytest.raises(ValueError, match=r"the Hub cannot be reached.*not in the local cache"):
        read_conversations(path)
    assert not caplog.records


def test_a_line_of_fifty_megabytes_is_one_row(tmp_path: Path) -> None:
    long = "word " * 10_000_000
    path = write_lines(
        tmp_path / "a.jsonl", chat(USER, ANSWER), chat(USER, {**ANSWER, "content": long})
    )
    assert path.stat().st_size > 50_000_000
    assert len(messages(path)[1][1].content) == len(long)


def test_the_content_of_a_source_changes_with_any_of_its_files(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", chat(USER, ANSWER))
    write_lines(tmp_path / "b.jsonl", chat(USER, ANSWER))
    before = content_of(tmp_path)
    assert content_of(tmp_path) == before
    assert [name for name, _ in before] == ["a.jsonl", "b.jsonl"]
    write_lines(tmp_path / "b.jsonl", chat(USER, ANSWER, id="x"))
    assert content_of(tmp_path) != before
    dataset = Dataset.from_list([chat(USER, ANSWER)])
    dataset.save_to_disk(tmp_path / "saved")
    assert [name for name, _ in content_of(tmp_path / "saved")] == ["data-00000-of-00001.arrow"]
