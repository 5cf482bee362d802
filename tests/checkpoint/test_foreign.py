"""Weights of others: plain state_dicts in both formats and under any wrapper, and nothing that would have to run."""

import argparse
import datetime
import functools
import io
import json
import os
import pickle
import re
import subprocess
import sys
import warnings
import zipfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from timm.utils.checkpoint_saver import CheckpointSaver
from timm.utils.model_ema import ModelEmaV3
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_parts
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel

from lockstep.checkpoint import weights
from lockstep.checkpoint.foreign import load_foreign, read_foreign
from lockstep.commands.export import Export, export
from lockstep.errors import UserError
from tests.checkpoint.moments import bits, model
from tests.inprocess import said


def prefixed(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("nest", [None, "state_dict", "net", "model_state_dict"])
@pytest.mark.parametrize("legacy", [False, True])
def test_state_dicts_of_torch_load(tmp_path: Path, prefix: str, nest: str | None, legacy: bool) -> None:
    theirs, ours, path = model(0), model(1, channels_last=True), tmp_path / "weights.anything"
    state: Any = prefixed(theirs.state_dict(), prefix)
    content = {"epoch": 3, "optimizer": {"lr": 0.1}, nest: state} if nest else state
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    assert bits(read_foreign(path)) == bits(dict(state))
    stride = ours[0].weight.stride()
    load_foreign(nn.DataParallel(ours), path)
    assert bits(ours.state_dict()) == bits(theirs.state_dict())
    assert ours[0].weight.stride() == stride


@pytest.mark.parametrize("prefix", ["", "module."])
def test_safetensors_load(tmp_path: Path, prefix: str) -> None:
    theirs, ours, path = model(0), model(1), tmp_path / "weights.pt"  # the content decides
    save_file(prefixed(theirs.state_dict(), prefix), path)
    load_foreign(ours, path)
    assert bits(ours.state_dict()) == bits(theirs.state_dict())


def test_parameters_load_as_weights_and_a_models_own_module_keeps_its_name(tmp_path: Path) -> None:
    own = nn.ModuleDict({"module": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    torch.save(dict(own.named_parameters()), tmp_path / "w.pt")
    fresh = nn.ModuleDict({"module": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    load_foreign(fresh, tmp_path / "w.pt")
    assert bits(fresh.state_dict()) == bits(own.state_dict())
    clash = {"module.weight": torch.ones(1), "weight": torch.zeros(1)}
    torch.save(clash, tmp_path / "c.pt")
    with pytest.raises(UserError, match=r"module\.weight \[1\] float -> \(none\)"):
        load_foreign(nn.Linear(1, 1, bias=False), tmp_path / "c.pt")


def test_another_models_weights_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"module.weight": torch.ones(3, 3)}, tmp_path / "w.pt")
    message = r"w\.pt does not fit Linear \(file -> model\): weight \[3, 3\] float -> \[2, 2\] float, bias \(none\)"
    with pytest.raises(UserError, match=message):
        load_foreign(nn.Linear(2, 2), tmp_path / "w.pt")


class _Settings(dict[str, Any]):
    """As Lightning's AttributeDict or yacs' CfgNode."""


def _harmless(tmp_path: Path) -> dict[str, Any]:
    """What training scripts save beside the weights."""
    best, scheduler = np.float64(0.5), torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], 0.1), 1)
    return {
        "args": argparse.Namespace(lr=0.1, output=tmp_path, model="resnet18"), "best": best, "history": [best] * 3,
        "hyper_parameters": _Settings(lr=0.1, layers=[1, 2]), "scheduler": scheduler, "losses": defaultdict(list, a=[]),
        "matrix": np.ones((2, 2)), "when": datetime.datetime(2026, 1, 1), "kind": functools.partial(print, 1),
        "optimizer": {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}, "epoch": 3,
    }  # fmt: skip


