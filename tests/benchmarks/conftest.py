"""The benchmarks are scripts: their folder is on the import path, for them and for the processes that they start."""

import sys
from pathlib import Path

FOLDER = str(Path(__file__).parents[2] / "benchmarks")
if FOLDER not in sys.path:
    sys.path.append(FOLDER)
