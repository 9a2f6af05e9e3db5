"""The GPU's one name in this package, and torch's module for it.

The tests put a stand-in in the place of both (`tests/gpu_standin/`), so that what is done on a GPU runs without one.
"""

from __future__ import annotations

import torch

KIND = "cuda"  # the type of its devices
cuda = torch.cuda
