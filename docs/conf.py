"""The site's settings, for both languages: docs/ is English, docs/zh/ (`-t zh`) has the same pages in Chinese.

Pages are plain Markdown that reads well in a checkout too. What a checkout and a site do differently stands here: links
to the other language and to files outside docs/, headings' anchors, and what the reference has from the code.
"""

import os
import re
import sys
from pathlib import Path

import sphinx.locale
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.matching import patfilter

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # the reference is this checkout's, installed or not
from docs.chinese_search import SearchPairs  # noqa: E402
from docs.from_code.parts import PARTS  # noqa: E402

CHINESE = re.compile(r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]")
OF_THEME = {
    "On this page": "本页内容",
    "Next": "下一页",
    "Previous": "上一页",
    "Home": "首页",
}  # not in its translation
GENERATED = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
ZH = tags.has("zh")  # type: ignore[name-defined]  # noqa: F821 (Sphinx's)
# Where the source is to be read, if the environment knows: then links to it lead there, and otherwise to a copy.
REPOSITORY = "/".join(os.environ.get(f"GITHUB_{name}", "") for name in ("SERVER_URL", "REPOSITORY")).strip("/")

project = "Lockstep"
author = "The Lockstep developers"
extensions = ["myst_parser"]
language = "zh_CN" if ZH else "en"
html_search_language = "zh" if ZH else "en"
exclude_patterns = [] if ZH else ["zh"]
templates_path = ["_templates"]
myst_heading_anchors = 6
smartquotes = False  # two hyphens are a flag's
suppress_warnings = ["misc.highlighting_failure"]  # code that a page shows may be half a program

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"top_of_page_buttons": ["view"]}  # its template is the language switch
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
html_baseurl = os.environ.get("SITE_URL", "")


def address(page: Path, path: Path, anchor: str) -> str:
    """The link in a built page to a file of this tree: relative, to the repository, or nothing where neither has it."""
    fragment = f"#{anchor}" if anchor else ""
    if path.parent == ROOT and path.name in ("README.md", "README.zh-CN.md"):
        path = DOCS / ("index.md" if path.name == "README.md" else "zh/index.md")
    if path.suffix == ".md" and path.is_relative_to(DOCS):
        return os.path.relpath(path.with_suffix(".html"), page.parent) + fragment
    if REPOSITORY and path.is_relative_to(ROOT):
        return f"{REPOSITORY}/{'tree' if path.is_dir() else 'blob'}/HEAD/{path.relative_to(ROOT)}{fragment}"
    return ""


def anchor_headings(app: Sphinx, doctree: nodes.document) -> None:
    """A heading's anchor is what a code host makes of it, in Chinese too, where Sphinx would count id1, id2."""
    slugs = app.env.metadata[app.env.current_document.docname].get("myst_slugs", {})
    of_section = {identity: slug for slug, (_, identity, _) in slugs.items()}
    for section in doctree.findall(nodes.section):
        slug = next((of_section[name] for name in section["ids"] if name in of_section), None)
        if slug and slug not in section["ids"]:
            section["ids"].insert(0, slug)
    for slug, (line, identity, title) in slugs.items():
        if identity in of_section:
            slugs[slug] = (line, slug, title)


def link_outside(app: Sphinx, doctree: nodes.document) -> None:
    """Links that leave this language's pages: to the other's, to the repository, or to a copy of the file."""
    docname = app.env.current_document.docname
    page = app.env.doc2path(docname)
    wanted = (addnodes.pending_xref, addnodes.download_reference)
    for node in [found for kind in wanted for found in doctree.findall(kind)]:
        target = str(node["reftarget"])
        if target in app.env.found_docs:
            continue
        if node.get("refdomain") == "doc":  # without its suffix, and absolute or from the source folder
            path = Path(app.srcdir, f"{target}.md")
        else:
            path = Path(os.path.normpath(page.parent / target.partition("#")[0]))
        if not path.exists():
            continue  # Sphinx warns
        if uri := address(page, path, node.get("reftargetid") or ""):
            new: nodes.Element = nodes.reference("", "", *node.children, refuri=uri, internal=uri.startswith("."))
        elif path.is_dir():
            new = nodes.inline("", "", *node.children)
        else:
            copied = os.path.relpath(path, page.parent)
            new = addnodes.download_reference("", "", *node.children, reftarget=copied, refdoc=docname)
        node.replace_self(new)


def complete_list(app: Sphinx, docname: str, content: list[str]) -> None:
    """An index names the pages of both languages; those that this one does not have yet are left out.

    A folder's index without a list has all pages of the folder.
    """
    if Path(docname).name == "index":
        if "```{toctree}" not in content[0]:
            content[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"
        kept, in_list = [], False
        for line in content[0].splitlines():
            in_list = line.startswith("```{toctree}") or (in_list and line != "```")
            entry = in_list and line and not line.startswith((":", "`"))
            if not entry or any(patfilter(app.env.found_docs, f"{docname.removesuffix('index')}{line}")):
                kept.append(line)
        content[0] = "\n".join(kept) + "\n"


def fill_in(_app: Sphinx, _docname: str, content: list[str]) -> None:
    """What a page has from the code, in the place of a comment that names it."""
    content[0] = GENERATED.sub(lambda found: PARTS[found[1]]("zh" if ZH else "en"), content[0])


def join_lines(_app: Sphinx, doctree: nodes.document) -> None:
    """Where a line of Chinese ends in the source, no space belongs."""
    for line_end in [text for text in doctree.findall(nodes.Text) if text == "\n"]:
        siblings = line_end.parent.children
        place = next(number for number, each in enumerate(siblings) if each is line_end)
        around = [each.astext() for each in siblings[max(0, place - 1) : place + 2 : 2]]
        if len(around) == 2 and CHINESE.fullmatch(around[0][-1:]) and CHINESE.fullmatch(around[1][:1]):
            del line_end.parent[place]


def switch_language(_app: Sphinx, pagename: str, _template: str, context: dict[str, object], _tree: object) -> None:
    """Where the same page is in the other language; its front page where it has none."""
    here, there = (DOCS / "zh", DOCS) if ZH else (DOCS, DOCS / "zh")
    generated = not (here / f"{pagename}.md").exists()
    same = pagename if generated or (there / f"{pagename}.md").exists() else "index"
    context["other_page"] = os.path.relpath(there / f"{same}.html", (here / pagename).parent)
    context["other_name"], context["other_language"] = ("English", "en") if ZH else ("中文", "zh-CN")
    if ZH:
        context["_"] = lambda text: OF_THEME.get(text) or sphinx.locale._(text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls it. What changes a page's tree runs before Sphinx has collected its files and headings."""
    app.connect("source-read", complete_list)
    app.connect("source-read", fill_in)
    app.connect("doctree-read", anchor_headings, priority=100)
    app.connect("doctree-read", link_outside, priority=100)
    app.connect("html-page-context", switch_language)
    app.add_search_language(SearchPairs)
    if ZH:
        app.connect("doctree-read", join_lines, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
