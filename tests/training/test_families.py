"""Families of networks, of which `nox -s exhaustive` tries all: two of each here."""

from pathlib import Path

import pytest

from tests.parallel.exact_families import digests
from tests.pool import Pool
from tests.training.families import FAMILIES, compared, said

pytestmark = pytest.mark.slow(8)


def test_there_are_families_enough() -> None:
    libraries = [family.partition("/")[0] for family in FAMILIES]
    assert libraries.count("torchvision") >= 20
    assert libraries.count("timm") >= 12


def test_plain_mode_is_equal_but_for_rounding(tmp_path: Path) -> None:
    with Pool(timeout=400) as pool:
        for family in ("timm/test_efficientnet", "torchvision/vit"):
            found = compared(pool, family, (3,), str(tmp_path / "gradients.pt"))
            assert found.holds, str(found)
            assert max(found.differences.values()) > 0, "nothing was compared"


def test_the_self_check_says_nothing() -> None:
    with Pool(timeout=400) as pool:  # batch norm behind batch norm, depthwise
        assert said(pool, "torchvision/shufflenet_v2_x0_5", (1, 2)) == ""


def test_exact_mode_leaves_one_digest() -> None:
    with Pool(timeout=400) as pool:
        for family in ("timm/test_vit", "torchvision/squeezenet1_1"):
            found = digests(pool, family, "bf16", ways=((1, 1), (1, 2), (3, 1)))
            assert len(set(found.values())) == 1, found
