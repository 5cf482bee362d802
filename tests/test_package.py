"""What is installed: its name and extras, what is in wheel and source distribution, and that the wheel trains."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import lockstep
from tests.subprocesses import Command, Completed

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
STRANGER = re.compile(r"pip install (?:-\S+ )*['\"]?lockstep(?!-torch)")
CHECKOUT = ("tests", "docs", "examples", "benchmarks", "src", ".ci", ".github")


def extras_in(text: str) -> set[str]:
    """The extras that a text tells to install, as `pip install 'lockstep-torch[timm]'` or `pip install '.[dev]'`."""
    found = re.findall(r"pip install[^\n]*?(?:lockstep-torch|\.)\[([^\]]+)\]", text)
    return {extra.strip() for names in found for extra in names.split(",")} - {"{name}"}


def sources() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]


def test_every_extra_that_is_named_exists() -> None:
    named = {path: extras_in(path.read_text()) for path in sources()}
    assert {"dev", "timm", "compare", "tensorboard"} <= set.union(*named.values())
    assert not {path.name: extras - set(EXTRAS) for path, extras in named.items() if extras - set(EXTRAS)}


def test_nobody_is_told_to_install_the_package_lockstep_which_is_somebody_else_s() -> None:
    assert STRANGER.search("first `pip install 'lockstep[timm]'`")
    assert STRANGER.search("pip install --upgrade lockstep")
    assert not [path for path in sources() if STRANGER.search(path.read_text())]


def test_all_has_every_extra_but_the_developers_tools() -> None:
    (named,) = EXTRAS["all"]
    assert set(re.findall(r"[\w-]+", named)) - {"lockstep-torch"} == set(EXTRAS) - {"all", "dev", "docs"}


def test_extras_with_a_package_of_this_tree_are_installed_with_its_folder() -> None:
    """An index need not have it."""
    folders = {f"./packages/{path.parent.name}" for path in ROOT.glob("packages/*/pyproject.toml")}
    own = {tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["name"] for folder in folders}
    asking = {name for name, needs in EXTRAS.items() if own & set(needs)} | {"all"}
    commands = [line for path in sources() for line in re.findall(r"pip install[^`\n]*", path.read_text())]
    commands = [line for line in commands if extras_in(line) & asking]
    assert len(commands) >= 2
    assert not [line for line in commands if not folders <= set(line.split())]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the wheel and the source distribution; they are built from a copy, the wheel from the other."""
    folder = tmp_path_factory.mktemp("build")
    leftovers = shutil.ignore_patterns(
        "*.egg-info", "__pycache__", ".git", ".*_cache", "build", "dist", "runs", ".venv"
    )
    shutil.copytree(ROOT, folder / "source", ignore=leftovers)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", f"{folder}/dist", f"{folder}/source"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_has_the_package_its_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        metadata = HeaderParser().parsestr(
            file.read(f"lockstep_torch-{lockstep.__version__}.dist-info/METADATA").decode()
        )
    package = {
        path for path in (ROOT / "src/lockstep").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == {str(path.relative_to(ROOT / "src")) for path in package}
    assert {"lockstep/py.typed", "lockstep/data/digits/train.bin", "lockstep/data/digits/test.bin"} <= names
    assert (metadata["Name"], metadata["Version"]) == ("lockstep-torch", lockstep.__version__)
    assert set(metadata.get_all("Provides-Extra") or ()) == set(EXTRAS)


@pytest.mark.slow
def test_the_source_distribution_is_the_checkout(built: Path) -> None:
    (found,) = built.glob("*.tar.gz")
    with tarfile.open(found) as file:
        names = {member.name.partition("/")[2] for member in file if member.isfile()}
    wanted = {path for top in CHECKOUT for path in (ROOT / top).rglob("*") if path.is_file()}
    wanted |= {path for path in ROOT.iterdir() if path.suffix in (".md", ".py", ".toml", ".cff", ".in")}
    wanted |= {ROOT / name for name in ("LICENSE", ".gitignore", ".pre-commit-config.yaml", ".pre-commit-hooks.yaml")}
    shown = {str(path.relative_to(ROOT)) for path in wanted if "__pycache__" not in path.parts}
    assert not {name for name in shown if ".egg-info" not in name} - names


@pytest.mark.slow
def test_the_index_would_take_both(built: Path) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.iterdir())]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.count("PASSED")) == (0, 2), ended.stdout + ended.stderr


@pytest.mark.slow
def test_the_wheel_trains_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*pip, str(installed), str(wheel)], check=True, timeout=120)

    def python(*argv: str) -> Completed:
        return Command(sys.executable, *argv, cwd=elsewhere, env={"PYTHONPATH": str(installed)}).end(timeout=180)

    program = str(installed / "bin/lockstep")
    assert python(program, "--version").out.startswith(f"lockstep {lockstep.__version__} ")
    ended = python(program, "train", "digits", "--model", "mlp", "--epochs", "1", "--nproc", "2")
    assert ended.code == 0, ended.text
    assert "test accuracy" in ended.out
    (run,) = (elsewhere / "runs").iterdir()
    assert (run / "weights/final.safetensors").is_file()
    assert python("-c", "import lockstep; print(lockstep.__file__)").out.strip() == str(
        installed / "lockstep/__init__.py"
    )
