"""The package as others get it: a wheel, made from the sdist, in an environment of its own; which Python it takes."""

from __future__ import annotations

import ast
import fcntl
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


def build(kind: str, source: Path, folder: Path) -> Path:
    """Builds as pip does, but with the setuptools that is here, so that no network is needed."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.mark.slow
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
    settings = ["max_steps=2", "run.name=a", "cluster.workers=1"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-m", "ddp", "train", *settings]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert json.loads((elsewhere / "runs" / "a" / "summary.json").read_text())["steps"] == 2
    assert f"{python} -m ddp train -m cluster.workers=1,2" in done.stdout, "as it was started"
    assert {path.name for path in elsewhere.iterdir()} == {"runs"}


@pytest.mark.slow
def test_the_command_works_from_any_folder_without_activating_anything(tmp_path: Path) -> None:
    clone, elsewhere = tmp_path / "the clone", tmp_path / "elsewhere"
    elsewhere.mkdir()
    scripts = ("scripts/ddp", "scripts/_setup.sh")
    for name in (*scripts, "constraints.txt", "pyproject.toml", "ddp/vision.py"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    venv.create(clone / ".venv", symlinks=True)
    (packages,) = (clone / ".venv").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{ROOT}\n{Path(torch.__file__).parent.parent}\n")
    content = b"".join((clone / name).read_bytes() for name in ("constraints.txt", "pyproject.toml"))
    stamp = hashlib.sha256(content + f"{sys.version_info[:2]} {clone}".encode())
    (clone / ".venv" / "installed-from").write_text(stamp.hexdigest())  # so it installs nothing
    for stranger in ("ddp/__init__.py", "random.py"):
        (elsewhere / stranger).parent.mkdir(exist_ok=True)
        (elsewhere / stranger).write_text("raise AssertionError('imported from the current folder')")
    (tmp_path / "link").symlink_to(clone / "scripts" / "ddp")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=60)

    done = run("../the clone/scripts/ddp", "draw", "ring", "3", "--svg", "ring.svg")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert (elsewhere / "ring.svg").is_file()
    refused = run("../the clone/scripts/ddp", "draw", "rong", "3")
    assert refused.returncode == 2 and refused.stderr.startswith("'../the clone/scripts/ddp' draw: there is no")
    assert run("../link", "draw", "rong", "3").stderr.startswith("../link draw: there is no")

    mended = run("bash", "-c", "source ../the*/scripts/_setup.sh; let_torchvision_be_imported")
    assert (mended.returncode, mended.stderr) == (0, "")
    plain = run("../the clone/.venv/bin/python", "-W", "error", "-P", "-c", "import torchvision.models")
    assert (plain.returncode, plain.stderr) == (0, ""), "torchvision's build for CUDA beside torch's for the CPU"


INTERPRETER = """#!/bin/bash
case $1 in
    --version) echo Python {version}.0 ;;
    -c) exec {python} -c "import sys; sys.version_info = (*map(int, '{version}'.split('.')), 0); $2" ;;
    *) exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"python3": "3.12", "python3.13": "3.13"}, "making .venv with Python 3.12.0"),
        ({"python3": "3.14", "python3.12": "3.12"}, "making .venv with Python 3.12.0"),
        ({"python3.11": "3.11"}, "making .venv with Python 3.11.0"),
        ({"python3": "3.14"}, "this needs Python 3.11, 3.12 or 3.13, and finds Python 3.14.0; "),
        ({"python3": "3.10"}, "this needs Python 3.11, 3.12 or 3.13, and finds Python 3.10.0; "),
        ({}, "this needs Python 3.11, 3.12 or 3.13, and finds none; "),
    ],
)
@pytest.mark.quick(1)
def test_the_scripts_take_a_python_that_fits(found: dict[str, str], said: str, tmp_path: Path) -> None:
    folder, scripts = tmp_path / "bin", tmp_path / "scripts"
    folder.mkdir()
    scripts.mkdir()
    shutil.copy(ROOT / "scripts" / "_setup.sh", scripts)
    for tool in ("bash", "dirname"):
        (folder / tool).symlink_to(str(shutil.which(tool)))
    for name, version in found.items():
        (folder / name).write_text(INTERPRETER.format(version=version, python=sys.executable))
        (folder / name).chmod(0o755)
    command = ["bash", "-c", "set -euo pipefail; source scripts/_setup.sh"]
    ended = subprocess.run(command, cwd=tmp_path, env={"PATH": str(folder)}, capture_output=True, text=True)
    assert ended.returncode == 1, "these interpreters make no virtual environment"
    assert said in ended.stderr.splitlines()[0]


