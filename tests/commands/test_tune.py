"""`lockstep tune`: what it tries, what it takes, and the command that it prints."""

import itertools
from collections.abc import Callable, Iterator

import pytest

from lockstep.commands.measuring import Row
from lockstep.commands.tune import Choice, Plan, choices, images_per_s, print_tuned, tune
from lockstep.config import Config
from lockstep.config.fields import with_values
from lockstep.config.recipes import recipe
from lockstep.distributed import proc
from lockstep.distributed.failures import WorkerFailed
from lockstep.distributed.world import World
from lockstep.errors import UserError

CPU = recipe("digits").with_execution(device="cpu")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores and a compiler."""
    monkeypatch.setattr(proc, "cores", lambda: 4)
    monkeypatch.setattr("shutil.which", lambda name: name)


def tuned(
    speed: Callable[[Config], float], others: float = 0.0, **plan: object
) -> tuple[list[Choice], list[str], str, str]:
    """Tune on a machine of these speeds, which slows down from one measurement to the next."""
    slower: Iterator[float] = (0.99**n for n in itertools.count())

    def measure(row: Row, _: float) -> dict[str, float]:
        return {"images_per_s": speed(row.config) * next(slower), "others_cores": others}

    return tune(Plan(config=CPU, **plan), lambda _: None, measure)  # type: ignore[arg-type]


def fast(config: Config) -> float:
    """Quickest on two processes of two threads, in bf16, not compiled; four processes fail."""
    nproc = config.execution.nproc
    if nproc == 4:
        raise WorkerFailed(0, "no memory", 1)
    split = 1.5 if nproc == 2 else 1.2 if nproc == 1 else 1.0
    return 1000 * split * (2.0 if config.precision == "bf16" else 1.0) * (0.5 if config.model.compile else 1.0)


def test_the_quickest_of_each_axis_is_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    rows, notes, exact, quickest = tuned(fast, others=1.5)
    assert [row.name for row in rows if row.taken] == ["2 x 2 threads", "as it is", "as it is", "bf16"]
    assert exact == "lockstep train digits --nproc 2 --device cpu --threads 2"
    assert quickest == "lockstep train digits --precision bf16 --nproc 2 --device cpu --threads 2"
    assert notes[0] == "split: 4 x 1 threads can't be measured: rank 0: no memory"
    assert notes[1] == "workers: there is nothing to choose here"
    assert "others kept 1.5 cores busy" in notes[2]
    print_tuned(rows, notes, exact, quickest)
    shown = capsys.readouterr().out
    assert f"\n{exact}\nor, with products of 8 bits (look at the accuracy):\n{quickest}\n" in shown
    assert shown.count("taken") == 4
    assert shown.count(" rounding") == 4


def test_where_nothing_is_quicker_all_stays() -> None:
    rows, _, exact, quickest = tuned(lambda _: 1000.0)
    assert all(row.taken == (row.name == "as it is") for row in rows)
    assert exact == quickest == "lockstep train digits --device cpu"


def test_what_cannot_be_tuned_is_refused() -> None:
    with pytest.raises(UserError, match="unknown axis"):
        Plan(axes=("spilt",))
    with pytest.raises(UserError, match="--rounds 1 gives no interval"):
        Plan(rounds=1)


@pytest.mark.parametrize("axis", ["split", "precision"])
def test_real_steps_are_measured(axis: str) -> None:
    (fields, *_) = choices(axis, CPU, 1, False).values()
    config = with_values(CPU, fields)
    assert config != CPU
    assert images_per_s(World.single(), config, 0.01) > 0