@pytest.mark.parametrize("legacy", [False, True])
def test_what_scripts_save_beside_their_weights_is_passed_over(tmp_path: Path, legacy: bool) -> None:
    theirs, ours, path, harmless = model(0), model(1), tmp_path / "checkpoint.pth", _harmless(tmp_path)
    state = theirs.half().state_dict()
    average, expected = AveragedModel(theirs.float()).state_dict(), bits(theirs.state_dict())
    several = [(name, harmless) for name in ("state_dict", "model", "module", "network", "model_ema")]
    for name, beside in several + [("model", {entry: value}) for entry, value in harmless.items()]:
        content = {**beside, name: average if name == "model_ema" else state}
        torch.save(content, path, _use_new_zipfile_serialization=not legacy)
        load_foreign(ours, path)
        assert bits(ours.state_dict()) == expected
    torch.save({"student": state, "teacher": state}, path)
    with pytest.raises(UserError, match="several sets of weights: student, teacher"):
        read_foreign(path)


def test_weights_two_levels_down_are_found(tmp_path: Path) -> None:
    theirs = model(0).state_dict()
    for state in ({"model": {"state_dict": theirs, "epoch": 3}}, {"state_dict": {"net": theirs}}, {0: theirs}):
        torch.save(state, tmp_path / "w.pt")
        load_foreign(ours := model(1), tmp_path / "w.pt")
        assert bits(ours.state_dict()) == bits(theirs)


def test_timms_and_torchvisions_training_scripts_checkpoints_load(tmp_path: Path) -> None:
    """timm's by its own saver, torchvision's by the lines of references/classification/train.py."""
    theirs, args = model(0), argparse.Namespace(model="resnet18", output_dir=str(tmp_path), opt="sgd")
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9)
    theirs(torch.randn(2, 3, 3, 3)).sum().backward()
    optimizer.step()
    average = ModelEmaV3(theirs, decay=0.5)
    saver = CheckpointSaver(theirs, optimizer, args, average, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path))
    saver.save_checkpoint(0, metric=12.5)
    ema = AveragedModel(nn.DataParallel(theirs))
    checkpoint = {
        "model": theirs.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 0, "args": args,
        "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 30).state_dict(), "model_ema": ema.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
    }  # fmt: skip
    torch.save(checkpoint, tmp_path / "model_0.pth")
    torch.save(ema.state_dict(), tmp_path / "ema.pth")
    for name in ("last.pth.tar", "model_best.pth.tar", "model_0.pth", "ema.pth"):
        ours = model(1)
        assert load_foreign(ours, tmp_path / name) == []
        assert bits(ours.state_dict()) == bits(theirs.state_dict())


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "net.model.", "module.model."])
@pytest.mark.parametrize("inner", ["", "_orig_mod.", "module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."])
def test_wrappers_anywhere_in_the_names(tmp_path: Path, prefix: str, inner: str) -> None:
    """As torch.compile leaves them of one block, and LightningModules beside losses and metrics of their own."""
    theirs, ours = (nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) for _ in "ab")
    state = {f"{prefix}{name.replace('1.', f'1.{inner}', 1)}": value for name, value in theirs.state_dict().items()}
    others = {"criterion.weight": torch.ones(2), "metric.total": torch.ones(1)} if prefix.endswith("model.") else {}
    torch.save({"state_dict": {**others, **state}}, tmp_path / "w.ckpt")
    left = ["criterion.weight, metric.total in it are not the model's, and left out"] * bool(others)
    assert load_foreign(ours, tmp_path / "w.ckpt") == left
    assert bits(ours.state_dict()) == bits(theirs.state_dict())


def test_two_networks_of_one_kind_in_a_file_are_not_guessed_at(tmp_path: Path) -> None:
    torch.save(
        prefixed(model(0).state_dict(), "student.") | prefixed(model(1).state_dict(), "teacher."), tmp_path / "w"
    )
    with pytest.raises(UserError, match=r"these are the model's weights more than once: student\., teacher\."):
        load_foreign(model(2), tmp_path / "w")


