"""The package as others get it: a wheel, made from the sdist, in an environment of its own, started from anywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def build(kind: str, source: Path, folder: Path) -> Path:
    """Builds as pip does, but with the setuptools that is here, so that no network is needed."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def test_an_installed_package_trains_from_any_folder(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    for name in ("ddp", "README.md", "LICENSE", "pyproject.toml"):  # builds leave folders behind
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        clone.mkdir(exist_ok=True)
        copy(ROOT / name, clone / name)
    with tarfile.open(build("sdist", clone, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
        source = tmp_path / archive.getnames()[0]
    wheel = build("wheel", source, tmp_path)

    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    shutil.unpack_archive(wheel, packages, "zip")
    # Dependencies come from here, but not ddp: a .pth file of that folder, such as an editable install's, is not read.
    (packages / "dependencies.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    settings = ["max_steps=2", "run.name=a", "cluster.threads_per_worker=1"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-m", "ddp", "train", *settings]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert json.loads((elsewhere / "runs" / "a" / "summary.json").read_text())["steps"] == 2
    assert "python -m ddp train -m cluster.workers=1,2,4" in done.stdout
    assert {path.name for path in elsewhere.iterdir()} == {"runs"}
