"""Answers through a server: the same conversations, whatever the network does on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from answering import PROMPTS as REPEATING
from server import Behaviour, said, serving
from tiny import tiny_tokenizer

from drafthead.data.conversations import read_conversations
from drafthead.inference import endpoint as module
from drafthead.inference.answers import Answering, Report, part_path
from drafthead.inference.endpoint import Endpoint, answer_by_server

PROMPTS = REPEATING[:6]
ANSWERING = Answering(max_new_tokens=64, seed=None, batch=3)


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def does() -> Behaviour:
    return Behaviour()


@pytest.fixture
def url(does: Behaviour) -> Iterator[str]:
    with serving(does) as address:
        yield address


def ask(url: str, out: Path, answering: Answering = ANSWERING, **more: Any) -> Report:
    given = Endpoint(url, more.pop("model", "tiny"), more.pop("retries", 4), more.pop("timeout", 9))
    return answer_by_server(given, more.pop("prompts", PROMPTS), out, answering, **more)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_all_turns_are_answered_in_the_order_of_the_prompts(url: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    report = ask(url, out)
    assert (report.written, report.skipped.total()) == (len(PROMPTS), 0)
    made = rows(out)
    assert [row["id"] for row in made] == [prompt.id for prompt in PROMPTS]
    for row, prompt in zip(made, PROMPTS, strict=True):
        turns = [m["content"] for m in row["messages"] if m["role"] == "user"]
        assert turns == list(prompt.turns)
        for index, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                assert message["content"] == said(row["messages"][:index])
                assert message["ids"] == [*message["content"].encode(), 2]
    assert report.new_tokens == sum(
        len(m["ids"]) for r in made for m in r["messages"] if "ids" in m
    )
    assert read_conversations(out, strict=True)[1].total == 0
    assert not part_path(out).exists()


def test_settings_are_sent_and_recorded(does: Behaviour, url: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    answering = replace(ANSWERING, temperature=0.6, top_p=0.9, top_k=20, max_new_tokens=33)
    ask(url, out, answering, template_kwargs={"enable_thinking": False})
    told = {key: does.requests[0][key] for key in ("model", "temperature", "top_p", "max_tokens")}
    assert told == {"model": "tiny", "temperature": 0.6, "top_p": 0.9, "max_tokens": 33}
    assert does.requests[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert does.requests[0]["return_token_ids"] is True
    assert does.requests[0]["top_k"] == 20
    assert does.requests[0]["repetition_penalty"] == 1.0
    assert all("seed" not in request for request in does.requests)
    assert rows(out)[0]["made"] == {
        "target": "tiny",
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "max_new_tokens": 33,
        "seed": None,
        "template_kwargs": {"enable_thinking": False},
    }


def test_a_seed_is_sent_where_it_is_asked_for_and_differs_by_turn(
    does: Behaviour, url: str, tmp_path: Path
) -> None:
    ask(url, tmp_path / "out.jsonl", replace(ANSWERING, seed=7))
    seeds = [request["seed"] for request in does.requests]
    assert len(set(seeds)) == len(seeds) == sum(len(prompt.turns) for prompt in PROMPTS)


def test_another_kind_of_server_is_sent_nothing_it_may_not_know(
    does: Behaviour, url: str, tmp_path: Path
) -> None:
    does.owner = "openai"
    report = ask(url, tmp_path / "out.jsonl")
    known = {"model", "messages", "temperature", "top_p", "max_tokens"}
    assert all(set(request) == known for request in does.requests)
    answers = [m for r in rows(tmp_path / "out.jsonl") for m in r["messages"]]
    assert not any("ids" in message for message in answers)
    assert report.new_tokens > 0, "by the server's own count"


def test_a_server_without_a_list_of_models_will_do(
    does: Behaviour, url: str, tmp_path: Path
) -> None:
    does.models = False
    assert ask(url, tmp_path / "out.jsonl").written == len(PROMPTS)


@pytest.mark.parametrize("failure", [429, 500, 503, "cut", "drop"])
def test_what_fails_for_a_passing_reason_is_asked_again(
    does: Behaviour, url: str, tmp_path: Path, failure: Any
) -> None:
    ask(url, tmp_path / "straight.jsonl")
    does.failures = [failure, failure, None, failure]
    ask(url, tmp_path / "out.jsonl")
    assert not does.failures
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "straight.jsonl").read_bytes()


def test_no_more_conversations_are_under_way_than_asked_for(
    does: Behaviour, url: str, tmp_path: Path
) -> None:
    does.seconds = 0.1
    ask(url, tmp_path / "out.jsonl", prompts=PROMPTS * 2)
    assert does.most_at_once == ANSWERING.batch


def test_a_server_that_dies_leaves_what_is_finished_and_the_rest_follows(
    does: Behaviour, url: str, tmp_path: Path
) -> None:
    out, other = tmp_path / "out.jsonl", tmp_path / "straight.jsonl"
    ask(url, other)
    asked = len(does.requests)
    does.failures = [None] * 5 + ["drop"] * 100
    with pytest.raises(ValueError, match=r"no connection, .*: the same command goes on") as caught:
        ask(url, out, replace(ANSWERING, batch=1), retries=1)
    assert "\n" not in str(caught.value)
    assert "out.jsonl.part" in str(caught.value)
    kept = part_path(out).read_text().splitlines()
    assert len(kept) == 1 + 3, "the header, and three conversations with 3, 1 and 1 turns"
    does.failures = []
    before = len(does.requests)
    ask(url, out)
    assert out.read_bytes() == other.read_bytes()
    assert len(does.requests) - before == asked - 5, "nothing finished is asked again"


def test_where_the_server_is_may_change_between_runs(
    does: Behaviour, url: str, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    does.failures = [None] * 5 + ["drop"] * 100
    with pytest.raises(ValueError, match="no connection"):
        ask(url, out, replace(ANSWERING, batch=1), retries=0)
    with serving(Behaviour()) as elsewhere:
        assert ask(elsewhere, out).written == len(PROMPTS)


def test_other_settings_or_another_model_are_not_mixed(
    does: Behaviour, url: str, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    does.failures = [None] * 5 + ["drop"] * 100
    with pytest.raises(ValueError, match="no connection"):
        ask(url, out, replace(ANSWERING, batch=1), retries=0)
    does.failures = []
    attempts: list[dict[str, Any]] = [
        {"answering": replace(ANSWERING, temperature=0.1)},
        {"model": "other"},
        {"template_kwargs": {"enable_thinking": True}},
        {"tokenizer": tiny_tokenizer()},
        {"prompts": PROMPTS[:-1]},
    ]
    for attempt in attempts:
        with pytest.raises(ValueError, match=r"was begun with .*: remove it, or name"):
            ask(url, out, **attempt)


def test_no_server_is_one_line(tmp_path: Path) -> None:
    with serving(Behaviour()) as url:
        pass
    with pytest.raises(ValueError, match=r"no connection, tried .*; is the server up\?") as caught:
        ask(url, tmp_path / "out.jsonl", retries=1)
    assert "\n" not in str(caught.value)
    assert "is finished" not in str(caught.value)
    assert not list(tmp_path.iterdir()), "nothing was answered: nothing is left"


@pytest.mark.parametrize("listed", [True, False])
def test_a_wrong_model_is_named(does: Behaviour, url: str, tmp_path: Path, listed: bool) -> None:
    does.models = listed
    known = "it has tiny" if listed else "see its list of models"
    with pytest.raises(ValueError, match=f"has no model 'large': {known}; give it as --model"):
        ask(url, tmp_path / "out.jsonl", model="large")


def test_a_server_that_is_slow_is_given_up_in_time(
    does: Behaviour, url: str, tmp_path: Path
) -> None:
    does.seconds = 30.0
    since = time.monotonic()
    with pytest.raises(ValueError, match=r"no answer within 0\.3 s, tried again in vain"):
        ask(url, tmp_path / "out.jsonl", timeout=0.3, retries=1)
    assert time.monotonic() - since < 15


def test_a_refused_prompt_costs_that_conversation(
    does: Behaviour, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a later turn, what was answered before it stays."""
    does.refused = "river"
    report = ask(url, tmp_path / "out.jsonl")
    assert report.written == len(PROMPTS)
    assert len(rows(tmp_path / "out.jsonl")[0]["messages"]) == 2
    does.refused = "apples"
    report = ask(url, tmp_path / "second.jsonl")
    assert (report.written, dict(report.skipped)) == (len(PROMPTS) - 1, {"refused": 1})
    assert "refused a request: the prompt is longer than the context" in caplog.text


