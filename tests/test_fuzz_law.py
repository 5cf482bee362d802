"""The fuzzer of the law: its configurations are ones that a user could ask for, and it sees what it is there to see."""

import random
from pathlib import Path
from unittest import mock

import pytest

from lockstep.commands.shared.arguments import planned
from lockstep.commands.verify.plan import Plan
from lockstep.errors import UserError
from tests import fuzz_law
from tests.fuzz_draws import Drawn, draw
from tests.pool import Pool


def test_most_of_what_is_drawn_can_be_asked_for_and_it_differs() -> None:
    drawn = [draw(random.Random(i), Path("pictures")) for i in range(12)]
    assert len(set(drawn)) == 12
    plans = 0
    for each in drawn:
        args = [each.recipe, *each.flags, "--nproc", ",".join(map(str, each.nproc))]
        try:
            planned("verify", lambda config: Plan(config=config), args, "{}")
            plans += 1
        except UserError:
            pass
    assert plans >= 9


def test_the_same_seed_draws_the_same() -> None:
    assert draw(random.Random("7 3"), Path("pictures")) == draw(random.Random("7 3"), Path("pictures"))


SMALL = (
    "--model", "tests.commands.variants:centred_net", "--image-size", "5", "--batch-size", "8", "--fraction", "0.012",
    "--epochs", "1", "--exact", "3",
)  # fmt: skip


@pytest.mark.slow
def test_a_train_that_leaves_something_else_is_seen() -> None:
    # the model gives its buffer a new tensor in each pass: who looks it up once follows another than is written
    drawn = Drawn("digits", SMALL, (1, 2), 3, 1, 2, False)
    right = fuzz_law.trained
    with Pool() as pool:
        assert fuzz_law.tried(drawn, pool) == ("exact, resumed, threads", [])

        def wrong(*args: object) -> dict[str, object]:
            end = right(*args)  # type: ignore[arg-type]
            return end | {"weights_sha256": f"{end['weights_sha256']} and what a fault adds"}

        with mock.patch.object(fuzz_law, "trained", wrong):
            _, found = fuzz_law.tried(drawn, pool)
    assert found == [f"with N = {n}, train and verify's trace differ in weights_sha256" for n in (1, 2)]
