"""The data sets that come in official files: which files, where they lie, and how they are laid out.

IDX files (MNIST, Fashion-MNIST) lie where torchvision's classes put them; the CIFAR sets in their binary versions, as
https://www.cs.toronto.edu/~kriz/cifar.html describes them. Means and standard deviations are those of the training
pixels / 255, computed from the files themselves (for CIFAR-100, the values in common use).
"""

import hashlib
import math
import queue
import tempfile
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from lockstep.data.image_sets import ArraySet, check_labels
from lockstep.distributed.world import World
from lockstep.errors import UserError, reason

PROBE_SECONDS = 6.0  # for a server's first bytes: a machine without a network hears of it soon
STALL_SECONDS = 30.0  # a download that brings nothing for this long has failed
REPLACE = "Delete it and run again to have it downloaded, or put the published file in its place."
_ELSEWHERE = "name another folder with --data-dir DIR or the environment's LOCKSTEP_DATA"


@dataclass(frozen=True)
class Official:
    """A data set in official files, and the packages that they come in.

    files: name -> (bytes, checksum); packages: name -> (MD5, names of the files in it); each mirror + a package's name
    is an address. A checksum is hexadecimal, MD5 (32 digits) or SHA-256 (64). Packages are .gz or .tar.gz.
    """

    name: str
    folder: str  # below the data folder
    files: Mapping[str, tuple[int, str]]
    packages: Mapping[str, tuple[str, tuple[str, ...]]]
    mirrors: tuple[str, ...]
    train: tuple[str, ...]  # file names: records, or images and labels for IDX
    test: tuple[str, ...]
    label_bytes: int  # before each image's pixels, of which the last one counts; 0: IDX files
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]


def ensure(data: Official, root: Path) -> None:
    """Have every file of a set whole in `root / data.folder`; one process per host calls this.

    A missing file is unpacked from its package where that lies in the folder or in `root`, else downloaded.
    Raises UserError for a damaged file, a folder that cannot be written, or files that cannot be had from here.
    """
    folder = root / data.folder
    try:
        missing = [name for name in data.files if not (folder / name).is_file()]
        for name in data.files:
            if name not in missing:
                verify(folder / name, *data.files[name])
        if missing and not data.mirrors:
            raise UserError(f"{data.name}: {', '.join(missing)} missing from {folder}", "Install lockstep again.")
        for package, (_, members) in data.packages.items():
            if set(members) & set(missing):
                there = next(path for path in (folder, *folder.parents) if path.is_dir())
                with tempfile.TemporaryDirectory(prefix=".partial-", dir=there) as scratch:
                    _complete(data, root, package, missing, Path(scratch))
    except OSError as error:
        remedy = f"Give this user the right to do so and enough space, or {_ELSEWHERE}."
        raise UserError(f"{data.name}: cannot read or write its files in {folder}: {error}", remedy) from error


def _complete(data: Official, root: Path, package: str, missing: Sequence[str], scratch: Path) -> None:
    """Put the missing files of a package into their folder, by way of a scratch folder on the same disk."""
    from torchvision.datasets import utils

    folder, (checksum, members) = root / data.folder, data.packages[package]
    archive = next((path for path in (folder / package, root / package) if path.is_file()), None)
    failures: dict[str, str] = {}
    for mirror in data.mirrors if archive is None else ():
        download = partial(utils.download_url, mirror + package, scratch, package, checksum)
        failures[mirror] = within_time(download, scratch)
        if not failures[mirror]:
            archive = scratch / package
            break
    if archive is None:
        tried = "; ".join(f"{mirror}: {failure}" for mirror, failure in failures.items())
        raise UserError(
            f"{data.name}: {', '.join(missing)} missing from {folder}, and not to be had from here ({tried})",
            f"On a machine with a network download {', '.join(data.packages)} from {data.mirrors[0]} and put "
            f"it there, packed or unpacked; or {_ELSEWHERE}, the folder that holds {data.folder}.",
        )
    verify(archive, None, checksum)  # before anything of it is unpacked
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python's, for archives that nobody has verified
        utils.extract_archive(str(archive), str(scratch))
    found = {path.name: path for path in scratch.rglob("*") if path.name in members and path.name in missing}
    for name, path in found.items():
        verify(path, *data.files[name])
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in found.items():  # same file system: a name appears with the whole file behind it
        path.replace(folder / name)


