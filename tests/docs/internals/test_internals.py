"""docs/internals: programs as printed, outputs as the torch that is installed gives them, names that it has."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.docs.internals import pages
from tests.docs.internals.pages import PAGES, ROOT, blocks, chinese, code, commands, exists, named, outputs
from tests.subprocesses import Command

EXAMPLES = sorted((ROOT / pages.PROGRAMS).glob("*.py"))
TEXTS = [*PAGES, *(chinese(page) for page in PAGES), *EXAMPLES]


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """Program -> what it prints; all of as many ranks in the same processes."""

    def run(programs: Sequence[Path], ranks: Sequence[dict[str, str]]) -> list[list[str]]:
        folder = tmp_path_factory.mktemp("internals")
        argv = ["-m", "tests.docs.internals.worker"]
        started = []
        for number, env in enumerate(ranks):
            args = [*argv, str(folder / f"{number}.json"), *map(str, programs)]
            started.append(Command(sys.executable, *args, cwd=ROOT, env={**pages.ENVIRONMENT, **env}, warm=True))
        for command in started:
            ended = command.end(timeout=300)
            assert ended.code == 0, ended.text
        return [json.loads((folder / f"{number}.json").read_text()) for number in range(len(ranks))]

    return outputs(run)


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_outputs_are_those_of_this_torch(page: Path, printed: dict[Path, str]) -> None:
    shown = [text.partition("\n")[2] for language, text in blocks(page) if language == "console"]
    for text, (_, program) in zip(shown, commands(page), strict=True):
        assert printed[program] == text, program.name


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_programs_are_as_printed(page: Path) -> None:
    shown = [text for language, text in blocks(page) if language == "python"]
    assert shown == [code(program) for _, program in commands(page)]


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_both_languages_show_the_same(page: Path) -> None:
    assert blocks(chinese(page)) == blocks(page)
    assert sorted(named(chinese(page).read_text())) == sorted(named(page.read_text()))


def test_each_program_stands_on_a_page() -> None:
    shown = {program for page in PAGES for _, program in commands(page)}
    assert {path for path in EXAMPLES if path.name != "two_cpus.py"} == shown


@pytest.mark.parametrize("path", TEXTS, ids=_id)
def test_torch_has_what_is_named(path: Path) -> None:
    text = path.read_text()
    missing = [f"{file}: {name}" for file, name in named(text) if not exists(file, name)]
    assert not missing
    assert named(text) or path.name in ("index.md", "two_cpus.py")


def test_a_name_that_torch_lacks_would_be_seen() -> None:
    file = "torch/nn/parallel/distributed.py"
    text = f"`{file}`: `DistributedDataParallel.forward`, `DistributedDataParallel.gone`, and more"
    assert [exists(*pair) for pair in named(text)] == [True, False]
    assert not exists(file, "Module"), "imported there, not written there"
    header = "torch/csrc/distributed/c10d/reducer.hpp"
    assert exists(header, "Reducer::rebuild_buckets")
    assert not exists(header, "Reducer::rebuild_nothing")
