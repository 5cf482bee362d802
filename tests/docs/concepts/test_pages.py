"""The concept pages: code on them stands in the programs, and what these print stands on them, in both languages."""

import re
import sys
from pathlib import Path

import pytest

from tests.subprocesses import Command

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples/concepts"
PAGES = sorted(path.name for path in (ROOT / "docs/concepts").glob("*.md"))
MEASURED = {"gil", "loss_scaling"}  # what these print is this machine's: their numbers are not compared
SLOW = {"gil", "memory", "membership", "nodes"}  # programs that take more than a few seconds


def english(name: str) -> str:
    return (ROOT / "docs/concepts" / name).read_text(encoding="utf-8")


def chinese(name: str) -> str:
    return (ROOT / "docs/zh/concepts" / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def formulas(text: str) -> list[str]:
    return re.findall(r"^    \S.*$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.MULTILINE)


def headings(text: str) -> list[str]:
    return re.findall(r"^(#+) ", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.MULTILINE)


def shown() -> dict[str, str]:
    """Program -> what the pages say it prints."""
    found = {}
    for name in PAGES:
        for block in blocks(english(name), "console"):
            command, _, printed = block.partition("\n")
            match = re.fullmatch(r"\$ python examples/concepts/(\w+)\.py", command)
            assert match, command
            found[match[1]] = printed
    return found


def test_each_page_exists_in_both_languages() -> None:
    assert sorted(path.name for path in (ROOT / "docs/zh/concepts").glob("*.md")) == PAGES
    for name in PAGES:
        for text, folder in ((english(name), "docs/concepts"), (chinese(name), "docs/zh/concepts")):
            assert name == "index.md" or re.search(rf"\]\([./zh]*concepts/{name}\)", text), f"{folder}/{name}"
            assert name == "index.md" or "![" in text
    index = re.findall(r"^- \[[^\]]+\]\(([\w-]+\.md)\)", english("index.md"), re.MULTILINE)
    assert sorted([*index, "index.md"]) == PAGES
    assert index == re.findall(r"^- \[[^\]]+\]\(([\w-]+\.md)\)", chinese("index.md"), re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_both_languages_show_the_same_code_numbers_and_formulas(name: str) -> None:
    for language in ("python", "console"):
        assert blocks(english(name), language) == blocks(chinese(name), language)
    assert formulas(english(name)) == formulas(chinese(name))
    assert headings(english(name)) == headings(chinese(name))


@pytest.mark.parametrize("name", PAGES)
def test_programs_on_a_page_stand_in_their_files(name: str) -> None:
    text = english(name)
    files = [EXAMPLES / file for file in re.findall(r"examples/concepts/(\w+\.py)", text)]
    for block in blocks(text, "python"):
        assert any(block in file.read_text(encoding="utf-8") for file in files), block


def test_every_program_has_its_output_on_a_page() -> None:
    assert sorted(shown()) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


def _param(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name


@pytest.mark.parametrize("name", [_param(name) for name in sorted(shown())])
def test_a_program_prints_what_the_page_says(name: str, tmp_path: Path) -> None:
    ended = Command(sys.executable, str(EXAMPLES / f"{name}.py"), cwd=tmp_path, warm=True).end(timeout=120)
    assert ended.code == 0, ended.text
    printed = shown()[name]
    if name in MEASURED:
        assert re.sub(r"[\d.]+", "#", ended.out) == re.sub(r"[\d.]+", "#", printed)
    else:
        assert ended.out == printed
    assert not ended.orphans


def test_the_glossaries_have_the_same_words_and_their_pages_use_them() -> None:
    pattern = r"^\| ([^|·]+)(?: · ([^|]+))? \| ([^|]+) ?.\[[^\]]+\]\(([^)]+)\). \|$"
    ours, theirs = (
        re.findall(pattern, (ROOT / "docs" / folder / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
        for folder in ("", "zh")
    )
    assert len(ours) > 40
    assert [(word, chinese, page) for word, chinese, _, page in ours] == [(w, c, page) for w, c, _, page in theirs]
    assert [word for word, *_ in ours] == sorted((word for word, *_ in ours), key=str.lower)
    for word, _, _, page in ours:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8").lower()
        for part in re.sub(r" \(.*", "", word).split(", "):
            assert part.lower() in text.replace("-", " ") + text, f"{word}: docs/{page}"
    assert all(re.search("[一-鿿]", meaning) for _, _, meaning, _ in theirs)


def test_the_numbers_of_the_text_are_those_of_the_formulas() -> None:
    resnet, ranks = 102.2e6, 8
    ring, server = 2 * (ranks - 1) / ranks * resnet, (ranks - 1) * resnet
    assert (round(ring / 1e6), round(server / 1e6)) == (179, 715)
    interval = (2 * 10 * 48 * 3600) ** 0.5  # of checkpoints, in seconds, by Young's rule
    for text in (english("parameter-server.md"), chinese("parameter-server.md"), english("data-parallel.md")):
        assert "179 MB" in text
        assert "715 MB" in text
    for text in (english("parameter-server.md"), chinese("parameter-server.md")):
        assert f"{server / 1.25e9:.2f}" in text
        assert f"{ring / 1.25e9:.2f}" in text
    for text in (english("elastic.md"), chinese("elastic.md")):
        assert re.search(rf"\b{round(interval / 60)} (minutes|分钟)", text)


@pytest.mark.slow
def test_fake_tensors_count_what_real_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.concepts import memory
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torchvision.models.resnet import Bottleneck, resnet50

    monkeypatch.setattr(memory, "BATCH", 2)
    real = memory.kept(resnet50(), Bottleneck)
    with FakeTensorMode():
        assert memory.kept(resnet50(), Bottleneck) == real
    assert real.all > real.recomputed > real.inputs_of_blocks > 0
