"""The file formats: what is written is what is read, to the bit, and nothing else is read at all."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.checkpoint.format import (
    FORMAT,
    MODEL,
    OPTIMIZER,
    STATE,
    Damaged,
    FileRecord,
    Manifest,
    decode,
    encode,
    parse_json,
    read_tensors,
    require_storable,
    safetensors_chunks,
)
from lockstep.errors import UserError
from tests.checkpoint.moments import bits

REAL = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint64, torch.uint32, torch.uint16, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
COMPLEX = [torch.complex64, torch.complex128]

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=8) | st.integers() | st.just("$tensor"), inner, max_size=3)
    ),
    max_leaves=12,
)


@st.composite
def tensors(draw: st.DrawFn, dtypes: list[torch.dtype]) -> torch.Tensor:
    """Any dtype, shape and bytes, with the dimensions in memory in any order."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=count, max_size=count))), dtype=torch.uint8)
    flat = raw % 2 == 1 if dtype == torch.bool else raw.view(dtype) if count else torch.empty(0, dtype=dtype)
    order = draw(st.permutations(range(len(shape))))
    return flat.view([shape[i] for i in order]).permute([order.index(i) for i in range(len(shape))])


@given(trees)
@settings(max_examples=50)
def test_plain_values_come_back_with_their_types_and_bits(tree: Any) -> None:
    text = json.dumps(encode(tree, "state"), allow_nan=False).encode()
    assert bits(decode(parse_json(text, STATE))) == bits(tree)


def test_tensors_in_a_tree_go_to_their_file() -> None:
    kept: dict[str, torch.Tensor] = {}

    def file_away(where: str, tensor: torch.Tensor) -> str:
        kept[where] = tensor
        return where

    tree = {"a": [torch.ones(2), (3, torch.zeros(1))], 7: {"step": torch.tensor(1.0)}}
    coded = encode(tree, "x", file_away)
    assert list(kept) == ["x.a.0", "x.a.1.1", "x.7.step"]
    keys: list[str] = []

    def find(name: str, key: str) -> torch.Tensor:
        keys.append(key)
        return kept[name]

    assert bits(decode(coded, find)) == bits(tree)
    assert keys == ["a", "a", "step"]


def test_numbers_of_numpy_become_pythons() -> None:
    found = decode(encode([np.float32(0.1), np.int64(3), np.bool_(True), np.float64("nan")], "x"))
    assert [type(value) for value in found] == [float, int, bool, float]
    assert found[0] == float(np.float32(0.1))


@pytest.mark.parametrize("value", [object(), {1.5: 0}, {(1, 2): 0}, {3}, b"x", torch.ones(1), lambda: 0, 1j])
def test_what_can_not_be_kept_is_named(value: Any) -> None:
    with pytest.raises(UserError, match=r"state\.a\.1 is a .* can't hold"):
        encode({"a": [0, value]}, "state")


@pytest.mark.parametrize(
    "value",
    [
        {"$pickle": "x"},
        {"$float": "1"},
        {"$float": "nan", "more": 1},
        {"$tuple": {}},
        {"$tuple": [], "$float": "nan"},
        {"$dict": [[1, 2, 3]]},
        {"$dict": [[[1], 2]]},
        {"$dict": 1},
        {"$tensor": "x"},
    ],
)
def test_what_is_never_written_is_not_read(value: Any) -> None:
    with pytest.raises(Damaged, match="no known kind"):
        decode([value])


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff\xfe", b"NaN", b"[Infinity]", b'{"a": 1, "a": 2}', b"[" * 200_000, b"1" * 5000]
)
def test_json_that_is_never_written_is_not_read(text: bytes) -> None:
    with pytest.raises(Damaged, match="can't be read"):
        parse_json(text, STATE)


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda n: n != "__metadata__"),
                       tensors(REAL), max_size=5))  # fmt: skip
def test_the_safetensors_library_reads_what_we_write(named: dict[str, torch.Tensor]) -> None:
    written = b"".join(safetensors_chunks(named))
    found = safetensors.torch.load(written)
    assert bits(dict(sorted(found.items()))) == bits(dict(sorted(named.items())))


@given(named=st.dictionaries(st.sampled_from("abcdef"), tensors(REAL + COMPLEX), max_size=5))
@example(named={"a": torch.ones(1), "b": torch.ones(1, dtype=torch.complex64)})
def test_tensors_come_back_from_a_file_aligned(tmp_path_factory: pytest.TempPathFactory, named: Any) -> None:
    path = tmp_path_factory.mktemp("f") / MODEL
    path.write_bytes(b"".join(safetensors_chunks(named)))
    found, _ = read_tensors(path)
    assert bits(dict(sorted(found.items()))) == bits(dict(sorted(named.items())))
    assert not [name for name, tensor in found.items() if tensor.data_ptr() % min(8, tensor.dtype.itemsize)]


