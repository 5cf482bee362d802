"""The CIFAR-10 script by mp.spawn before, mended and after: the same numbers out of the last two, on few images.

torchvision reads CIFAR-10 from pickled files and checks their sums, so those of a part of it are made here, and the
scripts' copies leave the check out. They compute in float64: under Adam rounding grows fast.
"""

import pickle
import re
import socket
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.docs.coming_from.test_scripts import PAGES, SCRIPTS
from tests.subprocesses import Command

IMPORT = "from torchvision import datasets, models, transforms\n"
UNCHECKED = "from torchvision.datasets import cifar\n\ncifar.check_integrity = lambda *_: True\n"
FLOAT64 = "torch.set_default_dtype(torch.float64)\n"
WARNED = 'import warnings\n\nwarnings.simplefilter("default")\n'  # as a user's Python, not as this one
FILES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def write_cifar(root: Path, records: dict[str, np.ndarray]) -> Path:
    """Files as torchvision reads them, of records as in the binary version: uint8 [n, 3073], the label first."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, rows in records.items():
        (folder / name).write_bytes(pickle.dumps({"data": rows[:, 1:].copy(), "labels": rows[:, 0].tolist()}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    return root


def epochs(
    script: str, data: Path, folder: Path, nproc: int, batch_norm: str = "auto", net: str = "models.resnet18("
) -> list[float]:
    """Loss and accuracy of each of two epochs, four numbers, that a script prints, over all of `data`."""
    text = (SCRIPTS / f"{script}.py").read_text(encoding="utf-8")
    assert IMPORT in text
    for old, new in (
        (IMPORT, IMPORT + UNCHECKED + FLOAT64 + WARNED),
        ('"12355"', f'"{free_port()}"'),
        ("models.resnet18(", net),
        (
            'data="data", fraction=0.25, batch_norm="auto"',
            f'data={str(data)!r}, fraction=1.0, batch_norm="{batch_norm}"',
        ),
    ):
        text = text.replace(old, new)
    (folder / f"{script}.py").write_text(text)
    given = (
        [str(nproc)] if script == "cifar10_after" else ["--nproc", str(nproc), "--data", str(data), "--fraction", "1"]
    )
    argv = (sys.executable, str(folder / f"{script}.py"), *given)
    ended = Command(*argv, cwd=folder, env={"OMP_NUM_THREADS": "1"}, warm=True).end(500)
    assert ended.code == 0, ended.text
    found = re.findall(r"epoch \d: loss (\d\.\d{6}) accuracy (\d\.\d{4})", ended.out)
    assert len(found) == 2, ended.text
    return [float(number) for pair in found for number in pair]


@pytest.mark.slow
def test_the_mended_script_and_the_one_after_print_the_same(tmp_path: Path) -> None:
    rng, records = np.random.default_rng(0), dict[str, np.ndarray]()
    for name in FILES:
        records[name] = rng.integers(0, 256, (8, 3073), dtype=np.uint8)
        records[name][:, 0] %= 10
    data = write_cifar(tmp_path / "data", records)
    net = "models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], "  # half of ResNet-18
    small = partial(epochs, data=data, folder=tmp_path, net=net)
    mended = small("cifar10_mended", nproc=2)
    assert small("cifar10_after", nproc=2, batch_norm="local") == pytest.approx(mended, abs=2e-6)
    assert small("cifar10_after", nproc=1) == pytest.approx(small("cifar10_after", nproc=2), abs=2e-6)
    assert abs(small("cifar10_before", nproc=2)[0] - mended[0]) > 1e-3


@pytest.mark.realdata
def test_the_pages_figures_are_those_of_cifar10(tmp_path: Path, real_data: Path) -> None:
    records = dict[str, np.ndarray]()
    for name in FILES:
        rows = np.fromfile(real_data / "cifar-10-batches-bin" / f"{name}.bin", np.uint8).reshape(-1, 3073)
        records[name] = rows[: 100 if name == "test_batch" else 32]
    data = write_cifar(tmp_path / "data", records)
    for page in PAGES:
        table = re.findall(r"^\| `(cifar10_\w+)\.py`([^|]*)\| (\d) \|(.*)\|$", page.read_text(encoding="utf-8"), re.M)
        assert len(table) == 5
        for script, how, nproc, figures in table if page is PAGES[0] else []:
            shown = [float(number) for number in re.findall(r"\d+\.\d+", figures)]
            found = epochs(script, data, tmp_path, int(nproc), "local" if "local" in how else "auto")
            assert found[::2] == pytest.approx(shown, abs=2e-3), (script, how)
