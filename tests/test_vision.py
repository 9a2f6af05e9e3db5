"""torchvision must be importable in a fresh process, silently, whatever was tried before."""

import subprocess
import sys
from pathlib import Path

import pytest


def run_python(program: str) -> str:
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


@pytest.mark.slow
def test_gives_a_working_package_even_after_a_plain_import_has_failed() -> None:
    program = """
import sys  # as in an environment that scripts/_setup.sh has not made:
sys.meta_path[:] = [each for each in sys.meta_path if each.__module__ != "torchvision_operators"]
try:
    import torchvision  # fails half-way beside a CPU torch, and leaves modules behind
except RuntimeError:
    pass
from ddp.vision import torchvision
package = torchvision()
print(package.transforms.CenterCrop(2).size, package.models.resnet18.__name__, package.datasets.MNIST.__name__)
print(package is torchvision())
import torchvision as plain
print(plain is package)
"""
    assert run_python(program).split("\n")[:3] == ["(2, 2) resnet18 MNIST", "True", "True"]


@pytest.mark.slow
def test_existing_operators_are_left_alone() -> None:
    """Where torchvision's own library can be loaded, or someone else has declared the operators, nothing is added."""
    program = """
import sys, torch
sys.meta_path[:] = [each for each in sys.meta_path if each.__module__ != "torchvision_operators"]
try:
    import torchvision
except RuntimeError:  # its own library cannot be loaded
    other = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        other.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import ddp.vision
ddp.vision.torchvision()
print(ddp.vision.declared)
"""
    assert run_python(program).strip() == "[]"


@pytest.mark.slow
def test_another_failure_is_not_hidden(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
(Path({str(tmp_path)!r}) / "torchvision.py").write_text("raise RuntimeError('built for another release')")
sys.path.insert(0, {str(tmp_path)!r})
from ddp.errors import ConfigError
from ddp.vision import torchvision
try:
    torchvision()
except ConfigError as error:
    print(error)
"""
    assert "built for another release; install the torchvision of the same release" in run_python(program)
