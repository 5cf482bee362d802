"""The house's own rules: who may import whom, how long a file gets, what is public, and what the docs promise."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lockstep

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"

PAGE = ROOT / "docs/design.md"


def floors_of(page: str) -> dict[str, int]:
    """Module -> floor, by the lines `N  names  what for` of the code block under the heading Floors."""
    block = page.partition("\n## Floors\n")[2].partition("\n## ")[0].split("```")[1]
    found: dict[str, int] = {}
    for line in block.strip().splitlines():
        number, names, _ = re.split(r" {2,}", line, maxsplit=2)
        for name in names.split():
            assert name not in found, f"{name} stands on two floors"
            found[name] = int(number)
    modules = {"lockstep" if name == "lockstep" else f"lockstep.{name.replace('/', '.')}": name for name in found}
    return {module: found[name] for module, name in modules.items()}


# A module's floor is that of its longest prefix here; it may import from floors below, or from its own.
FLOORS = floors_of(PAGE.read_text())
MAX_FLOORS, MAX_ROOMS, MAX_ARROWS = 10, 16, 60  # a room: a folder or file right below src/lockstep; an arrow: an import
MAX_FILE, MAX_FUNCTION, SMALL_FILE, MAX_SMALL_FILES = 600, 60, 60, 40
# How many lines a part of the source may have. A change that needs more raises its number here, so that review sees it.
BUDGETS = {
    "config": (1754, "config"),
    "data": (5132, "data"),
    "training": (5881, "training"),
    "gradients and draws": (4051, "parallel rng"),
    "processes": (2995, "distributed"),
    "state and monitoring": (3600, "checkpoint monitoring"),
    "models and their use": (1722, "models inference cli errors randomness __init__ __main__"),
    "audit": (4499, "commands/audit"),
    "reproduce": (2294, "commands/reproduce"),
    "measuring": (
        1488,
        "commands/compare commands/tune commands/sweep commands/lr_find commands/forecast commands/measuring",
    ),
    "verify, chaos": (1231, "commands/verify commands/chaos"),
    "looking at runs": (1273, "commands/report commands/runs commands/watch commands/diff"),
    "machines": (1090, "commands/doctor commands/launch_script"),
    "everyday commands": (1473, "commands"),  # all others
}
MAX_LINES, MAX_FILES = 38_483, 260


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((SOURCE / "lockstep").rglob("*.py"))}


def floor(module: str) -> int:
    known = module
    while known not in FLOORS:
        known = known.rpartition(".")[0]
        if known in ("", "lockstep"):
            pytest.fail(f"{module} has no floor: give it one in docs/design.md")
    return FLOORS[known]


def imported(module: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, module of ours) for each import anywhere in the source; TYPE_CHECKING blocks included."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert node.level == 0, f"{module}:{node.lineno}: write the whole name, not a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.partition(".")[0] == "lockstep":
                while name not in MODULES:  # `from module import thing`, or a package without __init__
                    name = name.rpartition(".")[0]
                yield node.lineno, name


def upward(module: str, source: str) -> list[str]:
    """The imports of a module that go to a higher floor."""
    return [
        f"{module}:{line} (floor {floor(module)}) imports {other} (floor {floor(other)})"
        for line, other in imported(module, source)
        if floor(other) > floor(module)
    ]


def test_nothing_imports_from_a_floor_above() -> None:
    # the package itself names everything that is public, and imports a name when it is first used
    found = [line for name, path in MODULES.items() if name != "lockstep" for line in upward(name, path.read_text())]
    assert not found, "\n".join(found)


def test_an_import_from_above_would_be_seen() -> None:
    assert upward("lockstep.distributed.world", "def f():\n    from lockstep.data.loaders import Batch") == [
        "lockstep.distributed.world:2 (floor 2) imports lockstep.data.loaders (floor 3)"
    ]
    assert upward("lockstep.data.loaders", "import lockstep.training.loop")
    assert upward("lockstep.training.step", "from lockstep.training import loop")
    assert not upward("lockstep.training.loop", "import lockstep\nimport torch\nfrom lockstep.training import step")


def room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def arrows() -> dict[str, set[str]]:
    """Module -> the modules that it imports. The package's own names are imported when they are used: not counted."""
    graph = {name: {other for _, other in imported(name, path.read_text())} for name, path in MODULES.items()}
    graph["lockstep"] = set()
    return graph


