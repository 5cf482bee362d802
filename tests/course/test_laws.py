"""What each step is about, as a law: the right way's result is one on 1, 2 and 4 processes, the wrong way's is not."""

import pytest

import consequences
from tests.course.programs import run

PROCESSES = consequences.PROCESSES


def figure(one: consequences.Figure, step: str, *flags: str) -> list[str]:
    return [one.read(run(step, n, flags)) for n in PROCESSES]


def test_one_evaluation_on_one_and_two_processes() -> None:
    whole, half = run("07", 1), run("07", 2, ("--wrong",))
    assert run("07", 2) == whole
    assert consequences.WEIGHTS.read(half) == consequences.WEIGHTS.read(whole)
    assert consequences.LOSS.read(half) != consequences.LOSS.read(whole)


@pytest.mark.slow
@pytest.mark.parametrize("step", list(consequences.STEPS))
def test_the_right_way_does_not_depend_on_the_number(step: str) -> None:
    outputs = {run(step, n) for n in PROCESSES}
    assert len(outputs) == 1, outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "figures"),
    [
        ("02", (consequences.WEIGHTS, consequences.LOSS)),
        ("03", (consequences.WEIGHTS, consequences.LOSS, consequences.STEPS_AN_EPOCH)),
        ("05", (consequences.WEIGHTS, consequences.TRAINING)),
        ("07", (consequences.LOSS, consequences.EVALUATED)),
    ],
)
def test_the_wrong_way_depends_on_the_number(step: str, figures: tuple[consequences.Figure, ...]) -> None:
    for one in figures:
        values = figure(one, step, "--wrong")
        assert len(set(values)) == len(PROCESSES), (one.name, values)
        assert values[0] == one.read(run(step, 1)), "on one process both ways are the same"


@pytest.mark.slow
def test_the_plain_loop_misreports_what_it_trained() -> None:
    wrong, right = run("01", 1, ("--wrong",)), run("01", 1)
    assert consequences.WEIGHTS.read(wrong) == consequences.WEIGHTS.read(right)
    assert consequences.LOSS.read(wrong) != consequences.LOSS.read(right)
    assert consequences.ACCURACY.read(wrong) != consequences.ACCURACY.read(right)


@pytest.mark.slow
def test_a_second_run_finds_the_port_taken() -> None:
    assert figure(consequences.SECOND_RUN, "04", "--wrong") == ["EADDRINUSE"] * 3
    assert run("04", 2) == run("03", 2), "how processes are started changes nothing else"


@pytest.mark.slow
def test_a_forgotten_set_epoch_repeats_the_first_order() -> None:
    for flags, orders in (("--wrong",), 1), ((), 3):
        epochs = [line for line in run("06", 2, flags).splitlines() if "first samples" in line]
        assert len({line.partition("[")[2].partition("]")[0] for line in epochs}) == orders
        assert len(epochs) == 3
