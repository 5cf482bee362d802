"""The benchmarks of the data path, the order and the GPU run at toy sizes, and count what they say they count."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu
import numpy as np
import order
import photos
import pytest
import torch
from torch import nn

import data
from lockstep.config import Config, DataConfig
from lockstep.data.image_sets import ArraySet
from lockstep.errors import UserError
from lockstep.training.assemble import load_data

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    threads, tf32 = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.allow_tf32 = tf32


def part(**options: object) -> gpu.Part:
    fields = {"device": CPU, "tiny": True, "data_dir": "nowhere", "workers": 0, "ceilings": {}}
    return gpu.Part(**{**fields, "until": time.perf_counter() + 60, **options})  # type: ignore[arg-type]


def test_sides_run_in_turns_each_with_its_own_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    here = part(tiny=False)
    order: list[str] = []

    def side(name: str) -> dict[str, Any]:
        order.append(name)
        if name == "torn":
            raise RuntimeError("no such kernel")
        return {"seconds": 2.0 * len(order), "epochs": 2, "top1": 0.5}

    failed = gpu.in_turns(here, {name: partial(side, name) for name in ("a", "torn", "b")})
    assert order == ["a", "torn", "b", "b", "a"]
    assert failed == {"torn": "failed: RuntimeError: no such kernel"}
    assert here.kept["a"] == {"seconds": 12.0, "epochs": 4, "s_per_epoch": [1.0, 5.0], "top1": 0.5}
    set_up: list[str] = []
    monkeypatch.setattr(gpu, "configure", lambda precision, _: set_up.append(precision))
    with pytest.raises(UserError):
        gpu.run_tutorial(
            Config(data=DataConfig(dataset="nobody_has_this:set")),
            here,
            lambda model: torch.optim.SGD(model.parameters()),
        )
    assert set_up == ["fp32"], "the switches of the side before are put back first"


def test_augmentation_is_raced_against_equal_results() -> None:
    found = data.measure_cifar("nowhere", 40, rounds=2)  # raises where the two differ
    assert set(found["images_per_s"]) == {"torchvision", "lockstep", "lockstep again"}
    assert found["over_torchvision"]["low"] <= found["over_torchvision"]["ratio"] <= found["over_torchvision"]["high"]
    assert "random 32x32 images" in found["table"]["notes"][0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # timm leaves the files open
def test_photos_are_raced_at_toy_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "BATCH", 2)
    found = photos.measure((320, 240), count=4, workers=0, rounds=1, data_dir="nowhere")
    assert {"Lockstep, as stored", "--decode-size 256", "--decode-size 256 --cache", "DataLoader, Pillow"} < set(
        found["images_per_s"]
    )
    assert len(found["table"]["rows"]) == len(found["images_per_s"])


def test_an_augmentation_that_differs_is_not_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = data.by_hand
    monkeypatch.setattr(data, "by_hand", lambda *given: by_hand(*given) + 1e-3)
    with pytest.raises(AssertionError):
        data.measure_cifar("nowhere", 8, rounds=1)


def test_all_loaders_bring_the_whole_folder(tmp_path: Path) -> None:
    assert 20 < data.write_pictures(tmp_path, 6) < 500
    for name, make in data.LOADERS.items():
        if name != "timm":
            images = torch.cat(
                [batch.images if hasattr(batch, "images") else batch[0] for batch in make(tmp_path, 0)()]
            )
            assert images.shape == (6, 3, 224, 224), name
            assert images.dtype == torch.float32
            assert 0.5 < images.std() < 2, name


def test_cpu_time_is_counted_with_that_of_children() -> None:
    before = data.cpu_seconds()
    child = subprocess.Popen(
        [sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass\nprint(1, flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        child.stdout.readline()  # it has worked, and lives on as a loader's worker does
        assert data.cpu_seconds() - before >= 0.45
        child.communicate(b"\n")


def test_a_folder_is_raced_at_each_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("Lockstep", "DataLoader, decoded to tensors")
    monkeypatch.setattr(data, "LOADERS", {name: data.LOADERS[name] for name in names})
    found = data.measure_folder(4, [0], rounds=1, epochs=1)
    assert [row[:2] for row in found["table"]["rows"]] == [[name, 0] for name in names]
    assert all(each["images_per_s"] > 0 for each in found["loaders"].values())


def test_the_order_is_observed_case_by_case(monkeypatch: pytest.MonkeyPatch) -> None:
    run_it = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        assert command[1:3] == [order.__file__, "--observe"]
        if command[3] == "sampler":  # its peak is seen in a process that had none before
            return run_it(command, **options)
        return SimpleNamespace(stdout=json.dumps(order.observe(command[3], int(command[4]))))

    monkeypatch.setattr("order.subprocess.run", run)  # each in a process of its own takes seconds
    result = order.measure([10**12], sampler_samples=300_000, repeats=1)
    rows, [shown] = result["rows"], result["tables"]
    assert list(rows) == ["lockstep 1000000000000", "sampler 300000"]
    assert all(set(row) == set(order.AIMS) and row["first_ms"] > 0 < row["step_us"] for row in rows.values())
    assert rows["sampler 300000"]["peak_mb"] > 2, "a list of 300,000 numbers"
    assert [row[:2] for row in shown["rows"]] == [
        ["Order", "1e+12"],
        ["DistributedSampler", "3e+05"],
        ["DistributedSampler", "1e+12"],
    ]
    assert set(shown["rows"][2][2:]) == {"not measured"}


def test_operations_and_bytes_of_a_step_are_counted() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5, bias=False))
    batch = SimpleNamespace(images=torch.randn(8, 3, 2, 2), labels=torch.zeros(8, dtype=torch.int64))
    flops, moved = gpu.step_cost(model, batch, Config())
    assert flops == 2 * (2 * 8 * 12 * 5)  # forward, and the weights' gradient; the images need none
    # saved: the images, the log-probabilities and labels of the loss, and its total weight
    assert moved == 384 + 2 * (384 + 8 * 5 * 4 + 8 * 8 + 4) + 8 * 12 * 5 * 4


def test_a_call_is_timed_often_enough() -> None:
    assert gpu.seconds_of(lambda: time.sleep(0.002), CPU, 0.02) >= 0.002


def test_a_part_that_fails_keeps_what_it_had_and_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(found: gpu.Part) -> None:
        found.columns = ["a"]
        found.rows.append([1])
        raise RuntimeError("no kernel image\nand more")

    def works(found: gpu.Part) -> None:
        found.columns, found.kept = ["b"], {"x": 2}

    monkeypatch.setattr(gpu, "PARTS", {"ceilings": ("one", broken), "ladder": ("two", works)})
    result = gpu.measure(["ceilings", "ladder"], CPU, False, "", 0, 10, tmp_path / "out.json")
    assert result["failed"] == ["ceilings"]
    assert result["tables"][0]["rows"] == [[1]]
    assert "failed: RuntimeError: no kernel image" in result["tables"][0]["notes"]
    assert json.loads((tmp_path / "out.json").read_text())["parts"] == {"ceilings": {}, "ladder": {"x": 2}}


def test_the_tutorials_loop_stops_when_its_time_is_up() -> None:
    late = part(until=time.perf_counter())
    config = replace(late.config("mnist"), epochs=50, batch_size=16)
    found = gpu.run_tutorial(config, late, lambda model: torch.optim.SGD(model.parameters(), lr=0.01))
    assert found["epochs"] == 1
    assert late.notes == ["Data: random images of mnist's shape, 64 of them; top-1 says nothing."]


def test_the_tutorials_samples_are_the_sets() -> None:
    images, _ = load_data(part().config("cifar10"), part().world)
    assert isinstance(images, ArraySet)
    samples = gpu.Samples(images, lambda image: torch.from_numpy(np.array(image)))
    for index in (0, 63):
        pixels, label = samples[index]
        assert torch.equal(pixels.permute(2, 0, 1), images.read(np.array([index]), None)[0][0])
        assert label == index % 10


@pytest.mark.slow
def test_the_whole_command_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, gpu.__file__, "--tiny", "--device", "cpu", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path, env=environment)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(out.read_text())
    assert result["failed"] == [], ended.stdout
    assert list(result["parts"]) == list(gpu.PARTS)
    rungs = result["parts"]["ladder"]
    assert list(rungs) == list(gpu.RUNGS)
    assert all(rung["tflops"] > 0 and rung["low"] <= rung["s_per_step"] <= rung["high"] for rung in rungs.values())
    for name in ("mnist", "cifar10"):
        sides = result["parts"][name]
        assert {"Lockstep fp32", "Lockstep bf16", "the tutorials' way"} <= set(sides)
        assert all(0 <= side["top1"] <= 1 and side["seconds"] > 0 for side in sides.values())
    assert len(result["parts"]["cifar10-speed"]["runs"]) == 2
    for title, _ in gpu.PARTS.values():
        assert title in ended.stdout
