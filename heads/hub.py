"""A head on the Hub: pushed as one commit, pulled as verified files, any number of times.

A push compares first, and then sends what differs. The same content changes nothing; one that broke
goes on where it was, with no large file sent twice. A pull reads safetensors and JSON only, and
checks each file against the hash that the Hub states. Errors are one line and hold no token.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from httpx2 import HTTPError, InvalidURL
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelInfo,
    constants,
    get_token,
    snapshot_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from huggingface_hub.utils.sha import git_hash

from drafthead.heads.load import WEIGHTS, load_head
from drafthead.heads.published import CONFIG, NAMED, Content, is_published

HUB = "hub:"
"""Before a repository's name, where a folder could stand."""
GIT = {".gitattributes"}
"""What the Hub puts into a new repository."""
AGAIN = "the same command goes on where it was"


class HubError(ValueError):
    """What the Hub, or the way to it, did not allow."""


@dataclass(frozen=True)
class Pushed:
    """What a push came to."""

    repo: str
    url: str
    commit: str
    """Of the repository now."""
    changed: tuple[str, ...]
    """Files that the commit put there or removed; none: everything was there already."""
    private: bool


@dataclass(frozen=True)
class Pulled:
    """What a pull came to."""

    repo: str
    commit: str
    files: tuple[str, ...]
    left: tuple[str, ...]
    """Files of the repository that are no part of a head, and were not fetched."""


def push(
    files: Mapping[str, Content],
    repo: str,
    *,
    public: bool = False,
    update: bool = False,
    revision: str | None = None,
) -> Pushed:
    """Put a head's files (`publication`) into a model repository, in one commit.

    The repository is made where there is none, private unless `public`. One that holds anything
    else is left as it is without `update`; with it, files of an earlier head that this one lacks
    are removed. revision: a branch, made where there is none. Raises HubError.
    """
    check_name(repo)
    if revision is not None and re.fullmatch(r"[0-9a-f]{7,40}", revision):
        raise HubError(f"--revision {revision!r}: is a commit; name a branch to push to")
    with _asking(repo):
        if get_token() is None:
            raise HubError("no token for the Hub: log in with `hf auth login`, or set HF_TOKEN")
        _check_secret(files)
        hub = HfApi()
        additions = {name: CommitOperationAdd(name, content) for name, content in files.items()}
        there = _prepared(hub, repo, revision, public, update, additions)
        changed, stale = _differences(additions, there)
        if changed or stale:
            commit = hub.create_commit(
                repo,
                [*(additions[name] for name in changed), *map(CommitOperationDelete, stale)],
                commit_message=f"{'Update' if _held(there) else 'Add'} draft head",
                revision=revision,
                parent_commit=there.sha,
            )
            there = hub.model_info(repo, revision=commit.oid, files_metadata=True)
            if lost := [name for part in _differences(additions, there) for name in part]:
                raise HubError(
                    f"{repo}: the commit was made without {', '.join(lost)}: if a .gitignore there "
                    "names it, take that out and push again with --update"
                )
        if public and there.private:
            hub.update_repo_settings(repo, private=False)
        return Pushed(
            repo=repo,
            url=f"{constants.ENDPOINT}/{repo}",
            commit=there.sha or "",
            changed=(*changed, *stale),
            private=bool(there.private) and not public,
        )


def _check_secret(files: Mapping[str, Content]) -> None:
    """Refuse to publish the token, which a record of a run may have caught; HubError."""
    token = (get_token() or "").encode()
    for name, content in files.items():
        text = content if isinstance(content, bytes) else b""
        if name == CONFIG and isinstance(content, Path):
            text = content.read_bytes()
        if token and token in text:
            raise HubError(f"{name}: your token for the Hub is in it; take it out, and push again")


