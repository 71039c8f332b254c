"""The wheel holds what the checkout holds, works on its own, and takes one name.

An editable install hides what is missing from a wheel, and a full environment what is missing from
its dependencies. So the checks run in an environment of their own: the wheel, and of the present
environment what the wheel's own metadata ask for, extras left out.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("configs", "data", "heads", "inference", "train")

# Prints what the installed package gives; run far from the checkout.
PROBE = """
import gzip, importlib, importlib.metadata, importlib.resources, json, sys
from pathlib import Path
from omegaconf import OmegaConf
from drafthead.data.embedded import preset_path, reference_head, sample_path
from drafthead.heads import load_head
from drafthead.heads.card import card
from drafthead.heads.layouts.schema import load_schema, schema_names

packages, modules = map(json.loads, sys.argv[1:])
for module in modules:  # extras, of which none is there, are imported where they are used
    importlib.import_module(module)
found = {}
for package in packages:
    folder = Path(importlib.import_module(package).__file__).parent
    above = folder.parents[:package.count(".") - 1]  # a marker holds for what is below it, too
    found[package] = [str(folder), any((f / "py.typed").is_file() for f in (folder, *above))]
configs = Path(str(importlib.resources.files("drafthead.configs")))
presets = {}
for path in sorted(configs.rglob("*")):
    name = path.relative_to(configs).as_posix()
    if path.suffix == ".yaml":
        presets[name] = OmegaConf.to_container(OmegaConf.load(preset_path(name)))
    elif path.suffix == ".json":
        presets[name] = json.loads(preset_path(name).read_text())
samples = {}
for path in sorted(configs.rglob("*.jsonl.gz")):
    with gzip.open(sample_path(path.name), "rt", encoding="utf-8") as lines:
        samples[path.name] = [sorted(json.loads(line)) for line in lines]
pages = [importlib.resources.files(f"drafthead.{p}") for p in ("heads", "inference")]
script, = importlib.metadata.entry_points(group="console_scripts", name="drafthead")
schemas = {name: sorted(load_schema(name)) for name in schema_names()}
print(json.dumps({"packages": found, "presets": presets, "samples": samples,
                  "schemas": schemas, "card": card(reference_head()),
                  "head": load_head(reference_head()).settings.type,
                  "pages": sorted(f.name for p in pages for f in p.iterdir() if f.suffix == ".j2"),
                  "script": callable(script.load())}))
