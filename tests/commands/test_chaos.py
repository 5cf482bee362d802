"""chaos: what it refuses, what it concludes, and a training that it kills and that comes back."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.commands.chaos import Lost, Plan, Report, chaos
from lockstep.config import Config, Execution, Recovery
from lockstep.config.recipes import recipe
from lockstep.errors import UserError
from tests.subprocesses import run_lockstep


@pytest.mark.parametrize(
    ("kills", "config", "message"),
    [
        (0, Config(), "--kills 0 breaks nothing"),
        (1, Config(execution=Execution(nnodes=2, master_addr="a", master_port=1)), "this machine alone"),
        (1, Config(recovery=Recovery(checkpoint_every="0")), "Nothing could be recovered"),
        (1, Config(recovery=Recovery(checkpoint_every="never")), "Nothing could be recovered"),
    ],
)
def test_what_could_show_nothing_is_refused(kills: int, config: Config, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Plan(kills, config=config)


@pytest.mark.parametrize(
    ("exact", "ledgers", "weights", "lost", "holds"),
    [
        (True, 1, 1, 0, True),
        (False, 1, 2, 0, True),  # plain mode promises the order, and weights but for rounding
        (True, 1, 2, 0, False),
        (False, 2, 1, 0, False),
        (False, 1, 1, 1, False),
    ],
)
def test_runs_that_came_back_the_same(exact: bool, ledgers: int, weights: int, lost: int, holds: bool) -> None:
    digests = [set(map(str, range(n))) for n in (ledgers, weights)]
    assert Report(exact, lost=["why"] * lost, ledgers=digests[0], weights=digests[1]).holds == holds


@pytest.mark.slow
def test_a_training_that_can_not_run_is_not_broken_but_named(tmp_path: Path) -> None:
    config = replace(recipe("digits"), execution=Execution(nproc=1, device="cpu"))
    config = replace(config, model=replace(config.model, init="no-such-file"))
    with pytest.raises(Lost, match=r"(?s)undisturbed: the command ended|undisturbed: exit code 2.*no-such-file"):
        chaos(Plan(1, config=config), print)


@pytest.mark.slow
def test_what_is_killed_comes_back_as_the_same_run(tmp_path: Path) -> None:
    flags = ("--exact", "2", "--nproc", "2", "--threads", "1", "--epochs", "6", "--kills", "2", "--chaos-seed", "2")
    ended = run_lockstep("chaos", "digits", *flags, cwd=tmp_path, timeout=400)
    assert ended.code == 0, ended.text
    assert not ended.orphans
    assert "2 of 2 faults recovered" in ended.out
    assert "1 ledger digest(s), 1 weights digest(s)" in ended.out
    assert len(re.findall(r"(?:launcher|rank \d) of \d killed .*; back after", ended.err)) == 2, ended.err
    assert list(tmp_path.iterdir()) == []
