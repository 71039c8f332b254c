"""Pushing heads over real HTTP: one commit, once, from any break on, and no token told."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hub_client import asked_by_this_process, content, published, raised
from hub_server import TOKEN, Failure, Hub, Refusal, _Handler
from huggingface_hub import HfApi, constants
from tiny import tiny_head, tiny_target

from drafthead.heads import load_head
from drafthead.heads.eagle3 import Eagle3Head
from drafthead.heads.hub import HubError, fetched, pull, push
from drafthead.heads.published import Content

NAME = "org/head"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("heads") / "head"
    tiny_head(tiny_target()).save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Content]:
    """A head whose weights are in several files, and their index."""
    folder = tmp_path_factory.mktemp("heads") / "sharded"
    tiny_head(tiny_target()).save_pretrained(folder, max_shard_size="100KB")
    assert len([*folder.glob("model-*.safetensors")]) > 2
    return {path.name: path for path in folder.iterdir()} | {"README.md": b"---\n---\nshards\n"}


@pytest.fixture
def files(folder: Path) -> dict[str, Content]:
    return published(folder)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    found = Hub()
    with asked_by_this_process(found, tmp_path / "cache"):
        yield found


def writes(requests: list[str]) -> list[str]:
    return [r for r in requests if re.search(r"preupload|/lfs/|/commit/|/create|/settings", r)]


# Push


def test_a_push_is_one_commit_of_exactly_the_files_and_private(
    hub: Hub, files: dict[str, Content]
) -> None:
    done = push(files, NAME)
    assert hub.files(NAME) == content(files)
    assert hub.commits(NAME) == 1
    assert hub.repositories["models", NAME].private
    assert done.private
    assert set(done.changed) == set(files)
    assert done.commit == hub.repositories["models", NAME].branches["main"]


def test_f72_pushed_twice_the_second_changes_and_sends_nothing(
    hub: Hub, files: dict[str, Content]
) -> None:
    first = push(files, NAME)
    asked = len(hub.requests)
    for update in (False, True):
        again = push(files, NAME, update=update)
        assert again.changed == ()
        assert again.commit == first.commit
    assert not writes(hub.requests[asked:])
    assert hub.commits(NAME) == 1


def test_f72_an_existing_repository_is_refused_before_anything_is_sent(
    hub: Hub, files: dict[str, Content]
) -> None:
    old = {"LICENSE": b"mine", "certificate.json": b"{}", "config.json": b"{}"}
    there = hub.add(NAME, old, private=True)
    for revision in (None, "dev"):
        with pytest.raises(HubError, match=r"org/head exists and holds .*LICENSE.*: --update"):
            push(files, NAME, revision=revision)
    assert not writes(hub.requests)
    assert hub.files(NAME) == old
    done = push(files, NAME, update=True)
    assert hub.files(NAME) == content(files) | {"LICENSE": b"mine"}, "what is not ours stays"
    assert "certificate.json" in done.changed, "that of the head before is no longer true"
    assert len(there.commits) == 2


def test_a_branch_is_made_and_main_left_alone(hub: Hub, files: dict[str, Content]) -> None:
    done = push(files, NAME, revision="dev")
    assert hub.files(NAME, "dev") == content(files)
    assert hub.files(NAME) == {}
    assert push(files, NAME, revision="dev").commit == done.commit
    with pytest.raises(HubError, match="name a branch"):
        push(files, NAME, revision=done.commit)


def test_only_public_publishes(hub: Hub, files: dict[str, Content]) -> None:
    assert not push(files, "org/open", public=True).private
    assert not hub.repositories["models", "org/open"].private
    other = files | {"README.md": b"---\n---\nother\n"}
    with pytest.raises(HubError, match="org/open is public: say --public"):
        push(other, "org/open", update=True)
    assert hub.commits("org/open") == 1
    push(files, NAME)
    assert push(files, NAME, public=True).changed == ()
    assert not hub.repositories["models", NAME].private, "asked for, without another commit"


@pytest.mark.parametrize("how", get_args(Failure))
def test_f72_a_push_broken_at_any_request_goes_on_and_sends_nothing_twice(
    how: Failure, hub: Hub, sharded: dict[str, Content]
) -> None:
    """`late`: the work was done, and only the answer was lost."""
    files = sharded
    push(files, NAME)
    count = len(hub.requests)
    assert count > 10, hub.requests
    for at in range(count):
        hub.empty()
        hub.down_from, hub.how = at, how
        with pytest.raises(HubError, match="the same command goes on where it was") as error:
            push(files, NAME)
        assert "\n" not in str(error.value)
        assert TOKEN not in str(error.value)
        sent = {*hub.objects}
        hub.heal()
        push(files, NAME)
        where = f"{how} at request {at}"
        assert hub.files(NAME) == content(files), where
        assert hub.commits(NAME) == 1, where
        assert not any(f"PUT /lfs/{oid}" in hub.requests for oid in sent), where


def test_a_head_of_several_files_goes_there_comes_back_and_is_replaced_whole(
    hub: Hub, sharded: dict[str, Content], files: dict[str, Content], tmp_path: Path
) -> None:
    push(sharded, NAME)
    assert hub.files(NAME) == content(sharded)
    pull(NAME, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == content(
        sharded
    )
    push(files, NAME, update=True)
    assert hub.files(NAME) == content(files), "no shard of the one before is left"


def test_a_commit_of_somebody_else_in_between_is_not_overwritten(
    hub: Hub, files: dict[str, Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    push(files, NAME)
    create_commit = HfApi.create_commit

    def late(*arguments: Any, **more: Any) -> Any:
        hub.add(NAME, {"config.json": b"theirs"})
        return create_commit(*arguments, **more)

    monkeypatch.setattr(HfApi, "create_commit", late)
    with pytest.raises(HubError, match=r"changed by somebody else meanwhile \(412"):
        push(files | {"README.md": b"---\n---\nmine\n"}, NAME, update=True)
    assert hub.files(NAME) == {"config.json": b"theirs"}


def test_what_a_commit_left_out_is_said(
    hub: Hub, files: dict[str, Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _Handler._preupload

    def ignoring(*arguments: Any) -> Any:
        found = asked(*arguments)
        for file in found["files"]:
            file["shouldIgnore"] = file["path"] == "evaluation.json"
        return found

    monkeypatch.setattr(_Handler, "_preupload", ignoring)
    with pytest.raises(HubError, match=r"without evaluation\.json: if a \.gitignore there"):
        push(files, NAME)


def test_a_server_without_xet_is_said(
    hub: Hub, files: dict[str, Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    with pytest.raises(HubError, match="has no Xet storage, so set HF_HUB_DISABLE_XET=1"):
        push(files, NAME)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    push(files, NAME)
    assert hub.files(NAME) == content(files)


@pytest.mark.parametrize(
    ("repo", "said"),
    [
        ("head", "'head': whose? write ORG/NAME"),
        ("a/b/c", "'a/b/c': no name of a repository"),
        ("org/..", "'org/..': no name of a repository"),
        ("other/head", "other/head: the token may not do this (403, You don't have the rights"),
    ],
)
def test_where_a_head_may_not_go_is_one_line(
    repo: str, said: str, hub: Hub, files: dict[str, Content]
) -> None:
    with pytest.raises(HubError) as error:
        push(files, repo)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not hub.repositories


def test_tokens_are_needed_and_never_told(
    hub: Hub, files: dict[str, Content], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_stale")
    with pytest.raises(HubError, match=r"refuses the token \(401, .*`hf auth login`") as error:
        push(files, NAME)
    assert "hf_stale" not in str(error.value)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="no token for the Hub: log in with `hf auth login`"):
        push(files, NAME)
    assert not hub.repositories
    (tmp_path / "token").write_text(TOKEN)
    push(files, NAME)
    assert hub.commits(NAME) == 1


def test_no_part_of_a_token_is_told_where_an_answer_is_cut(
    hub: Hub, files: dict[str, Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    for said, again in ((500, "later the same command"), (422, "")):
        refusal = Refusal(said, "x" * (195 - len(TOKEN) // 2) + TOKEN)
        answer = partial(raised, refusal)
        monkeypatch.setattr(_Handler, "_dispatch", lambda *_, answer=answer, **__: answer())
        with pytest.raises(HubError, match=f"answered {said}") as error:
            push(files, NAME)
        assert TOKEN[:4] not in str(error.value)
        assert (again or "xx") in str(error.value)
        assert again or "same command" not in str(error.value), "it would be refused again"


def test_a_token_in_a_record_is_not_published(hub: Hub, files: dict[str, Content]) -> None:
    caught = json.dumps({"settings": {"headers": f"Bearer {TOKEN}"}}).encode()
    with pytest.raises(HubError, match=r"evaluation\.json: your token for the Hub is in it") as e:
        push(files | {"evaluation.json": caught}, NAME)
    assert TOKEN not in str(e.value)
    assert not hub.requests


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:port", "http://[::1", "localhost:9", ""])
def test_an_odd_endpoint_is_one_line(
    endpoint: str, hub: Hub, files: dict[str, Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(HubError, match=r"org/head: .* cannot be reached .*HF_ENDPOINT") as error:
        push(files, NAME)
    assert "\n" not in str(error.value)


def test_without_a_network_or_offline_is_one_line(
    hub: Hub, files: dict[str, Content], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://user:password@127.0.0.1:9")
    for ask in (lambda: push(files, NAME), lambda: pull(NAME, tmp_path / "out")):
        with pytest.raises(HubError, match=r"127\.0\.0\.1 cannot be reached \(.*HF_ENDPOINT") as e:
            ask()
        assert "password" not in str(e.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for ask in (lambda: push(files, NAME), lambda: pull(NAME, tmp_path / "out")):
        with pytest.raises(HubError, match=r"org/head: HF_HUB_OFFLINE is set.*unset it"):
            ask()


def test_what_is_no_model_is_said(hub: Hub, files: dict[str, Content], tmp_path: Path) -> None:
    hub.add("org/rows", {"README.md": b"x"}, kind="datasets")
    with pytest.raises(HubError, match=r"org/rows: is a data set on 127\.0\.0\.1 already; name an"):
        push(files, "org/rows")
    with pytest.raises(HubError, match=r"org/rows: is a data set on 127\.0\.0\.1, not a model"):
        pull("org/rows", tmp_path / "out")
    with pytest.raises(HubError, match=r"org/none: not on 127\.0\.0\.1, or not to be seen without"):
        pull("org/none", tmp_path / "out")


def test_a_heads_class_and_its_name_load_from_the_hub(
    hub: Hub,
    files: dict[str, Content],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commit = push(files, NAME).commit
    mine = load_head(folder).state_dict()
    head = Eagle3Head.from_pretrained(NAME, cache_dir=tmp_path / "other")
    assert all(torch.equal(mine[name], tensor) for name, tensor in head.state_dict().items())
    place = fetched(f"hub:{NAME}@{commit}")
    assert set(content(files)) == {path.name for path in place.iterdir()}
    fetched.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetched(f"hub:{NAME}@{commit}") == place, "in the cache, without a network"
    with pytest.raises(HubError, match="org/else: not in the cache here, and HF_HUB_OFFLINE is"):
        fetched("hub:org/else")