def test_a_server_that_refuses_everything_is_told_and_nothing_is_written(
    does: Behaviour, url: str, tmp_path: Path
) -> None:
    does.refused = " "
    out = tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match=r"refused all of 6 requests: the prompt is longer"):
        ask(url, out)
    with pytest.raises(ValueError, match=rf"refused all of {module.REFUSED} requests"):
        ask(url, tmp_path / "more.jsonl", prompts=PROMPTS * 20)
    assert len(does.requests) < 6 + 2 * module.REFUSED
    does.refused = ""
    assert ask(url, out).written == len(PROMPTS), "what was refused counts as not yet asked"


def test_cut_and_looping_answers_are_told_apart(does: Behaviour, url: str, tmp_path: Path) -> None:
    does.finish = "length"
    out = tmp_path / "out.jsonl"
    report = ask(url, out)
    assert dict(report.kept) == {"cut": len(PROMPTS)}
    assert all(row["finish"] == "length" for row in rows(out))
    assert all(len(row["messages"]) <= 3 for row in rows(out)), "no turn follows a cut one"
    does.content = "and so on " * 30
    for owner in ("vllm", "openai"):
        does.owner = owner
        report = ask(url, tmp_path / f"{owner}.jsonl")
        assert dict(report.skipped) == {"loop": len(PROMPTS)}