"""


class Environment(NamedTuple):
    """A virtual environment that holds the wheel."""

    folder: Path
    site_packages: Path

    def run(self, *command: str) -> str:
        """Run a program of the environment away from the checkout and give what it printed."""
        program = self.folder / "bin" / command[0]
        done = subprocess.run(
            [program, *command[1:]],
            cwd=self.folder,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def listed_packages() -> dict[str, str]:
    """Map each listed package to its folder as setuptools does, by the longest known prefix."""
    settings = project()["tool"]["setuptools"]
    folders = {}
    for package in settings["packages"]:
        known = max(
            (name for name in settings["package-dir"] if f"{package}.".startswith(f"{name}.")),
            key=len,
        )
        folders[package] = settings["package-dir"][known] + package[len(known) :].replace(".", "/")
    return folders


def source_files(root: Path) -> set[str]:
    """Name each file of the packages by its path in the wheel."""
    return {
        f"drafthead/{path.relative_to(root).as_posix()}"
        for folder in FOLDERS
        for path in (root / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the way a release is built, sdist first, in a copy that holds leftovers of a build."""
    root = tmp_path_factory.mktemp("source")
    skipped = shutil.ignore_patterns("__pycache__", ".*")
    for name in (*FOLDERS, "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=skipped)
        else:
            shutil.copy(ROOT / name, root / name)
    stale = root / "build" / "lib" / "drafthead" / "heads" / "deleted_long_ago.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    code = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    run_here([sys.executable, "-c", code], root)
    (sdist,) = (root / "dist").glob("drafthead-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(root / "sdist", filter="data")
    (unpacked,) = (root / "sdist").iterdir()
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index"]
    run_here([*pip, "--no-build-isolation", "--wheel-dir", str(root / "dist"), "."], unpacked)
    (built,) = (root / "dist").glob("drafthead-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Install the wheel into an empty environment that sees its dependencies, as installed here."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    run_here([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder.parent)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    run_here([*pip, str(wheel)], folder)
    dependencies = folder / "dependencies"
    link_distributions(required(metadata_of(wheel)), dependencies)
    (site_packages / "dependencies.pth").write_text(f"{dependencies}\n")
    return Environment(folder, site_packages)


def metadata_of(wheel: Path) -> Message:
    """What the wheel says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def required(metadata: Message) -> set[str]:
    """All distributions that this one needs, and those need, as installed here; no extras."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    while waiting:
        wanted = waiting.pop()
        if wanted.name in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        found.add(wanted.name)
        here = distribution(wanted.name)
        assert wanted.specifier.contains(here.version, prereleases=True), wanted
        waiting += [Requirement(line) for line in here.requires or ()]
    return found


def link_distributions(names: set[str], folder: Path) -> None:
    """Show what these distributions installed, and nothing else, as links in a folder."""
    folder.mkdir()
    for name in names:
        here = distribution(name)
        for top in {file.parts[0] for file in here.files or ()} - {"..", "__pycache__"}:
            link = folder / top
            if not link.is_symlink():
                link.symlink_to(Path(str(here.locate_file(top))))


def run_here(command: list[str], directory: Path) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_is_listed() -> None:
    listed = listed_packages()
    folders = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")}
    top = {path.parent for path in ROOT.glob("*/__init__.py")} - {ROOT / "build"}
    assert {ROOT / folder for folder in listed.values()} == folders | top
    for package, folder in listed.items():
        assert package == "drafthead." + folder.replace("/", "."), "import names follow folders"


def test_every_module_is_in_a_package() -> None:
    packages = {ROOT / folder for folder in listed_packages().values()}
    modules = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(modules) > len(FOLDERS)
    assert {path.parent for path in modules} == packages


def test_the_formatter_of_the_commit_hook_is_the_tested_one() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    tested = re.search(r"^ruff==(\S+)$", constraints, flags=re.MULTILINE)
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert tested
    assert f"rev: v{tested[1]} " in hooks


def test_constraints_cover_the_direct_dependencies() -> None:
    def key(requirement: str) -> str:
        return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~;\[ ]", requirement, maxsplit=1)[0]).lower()

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert all(
        re.fullmatch(r"[A-Za-z0-9._-]+==[^+\s]+", line) for line in pinned
    )  # no local builds
    metadata = project()["project"]
    extras = [r for group in metadata["optional-dependencies"].values() for r in group]
    wanted = {key(requirement) for requirement in metadata["dependencies"] + extras}
    assert wanted <= {key(line) for line in pinned}


def test_the_matrix_leaves_its_log_and_exit_code_when_a_cell_fails(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "tests").mkdir()
    for name in ("pyproject.toml", "constraints.txt", ".venv/.core", ".venv/.installed"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    stand_in = tmp_path / ".venv/bin/pytest"
    stand_in.parent.mkdir()
    lines = (
        "tests/matrix.py::test_a[one]" + " " * 20 + "FAILED  [ 50%]",
        "tests/matrix.py::test_a[two]" + " " * 20 + "PASSED  [100%]",
        "E   AssertionError: why",
        "===== 1 failed, 1 passed in 12.34s (0:00:12) =====",
    )
    stand_in.write_text(f"#!/bin/sh\ncat <<END\n{chr(10).join(lines)}\nEND\nexit 1\n")
    stand_in.chmod(0o755)
    done = subprocess.run(["make", "test-matrix"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "why" in done.stdout
    assert (tmp_path / "tests/matrix.log").read_text().splitlines() == [
        "tests/matrix.py::test_a[one]" + " " * 20 + "FAILED",
        "tests/matrix.py::test_a[two]" + " " * 20 + "PASSED",
        "===== 1 failed, 1 passed",
    ]
    assert not (tmp_path / "build/matrix.tmp").exists()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    shown = subprocess.run(["make", "help"], cwd=tmp_path, capture_output=True, text=True).stdout
    assert re.findall(r"^  make (\S+)  +\S", shown, flags=re.MULTILINE) == targets


@pytest.mark.slow
def test_the_wheel_holds_each_file_of_the_packages_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        license_files = [name for name in archive.namelist() if name.endswith("LICENSE")]
    assert names == source_files(ROOT)
    assert len(license_files) == 1


@pytest.mark.slow
def test_one_top_level_name_is_installed(installed: Environment) -> None:
    names = {path.name for path in installed.site_packages.iterdir()}
    names = {name for name in names if not name.endswith(".dist-info")}
    assert names == {"drafthead", "dependencies.pth"}
    assert not (installed.site_packages / "drafthead" / "__init__.py").exists()


@pytest.mark.slow
def test_all_that_is_no_module_loads_from_the_wheel(installed: Environment) -> None:
    packages = listed_packages()
    modules = [
        f"{package}.{path.stem}"
        for package, folder in packages.items()
        for path in sorted((ROOT / folder).glob("[!_]*.py"))
    ]
    asked = json.dumps(list(packages)), json.dumps(modules)
    output = installed.run("python", "-c", PROBE, *asked)
    probe = json.loads(output.splitlines()[-1])
    for package, (folder, typed) in probe["packages"].items():
        assert Path(folder).is_relative_to(installed.site_packages), "not from the wheel"
        assert typed, f"{package} lacks py.typed"
    in_source = {path.relative_to(ROOT / "configs").as_posix() for path in presets_of(ROOT)}
    assert set(probe["presets"]) == in_source
    assert any(name.startswith("heads/") for name in in_source)
    assert all(isinstance(preset, dict) and preset for preset in probe["presets"].values())
    assert {"train.jsonl.gz", "test.jsonl.gz"} <= set(probe["samples"])
    assert all(len(rows) > 0 for rows in probe["samples"].values())
    assert probe["script"] is True
    schemas = {path.stem for path in (ROOT / "heads" / "layouts" / "schemas").glob("*.yaml")}
    assert set(probe["schemas"]) == schemas
    assert all(probe["schemas"].values())
    assert probe["head"] == "eagle3"
    assert "# SmolLM2-135M-Instruct-eagle3" in probe["card"]
    assert {"card.md.j2", "page.html.j2"} <= set(probe["pages"])


@pytest.mark.slow
def test_the_command_runs_from_the_wheel(installed: Environment) -> None:
    assert "demo" in installed.run("drafthead", "--help")


def presets_of(root: Path) -> list[Path]:
    configs = root / "configs"
    return [path for kind in ("*.yaml", "*.json") for path in configs.rglob(kind)]
