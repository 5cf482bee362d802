"""Which copy of a model follows it, and how: fitted from weights alone."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lockstep.commands.reproduce import copies
from lockstep.commands.reproduce.copies import Copies, Copy, constant, decay, flat, warmed
from lockstep.commands.reproduce.experiment import _more_than_the_loss
from lockstep.commands.reproduce.places import user_line
from lockstep.commands.reproduce.source import line_that_sets


def _followed(follow: Callable[[nn.Module, nn.Module, int], None], steps: int = 6) -> Copies:
    """What is seen of an average that `follow` moves after each step of a model."""
    torch.manual_seed(0)
    model = nn.Linear(20, 10)
    average = copy.deepcopy(model)
    seen = Copies({1: Copy(average, "train.py:7", 0, flat(average))})
    seen.look(model, 0)
    for step in range(steps):
        with torch.no_grad():
            for each in model.parameters():
                each.add_(0.01 * torch.randn_like(each))
            follow(average, model, step)
        seen.look(model, step + 1)
        seen.look(model, step + 1)  # again before the next step: nothing has happened
    return seen


def _towards(average: nn.Module, model: nn.Module, kept: float) -> None:
    for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
        mine.mul_(kept).add_(theirs, alpha=1 - kept)


@given(st.sampled_from([0.5, 0.9, 0.99, 0.995, 0.999, 0.9999]), st.booleans())
def test_a_decay_is_found_from_the_weights(kept: float, copies_first: bool) -> None:
    def follow(average: nn.Module, model: nn.Module, step: int) -> None:
        _towards(average, model, 0.0 if copies_first and step == 0 else kept)

    seen = _followed(follow)
    told = seen.told()
    assert (len(told["decays"]), told["at"], told["born"]) == (6, "train.py:7", 0)
    assert constant(told["decays"]) == kept
    assert (told["decays"][0] == 0) == copies_first
    found = seen.found[1]
    assert all(torch.equal(each, found.module.get_parameter(name)) for name, each in seen.state().items())


def test_other_ways_to_move_are_no_constant_decay() -> None:
    def mean(average: nn.Module, model: nn.Module, step: int) -> None:
        _towards(average, model, step / (step + 1))

    def now_and_then(average: nn.Module, model: nn.Module, step: int) -> None:
        if step % 3 == 2:
            _towards(average, model, 0.9)

    def noise(average: nn.Module, model: nn.Module, step: int) -> None:
        del model, step
        for each in average.parameters():
            each.add_(0.01 * torch.randn_like(each))

    for follow in (mean, now_and_then, noise):
        told = _followed(follow).told()
        assert told, follow
        assert constant(told["decays"]) == 0, follow
    assert all(math.isnan(each) for each in _followed(noise).told()["decays"])


def test_a_copy_that_is_kept_or_renewed_is_no_average() -> None:
    assert _followed(lambda *_: None).told() == {}
    assert _followed(lambda average, model, _: _towards(average, model, 0.0)).told() == {}
    assert copies.Copies().state() == {}


def test_one_update_says_no_decay() -> None:
    assert constant([]) == constant([0.9]) == 0
    assert decay(torch.ones(3), torch.ones(3), torch.zeros(3)) == 1


def test_a_penalty_is_seen_in_what_backward_starts_from() -> None:
    def steps(*pairs: tuple[float, float]) -> list[dict[str, object]]:
        return [{"passes": [{"loss": loss, "backward": value, "at": "train.py:9"}]} for loss, value in pairs]

    assert _more_than_the_loss(steps((2.0, 2.0), (1.0, 1.0))) == []
    assert _more_than_the_loss(steps((2.0, 1.0), (1.0, 0.5))) == [], "divided by the passes"
    assert _more_than_the_loss(steps((2.0, math.nan), (1.0, math.nan))) == []
    assert "(train.py:9)" in _more_than_the_loss(steps((2.0, 2.5), (1.0, 1.5)))[0]


def test_lines_of_the_users_own_code(tmp_path: Path) -> None:
    here = user_line(str(Path(__file__).parent))
    assert here.startswith("test_copies.py:")
    assert user_line(str(tmp_path)) == ""
    path = tmp_path / "train.py"
    path.write_text("a = 1\nfor g in groups:\n    g['lr'] *= 2\ng['lr'] = 3\n")
    assert line_that_sets(str(path), "lr") == "train.py:3"
    assert line_that_sets(str(path), "momentum") == ""


@pytest.mark.parametrize(("decays", "found"), [([0.0, 0.9], 0.9), ([0.9, 0.9, 0.8], 0.0), ([0.0, 0.0], 0.0)])
def test_the_first_update_may_be_a_copy(decays: list[float], found: float) -> None:
    assert constant(decays) == found


@given(st.sampled_from([0, 1]), st.sampled_from([0.35, 0.5, 0.999]), st.integers(3, 12), st.booleans())
def test_a_warm_up_is_found_from_the_weights(first: int, cap: float, steps: int, copies_first: bool) -> None:
    kept = [min(cap, (1 + first + step) / (10 + first + step)) for step in range(steps)]
    if copies_first:
        kept[0] = 0.0
    told = _followed(lambda average, model, step: _towards(average, model, kept[step]), steps).told()
    capped = kept[1:].count(cap)
    if steps - 1 - capped < 2 or capped == 1:
        return  # too short to tell
    assert warmed(told["decays"]) == (cap if capped else 0.0, first)


@pytest.mark.parametrize("decays", [[], [0.9], [0.0, 0.9, 0.9, 0.9], [0.0, 0.5, 0.67, 0.75], [0.1, 2 / 11, 0.9, 0.9]])
def test_other_decays_are_no_warm_up(decays: list[float]) -> None:
    assert warmed(decays) is None