def test_no_circle() -> None:
    graph = arrows()
    list(TopologicalSorter(graph).static_order())  # CycleError names the circle
    rooms: dict[str, set[str]] = {}
    for name, others in graph.items():
        rooms.setdefault(room(name), set()).update(room(other) for other in others if room(other) != room(name))
    list(TopologicalSorter(rooms).static_order())
    assert len(rooms) <= MAX_ROOMS
    assert sum(map(len, rooms.values())) <= MAX_ARROWS


def test_the_page_lists_the_house_as_it_is() -> None:
    assert set(FLOORS) <= set(MODULES), "docs/design.md gives a floor to what is not there"
    assert sorted(set(FLOORS.values())) == list(range(len(set(FLOORS.values())))), "a floor is empty"
    assert len(set(FLOORS.values())) <= MAX_FLOORS
    assert {room(name) for name in MODULES} == {name for name in FLOORS if room(name) == name}
    with pytest.raises(AssertionError, match="two floors"):
        floors_of("\n## Floors\n```\n0  a b  this\n1  a  that\n```\n")


def lines_of(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def test_each_part_keeps_to_its_budget() -> None:
    own = {place: part for part, (_, places) in BUDGETS.items() for place in places.split()}
    spent = dict.fromkeys(BUDGETS, 0)
    for path in MODULES.values():
        names = path.relative_to(SOURCE / "lockstep").with_suffix("").parts
        prefixes = ["/".join(names[:n]) for n in range(len(names), 0, -1)]
        spent[next(own[prefix] for prefix in prefixes if prefix in own)] += lines_of(path)
    over = {part: (lines, BUDGETS[part][0]) for part, lines in spent.items() if lines > BUDGETS[part][0]}
    assert not over, f"lines, and the budget: {over}"
    assert sum(spent.values()) <= MAX_LINES
    assert len(MODULES) <= MAX_FILES


def test_files_and_functions_stay_short() -> None:
    found, small = [], []
    for name, path in MODULES.items():
        lines = lines_of(path)
        if lines > MAX_FILE:
            found.append(f"{name} has {lines} lines")
        if lines < SMALL_FILE:
            small.append(name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > MAX_FUNCTION:
                    found.append(f"{name}.{node.name} has {length} lines")
    assert not found, "\n".join(found)
    assert len(small) <= MAX_SMALL_FILES, f"who needs these alone? {small}"


def test_every_public_name_is_there_and_documented() -> None:
    tree = ast.parse((SOURCE / "lockstep/__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {n.names[0].name: n.module for n in block.body if isinstance(n, ast.ImportFrom)}
    assert typed == lockstep._PUBLIC, "type checkers and the interpreter see different names"
    assert sorted(lockstep.__all__) == sorted({*typed, "__version__"})
    assert set(dir(lockstep)) == set(lockstep.__all__)
    for name, module in typed.items():
        value = getattr(lockstep, name)
        assert value is getattr(importlib.import_module(module or ""), name)
        assert value.__doc__, name
    with pytest.raises(AttributeError, match="no_such_name"):
        lockstep.no_such_name  # noqa: B018


def test_every_public_name_is_used_by_a_test() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
    examples = "\n".join(path.read_text() for path in (ROOT / "examples").glob("*.py"))
    unused = [name for name in lockstep._PUBLIC if not re.search(rf"\b{name}\b", tests + examples)]
    assert not unused


def test_the_light_commands_import_no_torch() -> None:
    program = """
import sys
import lockstep
from lockstep.cli import main
lines = "|--help|--version|recipes|show cifar10|train --help|train mnist --help|train --help all"
lines += "|train --help optim|eval --help|index --help|predict --help|audit --help|doctor --help|runs|watch x|diff x y"
for line in lines.split("|"):
    try:
        main(line.split())
    except SystemExit as end:
        assert end.code in (0, None) or line in ("diff x y", "watch x"), (line, end.code)
    assert "torch" not in sys.modules, line
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "usage: lockstep" in ended.stdout


def test_a_launcher_imports_torch_and_not_what_costs_as_much_again() -> None:
    """Its workers start when it has imported. Torch is there: the check above would catch it."""
    program = """
import sys
import lockstep.distributed.launcher
from lockstep.config.recipes import recipe
from lockstep.training.run_folder import check, run
check(recipe("digits"))
assert "torch" in sys.modules
assert not {"torchvision", "torch._dynamo"} & sys.modules.keys()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
