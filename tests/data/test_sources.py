import gzip
import itertools
import os
import pickle
import shutil
import socket
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.config import DataConfig
from lockstep.config.objects import load_object
from lockstep.data import official
from lockstep.data.image_sets import ArraySet, check_labels
from lockstep.data.official import CIFAR10, CIFAR100, DIGITS, DIGITS_ROOT, FASHION_MNIST, MNIST, Official, load_official
from lockstep.data.sources import DATASETS, load, resolve_data_dir
from lockstep.distributed.world import World
from lockstep.errors import UserError
from tests.data.formats import mirrored, pack, resummed, server, tree, write_official
from tests.ranks import run_ranks

ALONE = World.single()
DOWNLOADED = [MNIST, FASHION_MNIST, CIFAR10, CIFAR100]
named = pytest.mark.parametrize("data", DOWNLOADED, ids=lambda data: data.name)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of other machines are not looked up."""
    look_up = socket.getaddrinfo

    def local_only(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in ("127.0.0.1", "localhost"):
            raise socket.gaierror(-2, "Name or service not known")
        return look_up(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", local_only)


def equal(images_and_labels: tuple[Tensor, Tensor], expected: tuple[np.ndarray, ...]) -> bool:
    return all(np.array_equal(a.numpy(), b) for a, b in zip(images_and_labels, expected, strict=True))


# The bundled digits


def test_digits_have_their_split_statistics_and_classes() -> None:
    train, test = load(DataConfig(), Path("/nowhere"), 0, ALONE)
    assert isinstance(train, ArraySet)
    assert isinstance(test, ArraySet)
    images, labels = train.load_all()
    assert (len(train), len(test), train.shape) == (1437, 360, (1, 8, 8))
    assert train.mean[0] == pytest.approx(float(images.double().mean() / 255), abs=1e-4)
    assert train.std[0] == pytest.approx(float(images.double().std(correction=0) / 255), abs=1e-4)
    assert torch.equal(images.unique(), (torch.arange(17) * 255 / 16).add(0.5).floor().to(torch.uint8))
    share = np.bincount(test.load_all()[1]) / (np.bincount(labels) + np.bincount(test.load_all()[1]))
    assert share == pytest.approx([0.2] * 10, abs=0.01)
    assert train.fingerprint != test.fingerprint


def test_digits_readme_names_source_licence_and_the_checksums_in_use() -> None:
    readme = (DIGITS_ROOT / "digits/README.md").read_text()
    for needed in ("UCI Machine Learning Repository", "Alpaydin", "Kaynak", "CC BY 4.0", "train.bin", "test.bin"):
        assert needed in readme
    assert all(checksum in readme for _, checksum in DIGITS.files.values())


def test_damaged_digits_say_to_install_again(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Install lockstep again"):
        load_official(DIGITS, tmp_path, ALONE)


# Arrays in files


@named
def test_official_files_give_the_samples_that_were_written_and_no_others(data: Official, tmp_path: Path) -> None:
    small, contents = write_official(data, tmp_path)
    sets = load_official(small, tmp_path, ALONE)
    for images, split in zip(sets, ("train", "test"), strict=True):
        assert equal(images.load_all(), contents[split])
        assert images.load_all()[0].is_contiguous()
        assert (images.shape, len(images), images.classes) == (data.shape, len(contents[split][1]), data.classes)
        for wrong in ([0, -1], [0, 10**6], [len(images)]):
            with pytest.raises(IndexError):
                images.read(np.array(wrong), None)
    assert len(set(data.classes)) == len(data.classes) in (10, 100)
    assert len(data.mean) == len(data.std) == data.shape[0]


@settings(max_examples=30)
@given(ids=st.lists(st.integers(0, 44), max_size=60))
def test_read_is_the_gather_of_all_samples(ids: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    chosen = np.array(ids, np.int64)
    for data in (CIFAR10, MNIST):  # five files and one
        root = tmp_path_factory.getbasetemp() / data.name
        if not root.exists():
            write_official(data, root, per_file=44)
        train, _ = load_official(resummed(data, root), root, ALONE)
        images, labels = train.load_all()
        picked, their_labels = train.read(chosen, 3)
        assert (picked.dtype, their_labels.dtype, picked.shape) == (torch.uint8, torch.int64, (len(ids), *data.shape))
        assert torch.equal(picked, images[chosen])
        assert torch.equal(their_labels, labels[chosen])


def test_pixels_stay_in_the_file_and_pickling_takes_only_its_path(tmp_path: Path) -> None:
    small, contents = write_official(CIFAR10, tmp_path, per_file=40)
    train, _ = load_official(small, tmp_path, ALONE)
    assert len(pickle.dumps(train)) < 4096
    again = pickle.loads(pickle.dumps(train))
    assert equal(again.load_all(), contents["train"])
    for images in (train, again):
        for array in images.images:
            assert not array.flags.owndata
            assert not array.flags.writeable
    # the map shows what is in the file now: nothing was copied at loading
    path = tmp_path / CIFAR10.folder / CIFAR10.train[0]
    raw = bytearray(path.read_bytes())
    raw[1] ^= 255
    with path.open("r+b") as file:
        file.write(raw)
    assert train.read(np.array([0]))[0][0, 0, 0, 0] == raw[1] == again.read(np.array([0]))[0][0, 0, 0, 0]


def test_fingerprints_tell_sets_and_splits_apart(tmp_path: Path) -> None:
    prints = set()
    for number, data in enumerate((*DOWNLOADED, CIFAR10)):
        small, _ = write_official(data, tmp_path / str(number), per_file=5 + number)
        prints |= {images.fingerprint for images in load_official(small, tmp_path / str(number), ALONE)}
    assert len(prints) == 2 * (len(DOWNLOADED) + 1)


# Bad files


@named
def test_a_label_out_of_range_names_file_and_sample(data: Official, tmp_path: Path) -> None:
    small, contents = write_official(data, tmp_path)
    name = data.train[-1]
    path = tmp_path / data.folder / name
    raw = bytearray(path.read_bytes())
    raw[8 + 2 if not data.label_bytes else 2 * (data.label_bytes + 3072) + data.label_bytes - 1] = 200
    path.write_bytes(raw)
    in_file = len(raw) // (data.label_bytes + 3072) if data.label_bytes else len(raw) - 8
    sample = len(contents["train"][1]) - in_file + 2
    with pytest.raises(UserError, match=rf"{name}: sample {sample} has label 200, and there are \d+ classes"):
        load_official(resummed(small, tmp_path), tmp_path, ALONE)


@given(labels=st.lists(st.integers(-3, 12), max_size=30), classes=st.integers(1, 10), first_id=st.integers(0, 100))
def test_check_labels_finds_the_first_bad_one(labels: list[int], classes: int, first_id: int) -> None:
    bad = [place for place, label in enumerate(labels) if not 0 <= label < classes]
    if not bad:
        check_labels("set", np.array(labels, np.int64), classes, first_id)
        return
    with pytest.raises(UserError, match=f"^set: sample {first_id + bad[0]} has label {labels[bad[0]]}, "):
        check_labels("set", np.array(labels, np.int64), classes, first_id)


@named
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda raw: raw[:-5], "is short: "),
        (lambda raw: raw + b"x", "is too long: "),
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "is damaged: its md5 is "),
    ],
)
def test_a_damaged_file_is_named_with_the_remedy_and_left_alone(
    data: Official, harm: Any, message: str, tmp_path: Path
) -> None:
    small, _ = write_official(data, tmp_path)
    for name in data.files:
        path = tmp_path / data.folder / name
        whole = path.read_bytes()
        path.write_bytes(harm(whole))
        with pytest.raises(UserError) as caught:
            load_official(small, tmp_path, ALONE)
        assert str(path) in caught.value.message
        assert message in caught.value.message
        assert "Delete it and run again" in caught.value.remedy
        assert path.read_bytes() == harm(whole)
        path.write_bytes(whole)
    load_official(small, tmp_path, ALONE)


def test_a_checksum_may_be_sha256(tmp_path: Path) -> None:
    digests = [checksum for _, checksum in CIFAR100.files.values()]
    assert {len(digest) for digest in digests} == {64}
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    official.verify(path, 3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    with pytest.raises(UserError, match="its sha256 is ba7816bf"):
        official.verify(path, 3, "0" * 64)


# Missing files


@named
def test_without_a_network_the_error_says_which_files_go_where(data: Official, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load(DataConfig(dataset=data.name), tmp_path / "data", 0, ALONE)
    for name in (*data.files, str(tmp_path / "data" / data.folder)):
        assert name in caught.value.message
    for name in (*data.packages, data.mirrors[0], "--data-dir", "LOCKSTEP_DATA"):
        assert name in caught.value.remedy
    assert tree(tmp_path) == set()


def test_a_mirror_that_never_answers_does_not_hold_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official, "PROBE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts into its backlog and says nothing
        silent = mirrored(MNIST, f"http://127.0.0.1:{mute.getsockname()[1]}/")
        with pytest.raises(UserError, match="nothing came for 0 s"):
            load_official(silent, tmp_path, ALONE)
    assert tree(tmp_path) == set()


def test_a_name_look_up_that_never_ends_does_not_hold_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(official, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: over.wait(30) and [])
    try:
        with pytest.raises(UserError, match="nothing came for 0 s"):
            load_official(MNIST, tmp_path, ALONE)
        assert not over.is_set()
    finally:
        over.set()


def test_a_download_that_stalls_ends_in_time_and_leaves_other_sockets_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(official, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(official, "PROBE_SECONDS", 0.3)
    over, defaults = threading.Event(), []

    class Stalling(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(b"half")
            defaults.append(socket.getdefaulttimeout())
            over.wait(30)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Stalling) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with pytest.raises(UserError, match=r"not to be had from here .*timed out"):
                load_official(mirrored(MNIST, f"http://127.0.0.1:{httpd.server_port}/"), tmp_path, ALONE)
            assert not over.is_set()
        finally:
            over.set()
            httpd.shutdown()
            thread.join()
    assert set(defaults) == {None}
    assert tree(tmp_path) == set()


@named
@pytest.mark.parametrize("beside", ["folder", "root"])
def test_packages_at_hand_are_unpacked(data: Official, beside: str, tmp_path: Path) -> None:
    small, contents = write_official(data, tmp_path)
    packed = pack(small, tmp_path, tmp_path / data.folder if beside == "folder" else tmp_path)
    before = tree(tmp_path)
    train, test = load_official(packed, tmp_path, ALONE)
    assert equal(train.load_all(), contents["train"])
    assert equal(test.load_all(), contents["test"])
    assert tree(tmp_path) == before | {f"{data.folder}/{name}" for name in data.files}


@named
def test_only_what_is_missing_is_downloaded(data: Official, tmp_path: Path) -> None:
    small, contents = write_official(data, tmp_path / "data")
    kept = next(iter(data.files))
    (tmp_path / kept).write_bytes((tmp_path / "data" / data.folder / kept).read_bytes())
    packed = pack(small, tmp_path / "data", tmp_path / "served")
    shutil.move(tmp_path / kept, tmp_path / "data" / data.folder / kept)
    with server(tmp_path / "served") as (address, got):
        dead = "http://nowhere.invalid/"
        train, test = load_official(mirrored(packed, dead, address), tmp_path / "data", ALONE)
        wanted = [p for p, (_, names) in packed.packages.items() if set(names) - {kept}]
        assert list(dict.fromkeys(got)) == wanted
        before = len(got)
        load_official(mirrored(packed, dead, address), tmp_path / "data", ALONE)
        assert len(got) == before
    assert equal(train.load_all(), contents["train"])
    assert equal(test.load_all(), contents["test"])
    assert {path.name for path in (tmp_path / "data" / data.folder).iterdir()} == set(data.files)


@named
def test_a_download_with_a_wrong_sum_leaves_nothing(data: Official, tmp_path: Path) -> None:
    small, _ = write_official(data, tmp_path / "data")
    packed = pack(small, tmp_path / "data", tmp_path / "served")
    damaged = tmp_path / "served" / next(iter(packed.packages))
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with server(tmp_path / "served") as (address, got), pytest.raises(UserError, match="not to be had from here"):
        load_official(mirrored(packed, address), tmp_path / "data", ALONE)
    assert set(got) == {damaged.name}
    assert list((tmp_path / "data" / data.folder).iterdir()) == []


@named
def test_a_damaged_package_at_hand_is_named_and_leaves_nothing(data: Official, tmp_path: Path) -> None:
    small, _ = write_official(data, tmp_path)
    packed = pack(small, tmp_path, tmp_path)
    package = tmp_path / list(packed.packages)[-1]
    whole = package.read_bytes()
    for harmed in (whole[: len(whole) // 2], b"no archive", gzip.compress(b"no tar file"), b""):
        package.write_bytes(harmed)
        with pytest.raises(UserError) as caught:
            load_official(packed, tmp_path, ALONE)
        assert package.name in caught.value.message
        assert "Delete it" in caught.value.remedy
        assert not any(name.endswith(".bin") or ".partial" in name for name in tree(tmp_path))


def test_a_folder_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    small, _ = write_official(CIFAR10, tmp_path / "data")
    packed = pack(small, tmp_path / "data", tmp_path / "served")
    (tmp_path / "file").write_text("in the way")
    with (
        server(tmp_path / "served") as (address, _),
        pytest.raises(UserError, match=r"cannot read or write its files in .*file/cifar-10-batches-bin") as caught,
    ):
        load_official(mirrored(packed, address), tmp_path / "file", ALONE)
    assert "LOCKSTEP_DATA" in caught.value.remedy


def _load_on_a_rank(world: World, data: Official, root: Path) -> Any:
    checks: list[int] = []
    own = official.ensure

    def ensure(*args: Any) -> None:
        checks.append(world.rank)
        own(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(official, "ensure", ensure)
        try:
            train, _ = load_official(data, root, world)
        except Exception as error:
            return type(error).__name__, str(error), checks
    return train.fingerprint, train.load_all()[1].tolist(), checks


def _load_twice(world: World, data: Official, nowhere: Official, root: Path) -> Any:
    return _load_on_a_rank(world, data, root / "data"), _load_on_a_rank(world, nowhere, root / "none")


def test_one_rank_downloads_while_the_others_wait_and_where_it_fails_it_says_why(tmp_path: Path) -> None:
    small, contents = write_official(MNIST, tmp_path / "data")
    packed = pack(small, tmp_path / "data", tmp_path / "served")
    with server(tmp_path / "served") as (address, got):
        nowhere = mirrored(MNIST, "http://127.0.0.1:9/")
        results, failed = zip(*run_ranks(_load_twice, 3, mirrored(packed, address), nowhere, tmp_path), strict=True)
    assert {package: got.count(package) for package in got} == dict.fromkeys(packed.packages, 2)  # it looks first
    assert [labels for _, labels, _ in results] == [contents["train"][1].tolist()] * 3
    assert len({fingerprint for fingerprint, _, _ in results}) == 1
    assert [checks for _, _, checks in results] == [[0], [], []]
    assert [kind for kind, _, _ in failed] == ["UserError", "PeerError", "PeerError"]
    assert "t10k-labels-idx1-ubyte" in failed[0][1]


@pytest.mark.realdata
@pytest.mark.parametrize("data", [MNIST, CIFAR10], ids=lambda data: data.name)
def test_the_real_files_have_the_published_statistics(data: Official, real_data: Path) -> None:
    train, test = load_official(data, real_data, ALONE)
    assert (len(train), len(test)) == ({"mnist": 60_000, "cifar10": 50_000}[data.name], 10_000)
    images, labels = train.load_all()
    counts = torch.stack([torch.bincount(images[:, c].flatten(), minlength=256) for c in range(images.shape[1])])
    values = torch.arange(256) / 255.0
    mean = (counts * values).sum(1) / counts.sum(1)
    std = ((counts * (values - mean[:, None]) ** 2).sum(1) / counts.sum(1)).sqrt()
    assert mean.tolist() == pytest.approx(data.mean, abs=1e-4)
    assert std.tolist() == pytest.approx(data.std, abs=1e-4)
    assert labels.bincount().tolist() == (
        [5000] * 10 if data is CIFAR10 else [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    )


# Sets by name, and users' own


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UserError, match="cifar10") as caught:
        load(DataConfig(dataset="cifar-10"), Path(), 0, ALONE)
    assert "Did you mean" in caught.value.remedy
    assert DATASETS == ("digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "folder")


def test_the_data_folder_is_the_flag_else_the_environment_else_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCKSTEP_DATA", raising=False)
    assert resolve_data_dir("") == tmp_path / "data"
    monkeypatch.setenv("LOCKSTEP_DATA", "~/sets")
    assert resolve_data_dir("") == Path.home() / "sets"
    assert resolve_data_dir("here") == tmp_path / "here"


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module of the user's into the current folder and loads `make` of it."""
    monkeypatch.chdir(tmp_path)
    count = itertools.count()

    def sets(body: str) -> Any:
        name = f"users_module_{tmp_path.name}_{next(count)}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text("import numpy as np, torch\n" + textwrap.dedent(body))
        return load(DataConfig(dataset=f"{name}:make"), tmp_path / "sets", 0, ALONE)

    return sets


