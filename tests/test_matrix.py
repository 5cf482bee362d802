"""The matrix of combinations: a share of it, the same refusals from flags and library, and that it sees a fault."""

from typing import Any
from unittest import mock

import pytest
from torch import nn

import lockstep
from lockstep.commands.shared.arguments import planned
from lockstep.commands.verify.plan import Plan
from lockstep.distributed.world import World
from lockstep.errors import UserError
from tests import matrix
from tests.matrix_axes import AXES, BASE, Choice, Combination, pairs
from tests.pool import Pool

# what `parallelize` takes, by the field that it is
_LIBRARY = {
    "execution.strategy": "strategy",
    "comm.compress": "compress",
    "model.batch_norm": "batch_norm",
    "model.find_unused_parameters": "find_unused_parameters",
}


def _sentence(call: Any) -> str:
    try:
        call()
    except UserError as error:
        return error.message
    return ""


def test_a_pair_is_refused_in_the_same_words_by_config_flags_and_library() -> None:
    seen = 0
    for pair in pairs():
        names = [name for name, _ in pair.choices]
        refusal = _sentence(pair.config)
        if all(name in _LIBRARY for name in names):
            options: dict[str, Any] = {_LIBRARY[name]: value for name, value in pair.choices}
            for world in (World.single(), World(0, 2, 0, 2, World.single().device, "gloo")):
                if refusal or world.size == 1:
                    said = _sentence(lambda o=options, w=world: lockstep.parallelize(nn.Linear(2, 2), w, **o))
                    assert said == refusal, pair
        if refusal and "bad" not in names and (seen := seen + 1) % 4 == 0:  # parsing takes a while
            flags = [f for choice in pair.choices for f in _flag(choice)]
            said = _sentence(lambda f=flags: planned("verify", lambda c: Plan(config=c), ["digits", *f], "{}"))
            assert said == refusal, pair
    assert seen > 20


def _flag(choice: Choice) -> list[str]:
    name, value = choice
    flag = "--" + name.rpartition(".")[2].replace("_", "-")
    if isinstance(value, tuple):
        return [flag, *value]
    return [flag] if value is True else [flag.replace("--", "--no-")] if value is False else [flag, str(value)]


def test_every_axis_is_a_field_and_moves_the_config() -> None:
    for name, values in AXES.items():
        for value in values:
            changed = Combination(((name, value),))
            assert changed.refusal() or changed.config() != BASE, changed


@pytest.mark.slow
def test_an_awkward_one_holds_and_what_is_wrong_is_seen() -> None:
    awkward = Combination(
        (("execution.strategy", "fsdp"), ("on_nonfinite", "skip"), ("bad", True), ("optim.ema", 0.7), ("accumulate", 2))
    )
    config = awkward.config()
    with Pool() as pool:
        ran = matrix._run(pool, config, 3)
    assert not list(matrix._against_hand(config, 3, ran))
    name = next(name for name in ran.weights if name.endswith("weight"))
    ran.weights[name] = ran.weights[name] * (1 + 1e-6)
    assert "the loop by hand ended" in next(matrix._against_hand(config, 3, ran))


@pytest.mark.slow
def test_a_few_awkward_ones_hold() -> None:
    bad: Choice = ("bad", True)
    few = [
        Combination((("accumulate", 2), ("on_nonfinite", "rollback"), bad)),
        Combination((("comm.compress", "bf16"), ("model.find_unused_parameters", True))),
        Combination((("execution.strategy", "fsdp"), ("model.activation_checkpointing", True), bad)),
    ]
    tally = matrix.tally_of(few, seconds=600)
    assert tally.failed == {}
    assert len(tally.held) + tally.slow == len(few)


@pytest.mark.slow
def test_what_the_data_can_not_be_used_for_counts_as_refused_and_nothing_else_does() -> None:
    augmented: Choice = ("data.augment", AXES["data.augment"][0])
    infinite = Combination((augmented, ("bad", True)))
    tally = matrix.tally_of([infinite], seconds=600)
    assert tally.failed == {}
    assert ["taken as normalised already" in sentence for sentence in tally.refused.values()] == [True]
    with mock.patch.object(matrix, "_LATER", ()):
        assert list(matrix.tally_of([infinite], seconds=600).failed) == [str(infinite)]