def test_the_old_names_of_weight_norm(tmp_path: Path) -> None:
    ours, theirs = (nn.Sequential(weight_norm(nn.Linear(3, 2)), nn.Linear(2, 2)) for _ in "ab")
    new = theirs.state_dict()
    old = {"module." + n.replace("parametrizations.weight.original0", "weight_g").replace(
        "parametrizations.weight.original1", "weight_v"): t for n, t in new.items()}  # fmt: skip
    assert {"module.0.weight_g", "module.0.weight_v", "module.0.bias"} < set(old)
    torch.save(old, tmp_path / "w.pt")
    load_foreign(ours, tmp_path / "w.pt")
    assert bits(ours.state_dict()) == bits(new)


def _net(channels: int, classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, classes))


def test_other_classes_and_colours_are_taken_where_that_is_asked(tmp_path: Path) -> None:
    theirs, path = _net(3, 9), tmp_path / "w.pt"
    torch.save(prefixed(theirs.state_dict(), "model."), path)
    grey, before = _net(1, 5), _net(1, 5)
    before.load_state_dict(grey.state_dict())
    with pytest.raises(UserError, match=r"0\.weight \[4, 3, 3, 3\] float32 -> \[4, 1, 3, 3\]") as refused:
        load_foreign(grey, path)
    done = ["0 is summed over its 3 input channel(s)", "3 keeps its initial values"]
    assert "--adapt-init: " + "; ".join(done) in refused.value.remedy
    assert bits(grey.state_dict()) == bits(before.state_dict())
    assert load_foreign(grey, path, adapt=True) == done
    ours, drawn = grey.state_dict(), before.state_dict()
    assert torch.equal(ours["3.weight"], drawn["3.weight"])
    assert torch.equal(ours["1.running_var"], theirs.state_dict()["1.running_var"])
    images = torch.randn(2, 1, 4, 4)
    torch.testing.assert_close(grey[0](images), theirs[0](images.expand(-1, 3, -1, -1)))  # grey is equal colours
    torch.save(grey.state_dict(), path)
    colours = _net(3, 5)
    assert load_foreign(colours, path, adapt=True) == ["0 is summed over its 1 input channel(s)"]
    torch.testing.assert_close(colours[0](images.expand(-1, 3, -1, -1)), grey[0](images))
    torch.save(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).state_dict(), path)
    with pytest.raises(UserError, match="Build the model that wrote it"):
        load_foreign(_net(1, 5), path, adapt=True)


