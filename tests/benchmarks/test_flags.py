"""What benchmarks type is what commands take: no benchmark is started by every test, and a flag may go."""

import ast
from pathlib import Path

import pytest

from lockstep.config import Config
from lockstep.config.fields import flag_names
from lockstep.config.flags import HABITS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILES = sorted(BENCHMARKS.rglob("*.py"))
OTHERS = {"--quiet", "--detach", "--force", "--uts"}  # of git and unshare


def flags_in(source: str) -> set[str]:
    """All texts in a file that are a flag, with or without its value."""
    texts = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    words = (text.partition("=")[0] for text in texts if isinstance(text, str) and " " not in text)
    return {word for word in words if word.startswith("--") and word[2:].replace("-", "").isalnum()}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(BENCHMARKS)))
def test_a_flag_is_one_of_a_command_or_of_the_benchmarks(file: Path) -> None:
    tree = ast.parse(file.read_text())
    taken = {
        each.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
        for each in node.args
        if isinstance(each, ast.Constant)
    }
    assert flags_in(file.read_text()) <= {*flag_names(Config), *HABITS, *OTHERS, *taken}
