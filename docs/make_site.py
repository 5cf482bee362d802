"""Build the site and check its links: `python docs/make_site.py FOLDER` puts English there, and Chinese in FOLDER/zh.

A warning fails the build, and so does a link within the site that leads to no file, or to no anchor of it.
"""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

DOCS = Path(__file__).parent
LANGUAGES = {"en": (DOCS, "."), "zh": (DOCS / "zh", "zh")}  # source, folder below the site's


class Page(HTMLParser):
    """A built page: the anchors that it has, and the links and files that it wants."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by feed, for each tag."""
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            if name in ("href", "src"):
                self.links.add(value or "")


def build(out: Path, language: str, doctrees: Path) -> None:
    """One language's pages, or the messages of Sphinx and its exit code."""
    source, below = LANGUAGES[language]
    words = [
        sys.executable,
        "-m",
        "sphinx",
        "--quiet",
        "--fresh-env",
        "--fail-on-warning",
        "-b",
        "html",
        "-c",
        str(DOCS),
    ]
    words += ["-t", language, "-d", str(doctrees / language), str(source), str(out / below)]
    if code := subprocess.run(words, check=False).returncode:
        raise SystemExit(code)


def broken_links(site: Path) -> list[str]:
    """PAGE: LINK for each link of a page that leads to no file of the site, or to no anchor of one."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    broken = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue  # elsewhere
            aim = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            aim = aim / "index.html" if aim.is_dir() else aim
            anchor = unquote(parts.fragment)
            if not aim.is_file() or (anchor and aim in pages and anchor not in pages[aim].anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


def stemmers(site: Path) -> list[str]:
    """The languages whose search asks for a stemmer that its script does not define: it would wait for good."""
    scripts = {name: (site / below / "_static/language_data.js").read_text() for name, (_, below) in LANGUAGES.items()}
    wanted = {name: script.partition("window.Stemmer = ")[2].partition(";")[0] for name, script in scripts.items()}
    return [name for name, stemmer in wanted.items() if not stemmer or scripts[name].count(stemmer) < 2]


def main(folder: str) -> None:
    """Both languages into a folder, and their links."""
    site = Path(folder).resolve()
    for language in LANGUAGES:
        build(site, language, site.parent / f".{site.name}-doctrees")
    if broken := broken_links(site):
        raise SystemExit("these links lead nowhere:\n" + "\n".join(broken))
    if silent := stemmers(site):
        raise SystemExit(f"the search has no stemmer: {', '.join(silent)}")
    pages = list(site.rglob("*.html"))
    print(f"{len(pages)} pages in {site}, every link within them leads somewhere")


if __name__ == "__main__":
    main(*sys.argv[1:])
