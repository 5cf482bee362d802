"""The course's pages hold what the programs are and print. This writes it anew, of all steps or as here of two:

    PYTHONPATH=src:examples/course python -m tests.docs.course.pages 03 07

Between `<!-- begin WHAT -->` and `<!-- end -->` of a page stands, in both languages alike but for the tables' words,

    program             the step's program
    diff                what changed in it since the step before, below the imports
    run N FLAGS         the command and what it prints
    table               the step's consequences on 1, 2 and 4 processes
    summary             the first figure of each step
"""

import difflib
import re
import sys
from pathlib import Path

import consequences
from tests.docs.course.programs import PAGES, ROOT, run

_BLOCK = re.compile(r"(<!-- begin ([^\n]*) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
DRAWN = ("program", "diff")  # what needs no run


def pages() -> list[Path]:
    """All pages of the course, in English first."""
    return [page for folder in PAGES for page in sorted(folder.glob("*.md"))]


def rendered(page: Path, kinds: tuple[str, ...] = ()) -> str:
    """The page as it has to be. `kinds`: of which blocks; default all."""

    def block(found: re.Match[str]) -> str:
        kind, *words = found[2].split()
        if kinds and kind not in kinds:
            return found[0]
        return found[1] + _block(page, kind, words) + "\n" + found[4]

    return _BLOCK.sub(block, page.read_text(encoding="utf-8"))


def _block(page: Path, kind: str, words: list[str]) -> str:
    step, chinese = page.name[:2], "zh" in page.relative_to(ROOT).parts
    match kind:
        case "program":
            return f"```python\n{consequences.program(step).read_text()}```"
        case "diff":
            before = consequences.program(f"{int(step) - 1:02}")
            old, new = (below_imports(path) for path in (before, consequences.program(step)))
            lines = [f"--- {before.name}", f"+++ {consequences.program(step).name}", *changes(old, new)]
            return "```diff\n" + "\n".join(line.rstrip() for line in lines) + "\n```"
        case "run":
            n, flags = int(words[0]), tuple(words[1:])
            return f"```console\n$ {shown(step, n, flags)}\n{run(step, n, flags)}```"
        case "table":
            return "\n".join(consequences.head(chinese) + _rows(step, chinese))
        case "summary":
            lines = consequences.head(chinese)
            lines = [f"| {'步骤' if chinese else 'step'} {lines[0]}", f"| --- {lines[1]}"]
            for name, one in consequences.STEPS.items():
                title = f" {one.chinese if chinese else one.title}"
                rows = _rows(name, chinese)
                for row in rows[: len(rows) // len(one.figures)]:
                    lines.append(f"| [{int(name)}{title}]({consequences.program(name).stem}.md) {row}")
                    title = ""
            return "\n".join(lines)
    raise ValueError(f"{page}: no block is called {kind}")


def below_imports(program: Path) -> list[str]:
    """Its lines after the last top-level import."""
    lines = program.read_text(encoding="utf-8").splitlines()
    last = max(at for at, line in enumerate(lines) if line.startswith(("import ", "from ")))
    return lines[last + 1 :]


def changes(old: list[str], new: list[str]) -> list[str]:
    """What was and what is: a large change is not divided by a line or two that happen to be equal within it."""
    found: list[tuple[int, int, int, int]] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        large = max(b - a, d - c, *((found[-1][1] - found[-1][0], found[-1][3] - found[-1][2]) if found else ())) > 3
        if found and large and a - found[-1][1] <= 2:
            found[-1] = (found[-1][0], b, found[-1][2], d)
        else:
            found.append((a, b, c, d))
    lines: list[str] = []
    for a, b, c, d in found:
        lines += ["@@", *(f" {line}" for line in old[max(a - 1, 0) : a]), *(f"-{line}" for line in old[a:b])]
        lines += [*(f"+{line}" for line in new[c:d]), *(f" {line}" for line in old[b : b + 1])]
    return lines


def _rows(step: str, chinese: bool) -> list[str]:
    return consequences.rows(step, consequences.measure(run, step), chinese)


def shown(step: str, n: int, flags: tuple[str, ...]) -> str:
    """The command that a reader types in examples/course; of two machines, the first one's."""
    words = consequences.commands(step, n, flags)[0]
    path = str(consequences.program(step))
    words = [Path(path).name if word == path else word for word in words if word != "--standalone"]
    if step == "01":
        return " ".join(["python", *words[words.index("01-plain-loop.py") :]])
    return " ".join(["torchrun", *words[2:]] if words[0] == "-m" else ["python", *words])


def main(names: list[str]) -> None:
    for page in pages():
        if not names or page.name[:2] in names:
            page.write_text(rendered(page), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