def test_conjugate_and_negated_views_are_written_as_what_they_mean(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    named = {"conj": value.conj(), "neg": value.conj().imag}
    path = tmp_path / MODEL
    path.write_bytes(b"".join(safetensors_chunks(named)))
    found, _ = read_tensors(path)
    assert torch.equal(found["conj"], torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(found["neg"], torch.tensor([-2.0, 4.0]))


def test_tensors_that_no_file_can_hold_are_named() -> None:
    for strange in (torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.float8_e4m3fnuz)):
        with pytest.raises(UserError, match=r"mask of model is a tensor of .* can't hold"):
            require_storable("mask of model", strange)
    for dtype in REAL + COMPLEX:
        require_storable("x", torch.zeros(1, dtype=dtype))


def _file(header: str, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + data


_ONE = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04N.",
        b"PK\x03\x04" + bytes(60),
        (1 << 63).to_bytes(8, "little") + b"{}",
        (99_000_000).to_bytes(8, "little") + b"{}",
        (100 << 40).to_bytes(8, "little") + b"{}",
        _file(_ONE),  # no data
        _file(_ONE, bytes(5)),
        _file(_ONE.replace("[0,4]", "[4,8]"), bytes(8)),
        _file(_ONE.replace("[1]", "[4294967296,4294967296]").replace("[0,4]", "[0,0]")),
        _file('{"__metadata__":{"complex":"[1]"}}'),
        _file('{"__metadata__":{"complex":"[\\"a\\"]"}}'),
        _file('{"__metadata__":{"complex":"3"}}'),
        _file('{"__metadata__":{"complex":"[[]"}}'),
        _file('{"__metadata__":{"complex":"[\\"a\\"]"},' + _ONE[1:], bytes(4)),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_damaged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / MODEL
    path.write_bytes(content)
    with pytest.raises(Damaged, match=MODEL):
        read_tensors(path)


def _manifest() -> Manifest:
    files = {name: FileRecord(3, hashlib.sha256(name.encode()).hexdigest()) for name in (MODEL, OPTIMIZER, STATE)}
    return Manifest(460, files)


def test_a_manifest_comes_back_and_has_one_text() -> None:
    manifest = _manifest()
    text = manifest.to_bytes()
    assert Manifest.from_bytes(text) == manifest
    assert json.loads(text)["digest"] == manifest.digest
    with pytest.raises(Damaged, match="not as it was written"):
        Manifest.from_bytes(json.dumps(json.loads(text)).encode())
    with pytest.raises(Damaged):
        Manifest.from_bytes(text + b" ")


def test_every_flipped_bit_and_every_cut_of_a_manifest_is_seen() -> None:
    text = _manifest().to_bytes()
    for position in range(8 * len(text)):
        damaged = bytearray(text)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(Damaged):
            Manifest.from_bytes(bytes(damaged))
    for length in range(len(text)):
        with pytest.raises(Damaged):
            Manifest.from_bytes(text[:length])


def _forged(**entries: Any) -> bytes:
    """A manifest with these entries and the digest that belongs to them."""
    found = {key: value for key, value in {**json.loads(_manifest().to_bytes()), **entries}.items() if key != "digest"}
    digest = hashlib.sha256((json.dumps(found, indent=1) + "\n").encode()).hexdigest()
    return (json.dumps({**found, "digest": digest}, indent=1) + "\n").encode()


def test_a_forged_manifest_may_not_name_other_files_or_sizes() -> None:
    assert Manifest.from_bytes(_forged()) == _manifest(), "the forger's tool works"
    files = json.loads(_manifest().to_bytes())["files"]
    entry = files[MODEL]
    for name in ("../model.safetensors", "/etc/passwd", "model.pt", "a/b", "manifest.json", ""):
        with pytest.raises(Damaged, match="not as it was written"):
            Manifest.from_bytes(_forged(files={**files, name: entry}))
    bad: Any
    for bad in ({**entry, "bytes": -1}, {**entry, "bytes": True}, {**entry, "bytes": 1e3}, {**entry, "sha256": "AB"},
                {**entry, "sha256": entry["sha256"].upper()}, {"bytes": 3}, [], None):  # fmt: skip
        with pytest.raises(Damaged, match="no size and SHA-256"):
            Manifest.from_bytes(_forged(files={**files, MODEL: bad}))
    for name in (MODEL, OPTIMIZER, STATE):
        with pytest.raises(Damaged, match="not as it was written"):
            Manifest.from_bytes(_forged(files={key: value for key, value in files.items() if key != name}))
    entries: Any
    for entries in ({"step": -1}, {"step": True}, {"step": "460"}, {"step": None}, {"files": []},
                    {"extra": 1}, {"format": 0}, {"format": "1"}, {"format": True}):  # fmt: skip
        with pytest.raises(Damaged, match="not as it was written"):
            Manifest.from_bytes(_forged(**entries))
    for text in (b"[]", b"3", b"{}", b"null"):
        with pytest.raises(Damaged):
            Manifest.from_bytes(text)


def test_a_newer_format_is_told_from_damage() -> None:
    with pytest.raises(UserError, match=f"of format {FORMAT + 1}, and this version reads up to {FORMAT}"):
        Manifest.from_bytes(_forged(format=FORMAT + 1))
