"""The wheel: what an installed package brings along, away from any checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def installed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel of this project."""
    folder, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    for name in ("pcl", "nbs", "results"):  # a copy, because a build leaves its traces beside the sources
        shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*wheel, "-w", str(folder), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    zipfile.ZipFile(built).extractall(folder / "site")
    return folder / "site"


def pcl(site: Path, cwd: Path, *words: str) -> str:
    """Run the command of the unpacked package somewhere else."""
    env = {k: v for k, v in os.environ.items() if k != "PCL_RESULTS"} | {"PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-m", "pcl.cli", *words], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_carries_the_chapters_the_ledger_and_the_types(root: Path, installed: Path) -> None:
    chapters = {p.name for p in (root / "nbs").glob("*.ipynb")}
    assert {p.name for p in (installed / "pcl" / "notebooks").glob("*.ipynb")} == chapters
    assert (installed / "pcl" / "results" / "paper.toml").exists() and (installed / "pcl" / "py.typed").exists()
    assert {p.name for p in (installed / "pcl").glob("*.py")} == {p.name for p in (root / "pcl").glob("*.py")}


def test_the_command_works_away_from_the_checkout(root: Path, installed: Path, tmp_path: Path) -> None:
    pcl(installed, tmp_path, "notebooks", "chapters")
    assert len(list((tmp_path / "chapters").glob("*.ipynb"))) == len(list((root / "nbs").glob("*.ipynb")))
    assert "sampler" in pcl(installed, tmp_path, "report"), "the packaged ledger is read"
    pcl(installed, tmp_path, "run", "sampler", "--row", "D=10_kappa=20", "--preset", "smoke", "--seeds", "1")
    assert len(list((tmp_path / "results" / "sampler").glob("*.json"))) == 1, "new records go to the working folder"