def verify(path: Path, size: int | None, checksum: str) -> None:
    """Raise UserError where a file has not this size (None: any) and checksum; of a SHA-256 its beginning will do."""
    if size is not None and (found_size := path.stat().st_size) != size:
        short = "short" if found_size < size else "too long"
        raise UserError(f"{path} is {short}: {found_size} bytes instead of {size}", REPLACE)
    algorithm = "md5" if len(checksum) == 32 else "sha256"
    with path.open("rb") as file:
        # FIPS builds compute MD5 only where it is marked as no security matter
        found = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
    if not found.startswith(checksum):
        raise UserError(f"{path} is damaged: its {algorithm} is {found} instead of {checksum}", REPLACE)


def fetch(url: str, path: Path, checksum: str) -> str:
    """Download a file to its place, where it appears whole; returns why that failed, empty where it didn't.

    `checksum`: how its SHA-256 begins.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=path.parent) as scratch:
            whole = Path(scratch, path.name)
            download = partial(torch.hub.download_url_to_file, url, str(whole), checksum or None)
            if not (failure := within_time(download, Path(scratch))):
                whole.replace(path)
            return failure
    except OSError as error:
        return f"{path}: {error.strerror}"


def unreachable(url: str) -> str:
    """Why an address gives no answer within PROBE_SECONDS; empty where it does, be it with an error."""

    def probe() -> None:
        with suppress(urllib.error.HTTPError), urllib.request.urlopen(urllib.request.Request(url, method="HEAD")):
            pass

    failure = within_time(probe)
    return f"{url}: {failure}" if failure else ""


def within_time(work: Callable[[], object], folder: Path | None = None) -> str:
    """Run what waits for a server; returns why it failed, empty where it didn't. `folder`: where it writes.

    torch's and torchvision's downloaders wait for ever where nothing comes: such a one is left to its thread.
    """
    outcome: queue.SimpleQueue[str] = queue.SimpleQueue()

    def run() -> None:
        try:
            work()
            outcome.put("")
        except Exception as error:  # of the network, the disk or the library
            cause = getattr(error, "reason", None)
            outcome.put(reason(cause if isinstance(cause, Exception) else error))

    threading.Thread(target=run, daemon=True).start()
    size, since = 0, time.monotonic()
    while time.monotonic() - since < (limit := STALL_SECONDS if size else PROBE_SECONDS):
        with suppress(queue.Empty):
            return outcome.get(timeout=0.05)
        with suppress(OSError):  # a file that is just getting its name
            written = sum(path.stat().st_size for path in folder.iterdir()) if folder else 0
            if written != size:
                size, since = written, time.monotonic()
    return f"timed out: nothing came for {limit:.0f} s"


def load_official(data: Official, root: Path, world: World) -> tuple[ArraySet, ArraySet]:
    """Training and test set from `root / data.folder`, downloaded and verified by one rank per host.
    Raises UserError as `ensure` does, and PeerError on the waiting ranks, where a host's first rank failed.
    """
    with world.first_on_host():
        if world.local_rank == 0:
            ensure(data, root)
    return open_split(data, root, "train"), open_split(data, root, "test")


def open_split(data: Official, root: Path, split: str) -> ArraySet:
    """A split whose files are whole, as `ensure` has found them by their checksums. Pixels are mapped, not read."""
    files = data.train if split == "train" else data.test
    paths = [root / data.folder / name for name in files]
    try:
        raw = [np.memmap(path, np.uint8, "r") for path in paths]
    except OSError as error:
        remedy = "Every machine of the run needs the data below its --data-dir, readable by this user."
        raise UserError(f"{data.name}: its files can't be read: {error}", remedy) from error
    if data.label_bytes:  # records: label bytes first, of which the last one counts, pixels after
        rows = [array.reshape(-1, data.label_bytes + math.prod(data.shape)) for array in raw]
        images = [array[:, data.label_bytes :] for array in rows]
        labels = [np.array(array[:, data.label_bytes - 1]) for array in rows]
    else:  # IDX, https://yann.lecun.com/exdb/mnist/: a header of 16 or 8 bytes, then the values
        images, labels = [raw[0][16:]], [np.array(raw[1][8:])]
    first_id = 0
    for path, values in zip(paths if data.label_bytes else paths[1:], labels, strict=True):
        check_labels(str(path), values, len(data.classes), first_id)
        first_id += len(values)
    identity = repr((data.name, split, [data.files[name] for name in files]))
    return ArraySet(
        name=f"{data.name}/{split}",
        classes=data.classes,
        mean=data.mean,
        std=data.std,
        images=tuple(array.view(np.ndarray).reshape(-1, *data.shape) for array in images),
        labels=np.concatenate(labels).astype(np.int64),
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        reopen=(open_split, (data, root, split)),
    )


_IDX = {
    "train-images-idx3-ubyte": 16 + 60_000 * 784,
    "train-labels-idx1-ubyte": 8 + 60_000,
    "t10k-images-idx3-ubyte": 16 + 10_000 * 784,
    "t10k-labels-idx1-ubyte": 8 + 10_000,
}


def _mnist_like(
    name: str, folder: str, mirrors: tuple[str, ...], sums: dict[str, tuple[str, str]], mean: float, std: float,
    classes: tuple[str, ...],
) -> Official:  # fmt: skip
    """sums: file name -> (MD5 of the file, MD5 of its .gz)."""
    files = {file: (size, sums[file][0]) for file, size in _IDX.items()}
    packages, names = {f"{file}.gz": (sums[file][1], (file,)) for file in _IDX}, tuple(_IDX)
    one = (1, 28, 28), (mean,), (std,), classes
    return Official(name, folder, files, packages, mirrors, names[:2], names[2:], 0, *one)


_DIGITS_FILES = {  # bundled: see digits/README.md
    "train.bin": (1437 * 65, "31af129e7a009fb242f49a26f75cc955"),
    "test.bin": (360 * 65, "4edac7317d906ebf9da8062259a17f60"),
}
DIGITS = Official(
    "digits", "digits", _DIGITS_FILES, {}, (),
    ("train.bin",), ("test.bin",), 1, (1, 8, 8), (0.3058,), (0.3761,), tuple("0123456789"),
)  # fmt: skip
DIGITS_ROOT = Path(__file__).parent

MNIST = _mnist_like(
    "mnist",
    "MNIST/raw",
    ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    {
        "train-images-idx3-ubyte": ("6bbc9ace898e44ae57da46a324031adb", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        "train-labels-idx1-ubyte": ("a25bea736e30d166cdddb491f175f624", "d53e105ee54ea40749a09fcbcd1e9432"),
        "t10k-images-idx3-ubyte": ("2646ac647ad5339dbf082846283269ea", "9fb629c4189551a2d022fa330f9573f3"),
        "t10k-labels-idx1-ubyte": ("27ae3e4e09519cfbb04c329615203637", "ec29112dd5afa0611ce80d1b7f02629c"),
    },
    0.1307, 0.3081, tuple("0123456789"),
)  # fmt: skip
FASHION_MNIST = _mnist_like(
    "fashion-mnist",
    "FashionMNIST/raw",
    ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    {
        "train-images-idx3-ubyte": ("f4a8712d7a061bf5bd6d2ca38dc4d50a", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        "train-labels-idx1-ubyte": ("9018921c3c673c538a1fc5bad174d6f9", "25c81989df183df01b3e8a0aad5dffbe"),
        "t10k-images-idx3-ubyte": ("8181f5470baa50b63fa0f6fddb340f0a", "bef4ecab320f06d8554ea6380940ec79"),
        "t10k-labels-idx1-ubyte": ("15d484375f8d13e6eb1aabb0c3f46965", "bb300cfdad3c16e7a12a480ee83cd310"),
    },
    0.2860, 0.3530,
    ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)  # fmt: skip

_CIFAR_MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)
_CIFAR10_FILES = {
    name: (10_000 * 3073, checksum)
    for name, checksum in {
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    }.items()
}
_CIFAR10_PACKAGES = {"cifar-10-binary.tar.gz": ("c32a1d4ab5d03f1284b67883e8d87530", tuple(_CIFAR10_FILES))}
CIFAR10 = Official(
    "cifar10", "cifar-10-batches-bin", _CIFAR10_FILES, _CIFAR10_PACKAGES, _CIFAR_MIRRORS,
    tuple(_CIFAR10_FILES)[:5], tuple(_CIFAR10_FILES)[5:], 1, (3, 32, 32),
    (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616),
    ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)  # fmt: skip
_CIFAR100_FILES = {
    "train.bin": (50_000 * 3074, "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
    "test.bin": (10_000 * 3074, "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
}
_CIFAR100_PACKAGES = {"cifar-100-binary.tar.gz": ("03b5dce01913d631647c71ecec9e9cb8", ("train.bin", "test.bin"))}
_CIFAR100_CLASSES = """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man
maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain
plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake
spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm"""
CIFAR100 = Official(  # two bytes of labels, coarse, then fine: the fine one counts
    "cifar100", "cifar-100-binary", _CIFAR100_FILES, _CIFAR100_PACKAGES, _CIFAR_MIRRORS,
    ("train.bin",), ("test.bin",), 2, (3, 32, 32),
    (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), tuple(_CIFAR100_CLASSES.split()),
)  # fmt: skip

OFFICIAL = {data.name: data for data in (DIGITS, MNIST, FASHION_MNIST, CIFAR10, CIFAR100)}
