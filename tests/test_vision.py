"""torchvision must be importable in a fresh process, silently, whatever was tried before."""

import subprocess
import sys

import pytest


def run_python(program: str) -> str:
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


@pytest.mark.parametrize(
    "before",
    [
        "",
        # A plain import that failed half-way leaves modules behind.
        "try:\n    import torchvision\nexcept RuntimeError:\n    pass",
    ],
)
def test_gives_a_working_package(before: str) -> None:
    program = f"""{before}
from ddp.vision import torchvision
package = torchvision()
import torch
print(package.models.resnet18(num_classes=3)(torch.zeros(1, 3, 64, 64)).shape)
print(package is torchvision())
import torchvision as plain
print(plain is package)
"""
    assert run_python(program).split("\n")[:3] == ["torch.Size([1, 3])", "True", "True"]


def test_existing_operators_are_left_alone() -> None:
    """Where torchvision's own library can be loaded, or someone else has declared the operators, nothing is added."""
    program = """
import torch
other = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    other.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import ddp.vision
ddp.vision.torchvision()
print(ddp.vision._declared)
"""
    assert run_python(program).strip() == "[]"


def test_another_failure_is_not_hidden(tmp_path) -> None:  # type: ignore[no-untyped-def]
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