def test_a_head_for_as_many_other_classes_keeps_its_initial_values(tmp_path: Path) -> None:
    theirs, path = _net(3, 2), tmp_path / "w.safetensors"
    weights.save(theirs, path, {"classes": json.dumps(["cat", "dog"])})
    for classes, adapt, done in (
        (("cat", "dog"), True, []),
        (("ant", "bee"), True, ["3 keeps its initial values"]),
        (("ant", "bee"), False, ["its last layer stays, though it was trained for other classes (--adapt-init "
                                 "initialises it again)"]),
        (None, True, []),
    ):  # fmt: skip
        ours = _net(3, 2)
        drawn = {name: value.clone() for name, value in ours.state_dict().items()}
        assert load_foreign(ours, path, adapt, classes) == done
        found, expected = ours.state_dict(), theirs.state_dict()
        assert torch.equal(
            found["3.weight"], (drawn if done == ["3 keeps its initial values"] else expected)["3.weight"]
        )
        assert torch.equal(found["0.weight"], expected["0.weight"])


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return __import__("os").mkdir, (self.path,)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "model.pkl"])
def test_what_would_have_to_run_is_refused_and_does_not(tmp_path: Path, name: str) -> None:
    sentinel, path = tmp_path / "executed", tmp_path / name
    bomb = _Bomb(sentinel)
    path.write_bytes(pickle.dumps(bomb))
    with pytest.raises(UserError, match="reading it could run code"):
        read_foreign(path)
    for legacy in (False, True):
        for content in (bomb, {"weight": torch.ones(1), "x": bomb}, {"state_dict": bomb}):
            torch.save(content, path, _use_new_zipfile_serialization=not legacy)
            with pytest.raises(UserError, match="reading it could run code") as caught:
                read_foreign(path)
            assert "torch.save(model.state_dict(), path)" in caught.value.remedy
    torch.save(model(), path)
    with pytest.raises(UserError, match=r"holds a torch\.nn\.modules\.container\.Sequential, not a state_dict"):
        read_foreign(path)
    assert not sentinel.exists()
    pickle.loads(pickle.dumps(bomb))
    assert sentinel.exists(), "it does something where it runs"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.ones(2), "holds a Tensor, not a state_dict"),
        ({}, "holds an empty dict"),
        ([1, 2], "holds a list, not a state_dict"),
        ({"epoch": 3, "a": torch.ones(1)}, "entries that are no weights: epoch"),
        ({1: torch.ones(1)}, "entries that are no weights: 1"),
        ({"model": {}}, "holds an empty dict"),
        ({"a": torch.ones(1), "b": torch.ones(1, device="meta")}, "entries that are no weights: b"),
    ],
)
def test_a_file_without_a_state_dict_is_told(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(UserError, match=message):
        read_foreign(tmp_path / "w.pt")


def test_a_broken_file_is_named_with_what_to_do_about_it(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(4)}, tmp_path / "w.safetensors")
    torch.save({"weight": torch.ones(4)}, tmp_path / "w.pt")
    torch.save({"weight": torch.ones(4000)}, tmp_path / "big.pt")
    tensors, by_torch, big = ((tmp_path / name).read_bytes() for name in ("w.safetensors", "w.pt", "big.pt"))

    def zipped(*names: str) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for each in names:
                archive.writestr(each, b"3")
        return file.getvalue()

    for name, content, message, remedy in (
        ("w.safetensors", tensors[:-3], "is damaged or not a safetensors file", "download the file again"),
        ("w.safetensors", tensors[:20], "is damaged or not a safetensors file", "download the file again"),
        ("w.safetensors", b"<!doctype html>", "is damaged or not a safetensors file", "download the file again"),
        ("w.safetensors", b"", "is empty", "Download or copy the file again"),
        ("w.pt", b"", "is empty", "Download or copy the file again"),
        ("w.pt", by_torch[:-100], "is damaged: PytorchStreamReader failed", "Download or copy the file again"),
        ("w.pt", big[:5000], "is damaged", "Download or copy the file again"),
        ("w.pt", zipped("notes.txt"), "is a zip archive without what torch.save writes: notes.txt", "Unpack it"),
        (
            "w.npz",
            zipped("a.npy"),
            "is a zip archive without what torch.save writes: a.npy",
            "torch.save(model.state_dict(), path)",
        ),
        (
            "w.pt",
            zipped("w/version", "w/data.pkl", "w/constants.pkl"),
            "holds a TorchScript program",
            "torch.jit.load(path)",
        ),
        ("w.pt", b"<!doctype html>", "holds neither safetensors nor what torch.save", "Download or copy"),
        ("w.bin", b"version https://git-lfs.github.com/spec/v1\noid", "is a pointer of Git LFS", "git lfs pull"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=re.escape(f"{name} {message}")) as refused:
            read_foreign(tmp_path / name)
        assert remedy in refused.value.remedy


def test_what_is_no_plain_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("w.safetensors", "folder/model.safetensors"):
        os.mkfifo(tmp_path / name)
    for path in (tmp_path / "w.safetensors", tmp_path / "folder", "/dev/null"):
        with pytest.raises(UserError, match=r"((w|model)\.safetensors|null) is no plain file"):
            load_foreign(model(), path)
    for use in (weights.read, lambda path: weights.load(model(), path)):
        with pytest.raises(UserError, match="is no plain file"):
            use(tmp_path / "w.safetensors")
    assert weights.read_metadata(tmp_path / "w.safetensors") == {}


@given(
    octets=st.binary(max_size=300), start=st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02", b"\x08" + bytes(7) + b"{"])
)
def test_no_bytes_do_anything_but_fail(octets: bytes, start: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("w") / "w"
    path.write_bytes(start + octets)
    for use in (read_foreign, partial(weights.load, nn.Linear(2, 2))):
        with pytest.raises(UserError):
            use(path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "digits-run"
    (folder / "weights").mkdir(parents=True)
    for seed, name in enumerate(("best", "final")):
        weights.save(model(seed, channels_last=True), folder / "weights" / f"{name}.safetensors", {"epoch": "3"})
    return folder


@pytest.mark.parametrize("which", ["best", "final"])
def test_an_export_is_what_others_read(run: Path, which: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    expected = bits(dict(model(["best", "final"].index(which)).state_dict()))
    path = export("digits-run", Export(weights=which))
    assert path == Path(f"digits-run-{which}.safetensors")
    assert bits({name: load_file(path)[name] for name in expected}) == expected
    path = export(run, Export("torch", which))
    assert path == Path(f"digits-run-{which}.pt")
    loaded = torch.load(path, weights_only=True)
    assert bits({name: loaded[name] for name in expected}) == expected
    fresh = model(7)
    fresh.load_state_dict(loaded)
    assert bits(dict(fresh.state_dict())) == expected
    assert sorted(p.name for p in run.parent.iterdir()) == [
        "digits-run", f"digits-run-{which}.pt", f"digits-run-{which}.safetensors",
    ]  # fmt: skip


def test_an_export_vouches_for_itself_and_is_the_same_each_time(run: Path, tmp_path: Path) -> None:
    files = [export(run, Export(out=str(tmp_path / f"{i}.safetensors"))) for i in range(8)]
    assert len({path.read_bytes() for path in files}) == 1
    assert bits(weights.read(files[0], ours=True)) == bits(dict(model(0).state_dict()))
    load_foreign(model(1), files[0])


def test_an_export_overwrites_nothing_and_says_what_is_wrong(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "w.pt"
    export(run, Export("torch", out=str(out)))
    with pytest.raises(UserError, match=r"w\.pt exists already"):
        export(run, Export("torch", out=str(out)))
    with pytest.raises(UserError, match=r"--out w\.onnx is a name for --to onnx, and --to is safetensors"):
        export(run, Export(out="w.onnx"))
    with pytest.raises(UserError, match="no weights at"):
        export(tmp_path, Export())
    for form in ("torch", "safetensors"):
        with pytest.raises(UserError, match=r"there is no folder .*nowhere to write w into"):
            export(run, Export(form, out=str(tmp_path / "nowhere" / "w")))


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.pt"
    assert said(capsys, "export", run, "--to", "torch", "--weights", "final", "--out", out)[0].strip() == str(out)
    assert torch.load(out, weights_only=True)
    for words, message in (
        (["export"], "export needs a run folder"),
        (["export", str(run), "--to", "tflite"], "unknown to 'tflite'"),
        (["export", str(tmp_path)], "no weights at"),
    ):
        assert message in said(capsys, *words, code=2)[1]


@pytest.mark.slow
def test_a_folder_of_distributed_checkpoint_is_refused_with_the_command_that_makes_a_file_of_it(tmp_path: Path) -> None:
    folder, file = tmp_path / "parts", tmp_path / "whole.pt"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save_parts({"model": model().state_dict()}, checkpoint_id=folder)
    with pytest.raises(UserError, match="no weights at") as refused:
        read_foreign(folder)
    command = (
        refused.value.remedy.partition(" makes a file")[0].replace("FOLDER", str(folder)).replace("FILE", str(file))
    )
    subprocess.run([sys.executable, *command.split()[1:]], check=True, capture_output=True)
    assert read_foreign(file).keys() == model().state_dict().keys()


def test_a_folder_means_the_weights_in_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no weights at .* holds no model\.safetensors"):
        read_foreign(tmp_path)
    for use in (read_foreign, partial(weights.load, nn.Linear(2, 2))):
        with pytest.raises(UserError, match="no weights at"):
            use(tmp_path / "w.pt")
    (tmp_path / "weights").mkdir()
    save_file({"weight": torch.full((1,), 2.0)}, tmp_path / "weights/best.safetensors")
    assert read_foreign(tmp_path)["weight"] == 2
    save_file({"weight": torch.full((1,), 3.0)}, tmp_path / "model.safetensors")
    assert read_foreign(tmp_path)["weight"] == 3
