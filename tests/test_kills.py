"""A small budget of tests/kills.py."""

import pytest

from tests import kills


@pytest.mark.slow(25)
def test_what_is_struck_at_random_moments_ends_as_the_same_run_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "")  # which main sets
    assert kills.main(["--kills", "12", "--seconds", "25", "--seed", "2"]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_of_two_runs_started_at_once_one_trains(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "")
    assert kills.main(["--simultaneous", "3"]) == 0, capsys.readouterr().out
