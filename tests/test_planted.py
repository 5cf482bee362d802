"""Planted faults: each still has its place in the product, and one of them is said by a plain run."""

import subprocess
import sys

import pytest

from tests.planted import FAULTS, ROOT


def test_each_fault_has_its_place() -> None:
    gone = [name for name, f in FAULTS.items() if f.text not in (ROOT / "src/lockstep" / f.file).read_text()]
    assert not gone
    assert all(fault.text != fault.new for fault in FAULTS.values())


@pytest.mark.slow
def test_a_fault_is_said() -> None:
    command = [sys.executable, "-m", "tests.planted", "--only", "mean for sum"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=True)
    assert "(no fault): harmless" in ended.stdout
    assert "mean for sum: said on N = [2]" in ended.stdout
