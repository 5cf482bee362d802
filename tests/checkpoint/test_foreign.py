"""Weights of others: plain state_dicts in both formats and under any wrapper, and nothing that would have to run."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from lockstep import cli
from lockstep.checkpoint import weights
from lockstep.checkpoint.foreign import load_foreign, read_foreign
from lockstep.commands.export import Export, export
from lockstep.errors import UserError
from tests.checkpoint.moments import bits, model


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
    with pytest.raises(UserError, match=r"unexpected: module\.weight"):
        load_foreign(nn.Linear(1, 1, bias=False), tmp_path / "c.pt")


def test_another_models_weights_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"module.weight": torch.ones(3, 3)}, tmp_path / "w.pt")
    with pytest.raises(UserError, match=r"w\.pt does not fit Linear: missing: bias; another shape: weight \[3, 3\]"):
        load_foreign(nn.Linear(2, 2), tmp_path / "w.pt")


def test_a_lightning_module_s_names_are_found_below_its_attribute(tmp_path: Path) -> None:
    theirs, ours = model(0), model(1)
    torch.save({"epoch": 1, "state_dict": prefixed(theirs.state_dict(), "model.")}, tmp_path / "w.ckpt")
    assert load_foreign(ours, tmp_path / "w.ckpt") == []
    assert bits(ours.state_dict()) == bits(theirs.state_dict())


def _net(channels: int, classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, classes))


def test_other_classes_and_colours_are_taken_where_that_is_asked(tmp_path: Path) -> None:
    theirs, path = _net(3, 9), tmp_path / "w.pt"
    torch.save(prefixed(theirs.state_dict(), "model."), path)
    grey, before = _net(1, 5), _net(1, 5)
    before.load_state_dict(grey.state_dict())
    with pytest.raises(UserError, match=r"0\.weight \[4, 3, 3, 3\], the model has \[4, 1, 3, 3\]") as refused:
        load_foreign(grey, path)
    done = ["0 is summed over its 3 input channel(s)", "3 is drawn anew"]
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


def test_a_head_for_as_many_other_classes_is_drawn_anew(tmp_path: Path) -> None:
    theirs, path = _net(3, 2), tmp_path / "w.safetensors"
    weights.save(theirs, path, {"classes": json.dumps(["cat", "dog"])})
    for classes, adapt, done in (
        (("cat", "dog"), True, []),
        (("ant", "bee"), True, ["3 is drawn anew"]),
        (("ant", "bee"), False, ["its last layer stays, though it was trained for other classes (--adapt-init draws "
                                 "it anew)"]),
        (None, True, []),
    ):  # fmt: skip
        ours = _net(3, 2)
        drawn = {name: value.clone() for name, value in ours.state_dict().items()}
        assert load_foreign(ours, path, adapt, classes) == done
        found, expected = ours.state_dict(), theirs.state_dict()
        assert torch.equal(found["3.weight"], (drawn if done == ["3 is drawn anew"] else expected)["3.weight"])
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
    with pytest.raises(UserError, match="neither a safetensors file nor one of weights alone"):
        read_foreign(path)
    for legacy in (False, True):
        for content in (bomb, {"weight": torch.ones(1), "x": bomb}, {"state_dict": bomb}):
            torch.save(content, path, _use_new_zipfile_serialization=not legacy)
            with pytest.raises(UserError, match="reading them would run it") as caught:
                read_foreign(path)
            assert "torch.save(model.state_dict(), path)" in caught.value.remedy
    torch.save(model(), path)
    with pytest.raises(UserError, match="would run it"):
        read_foreign(path)
    assert not sentinel.exists()
    pickle.loads(pickle.dumps(bomb))
    assert sentinel.exists(), "it does something where it runs"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.ones(2), "holds no state_dict but a Tensor"),
        ({}, "holds no state_dict but a dict"),
        ([1, 2], "holds no state_dict but a list"),
        ({"epoch": 3, "a": torch.ones(1)}, "entries that are no weights: epoch"),
        ({1: torch.ones(1)}, "entries that are no weights: 1"),
        ({"model": {}}, "holds no state_dict"),
    ],
)
def test_a_file_without_a_state_dict_is_told(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(UserError, match=message):
        read_foreign(tmp_path / "w.pt")


def test_a_missing_one_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "w.pt", tmp_path):
        with pytest.raises(UserError, match="no weights at"):
            read_foreign(path)


@given(
    octets=st.binary(max_size=300), start=st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02", b"\x08" + bytes(7) + b"{"])
)
def test_no_bytes_do_anything_but_fail(octets: bytes, start: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("w") / "w"
    path.write_bytes(start + octets)
    with pytest.raises(UserError):
        read_foreign(path)


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
        export(run, Export(out=str(out)))
    with pytest.raises(UserError, match="no weights at"):
        export(tmp_path, Export())
    for form in ("torch", "safetensors"):
        with pytest.raises(UserError, match=r"can't write .*nowhere/w"):
            export(run, Export(form, out=str(tmp_path / "nowhere" / "w")))


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.pt"
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", str(run), "--to", "torch", "--weights", "final", "--out", str(out)])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert torch.load(out, weights_only=True)
    for words, message in (
        (["export"], "export needs a run folder"),
        (["export", str(run), "--to", "tflite"], "unknown to 'tflite'"),
        (["export", str(tmp_path)], "no weights at"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_a_folder_means_the_weights_in_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no weights at .* holds no model\.safetensors"):
        read_foreign(tmp_path)
    torch.save({"weight": torch.ones(1)}, tmp_path / "a.pth")
    assert read_foreign(tmp_path)["weight"] == 1
    torch.save({"weight": torch.zeros(1)}, tmp_path / "b.pt")
    with pytest.raises(UserError, match=r"holds several files of weights: a\.pth, b\.pt\n  Name the file"):
        read_foreign(tmp_path)
    (tmp_path / "weights").mkdir()
    save_file({"weight": torch.full((1,), 2.0)}, tmp_path / "weights/best.safetensors")
    assert read_foreign(tmp_path)["weight"] == 2
    save_file({"weight": torch.full((1,), 3.0)}, tmp_path / "model.safetensors")
    assert read_foreign(tmp_path)["weight"] == 3
