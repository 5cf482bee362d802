"""`lockstep tune`: what it tries, what it takes, and the command that it prints."""

import itertools
from collections.abc import Callable, Iterator

import pytest

from lockstep.commands.tune import run as tuning
from lockstep.commands.tune.measure import Speed, measure
from lockstep.commands.tune.plan import AXES, Plan
from lockstep.commands.tune.report import show
from lockstep.commands.tune.run import Tuned, tune
from lockstep.config import Config
from lockstep.config.recipes import recipe
from lockstep.errors import UserError
from lockstep.processes.failures import WorkerFailed
from lockstep.processes.world import World

CPU = recipe("digits").with_execution(device="cpu")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four quiet cores and a compiler."""
    monkeypatch.setattr(tuning, "cores", lambda: 4)
    monkeypatch.setattr(tuning, "_others", lambda: 0.0)
    monkeypatch.setattr("lockstep.commands.tune.plan.shutil.which", lambda name: name)


def tuned(speed: Callable[[Config], float], loss: Callable[[Config], float] = lambda _: 2.3, **plan: object) -> Tuned:
    """Tune on a machine of these speeds, which slows down from one measurement to the next."""
    slower: Iterator[float] = (0.99**n for n in itertools.count())
    return tune(
        Plan(config=CPU, **plan),  # type: ignore[arg-type]
        log=lambda _: None,
        measure=lambda config, _: Speed(speed(config) * next(slower), loss(config)),
    )


def fast(config: Config) -> float:
    """Quickest on two processes of two threads, in bf16, not compiled."""
    threads = config.execution.threads
    split = {(2, 2): 1.5, (1, 4): 1.2}.get((config.execution.nproc, threads), 1.0)  # type: ignore[arg-type]
    return 1000 * split * (2.0 if config.precision == "bf16" else 1.0) * (0.5 if config.model.compile else 1.0)


def test_the_quickest_of_each_axis_is_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    found = tuned(fast)
    assert [row.name for row in found.rows if row.taken] == ["2 x 2 threads", "as it is", "as it is", "bf16"]
    assert found.exactly == "lockstep train digits --nproc 2 --device cpu --threads 2"
    assert found.quickest == "lockstep train digits --precision bf16 --nproc 2 --device cpu --threads 2"
    assert found.notes == ["workers: there is nothing to choose here"]
    assert {row.changes for row in found.rows} == {"", "rounding", "products of 8 bits"}
    show(found)
    shown = capsys.readouterr().out
    assert found.exactly in shown
    assert found.quickest in shown
    assert shown.count("taken") == 4


def test_where_nothing_is_quicker_all_stays() -> None:
    found = tuned(lambda _: 1000.0)
    assert all(row.taken == (row.name == "as it is") for row in found.rows)
    assert found.exactly == found.quickest == "lockstep train digits --device cpu"


def test_what_computes_something_else_is_not_taken() -> None:
    found = tuned(fast, loss=lambda config: 2.31 if config.execution.nproc == 2 else 2.3, axes=("split",))
    assert [row.name for row in found.rows if not row.same] == ["2 x 2 threads"]
    assert [row.name for row in found.rows if row.taken] == ["1 x 4 threads"]


def test_a_choice_that_fails_is_named_and_the_others_go_on() -> None:
    def failing(config: Config) -> float:
        if config.execution.nproc == 4:
            raise WorkerFailed(0, "no memory", 1)
        return fast(config)

    found = tuned(failing, axes=("split",))
    assert found.notes == ["split: 4 x 1 threads can't be measured: rank 0: no memory"]
    assert [row.name for row in found.rows if row.taken] == ["2 x 2 threads"]


def test_what_cannot_be_tuned_is_refused() -> None:
    with pytest.raises(UserError, match="unknown axis"):
        Plan(axes=("spilt",))
    with pytest.raises(UserError, match="--rounds 1 gives no interval"):
        Plan(rounds=1)


@pytest.mark.parametrize("axis", ["split", "precision"])
def test_real_steps_are_measured(axis: str) -> None:
    config = AXES[axis].choices(CPU, 1, False)[0].config
    first, again = (measure(World.single(), config, 0.01) for _ in range(2))
    assert first.images_per_s > 0
    assert first.loss == again.loss
    assert 2 < first.loss < 3, "the first step's, of ten classes"
