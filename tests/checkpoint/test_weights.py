"""Weights on disk: whole or absent, for any wrapper and memory format, and never a surprise on loading."""

import hashlib
import os
import resource
import struct
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from lockstep.checkpoint.weights import digest, load, save
from lockstep.distributed import files
from lockstep.errors import UserError
from lockstep.parallel.strategy import unwrap

# torch 2.11 says so of itself when it imports its compiler
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("corner", self.first.weight.detach()[:2, :2])


def test_digest_is_sha256_of_the_little_endian_elements_in_order() -> None:
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.5, -2.0]]))
        layer.bias.copy_(torch.tensor([0.25]))
    layer.register_buffer("steps", torch.tensor(3))
    layer.register_buffer("narrow", torch.tensor([1.0], dtype=torch.bfloat16))
    octets = struct.pack("<3f", 1.5, -2.0, 0.25) + struct.pack("<q", 3) + b"\x80\x3f"
    assert digest(layer) == hashlib.sha256(octets).hexdigest()


def test_the_same_weights_make_the_same_file(tmp_path: Path) -> None:
    note = {name: name for name in ["epoch", "step", "top1", "classes", "normalisation"]}
    for i in range(12):  # the library's own order of the entries changes from file to file
        save(_model(), tmp_path / f"{i}.safetensors", note)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    with safe_open(tmp_path / "0.safetensors", "pt") as file:
        found = file.metadata()
        assert {name: found[name] for name in note} == note
        assert set(found) == {*note, "lockstep_sha256"}


def _compiled(model: nn.Module) -> nn.Module:
    return cast(nn.Module, torch.compile(model))  # to torch's types it is a function


def test_digest_ignores_memory_format_and_wrappers_and_sees_every_entry() -> None:
    model = _model()
    expected = digest(model)
    assert digest(_model().to(memory_format=torch.channels_last)) == expected
    assert digest(nn.DataParallel(_compiled(model))) == expected
    for name, tensor in model.state_dict().items():
        kept = tensor.clone()
        tensor.reshape(-1)[-1:].add_(1)
        assert digest(model) != expected, name
        tensor.copy_(kept)
    assert digest(model) == expected


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=9), columns=st.integers(1, 3))
def test_digest_of_a_transposed_view_is_that_of_its_logical_copy(values: list[float], columns: int) -> None:
    matrix = torch.tensor(values * columns).view(columns, -1)
    a, b = nn.Module(), nn.Module()
    a.register_buffer("x", matrix.t())
    b.register_buffer("x", matrix.t().contiguous())
    assert digest(a) == digest(b)


def test_unwrap_goes_through_any_nesting() -> None:
    model = _model()
    assert unwrap(model) is model
    assert unwrap(nn.DataParallel(nn.DataParallel(model))) is model
    assert unwrap(_compiled(nn.DataParallel(_compiled(model)))) is model


def test_a_round_trip_keeps_every_bit_and_leaves_one_file(tmp_path: Path) -> None:
    model, other, path = _model().to(memory_format=torch.channels_last), _model(1), tmp_path / "final.safetensors"
    model[1].num_batches_tracked.fill_(9)
    save(nn.DataParallel(model), path, {"epoch": "3"})
    load(_compiled(other), path)
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["epoch"] == "3"
    assert digest(other) == digest(model)
    assert sorted(load_file(path)) == sorted(model.state_dict()), "bare names, for any reader"
    assert [p.name for p in tmp_path.iterdir()] == ["final.safetensors"]


def test_tied_weights_and_overlapping_views_are_written_under_each_name(tmp_path: Path) -> None:
    model, path = _Tied(), tmp_path / "w.safetensors"
    save(model, path, {})
    assert set(load_file(path)) == set(model.state_dict())
    other = _Tied()
    load(other, path)
    assert digest(other) == digest(model)
    assert other.second.weight is other.first.weight


def test_prefixes_of_wrappers_are_stripped_but_not_a_models_own(tmp_path: Path) -> None:
    wrapped = nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": _model()})})
    own = nn.ModuleDict({"module": nn.Linear(2, 2)})
    path = tmp_path / "w.safetensors"
    save(wrapped, path, {})
    fresh = _model(1)
    load(fresh, path)
    assert digest(fresh) == digest(wrapped)
    save(own, path, {})
    again = nn.ModuleDict({"module": nn.Linear(2, 2)})
    load(again, path)
    assert digest(again) == digest(own)


def test_a_mismatch_names_what_is_missing_unexpected_and_misshapen_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save(_model(), path, {})
    other = nn.Sequential(nn.Conv2d(2, 4, 5), nn.Identity(), nn.Flatten(), nn.Linear(16, 3), nn.Linear(3, 1))
    before = digest(other)
    with pytest.raises(UserError) as caught:
        load(other, path)
    message = str(caught.value)
    for line in (
        "0.weight [4, 2, 3, 3] float -> [4, 2, 5, 5] float", "1.num_batches_tracked [] int64 -> (none)",
        "4.weight (none) -> [1, 3] float",
    ):  # fmt: skip
        assert line in message
    assert digest(other) == before


def test_a_file_cut_short_or_with_another_bit_is_named_or_changes_nothing(tmp_path: Path) -> None:
    path, model, saved = tmp_path / "w.safetensors", _model(1), _model()
    save(saved, path, {"epoch": "3"})
    whole, same, before = path.read_bytes(), 0, digest(model)
    for cut in (0, 4, 50, -1):
        path.write_bytes(whole[:cut])
        with pytest.raises(UserError, match=r"w\.safetensors is damaged"):
            load(model, path)
        assert digest(model) == before
    for at in range(0, len(whole), 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        try:
            load(model, path)
        except UserError:
            continue
        assert digest(model) == digest(saved), at  # in the name of the digest's entry, or in the padding
        same += 1
    assert same <= 12


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    broken = _model()
    with torch.no_grad():
        broken[0].weight[0, 0, 0, 0] = float("nan")
    save(broken, tmp_path / "w.safetensors", {})
    with pytest.raises(UserError, match=r"w\.safetensors holds weights that are not finite: 0\.weight"):
        load(_model(), tmp_path / "w.safetensors")


def test_what_a_damaged_file_holds_moves_no_cursor(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    for kind in (r"a\n", r"a\u001b[2J", r"a\rb\u0007"):
        header = f'{{"w": {{"dtype": "{kind}", "shape": [1], "data_offsets": [0, 4]}}}}'.encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        with pytest.raises(UserError, match="is damaged or not a safetensors file: ") as told:
            load(_model(), path)
        assert told.value.message.isprintable()


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.safetensors"
    save(_model(), path, {})
    before = path.read_bytes()

    monkeypatch.setattr(files, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="No space left"):
        save(_model(1), path, {})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]
    monkeypatch.undo()
    with pytest.raises(UserError, match="can't write"):
        save(_model(), path / "under-a-file", {})
    with pytest.raises(UserError, match="can't write"):
        save(_model(), tmp_path / "no-folder" / "w", {})

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(UserError, match=r"w\.safetensors: File too large") as refused:
            save(_model(1), path, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "ulimit -f" in refused.value.remedy
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_file_may_be_read_by_whom_the_umask_lets(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        save(_model(), tmp_path / "w.safetensors", {})
    finally:
        os.umask(before)
    assert (tmp_path / "w.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask


def test_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def get_extra_state(self) -> object:
            return {"a": 1}

    for use in (digest, lambda model: save(model, tmp_path / "w", {})):
        with pytest.raises(UserError, match="_extra_state"):
            use(Odd())
