"""The Chinese pages say what the English ones say, section by section: the same blocks, code, figures and links."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.docs.test_facts import anchors

DOCS = Path(__file__).parents[2] / "docs"
ZH = DOCS / "zh"
OVERVIEWS = {Path("README.md"), Path("index.md")}  # written for their language, so compared by nobody
ROOT = DOCS.parent
PAIRS = [*sorted({path.relative_to(ZH) for path in ZH.rglob("*.md")} - OVERVIEWS), Path("../CONTRIBUTING.md")]
_CJK = re.compile(r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FIGURE = re.compile(r"(?<![A-Za-z0-9_.])(\d[\d,]*(?:\.\d+)*(?:e[+-]?\d+)?(?<!,))(?: ?(million|billion|万|亿))?")
_UNITS = {"million": 1e6, "billion": 1e9, "万": 1e4, "亿": 1e8}
_SPELLED = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9}
_SPELLED |= {"eleven": 11, "twelve": 12, "dozen": 12, "fifteen": 15, "sixteen": 16, "twenty": 20, "thirty": 30}
_SPELLED |= {"forty": 40, "fifty": 50, "sixty": 60, "hundred": 100, "thousand": 1000, "once": 1, "twice": 2}
_SPELLED |= {"ten": 10, "half": 2, "double": 2, "second": 2, "third": 3, "fourth": 4, "fifth": 5}


@dataclass
class Section:
    """A heading and what stands below it, up to the next heading."""

    level: int
    heading: str
    prose: str = ""
    blocks: list[list[str]] = field(default_factory=list)  # each with its opening fence

    @property
    def flowing(self) -> str:
        """The prose, each paragraph in one line."""
        return re.sub(r"(?<!\n)\n(?!\n)", " ", self.prose)

    @property
    def code(self) -> set[str]:
        return set(re.findall(r"`([^`\n]+)`", self.flowing))

    @property
    def plain(self) -> str:
        """The prose without code and without the targets of links."""
        return _LINK.sub("]", re.sub(r"`[^`\n]*`", "", self.flowing))

    @property
    def figures(self) -> set[str]:
        """The numbers in digits, 2.4 million and 240 万 alike."""
        found = _FIGURE.finditer(self.plain)
        return {
            f"{float(at[1].replace(',', '')) * _UNITS[at[2]]:.0f}" if at[2] else at[1].replace(",", "") for at in found
        }

    @property
    def spelled(self) -> set[str]:
        """What the prose says of numbers in English words, as digits."""
        return {str(_SPELLED[word]) for word in re.findall(r"[a-z]+", self.plain.lower()) if word in _SPELLED}

    @property
    def links(self) -> list[str]:
        return _LINK.findall(re.sub(r"`[^`\n]*`", "", self.flowing))


def chinese_page(name: Path) -> Path:
    """The Chinese page of an English one, which is named from docs/."""
    return ROOT / f"{name.stem}.zh-CN.md" if name.parent == Path("..") else ZH / name


def sections(text: str) -> list[Section]:
    found = [Section(0, "")]
    fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
            if fenced:
                found[-1].blocks.append([line])
        elif fenced:
            found[-1].blocks[-1].append(line)
        elif heading := re.match(r"(#{1,6}) (.+)", line):
            found.append(Section(len(heading[1]), heading[2], prose=heading[2] + "\n"))
        else:
            found[-1].prose += line + "\n"
    return found


def cells(line: str) -> list[str]:
    """A line's indent, its first part, and what stands right of it: columns of a table, a remark, a comment."""
    indent = line[: len(line) - len(line.lstrip())]
    return [indent, *re.split(r"\s{2,}|(?<=\S) (?=# )", line.strip())]


def same_line(english: str, chinese: str) -> bool:
    """Equal, but for remarks to the right of the first column, and comments, which may be in Chinese."""
    ours, theirs = cells(english), cells(chinese)
    if len(ours) != len(theirs) or ours[0] != theirs[0]:
        return False
    comment = english.lstrip().startswith("# ")
    parts = enumerate(zip(ours, theirs, strict=True))
    return all(a == b or ((at > 1 or comment) and _CJK.search(b) is not None) for at, (a, b) in parts)


def differing_lines(english: Section, chinese: Section) -> list[str]:
    different = []
    for ours, theirs in zip(english.blocks, chinese.blocks, strict=True):
        if len(ours) != len(theirs):
            different.append(f"{len(theirs)} lines instead of {len(ours)}: {theirs[1]}")
            continue
        different += [f"{b!r} instead of {a!r}" for a, b in zip(ours, theirs, strict=True) if not same_line(a, b)]
    return different