def test_a_pair_of_tensors_becomes_an_array_set(user: Any) -> None:
    train, val = user("""
        def make():
            images = torch.arange(6 * 2 * 4 * 4).reshape(6, 2, 4, 4).to(torch.uint8)
            return (images, torch.tensor([0, 1, 2, 0, 1, 2])), (images[:2].numpy(), np.array([3, 0]))
    """)
    assert isinstance(train, ArraySet)
    images, labels = train.load_all()
    assert (train.classes, val.classes) == (tuple("0123"),) * 2
    assert torch.equal(train.read(np.array([4, 0]), 0)[0], images[[4, 0]])
    assert labels.tolist() == [0, 1, 2, 0, 1, 2]
    scaled = images.double().transpose(0, 1).flatten(1) / 255
    assert train.mean == pytest.approx(scaled.mean(1).tolist()) == val.mean
    assert train.std == pytest.approx(scaled.std(1, correction=0).tolist())
    assert train.fingerprint != val.fingerprint
    assert torch.equal(pickle.loads(pickle.dumps(train)).load_all()[0], images)


def test_float_images_pass_through_unchanged(user: Any) -> None:
    train, val = user("""
        from torch.utils.data import TensorDataset, Subset
        images = torch.linspace(-2, 2, 5 * 3 * 2 * 2).reshape(5, 3, 2, 2)
        def make():
            whole = TensorDataset(images, torch.tensor([0, 1, 0, 1, 0]))
            whole.classes = ["a", "b"]
            return Subset(whole, [1, 2, 3]), whole
    """)
    images, labels = train.read(np.array([2, 0]), None)
    assert images.dtype == torch.float32
    assert torch.equal(images, torch.linspace(-2, 2, 60).reshape(5, 3, 2, 2)[[3, 1]])
    assert (labels.tolist(), train.classes, len(train), len(val)) == ([1, 1], ("a", "b"), 3, 5)
    assert train.read(np.array([], np.int64), 0)[0].shape == (0, 3, 2, 2)


