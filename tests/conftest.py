"""Settings that must stand before torch is imported, in this process and in every rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["MKL_CBWR"] = "AUTO"
sys.path.insert(0, str(Path(__file__).parent))  # for `from ranks import run_ranks`