def differing_figures(english: Section, chinese: Section) -> set[str]:
    """Figures of one page that the other lacks; what English spells out may be digits in Chinese."""
    lost = english.figures - chinese.figures
    made_up = chinese.figures - english.figures - english.spelled - {"0", "1"}
    return lost | made_up


def titles(page: Path) -> list[str]:
    """The anchors of a page's headings, in their order."""
    seen: list[str] = []
    for section in sections(page.read_text(encoding="utf-8"))[1:]:
        (slug,) = anchors(f"# {section.heading}")
        seen.append(f"{slug}-{sum(s == slug for s in seen)}" if slug in seen else slug)
    return seen


def aim(page: Path, target: str) -> tuple[str, int | None]:
    """Where a link leads: the English page or file behind it, and the number of the heading there."""
    if target.startswith("https://"):
        return target, None
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    number = titles(file).index(anchor) if anchor else None
    if file.parent == ROOT:
        file = file.with_name(file.name.replace(".zh-CN.", "."))
    if file.is_relative_to(ZH):
        file = DOCS.parent / "README.md" if file == ZH / "README.md" else DOCS / file.relative_to(ZH)
    return str(file).replace(".zh.", "."), number


def differing_links(name: Path, english: Section, chinese: Section) -> list[str]:
    """Links that one page lacks, but for those between the two, and Chinese ones that miss a Chinese page."""
    twins = {(str((DOCS / name).resolve()), None)}
    here = chinese_page(name)
    ours = Counter(aim(DOCS / name, target) for target in english.links)
    theirs = Counter(aim(here, target) for target in chinese.links)
    different = [str(found) for found in (ours - theirs) + (theirs - ours) if found not in twins]
    for target in chinese.links:
        file = here.parent.joinpath(target.partition("#")[0]).resolve()
        if file.suffix == ".md" and file.is_relative_to(DOCS) and not file.is_relative_to(ZH):
            page = file.relative_to(DOCS)
            if page not in {name, *OVERVIEWS} and (ZH / page).exists():
                different.append(f"{target}, though there is docs/zh/{page}")
    return different


def _both(name: Path) -> list[tuple[Section, Section]]:
    pages = [sections(page.read_text(encoding="utf-8")) for page in (DOCS / name, chinese_page(name))]
    levels = [[(section.level, len(section.blocks)) for section in page] for page in pages]
    assert levels[0] == levels[1], [[section.heading for section in page] for page in pages]
    return list(zip(*pages, strict=True))


@pytest.mark.parametrize("name", PAIRS, ids=str)
def test_the_pages_say_the_same(name: Path) -> None:
    for english, chinese in _both(name):
        assert not differing_lines(english, chinese), english.heading
        assert english.code ^ chinese.code == set(), english.heading
        assert differing_figures(english, chinese) == set(), english.heading
        assert not differing_links(name, english, chinese), english.heading


@pytest.mark.parametrize("name", PAIRS, ids=str)
def test_the_chinese_pages_are_set_well(name: Path) -> None:
    """A half-width space between Chinese and Latin letters or digits, and full-width marks after Chinese words."""
    for section in sections(chinese_page(name).read_text(encoding="utf-8")):
        shown = re.sub(r"`[^`\n]*`", "X", section.prose)
        assert not re.findall(r".{0,9}(?:[\u4e00-\u9fff][A-Za-z0-9]|[A-Za-z0-9][\u4e00-\u9fff]).{0,9}", shown)
        assert not re.findall(r".{0,9}[\u4e00-\u9fff][,;:?!].{0,9}", shown)


def test_what_differs_would_be_seen() -> None:
    english = "# A\nGive `--lr 1`, two of 3.5 [b](#b).\n```\nls   all of it\n1  2\n```\n## B\n"
    chinese = "# 甲\n用 `--lr 1` 和 3.5 里的 2 个 [乙](#乙)。\n```\nls  全部\n1  2\n```\n## 乙\n"

    def differences(changed: str) -> list[object]:
        ours, theirs = sections(english)[1], sections(changed)[1]
        return [differing_lines(ours, theirs), ours.code ^ theirs.code, differing_figures(ours, theirs)]

    assert not any(differences(chinese))
    assert differences(chinese.replace("ls  ", "la  "))[0] == ["'la  全部' instead of 'ls   all of it'"]
    assert differences(chinese.replace("1  2", "1  3"))[0]
    assert differences(chinese.replace("--lr 1", "--lr 2"))[1] == {"--lr 1", "--lr 2"}
    assert differences(chinese.replace("3.5", "3.6"))[2] == {"3.5", "3.6"}
    assert differences(chinese.replace("2 个", "4 个"))[2] == {"4"}
