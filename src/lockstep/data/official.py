"""The data sets that come in official files: which files, where they lie, and how they are laid out.

IDX files (MNIST, Fashion-MNIST) lie where torchvision's classes put them; the CIFAR sets in their binary versions, as
https://www.cs.toronto.edu/~kriz/cifar.html describes them. Means and standard deviations are those of the training
pixels / 255, computed from the files themselves (for CIFAR-100, the values in common use).
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

from lockstep.data.arrays import ArraySet, Column, Part, map_files
from lockstep.data.download import REPLACE, Release, ensure
from lockstep.errors import UserError
from lockstep.processes.world import World


@dataclass(frozen=True)
class Official:
    """A data set in official files. label_bytes: before each image's pixels, the last one counts; 0: IDX files."""

    release: Release
    train: tuple[str, ...]  # file names: records, or images and labels for IDX
    test: tuple[str, ...]
    label_bytes: int
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]


def load_official(data: Official, root: Path, world: World) -> tuple[ArraySet, ArraySet]:
    """Training and test set from `root / data.release.folder`, downloaded and verified by one rank per host.

    Raises:
        UserError: see `download.ensure`, `records`, `idx` and `arrays.check_labels`.
        PeerError: on the waiting ranks, where a host's first rank failed.
    """
    with world.first_on_host():
        if world.local_rank == 0:
            ensure(data.release, root)
    return _split(data, root, "train", data.train), _split(data, root, "test", data.test)


def _split(data: Official, root: Path, split: str, files: tuple[str, ...]) -> ArraySet:
    folder = root / data.release.folder
    if data.label_bytes:
        parts = tuple(records(folder / name, data.shape, data.label_bytes) for name in files)
    else:
        parts = (idx(folder / files[0], folder / files[1], data.shape),)
    identity = repr((data.release.name, split, [data.release.files[name] for name in files]))
    fingerprint = hashlib.sha256(identity.encode()).hexdigest()
    name = f"{data.release.name}/{split}"
    return map_files(name, data.classes, data.shape, data.mean, data.std, parts, fingerprint)


def records(path: Path, shape: tuple[int, int, int], label_bytes: int) -> Part:
    """A file of records, label bytes first, pixels after; UserError where it is not a whole number of them."""
    stride = label_bytes + math.prod(shape)
    size = _size(path)
    if size == 0 or size % stride:
        raise UserError(f"{path} is damaged: {size} bytes are no whole number of records of {stride}", REPLACE)
    return Part(size // stride, Column(path, label_bytes, stride), Column(path, label_bytes - 1, stride))


def idx(images: Path, labels: Path, shape: tuple[int, int, int]) -> Part:
    """A pair of IDX files (https://yann.lecun.com/exdb/mnist/): big-endian header, then bytes; UserError where torn."""
    _, height, width = shape
    count, *sides = _idx_header(images, 3)
    (label_count,) = _idx_header(labels, 1)
    if sides != [height, width] or label_count != count:
        raise UserError(
            f"{images} holds {count} images of {sides[0]}x{sides[1]}, {labels.name} {label_count} labels; "
            f"expected {height}x{width} and as many labels as images",
            "Delete both and run again to have them downloaded, or put the published files in their place.",
        )
    return Part(count, Column(images, 16, math.prod(shape)), Column(labels, 8, 1))


def _idx_header(path: Path, dimensions: int) -> list[int]:
    size, length = _size(path), 4 + 4 * dimensions
    with path.open("rb") as file:
        header = file.read(length)
    magic, *sizes = (int.from_bytes(header[at : at + 4], "big") for at in range(0, length, 4))
    if magic != 0x0800 + dimensions or size != length + math.prod(sizes) or sizes[0] == 0:  # 0x08: unsigned bytes
        raise UserError(
            f"{path} is damaged: it is no IDX file of {dimensions} dimension(s), or not as long as its header says",
            REPLACE,
        )
    return sizes


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}",
            "Every machine of the run needs the data below its --data-dir, readable by this user.",
        ) from error


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
    packages = {f"{file}.gz": (sums[file][1], (file,)) for file in _IDX}
    names = tuple(_IDX)
    return Official(
        Release(name, folder, files, packages, mirrors), names[:2], names[2:], 0, (1, 28, 28), (mean,), (std,), classes
    )


DIGITS = Official(  # bundled: see digits/README.md
    Release(
        "digits",
        "digits",
        {
            "train.bin": (1437 * 65, "31af129e7a009fb242f49a26f75cc955"),
            "test.bin": (360 * 65, "4edac7317d906ebf9da8062259a17f60"),
        },
        packages={},
        mirrors=(),
    ),
    train=("train.bin",),
    test=("test.bin",),
    label_bytes=1,
    shape=(1, 8, 8),
    mean=(0.3058,),
    std=(0.3761,),
    classes=tuple("0123456789"),
)
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
    mean=0.1307,
    std=0.3081,
    classes=tuple("0123456789"),
)

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
    mean=0.2860,
    std=0.3530,
    classes=(
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
)  # fmt: skip

_CIFAR_MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)
_CIFAR10_SUMS = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}

CIFAR10 = Official(
    Release(
        "cifar10",
        "cifar-10-batches-bin",
        {name: (10_000 * 3073, checksum) for name, checksum in _CIFAR10_SUMS.items()},
        {"cifar-10-binary.tar.gz": ("c32a1d4ab5d03f1284b67883e8d87530", tuple(_CIFAR10_SUMS))},
        _CIFAR_MIRRORS,
    ),
    train=tuple(_CIFAR10_SUMS)[:5],
    test=tuple(_CIFAR10_SUMS)[5:],
    label_bytes=1,
    shape=(3, 32, 32),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)

CIFAR100 = Official(
    Release(
        "cifar100",
        "cifar-100-binary",
        {
            "train.bin": (50_000 * 3074, "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
            "test.bin": (10_000 * 3074, "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
        },
        {"cifar-100-binary.tar.gz": ("03b5dce01913d631647c71ecec9e9cb8", ("train.bin", "test.bin"))},
        _CIFAR_MIRRORS,
    ),
    train=("train.bin",),
    test=("test.bin",),
    label_bytes=2,  # coarse, then fine: the fine one counts
    shape=(3, 32, 32),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    classes=(
        "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
        "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
        "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish",
        "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
        "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
        "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine",
        "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk",
        "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
        "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale",
        "willow_tree", "wolf", "woman", "worm",
    ),
)  # fmt: skip

OFFICIAL = {data.release.name: data for data in (DIGITS, MNIST, FASHION_MNIST, CIFAR10, CIFAR100)}