def test_a_linked_environment_is_left_alone_and_two_first_calls_do_not_meet(tmp_path: Path) -> None:
    checkout, others = tmp_path / "checkout", tmp_path / "others"
    (checkout / "scripts").mkdir(parents=True)
    others.mkdir()
    for name in ("scripts/_setup.sh", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout / name)
    command = ["bash", "-c", "set -euo pipefail; source scripts/_setup.sh"]
    (checkout / ".venv").symlink_to(others)
    refused = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1 and f".venv is a link to {others}" in refused.stderr
    assert not list(others.iterdir())

    (checkout / ".venv").unlink()
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    with (checkout / ".venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a first call does while it installs
        with subprocess.Popen(command, cwd=checkout, stderr=subprocess.PIPE, text=True) as second:
            while "FLOCK" not in (waits := Path("/proc/locks").read_text()) or "->" not in waits:
                assert second.poll() is None, second.stderr
            content = b"".join((checkout / name).read_bytes() for name in ("constraints.txt", "pyproject.toml"))
            stamp = hashlib.sha256(content + f"{sys.version_info[:2]} {checkout}".encode())
            (checkout / ".venv" / "installed-from").write_text(stamp.hexdigest())
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert second.wait(60) == 0 and second.stderr is not None
            assert second.stderr.read() == "", "it installs nothing more"


@pytest.mark.slow
def test_importing_ddp_and_its_data_leaves_torch_for_later() -> None:
    program = """
import sys
import ddp, ddp.data
assert not {"torch", "numpy"} & set(sys.modules)
from ddp.run.launch.from_python import _pickled
assert _pickled(print, (), {}) and "torch" not in sys.modules, "workers would wait for its import"
assert all(getattr(ddp.data, name).__name__ == name for name in ddp.data.__all__)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_first_lesson_imports_little_of_the_package() -> None:
    """Communicators, hooks and optimizers are imported where a program first makes one."""
    program = """
import sys
from pathlib import Path
import ddp
ddp.NaiveDataParallel
found = [Path(module.__file__) for name, module in sys.modules.items() if name.split(".")[0] == "ddp"]
num_lines = sum(len(path.read_text().splitlines()) for path in found)
assert 2_000 < num_lines <= 7_000, num_lines
ddp.gradients.TopK, ddp.optim.LARS
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_error_has_a_name_in_ddp_and_a_misspelt_one_a_hint() -> None:
    """A program that catches an error writes `except ddp.ConfigError`, before anything has imported ddp.errors."""
    program = """
import sys
import ddp
assert "ddp.errors" not in sys.modules
assert issubclass(ddp.ConfigError, ValueError) and ddp.errors.ConfigError is ddp.ConfigError
kinds = {name: each for name, each in vars(ddp.errors).items() if isinstance(each, type) and name[0] != "_"}
classes = {name: each for name, each in kinds.items() if issubclass(each, Exception)}
assert len(classes) > 10
assert all(getattr(ddp, name) is each and name in ddp.__all__ for name, each in classes.items())
misspelt = {"ConfgError": "ConfigError", "Diverge": "Diverged", "LoadersLost": "LoaderLost", "fitt": "fit"}
for wrong, right in misspelt.items():
    try:
        getattr(ddp, wrong)
    except AttributeError as error:
        assert str(error) == f"module 'ddp' has no attribute {wrong!r}. Did you mean {right}?", error
    else:
        raise AssertionError(wrong)
assert not hasattr(ddp, "nothing_like_it") and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("package", ["ddp", "ddp/data", "ddp/gradients", "ddp/optim"])
def test_names_for_users_are_those_that_type_checkers_see(package: str) -> None:
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.startswith("ddp.")]
    seen = {alias.name: node.module for node in imports for alias in node.names if alias.asname == alias.name}
    homes = importlib.import_module(package.replace("/", "."))._MODULES
    assert seen == homes
