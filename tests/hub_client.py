"""The Hub's client of this process, sent to the server of `hub_server`, and what it is to send."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_server import TOKEN, Hub, serving
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http, close_session
from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

from drafthead.heads.published import Content


@contextmanager
def asked_by_this_process(hub: Hub, cache: Path) -> Iterator[str]:
    """Serve, with the Hub's client of this process sent there: what it read when it was imported is
    changed, and it does not wait before it tries again.
    """
    with serving(hub) as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "ENDPOINT", endpoint)
        template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        for module in (_http, file_download):
            patch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))
        patch.setenv("HF_TOKEN", TOKEN)
        disable_progress_bars()
        yield endpoint
        enable_progress_bars()
        close_session()


def published(folder: Path) -> dict[str, Content]:
    """What is published of the head; the card and the record stand for any."""
    return {
        "config.json": folder / "config.json",
        "model.safetensors": folder / "model.safetensors",
        "README.md": b"---\nlibrary_name: drafthead\n---\n# A head\n",
        "evaluation.json": b'{"heads": {}}\n',
    }


def content(files: dict[str, Content]) -> dict[str, bytes]:
    return {name: f if isinstance(f, bytes) else f.read_bytes() for name, f in files.items()}


def raised(error: Exception) -> None:
    raise error
