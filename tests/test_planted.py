"""Planted faults: each still has its place in the product."""

from tests.planted import FAULTS, ROOT


def test_each_fault_has_its_place() -> None:
    gone = [name for name, f in FAULTS.items() if f.text not in (ROOT / "src/lockstep" / f.file).read_text()]
    assert not gone
    assert all(fault.text != fault.new for fault in FAULTS.values())
