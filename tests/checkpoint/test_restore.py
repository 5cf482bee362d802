"""Snapshot, disk, restore: the same bits for any optimizer, and a refusal with its reasons for anything else."""

import copy
import math
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep.checkpoint.foreign import load_foreign
from lockstep.checkpoint.restore import Loaded, restore, verify
from lockstep.checkpoint.store import folder_name, write
from lockstep.checkpoint.writer import copy_to_host, snapshot
from lockstep.config import Config, Execution, OptimConfig
from lockstep.config.fields import diff_configs
from lockstep.errors import UserError
from tests.checkpoint.moments import OPTIMIZERS, bits, model, train

# torch 2.11 says so of itself when it imports its compiler
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")


def _through_disk(folder: Path, *parts: Any, **more: Any) -> Loaded:
    with mock.patch("os.fsync"):  # what syncing is for is tested elsewhere, and it takes most of the time
        manifest = write(snapshot(*parts, **more), folder)
        return verify(folder / folder_name(manifest.step))


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    channels_last=st.booleans(),
    steps=st.integers(0, 3),
)
@example(name="muon", dtype=torch.float32, channels_last=True, steps=2)
@example(name="lbfgs", dtype=torch.float64, channels_last=False, steps=2)
@example(name="adam, lr tensor", dtype=torch.float32, channels_last=True, steps=1)
def test_what_is_restored_has_the_same_bits_and_trains_on_alike(
    name: str, dtype: torch.dtype, channels_last: bool, steps: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if name == "lbfgs":  # torch's takes nothing else
        dtype, channels_last = torch.float64, False
    first, second = (model(seed, dtype, channels_last) for seed in (0, 1))
    optimizer, other = (OPTIMIZERS[name](list(net.parameters())) for net in (first, second))
    train(first, optimizer, 0, steps)
    folder = tmp_path_factory.mktemp("c")
    train(second, other, 7, 8)  # restoring replaces what is there
    loaded = _through_disk(folder, steps, first, optimizer, state={"samples": 4 * steps})
    strides = [parameter.stride() for parameter in second.parameters()]
    assert restore(loaded, second, other) == {"samples": 4 * steps}
    assert [parameter.stride() for parameter in second.parameters()] == strides
    assert bits(second.state_dict()) == bits(first.state_dict())
    assert bits(other.state_dict()) == bits(optimizer.state_dict())
    train(first, optimizer, steps, steps + 2)
    train(second, other, steps, steps + 2)
    assert bits(second.state_dict()) == bits(first.state_dict())
    assert bits(other.state_dict()) == bits(optimizer.state_dict())


class _Odd(torch.optim.SGD):
    """State of every kind that an optimizer may keep, some of it in another dtype than its parameter."""

    def fill(self) -> None:
        first, second = self.param_groups[0]["params"][:2]
        shared = torch.tensor([1.5])
        self.state[first] = {
            "wide": torch.full_like(first, 1 / 3, dtype=torch.float64),
            "packed": torch.arange(5, dtype=torch.uint8),
            "flag": torch.tensor(True),
            "empty": torch.empty(0, 3),
            "nested": [None, (torch.tensor(7), "text", {3: torch.tensor(0.1, dtype=torch.float64), "$x": -math.inf})],
            "a.b": shared,
            "a": {"b": torch.tensor([2.5])},
            "deep": [[], {}, ()],
        }
        self.state[second]["shared"] = shared
        self.state["all of them"] = {"seen": 3, "sum": torch.tensor([1 + 2j, math.nan])}
        self.param_groups[0]["extra"] = {"schedule": (1, [2.5, None]), "tensor": torch.tensor(3, dtype=torch.int32)}


def test_an_optimizers_state_may_be_anything_plain(tmp_path: Path) -> None:
    nets = [model(seed, torch.bfloat16, channels_last=True) for seed in (0, 1)]
    optimizer, other = (_Odd(net.parameters(), 0.1) for net in nets)
    optimizer.fill()
    restore(_through_disk(tmp_path, 1, nets[0], optimizer), nets[1], other)
    assert bits(other.state_dict()) == bits(optimizer.state_dict())
    first, second = other.param_groups[0]["params"][:2]
    assert other.state[first]["wide"].stride() == first.stride() == (12, 1, 6, 3)
    assert other.state[first]["a.b"] is other.state[second]["shared"], "one tensor in two places stays one"


def test_what_an_optimizer_can_not_keep_is_named_and_nothing_written(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(UserError, match=r"param_groups\.0\.hook is a builtin_function_or_method"):
        snapshot(1, net, optimizer)
    with pytest.raises(UserError, match=r"state\.when is a object"):
        snapshot(1, net, torch.optim.SGD(net.parameters(), 0.1), state={"when": object()})
    sparse = torch.optim.SGD(net.parameters(), 0.1)
    sparse.state[net[0].weight]["mask"] = torch.eye(2).to_sparse()
    with pytest.raises(UserError, match=r"state\.0\.mask of optimizer is a tensor of torch.sparse_coo"):
        snapshot(1, net, sparse)
    tuples = torch.optim.SGD(net.parameters(), 0.1)
    tuples.state[(1, 2)] = {"x": 1}
    with pytest.raises(UserError, match="state for a tuple"):
        snapshot(1, net, tuples)


def test_wrappers_scaler_and_average_come_along(tmp_path: Path) -> None:
    first, second = model(0), model(1)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in (first, second)]
    averages = [AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for net in (first, second)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (512.0, 8.0)]
    train(first, optimizers[0], 0, 2)
    averages[0].update_parameters(first)
    scalers[0].load_state_dict({**scalers[0].state_dict(), "scale": 256.0, "_growth_tracker": 17})
    loaded = _through_disk(tmp_path, 2, nn.DataParallel(first), optimizers[0], scalers[0], averages[0])
    assert loaded.has_ema
    restore(loaded, cast(nn.Module, torch.compile(second)), optimizers[1], scalers[1], averages[1])
    for before, after in ((first, second), (averages[0], averages[1]), (scalers[0], scalers[1])):
        assert bits(after.state_dict()) == bits(before.state_dict())
    assert scalers[1].state_dict()["_growth_tracker"] == 17


class Versioned(nn.Linear):
    """Asks which version of it wrote its entries, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, entries: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version") != 2:
            raise ValueError(f"version should be 2 instead of {metadata.get('version')}")
        super()._load_from_state_dict(entries, prefix, metadata, *rest)


def test_a_module_that_asks_for_the_version_of_its_entries_gets_its_own(tmp_path: Path) -> None:
    first, second, third = (nn.Sequential(Versioned(3, 2), nn.BatchNorm1d(2)) for _ in range(3))
    average = AveragedModel(second)
    optimizer = torch.optim.SGD(first.parameters(), 0.1)
    loaded = _through_disk(tmp_path, 1, first, optimizer, ema=AveragedModel(first))
    restore(loaded, second, ema=average)
    assert bits(second.state_dict()) == bits(average.module.state_dict()) == bits(first.state_dict())
    old = {name: tensor for name, tensor in first.state_dict().items() if name != "1.num_batches_tracked"}
    torch.save(old, tmp_path / "old.pt")
    third[1].num_batches_tracked.fill_(5)
    load_foreign(third, tmp_path / "old.pt")
    assert bits(third.state_dict()) == bits(first.state_dict()), "a count that is not there is 0"


def test_what_is_none_is_left_out(tmp_path: Path) -> None:
    first, second = model(0), model(1)
    loaded = _through_disk(tmp_path, 2, first, torch.optim.Adam(first.parameters()), state={"a": 1})
    assert restore(loaded, second) == {"a": 1}
    assert bits(second.state_dict()) == bits(first.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    restore(loaded, second, scaler=scaler)
    assert scaler.get_scale() == 8.0, "a scaler that was not there before starts fresh"
    average = AveragedModel(second)
    with pytest.raises(UserError, match="ema: the checkpoint has no moving average"):
        restore(loaded, second, ema=average)


def test_how_an_optimizer_computes_and_what_the_caller_keeps_are_the_live_ones(tmp_path: Path) -> None:
    first, second = model(0), model(1)
    optimizer = torch.optim.SGD(first.parameters(), 0.1, momentum=0.9, foreach=False, weight_decay=0.1)
    other = torch.optim.SGD(second.parameters(), 0.7, momentum=0.5, foreach=True)
    loaded = _through_disk(tmp_path, 1, first, optimizer)
    restore(loaded, second, other, keep=("lr",))
    group = other.param_groups[0]
    assert (group["foreach"], group["lr"], group["momentum"], group["weight_decay"]) == (True, 0.7, 0.9, 0.1)


def test_restored_tensors_are_no_longer_the_files(tmp_path: Path) -> None:
    first, second = model(0), model(1)
    optimizer, other = (OPTIMIZERS["adam"](list(net.parameters())) for net in (first, second))
    train(first, optimizer, 0, 1)
    loaded = _through_disk(tmp_path, 1, first, optimizer)
    restore(loaded, second, other)
    expected = bits(other.state_dict())
    for path in loaded.path.iterdir():
        path.write_bytes(b"\0" * path.stat().st_size)  # the same pages that a map would show
    assert bits(other.state_dict()) == expected
    with pytest.raises(UserError, match="can't read the checkpoint"):
        restore(loaded, second, other)


def test_another_model_is_refused_with_a_diff_and_nothing_changes(tmp_path: Path) -> None:
    first = model()
    loaded = _through_disk(tmp_path, 1, first, torch.optim.SGD(first.parameters(), 0.1))
    other = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Identity(), nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 5)).double()
    before, optimizer = bits(other.state_dict()), torch.optim.SGD(other.parameters(), 0.1)
    with pytest.raises(UserError) as caught:
        restore(loaded, other, optimizer)
    text = str(caught.value)
    assert "step-000000001 is not of this run (checkpoint -> now):" in text
    assert "model: 0.weight [4, 3, 2, 2] float32 -> [4, 3, 2, 2] float64" in text
    assert "model: 1.running_mean [4] float32 -> (none)" in text
    assert "model: 3.weight [3, 16] float32 -> [5, 16] float64" in text
    assert "and 5 more" in text
    assert bits(other.state_dict()) == before


def test_another_optimizer_is_refused_with_a_diff_and_nothing_changes(tmp_path: Path) -> None:
    first, second = model(0), model(1)
    loaded = _through_disk(tmp_path, 1, first, torch.optim.SGD(first.parameters(), 0.1, momentum=0.9))
    before = bits(second.state_dict())
    for other, message in (
        (torch.optim.Adam(second.parameters()), "optimizer: SGD -> Adam"),
        (torch.optim.SGD(list(second.parameters())[1:], 0.1), r"optimizer: parameters by group \[6\] -> \[5\]"),
        (
            torch.optim.SGD([{"params": list(second.parameters())[::-1]}], 0.1),
            r"parameter 0: \['0.weight', \[4, 3, 2, 2\], 'float32'\] -> \['3.bias', \[3\], 'float32'\]",
        ),
        (torch.optim.SGD(copy.deepcopy(second).parameters(), 0.1), r"-> \[\"\(not the model's\)\""),
    ):
        with pytest.raises(UserError, match=message):
            restore(loaded, second, other)
        assert bits(second.state_dict()) == before


def test_no_pickle_is_read_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in ((pickle, ("load", "loads", "dump", "dumps")), (torch, ("load", "save"))):
        for name in names:
            monkeypatch.setattr(module, name, mock.Mock(side_effect=AssertionError("pickle was used")))
    first, second = model(0), model(1)
    optimizer, other = (OPTIMIZERS["muon"](list(net.parameters())) for net in (first, second))
    train(first, optimizer, 0, 1)
    restore(_through_disk(tmp_path, 1, first, optimizer), second, other)
    with pytest.raises(AssertionError, match="pickle was used"):
        torch.load("x")


def test_memory_is_used_again_where_it_is_given() -> None:
    net = model(channels_last=True)
    optimizer = OPTIMIZERS["adam"](list(net.parameters()))
    train(net, optimizer, 0, 1)
    first = snapshot(1, net, optimizer)
    places = [tensor.data_ptr() for named in first.tensors.values() for tensor in named.values()]
    held = bits(dict(first.tensors["model.safetensors"]))
    assert held == bits(net.state_dict())
    assert first.tensors["model.safetensors"]["0.weight"].stride() == net[0].weight.stride(), "one straight copy"
    train(net, optimizer, 1, 2)
    assert bits(dict(first.tensors["model.safetensors"])) == held, "training does not reach a snapshot"
    second = snapshot(2, net, optimizer, reuse=first)
    assert [tensor.data_ptr() for named in second.tensors.values() for tensor in named.values()] == places
    assert len(set(places)) == len(places)


@given(st.lists(st.integers(0, 5000), max_size=12), st.lists(st.integers(0, 5000), max_size=12))
def test_no_two_tensors_of_a_snapshot_share_a_byte(sizes: list[int], later: list[int]) -> None:
    copies: dict[str, Tensor] = {}
    for counts in (sizes, later):
        originals = {str(i): torch.full((count,), i, dtype=torch.int16) for i, count in enumerate(counts)}
        copies = copy_to_host({"f": originals}, {"f": copies})["f"]
        assert bits(copies) == bits(originals)
        for tensor in originals.values():
            tensor.zero_()
        spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in copies.values() if t.nbytes)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_a_view_that_overlaps_itself_is_copied_as_what_it_shows() -> None:
    wide = torch.arange(3.0).expand(4, 3)
    assert torch.equal(copy_to_host({"f": {"x": wide}}, {})["f"]["x"], wide)


def test_configs_are_compared_entry_by_entry() -> None:
    saved = Config(optim=OptimConfig(lr=0.1), execution=Execution(nproc=2))
    now = Config(optim=OptimConfig(lr=0.2, milestones=(3.0,)), batch_size=32, execution=Execution(nproc=3))
    before, after = {**saved.to_dict(), "data_fingerprint": "ab"}, {**now.to_dict(), "data_fingerprint": "cd"}
    expected = {"batch_size: 64 -> 32", "optim.lr: 0.1 -> 0.2", "optim.milestones: [] -> [3.0]"}
    expected.add("data_fingerprint: ab -> cd")
    assert set(diff_configs(before, after)) == expected
    assert diff_configs(before, before) == []
    assert set(diff_configs(before, after, ())) == {*expected, "execution.nproc: 2 -> 3"}
    assert diff_configs(before, after, ("execution", "optim", "--batch-size", "data_fingerprint")) == []
    assert diff_configs(before, after, ("execution", "lr", "optim.milestones", "batch_size")) == [
        "data_fingerprint: ab -> cd"
    ]
    assert diff_configs({"a": {"b": ()}}, {"a": {"b": []}}) == [], "JSON knows lists alone"
    assert diff_configs({"a": ""}, {"b": None}) == ["a: '' -> (none)", "b: (none) -> None"]
    forged = diff_configs({"a\nb": "x\0\n", "c": "d"}, {"c": ""})
    assert forged == ["'a\\nb': 'x\\x00\\n' -> (none)", "c: d -> ''"], "it stays on its line"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("fused", [False, True])
def test_on_a_gpu(tmp_path: Path, name: str, fused: bool) -> None:
    cls: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = model(seed, channels_last=True).cuda()
        return net, cls(net.parameters(), 0.01, fused=fused)

    (first, optimizer), (second, other) = make(0), make(1)
    train(first, optimizer, 0, 3)
    taken = snapshot(3, first, optimizer)
    assert all(tensor.is_pinned() for named in taken.tensors.values() for tensor in named.values() if tensor.numel())
    expected = bits(optimizer.state_dict())
    train(first, optimizer, 3, 5)  # the snapshot has waited for its copies
    write(taken, tmp_path)
    restore(verify(tmp_path / folder_name(3)), second, other)
    assert bits(other.state_dict()) == expected
    assert all(parameter.is_cuda for parameter in second.parameters())
    steps = [entry["step"].device.type for entry in other.state.values() if "step" in entry]
    assert set(steps) <= ({"cuda"} if fused else {"cpu"})
    train(second, other, 3, 5)
    assert bits(second.state_dict()) == bits(first.state_dict())
    on_cpu = model(2)  # and on another device
    cpu_optimizer = cls(on_cpu.parameters(), 0.01)
    restore(verify(tmp_path / "step-000000003"), on_cpu, cpu_optimizer)
    train(on_cpu, cpu_optimizer, 3, 4)


def test_a_state_that_names_no_tensor_is_refused(tmp_path: Path) -> None:
    nets = model(0), model(1)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in nets]
    train(nets[0], optimizers[0], 0, 2)
    loaded = _through_disk(tmp_path, 2, nets[0], optimizers[0])
    loaded.document["optimizer"]["state"][0][1]["momentum_buffer"] = "a"
    with pytest.raises(UserError, match="its state is not what its class"):
        restore(loaded, nets[1], optimizers[1])


@pytest.mark.parametrize("forged", [{"scale": -1}, {"scale": "x"}, [3], {"growth_factor": float("nan")}])
def test_a_scaler_that_none_has_written_is_refused(tmp_path: Path, forged: Any) -> None:
    net, scaler = model(0), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loaded = _through_disk(tmp_path, 2, net, optimizer, scaler)
    if isinstance(forged, dict):
        forged = {**loaded.document["scaler"], **forged}
    loaded.document["scaler"] = forged
    with pytest.raises(UserError, match="scaler: its state is not what a gradient scaler keeps"):
        restore(loaded, net, optimizer, scaler)
    del forged[next(iter(forged)) if isinstance(forged, dict) else 0]
    loaded.document["scaler"] = forged or {"scale": 1.0}
    with pytest.raises(UserError, match="scaler: its state"):
        restore(loaded, net, optimizer, scaler)
