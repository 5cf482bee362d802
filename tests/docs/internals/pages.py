"""The pages of docs/internals, and what they have to agree with: the programs, their output, and torch's source.

`python -m tests.docs.internals.pages` writes programs and outputs into the pages of both languages; `--python FILE`
runs them by another interpreter, as one with another torch, and prints where its outputs differ.
"""

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore

from tests.docs.internals.worker import PORTS

ROOT = Path(__file__).parents[3]
PROGRAMS = "examples/internals"
PAGES = sorted((ROOT / "docs/internals").glob("*.md"))
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(rf"\$ (?:python|torchrun --nproc-per-node (\d)) ({PROGRAMS}/\w+\.py)")
# on a page as `torch/nn/parallel/distributed.py`: `DistributedDataParallel.forward`, `_find_tensors`;
# in a program as a line of its docstring, without the backticks
ON_PAGE = re.compile(r"`(torch/[\w/]+\.(?:py|hpp))`(?:: |\uff1a)(`[\w.:]+`(?:(?:, |、)`[\w.:]+`)*)")
IN_PROGRAM = re.compile(r"^(torch/[\w/]+\.(?:py|hpp)): ([\w.:]+(?:, [\w.:]+)*)$", re.MULTILINE)
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}  # what the outputs are of: the CPU, one thread a rank
Run = Callable[[Sequence[Path], Sequence[dict[str, str]]], list[list[str]]]  # programs, ranks -> texts of each rank


def chinese(page: Path) -> Path:
    """The page of the same name in Chinese."""
    return ROOT / "docs/zh" / page.relative_to(ROOT / "docs")


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of each fenced block."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def commands(page: Path) -> list[tuple[int, Path]]:
    """(processes, 0 without torchrun; program) of each console block; a ValueError where a command is another."""
    found = []
    for language, text in blocks(page):
        if language == "console":
            match = COMMAND.fullmatch(text.splitlines()[0])
            if not match:
                raise ValueError(f"{page.name}: not a command of these pages: {text.splitlines()[0]}")
            found.append((int(match[1] or 0), ROOT / match[2]))
    return found


def code(program: Path) -> str:
    """A program without the docstring at its head: what a page shows."""
    text = program.read_text(encoding="utf-8")
    head = ast.parse(text).body[0]
    return "\n".join(text.splitlines()[head.end_lineno :]).strip() + "\n"


def named(text: str) -> list[tuple[str, str]]:
    """(file, name) of torch's source, wherever a text gives them."""
    found = [*ON_PAGE.findall(text), *IN_PROGRAM.findall(text)]
    return [(file, name) for file, names in found for name in re.findall(r"[\w.:]+", names)]


def exists(file: str, name: str) -> bool:
    """Whether the torch that is installed has this name in this file; of C++ the header, where a method is declared."""
    if file.endswith(".hpp"):
        header = Path(torch.__file__).parent / "include" / file
        return all(re.search(rf"\b{part}\b", header.read_text(encoding="utf-8")) for part in name.split("::"))
    module = importlib.import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    found: object = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None)
    written = rf"^ *(?:(?:async )?def|class) {name.rpartition('.')[2]}\b"
    return found is not None and re.search(written, inspect.getsource(module), re.MULTILINE) is not None


def outputs(run: Run) -> dict[Path, str]:
    """What each program of the pages prints: the first rank's lines, then the second's."""
    by_size: dict[int, list[Path]] = {}
    for page in PAGES:
        for size, program in commands(page):
            by_size.setdefault(size, []).append(program)
    texts: dict[Path, str] = {}
    for size, programs in sorted(by_size.items()):
        stores = [_store() for _ in programs if size]
        base = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "localhost",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            PORTS: " ".join(str(store.port) for store in stores),
        }
        ranks = [{**base, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)] or [{}]
        texts |= {program: "".join(said) for program, *said in zip(programs, *run(programs, ranks), strict=True)}
    return texts


def _store() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))


def written(page: Path, texts: dict[Path, str]) -> str:
    """A page with its programs and outputs as they are."""
    programs = iter(commands(page))
    parts = re.split(r"(^```console\n.*?^```$)", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for i in range(1, len(parts), 2):
        _, program = next(programs)
        parts[i] = f"{parts[i].splitlines()[0]}\n{parts[i].splitlines()[1]}\n{texts[program]}```"
        head, fence, _ = parts[i - 1].rpartition("```python\n")
        end = parts[i - 1].rpartition("\n```")[2]
        parts[i - 1] = f"{head}{fence}{code(program)}```{end}"
    return "".join(parts)


def _executed(python: str) -> Run:
    def run(programs: Sequence[Path], ranks: Sequence[dict[str, str]]) -> list[list[str]]:
        with tempfile.TemporaryDirectory() as folder:
            started = []
            for number, env in enumerate(ranks):
                out = Path(folder) / f"{number}.json"
                command = [python, "-m", "tests.docs.internals.worker", str(out), *map(str, programs)]
                started.append((subprocess.Popen(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT, **env}), out))
            if [process for process, _ in started if process.wait(600)]:
                raise SystemExit("a worker failed")
            return [json.loads(out.read_text()) for _, out in started]

    return run


def main() -> None:
    """Write the pages, or compare them with another interpreter's outputs."""
    if sys.argv[1:2] == ["--python"]:
        for program, text in outputs(_executed(sys.argv[2])).items():
            shown = [block for page in PAGES for _, block in blocks(page) if f" {program.relative_to(ROOT)}\n" in block]
            same = all(block.partition("\n")[2] == text for block in shown)
            print("same     " if same else "DIFFERENT", program.name)
            if not same:
                print(text)
        return
    texts = outputs(_executed(sys.executable))
    for page in PAGES:
        for language in (page, chinese(page)):
            language.write_text(written(language, texts), encoding="utf-8")


if __name__ == "__main__":
    main()
