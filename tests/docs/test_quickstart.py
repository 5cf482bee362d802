"""The quick start, followed in both languages: its commands run, and print what the page shows but for the numbers."""

import re
from pathlib import Path

import pytest

from tests.subprocesses import run_lockstep

DOCS = Path(__file__).parents[2] / "docs"


def consoles(page: Path) -> list[str]:
    return re.findall(r"^```console\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def sessions(text: str) -> list[tuple[list[str], list[str]]]:
    """Each command's words and the lines shown below it."""
    found: list[tuple[list[str], list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ ").split(), []))
        else:
            found[-1][1].append(line)
    return found


def normal(line: str) -> str:
    """A line without what differs between machines: numbers, digests, widths."""
    timeless = re.sub(r"\b\d+(:\d\d)+ (min|h)\b", "# s", line)  # of a slow machine
    return re.sub(r" +", " ", re.sub(r"\b[0-9a-f]{12}\b|[\d.,]+", "#", timeless)).strip()


def as_shown(shown: list[str], printed: list[str]) -> bool:
    """Whether the lines were printed in their order, with any others where the page has three dots."""
    parts = [re.escape(normal(line)) if line != "..." else r"[^\0]*?" for line in shown]
    text = "\n".join(normal(line) for line in printed if not re.search(r"images/s .* left", line))
    return re.fullmatch("\n?".join(parts) + "\n?", text) is not None


def test_both_languages_show_the_same() -> None:
    assert consoles(DOCS / "quickstart.md") == consoles(DOCS / "zh/quickstart.md")
    assert len(consoles(DOCS / "quickstart.md")) == 4


def test_what_is_not_printed_would_be_seen() -> None:
    assert as_shown(["a 1", "...", "b"], ["a 2.5", "x", "y", "b"])
    assert as_shown(["a 1", "..."], ["a 2.5", "x"])
    assert not as_shown(["a 1", "...", "b"], ["a 2.5", "x"])
    assert not as_shown(["a 1", "b"], ["a 1", "x", "b"])


@pytest.mark.slow
def test_its_commands_print_what_it_shows(tmp_path: Path) -> None:
    for words, shown in (each for text in consoles(DOCS / "quickstart.md") for each in sessions(text)):
        assert words[0] == "lockstep"
        ended = run_lockstep(*words[1:], cwd=tmp_path, timeout=300)
        assert ended.code == 0, ended.text
        if "train" in words:
            accuracy = float(re.findall(r"test accuracy ([\d.]+)%", ended.out)[0])
            assert accuracy > 97
        assert as_shown(shown, ended.out.splitlines()), ended.text
