"""The losses of the command line beside torch's and formulas by hand, and the weights of classes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.errors import UserError
from lockstep.training.losses import ClassLoss, class_weights, cross_entropy

GENERATOR = torch.Generator().manual_seed(0)
OUTPUTS = torch.randn(9, 4, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.randint(4, (9,), generator=GENERATOR)
SOFT = torch.rand(9, 4, generator=GENERATOR, dtype=torch.float64).softmax(1)
WEIGHTS = torch.tensor([1.0, 2.5, 0.3, 7.0], dtype=torch.float64)


def value(loss: ClassLoss, labels: Tensor, outputs: Tensor = OUTPUTS) -> Tensor:
    found = loss(outputs, labels)
    return found if isinstance(found, Tensor) else found[0] / found[1]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_is_torchs(smoothing: float) -> None:
    for labels in (LABELS, SOFT):
        plain = F.cross_entropy(OUTPUTS, labels, label_smoothing=smoothing)
        torch.testing.assert_close(value(ClassLoss("cross-entropy", smoothing=smoothing), labels), plain)
        torch.testing.assert_close(cross_entropy(smoothing)(OUTPUTS, labels), plain)
    weighted = ClassLoss("cross-entropy", smoothing=smoothing, weights=WEIGHTS)
    torch.testing.assert_close(
        value(weighted, LABELS), F.cross_entropy(OUTPUTS, LABELS, WEIGHTS, label_smoothing=smoothing)
    )
    # torch divides soft labels' weighted losses by their number: here by their weights, as of class numbers
    theirs = F.cross_entropy(OUTPUTS, SOFT, WEIGHTS, label_smoothing=smoothing) * 9 / (SOFT * WEIGHTS).sum()
    torch.testing.assert_close(value(weighted, SOFT), theirs)


@pytest.mark.parametrize("loss", [ClassLoss(kind, 1.5, 0.1, WEIGHTS) for kind in ("cross-entropy", "bce", "focal")])
def test_class_numbers_are_soft_labels_of_one_class(loss: ClassLoss) -> None:
    torch.testing.assert_close(value(loss, LABELS), value(loss, F.one_hot(LABELS, 4).double()))


def test_bce_and_focal_loss_by_hand() -> None:
    hot = F.one_hot(LABELS, 4).double()
    plain = F.binary_cross_entropy_with_logits(OUTPUTS, hot * 0.9 + 0.025)
    torch.testing.assert_close(value(ClassLoss("bce", smoothing=0.1), LABELS), plain)
    chance = OUTPUTS.softmax(1)[torch.arange(9), LABELS]
    focal = -((1 - chance) ** 2) * chance.log()
    torch.testing.assert_close(value(ClassLoss("focal", 2.0), LABELS), focal.mean())
    mine = WEIGHTS[LABELS]
    torch.testing.assert_close(value(ClassLoss("focal", 2.0, 0.0, WEIGHTS), LABELS), (focal * mine).sum() / mine.sum())
    each = F.binary_cross_entropy_with_logits(OUTPUTS, hot, reduction="none").mean(1)
    torch.testing.assert_close(value(ClassLoss("bce", weights=WEIGHTS), LABELS), (each * mine).sum() / mine.sum())
    torch.testing.assert_close(value(ClassLoss("focal", 0.0), SOFT), F.cross_entropy(OUTPUTS, SOFT))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_a_focal_loss_of_certainty_has_a_finite_gradient(gamma: float) -> None:
    outputs = torch.tensor([[200.0, -200.0], [-200.0, 200.0]], requires_grad=True)
    value(ClassLoss("focal", gamma, 0.1), torch.tensor([0, 0]), outputs).backward()
    assert outputs.grad is not None
    assert torch.isfinite(outputs.grad).all()


def test_outputs_of_half_precision_are_summed_in_float32() -> None:
    for loss in (ClassLoss("bce"), ClassLoss("focal", 2.0), ClassLoss("cross-entropy", weights=WEIGHTS)):
        half = OUTPUTS.to(torch.bfloat16)
        found = value(loss, SOFT.float(), half)
        torch.testing.assert_close(found.float(), value(loss, SOFT.float(), half.float()).float())
    assert cross_entropy(0.0)(OUTPUTS.to(torch.bfloat16), SOFT.float()).dtype == torch.float32


@given(st.lists(st.integers(0, 3), min_size=1, max_size=50), st.sampled_from(["auto", "effective:0.9", "1,2,3,0.5"]))
def test_a_samples_weight_is_one_on_average(labels: list[int], text: str) -> None:
    weights = class_weights(text, np.array(labels), "abcd")
    assert weights is not None
    assert np.isclose(weights[labels].mean(), 1)
    assert (weights > 0).all()


def test_rare_classes_weigh_more() -> None:
    labels = np.array([0] * 90 + [1] * 9 + [2])
    weights = class_weights("auto", labels, "abc")
    assert weights is not None
    np.testing.assert_allclose(weights * [90, 9, 1], 100 / 3)  # all classes weigh the same together
    effective = class_weights("effective:0.9", labels, "abc")
    assert effective is not None
    np.testing.assert_allclose(effective[2] / effective[1], (1 - 0.9**9) / (1 - 0.9))
    assert class_weights("none", labels, "abc") is None
    with pytest.raises(UserError, match="--class-weights has 2 weights, and there are 3 classes"):
        class_weights("1,2", labels, "abc")