def test_thoughts_that_the_server_takes_out_are_an_error(
    does: Behaviour, url: str, tmp_path: Path
) -> None:
    does.message = {"reasoning_content": "Hm."}
    with pytest.raises(ValueError, match="takes thoughts out of its answers"):
        ask(url, tmp_path / "out.jsonl")


def replied(message: Any, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": "stop", "message": message, **choice}]}


@pytest.mark.parametrize(
    ("garbage", "what"),
    [
        ([], "its answer"),
        ({"error": {"message": "overloaded"}}, "choices"),
        ({"choices": []}, "choices"),
        ({"choices": [None]}, r"choices\.0"),
        ({"choices": "abc"}, "choices"),
        ({"choices": [{"finish_reason": "stop"}]}, r"choices\.0\.message"),
        (replied("hi"), r"choices\.0\.message"),
        (replied({"content": [{"text": "hi"}]}), r"choices\.0\.message\.content"),
        (replied({"content": "hi"}, token_ids=["a"]), r"choices\.0\.token_ids\.0"),
        (replied({"content": "hi"}) | {"usage": "much"}, "usage"),
    ],
)
def test_json_that_is_no_answer_is_one_line(
    does: Behaviour, url: str, tmp_path: Path, garbage: Any, what: str
) -> None:
    """It is told what of it is no answer, and nothing of it is written."""
    does.failures = [garbage] * len(PROMPTS)
    with pytest.raises(ValueError, match=rf"no OpenAI server; {what}: [^\n]+$"):
        ask(url, tmp_path / "out.jsonl")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("reason", ["length", "abort", "content_filter"])
def test_an_answer_that_the_target_did_not_end_counts_as_cut(
    does: Behaviour, url: str, tmp_path: Path, reason: str
) -> None:
    """Else a head would learn an end of turn that the target never emitted."""
    does.finish = reason
    assert dict(ask(url, tmp_path / "out.jsonl").kept) == {"cut": len(PROMPTS)}
    assert {row["finish"] for row in rows(tmp_path / "out.jsonl")} == {"length"}


def test_half_a_surrogate_pair_does_not_keep_the_file_from_being_written(
    does: Behaviour, url: str, tmp_path: Path
) -> None:
    does.failures = [replied({"content": "a\ud800b"}, finish_reason="length")] * len(PROMPTS)
    assert ask(url, tmp_path / "out.jsonl").written == len(PROMPTS)
    assert rows(tmp_path / "out.jsonl")[0]["messages"][1]["content"] == "a?b"


def test_a_server_that_speaks_something_else_is_told(
    does: Behaviour, url: str, tmp_path: Path
) -> None:
    does.failures = ["text"] * 3
    with pytest.raises(ValueError, match="no OpenAI server"):
        ask(url, tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match=r"'localhost:8000': give an address, as http://"):
        ask("localhost:8000", tmp_path / "out.jsonl")


def test_a_key_is_taken_from_the_environment(
    does: Behaviour, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    does.key = "secret"
    with pytest.raises(ValueError, match="wants a key: set OPENAI_API_KEY"):
        ask(url, tmp_path / "out.jsonl")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert ask(url, tmp_path / "out.jsonl").written == len(PROMPTS)
    assert b"secret" not in (tmp_path / "out.jsonl").read_bytes()
