"""Settings and fixtures that all tests share."""

from __future__ import annotations

import os

# Before torch and huggingface_hub are imported: threads that spin while they wait starve each other
# on a small machine, and nothing here may ask a hub.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # the tests themselves are what runs side by side
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
from filelock import FileLock

from drafthead.data.embedded import default_target, fetch_target


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Give the folder of the embedded target, in the cache that the commands use."""
    try:
        default_target().parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{default_target()}.lock"):
            return fetch_target(default_target())
    except ConnectionError as error:
        pytest.skip(str(error))