def _prepared(
    hub: HfApi,
    repo: str,
    revision: str | None,
    public: bool,
    update: bool,
    additions: Mapping[str, CommitOperationAdd],
) -> ModelInfo:
    """What the branch holds, made with its repository where they were missing; HubError where the
    head may not go there.
    """
    there = _info(hub, repo, None)
    if there is None:
        hub.create_repo(repo, private=not public, repo_type="model")
        there = hub.model_info(repo, files_metadata=True)
    branch = there if revision is None else _info(hub, repo, revision)
    if branch is not None and not any(_differences(additions, branch)):
        return branch
    held = _held(there if branch is None else branch)
    if held and not update:
        more = ", …" if len(held) > 3 else ""
        raise HubError(
            f"{repo} exists and holds something else ({', '.join(held[:3])}{more}): "
            "--update puts this head there, or name another repository"
        )
    if there.private is False and not public:
        raise HubError(f"{repo} is public: say --public to publish the head, or name another one")
    if branch is None:
        assert revision is not None
        hub.create_branch(repo, branch=revision, exist_ok=True)
        branch = hub.model_info(repo, revision=revision, files_metadata=True)
    return branch


def _info(hub: HfApi, repo: str, revision: str | None) -> ModelInfo | None:
    """The repository at a branch; None where there is no such."""
    try:
        return hub.model_info(repo, revision=revision, files_metadata=True)
    except GatedRepoError:
        raise
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return None


def _held(there: ModelInfo) -> list[str]:
    return [file.rfilename for file in there.siblings or () if file.rfilename not in GIT]


def _differences(
    additions: Mapping[str, CommitOperationAdd], there: ModelInfo
) -> tuple[list[str], list[str]]:
    """Files to send, and files of an earlier head to remove."""
    found = {file.rfilename: file for file in there.siblings or ()}
    changed = [name for name, add in additions.items() if not _same(add, found.get(name))]
    stale = [name for name in found if is_published(name) and name not in additions]
    return changed, stale


def _same(file: CommitOperationAdd, there: RepoSibling | None) -> bool:
    """Whether the Hub's file has this content, by the hash that it states."""
    if there is None or there.size != file.upload_info.size:
        return False
    if there.lfs is not None:
        return there.lfs.sha256 == file.upload_info.sha256.hex()
    with file.as_file() as content:
        return there.blob_id == git_hash(content.read())


def pull(repo: str, out: Path, revision: str | None = None) -> Pulled:
    """Fetch a head into a new folder, which is there whole or not at all.

    revision: a branch, tag or commit. Files of other kinds (pickles, code) are not fetched. Raises
    HubError, and ValueError for files that are no head.
    """
    check_name(repo)
    if not out.name or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise HubError(f"{out}: exists; name a new folder")
    out = out.resolve()  # the folder of a link, not the link, is put there
    partial = out.with_name(f".{out.name}.partial")
    with _asking(repo):
        hub = HfApi()
        there = hub.model_info(repo, revision=revision, files_metadata=True)
        wanted = {f.rfilename: f for f in there.siblings or () if is_published(f.rfilename)}
        left = sorted({*_held(there)} - {*wanted})
        _check_head(repo, wanted, left)
        for name, file in wanted.items():
            path = Path(hub.hf_hub_download(repo, name, revision=there.sha, local_dir=partial))
            if not _same(CommitOperationAdd(name, path), file):
                path.unlink()
                raise HubError(f"{repo}: {name} came damaged; {AGAIN}")
    for path in partial.iterdir():
        if path.name not in wanted:  # notes of the download, files of another revision
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    try:
        load_head(partial)
    except ValueError as error:
        shutil.rmtree(partial)
        raise ValueError(str(error).replace(str(partial), repo)) from error
    partial.rename(out)
    return Pulled(repo, there.sha or "", tuple(wanted), tuple(left))


@lru_cache(maxsize=16)
def fetched(name: str) -> Path:
    """The folder, in the cache of the Hub's client, of the head called `hub:ORG/NAME[@REVISION]`.

    Without a network it is what the cache holds. Raises HubError.
    """
    repo, _, revision = name.removeprefix(HUB).partition("@")
    check_name(repo)
    with _asking(repo, cached=True):
        patterns = [*NAMED, "model*.safetensors"]
        folder = Path(
            snapshot_download(
                repo,
                revision=revision or None,
                allow_patterns=patterns,
                ignore_patterns="*/*",
            )
        )
    _check_head(repo, [path.name for path in folder.iterdir()], [])
    return folder


def _check_head(repo: str, files: Mapping[str, object] | Sequence[str], left: list[str]) -> None:
    """Refuse a repository that holds no head as this library reads them."""
    if CONFIG in files and any(name.startswith(WEIGHTS.split(".")[0]) for name in files):
        return
    others = f" (it holds {', '.join(left[:3])})" if left else ""
    raise HubError(
        f"{repo}: holds no head{others}: config.json and model.safetensors are read, never a pickle"
    )


