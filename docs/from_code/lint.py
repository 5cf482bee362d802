"""What the pages of lint's codes have from the code: `python -m docs.from_code.lint` writes it into them.

Text and examples of docs/lint/LSxxx.md are written by hand, and the text of docs/zh/lint/LSxxx.md. The command writes
around them: the English title, what lint prints for the wrong example, what --fix makes of it, the line that silences
it; in Chinese the blocks of the English page; in docs/lint/index.md of both languages the lists.
"""

import ast
import functools
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.commands.lint.check import check
from lockstep.commands.lint.fixes import applied
from lockstep.commands.lint.output import written
from lockstep.commands.lint.rule import RULES, Finding

DOCS = Path(__file__).parents[1]
GROUPS = {"LS1": ("Data", "数据"), "LS2": ("Maths", "计算"), "LS3": ("Processes", "进程"), "LS4": ("Files", "文件")}
HEADINGS = {
    "wrong": ("Wrong", "错误的写法"),
    "right": ("Right", "正确的写法"),
    "fixed": ("With `--fix`", "用 `--fix`"),
    "silent": ("When it is no fault", "什么时候不算错"),
}
FIXED = (
    "`lockstep lint train.py --fix` makes this of the wrong example:",
    "`lockstep lint train.py --fix` 会把错误的例子改成这样：",
)
SILENCED = ("At the end of the line it is silenced by its code:", "在行尾写上代码，就不再报告：")
BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EVERY = frozenset(RULES)


@dataclass(frozen=True)
class Page:
    """A page's parts that are written by hand: Markdown, and the two programs."""

    title: str
    text: str
    wrong: str
    right: str
    harmless: str


def page_of(code: str, chinese: bool) -> Path:
    """Where a code's page is."""
    return DOCS / ("zh/lint" if chinese else "lint") / f"{code}.md"


def read(code: str, chinese: bool) -> Page:
    """A page taken apart. Raises ValueError where it lacks a part."""
    path = page_of(code, chinese)
    text = path.read_text(encoding="utf-8")
    heads = {name: f"\n## {words[chinese]}\n" for name, words in HEADINGS.items()}
    if any(text.count(head) != 1 for name, head in heads.items() if name != "fixed"):
        raise ValueError(f"{path} needs each of the headings {', '.join(heads.values())} once")
    intro, _, rest = text.partition(heads["wrong"])
    wrong, _, rest = rest.partition(heads["right"])
    right, _, harmless = rest.partition(heads["silent"])
    first, _, intro = intro.partition("\n")
    intro = re.sub(r"\A\s*(中文：|English: )\[.*\n", "", intro)
    harmless = harmless.partition(SILENCED[chinese])[0]
    return Page(first.partition(" · ")[2], intro.strip(), _program(wrong), _program(right), harmless.strip())


def _program(text: str) -> str:
    """The first program of a section, empty where it has none."""
    return next((body for language, body in BLOCK.findall(text) if language == "python"), "")


@functools.cache
def found_in(program: str) -> tuple[Finding, ...]:
    """What lint finds in a program, in a file train.py."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.py")
        path.write_text(program, encoding="utf-8")
        return tuple(_named(each) for each in check([path], EVERY)[0])


def _named(finding: Finding) -> Finding:
    values = {name: getattr(finding, name) for name in Finding.__dataclass_fields__}
    return Finding(**values | {"path": Path("train.py")})


def silenced(program: str, finding: Finding) -> str:
    """The line of a finding, as it is left out of the report."""
    return f"{program.splitlines()[finding.line - 1]}  # noqa: {finding.code}"


def fixed(program: str, findings: Sequence[Finding]) -> str:
    """A program after --fix, empty where nothing is mended so."""
    edits = [edit for finding in findings for edit in finding.edits]
    after = applied(program.encode(), edits).decode() if edits else ""
    ast.parse(after)
    return after


def whole(code: str, chinese: bool) -> str:
    """A page as it has to be: its own text, and the rest from the code and from the English page."""
    own, examples = read(code, chinese), read(code, False)
    findings = found_in(examples.wrong)
    count = f"{len(findings)} finding{'s' if len(findings) != 1 else ''} in 1 file"
    printed = f"{written(list(findings), 'text')}\n\n{count}"
    other = f"{'../../' if chinese else '../zh/'}lint/{code}.md"
    head = HEADINGS["wrong"][chinese], HEADINGS["right"][chinese], HEADINGS["fixed"][chinese]
    parts = [
        f"# {code} · {own.title if chinese else RULES[code].title}",
        f"{'English' if chinese else '中文'}{': ' if chinese else '：'}[{code}]({other})",
        own.text,
        f"## {head[0]}",
        f"```python\n{examples.wrong}```",
        f"```console\n$ lockstep lint train.py\n{printed}\n```",
        f"## {head[1]}",
        f"```python\n{examples.right}```",
    ]
    if after := fixed(examples.wrong, findings):
        parts += [f"## {head[2]}", FIXED[chinese], f"```python\n{after}```"]
    line = "\n".join(silenced(examples.wrong, each).strip() for each in findings)
    parts += [f"## {HEADINGS['silent'][chinese]}", own.harmless, SILENCED[chinese], f"```python\n{line}\n```"]
    return "\n\n".join(parts) + "\n"


def index(chinese: bool) -> str:
    """The lists of the index, a group of codes each."""
    parts = []
    for group, names in GROUPS.items():
        rows = [f"## {names[chinese]}", ""]
        for code in sorted(each for each in RULES if each.startswith(group)):
            title = read(code, True).title if chinese else RULES[code].title
            rows.append(f"- [{code}]({code}.md) {title}")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def whole_index(chinese: bool) -> str:
    """The index with its lists, which stand between two comments."""
    text = page_of("index", chinese).read_text(encoding="utf-8")
    return re.sub(r"(?<=<!-- begin codes -->\n).*?(?=\n<!-- end -->)", lambda _: index(chinese), text, flags=re.DOTALL)


def main() -> None:
    """Write all pages anew."""
    for chinese in (False, True):
        for code in RULES:
            page_of(code, chinese).write_text(whole(code, chinese), encoding="utf-8")
        page_of("index", chinese).write_text(whole_index(chinese), encoding="utf-8")


if __name__ == "__main__":
    main()
