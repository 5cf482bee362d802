"""A small share of the damaged run folders; `nox -s exhaustive` takes 10,000."""

import time
from pathlib import Path

import pytest

from tests.damages import canary_sings, damage


@pytest.mark.slow(100)
def test_damages_are_found_out_or_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert canary_sings(tmp_path)
    seed = int(time.time())
    tally = damage(30, seed, tmp_path)
    assert not tally.failures, f"seed {seed}\n" + "\n".join(tally.failures)
    assert tally.outcomes["refused"] > 1
    assert tally.outcomes["harmless"] > 2