@pytest.mark.parametrize("kind", ["float64", "float32", "uint8"])
def test_no_sample_of_a_dataset_has_the_type_of_one(user: Any, kind: str) -> None:
    train, _ = user(
        f"""
        import torch
        from torch.utils.data import TensorDataset

        def make():
            whole = TensorDataset(torch.zeros(5, 1, 4, 4).to(torch.{kind}), torch.tensor([0, 1, 0, 1, 0]))
            whole.classes = ("a", "b")
            return whole, whole
        """
    )
    some, none = train.read(np.arange(2), 0)[0], train.read(np.arange(0), 0)[0]
    assert (none.dtype, none.shape) == (some.dtype, (0, 1, 4, 4))


def test_a_dataset_of_pil_images_becomes_uint8(user: Any, tmp_path: Path) -> None:
    train, _ = user("""
        from PIL import Image
        class Pictures:
            targets = [0, 2, 1]
            mean, std = (0.1, 0.2, 0.3), (1.0, 1.0, 1.0)
            def __init__(self, root): self.root = root
            def __len__(self): return 3
            def __getitem__(self, i): return Image.new("RGB", (4, 2), (i, 10, 255)), self.targets[i]
        def make(data_dir):
            assert data_dir.name == "sets"
            return Pictures(data_dir), Pictures(data_dir)
    """)
    images, labels = train.read(np.array([2, 1]), 0)
    assert images.dtype == torch.uint8
    assert images[:, :, 0, 0].tolist() == [[2, 10, 255], [1, 10, 255]]
    assert (train.shape, labels.tolist(), train.mean) == ((3, 2, 4), [1, 2], (0.1, 0.2, 0.3))


