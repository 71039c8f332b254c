"""Tests that need a serving engine in an environment of its own: run where this folder is named.

`make test-engines`, or `pytest tests/engines` once `make engine-vllm` made .venv-vllm; another
Python with the engine is named by DRAFTHEAD_ENGINE_PYTHON.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over them where the whole suite is run."""
    named = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(path == HERE or HERE in path.parents for path in named) else True


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """Give the engine's Python; it is a failure that there is none, as the tests were asked for."""
    given = os.environ.get("DRAFTHEAD_ENGINE_PYTHON")
    python = Path(given) if given else HERE.parents[1] / ".venv-vllm" / "bin" / "python"
    if not python.is_file():
        pytest.fail(f"no engine at {python}: `make engine-vllm` builds it")
    return python