# What goes wrong


def check_name(repo: str) -> None:
    """Refuse what is no ORG/NAME of a repository; HubError."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise HubError(f"{repo!r}: no name of a repository ({error}); write ORG/NAME") from error
    if repo.count("/") != 1:
        raise HubError(f"{repo!r}: whose? write ORG/NAME, with your own name or an organisation's")


@contextmanager
def _asking(repo: str, cached: bool = False) -> Iterator[None]:
    """Turn what the Hub's client raises into one line, and keep its remarks to itself.

    cached: the block goes on by itself where there is no network.
    """
    if constants.is_offline_mode() and not cached:
        raise HubError(f"{repo}: HF_HUB_OFFLINE is set, so that nothing asks the Hub; unset it")
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it tells of every retry, twice, with signed addresses
    try:
        yield
    except HubError:
        raise
    except RuntimeError as error:  # of a thread that sends a file
        raise HubError(_without_token(_line(repo, error.__cause__ or error))) from None
    except (HTTPError, InvalidURL, ConnectionError, EntryNotFoundError, ValueError) as error:
        raise HubError(_without_token(_line(repo, error))) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise HubError(f"{repo}: the disk is full; make room, and {AGAIN}") from None
    finally:
        logger.setLevel(level)


def _line(repo: str, error: BaseException) -> str:
    """What happened, and what to do."""
    if isinstance(error, HfHubHTTPError):
        return _answered(repo, error)
    words = " ".join(str(error).split())
    if "xet-write-token" in words and "404" in words:  # a server of one's own, or a mirror
        return f"{repo}: {_host()} has no Xet storage, so set HF_HUB_DISABLE_XET=1; {AGAIN}"
    if not isinstance(error, HTTPError | InvalidURL | ConnectionError | EntryNotFoundError):
        return f"{repo}: {words}"
    if constants.is_offline_mode():
        return f"{repo}: not in the cache here, and HF_HUB_OFFLINE is set; unset it to fetch it"
    # Without numbers, and without the advice that the client adds where nothing is in its cache.
    why = re.sub(r"Got: \w+: |\[Errno -?\d+\] ", "", str(error).strip().partition("\n")[0])
    return (
        f"{repo}: {_host()} cannot be reached ({why}); check the network and HF_ENDPOINT: {AGAIN}"
    )


def _answered(repo: str, error: HfHubHTTPError) -> str:
    """The same for an answer that says no."""
    status = error.response.status_code
    words = _without_token(" ".join((error.server_message or "").split()))  # before it is cut
    said = words[:200] or error.response.reason_phrase
    if isinstance(error, GatedRepoError):
        return f"{repo}: gated; ask for access on its page, then log in with `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return f"{repo}: has no such revision; name a branch, tag or commit of it, or none"
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        kind = _other_kind(repo)
        if kind is not None:
            return f"{repo}: is a {kind} on {_host()}, not a model; name another repository"
        return f"{repo}: not on {_host()}, or not to be seen without a token that may read it"
    if status == 401:
        return f"the Hub refuses the token (401, {said}): log in again with `hf auth login`"
    if status == 403:
        return f"{repo}: the token may not do this (403, {said}); use one that may write there"
    if status in (409, 412):
        kind = _other_kind(repo)
        if kind is not None:
            return f"{repo}: is a {kind} on {_host()} already; name another repository"
        return f"{repo}: changed by somebody else meanwhile ({status}, {said}); {AGAIN}"
    again = f"; later {AGAIN}" if status >= 500 or status in (408, 429) else ""
    return f"{repo}: {_host()} answered {status} ({said}){again}"


def _other_kind(repo: str) -> str | None:
    """`data set` or `space`, where the name is taken by one."""
    for kind, told in (("dataset", "data set"), ("space", "space")):
        try:
            if HfApi().repo_exists(repo, repo_type=kind):
                return told
        except (HTTPError, OfflineModeIsEnabled):
            return None
    return None


def _host() -> str:
    """The Hub's host, without what else an address may hold."""
    try:
        return urlsplit(constants.ENDPOINT).hostname or "the Hub"
    except ValueError:
        return "the Hub"


def _without_token(text: str) -> str:
    token = get_token()
    return text.replace(token, "…") if token else text