def test_an_image_set_of_the_users_is_taken_as_it_is(user: Any) -> None:
    train, val = user("""
        from lockstep.data.official import DIGITS, DIGITS_ROOT, load_official
        from lockstep.distributed.world import World
        def make(root):
            return load_official(DIGITS, DIGITS_ROOT, World.single())
    """)
    assert (len(train), len(val)) == (1437, 360)


PARTS = """
class Sized:
    def __init__(self, image, count=1): self.image, self.count = image, count
    def __len__(self): return self.count
    def __getitem__(self, i): return self.image, 0
class Unread:
    classes = ()
    def read(self, ids, epoch): ...
empty = Sized(5, count=0)
empty.classes = ()
x, y = torch.zeros(3, 1, 4, 4), torch.zeros(3).long()
"""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ("3", "is an int, not a function"),
        ("lambda a, b: ...", "needs arguments: a, b"),
        ("lambda: None", "gives a NoneType, not two sets"),
        ("lambda: (1, 2, 3)", "gives a tuple of 3"),
        ("lambda: ([], [])", "is a list"),
        ("lambda: (1, 2)", "train is an int"),
        ("lambda: [(x[:, 0], x[:, 0])] * 2", r"train has images float32 \[3, 4, 4\]"),
        ("lambda: [(x, y[:2])] * 2", r"labels int64 \[2\]"),
        ("lambda: [(x.bfloat16(), y)] * 2", "numpy takes no such tensor"),
        ("lambda: [(x, torch.tensor([0, -1, 2]))] * 2", "train: sample 1 has label -1"),
        ("lambda: ((x, y), (x[:, :, :2], y))", "differ in shape"),
        ("lambda: (Sized(5), Sized(5))", "sample 0 is an int, not an image"),
        ("lambda: (Sized(x[0]), Sized(x[0]))", "does not say which classes"),
        ("lambda: (empty, empty)", "train is empty"),
        ("lambda: (Unread(), Unread())", "an ImageSet without __len__, fingerprint, mean, name, shape, std"),
    ],
)
def test_a_wrong_return_says_what_is_expected(user: Any, make: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        user(f"{PARTS}make = {make}")
    assert caught.value.remedy


def test_bad_samples_of_a_dataset_are_named(user: Any) -> None:
    train, _ = user("""
        class D:
            classes = ["a", "b"]
            def __len__(self): return 4
            def __getitem__(self, i): return torch.zeros(1, 2, 2 + (i == 2)), 7 * (i == 1)
        def make(): return D(), D()
    """)
    with pytest.raises(UserError, match="sample 1 has label 7"):
        train.read(np.array([0, 1]), 0)
    with pytest.raises(UserError, match=r"sample 2 is \[1, 2, 3\]"):
        train.read(np.array([0, 2]), 0)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module_here:make", "there is no module 'no_such_module_here'"),
        ("lockstep.no_such:make", "there is no module 'lockstep.no_such'"),
        ("lockstep.errors:UserEror", "unknown attribute of lockstep.errors .*'UserEror'"),
        ("lockstep.errors:", "not of the form"),
        (":make", "not of the form"),
        ("../x:make", "not of the form"),
    ],
)
def test_an_object_that_is_not_there_is_a_user_error(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_object(path, "model")
    assert "--model" in str(caught.value)
    assert caught.value.remedy


def test_objects_are_looked_for_in_the_current_folder_and_their_own_errors_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "users_objects.py").write_text("class A:\n    b = 5\n")
    assert load_object("users_objects:A.b", "model") == 5
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "users_rank.py").write_text("import os\nrank = os.environ['RANK']\n")
    with pytest.raises(UserError, match="importing users_rank reads RANK"):
        load_object("users_rank:rank", "model")
    assert os.environ["RANK"] == "1"
    (tmp_path / "users_broken.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_object("users_broken:A", "model")
