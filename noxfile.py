"""What a change has to pass, each by one command: `nox -s lint types docs test`, or `nox` for these four.

They run in the environment that nox itself is in (`pip install '.[dev]'`): torch is gigabytes, and one copy is enough.
What follows `--` goes to the program: `nox -s test -- -k order`.
"""

import ast
import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "docs", "test"]
BENCHMARKS = Path("benchmarks")
NOT_BENCHMARKS = {"common", "namespaces", "page"}


@nox.session
def lint(session: nox.Session) -> None:
    """Style and layout of the code; seconds. `ruff check --fix` and `ruff format` mend most of it."""
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """Strict types; half a minute."""
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """That the pages are true: links, flags, commands, programs and what they print, in both languages; minutes.

    `-- -m "not slow"` leaves out what trains.
    """
    _part(session, "tests/docs")
    session.run(sys.executable, "-m", "tests.docs.test_blocks")  # what is done with how many blocks and commands


@nox.session
def benchmarks(session: nox.Session) -> None:
    """The benchmarks' own tests, which measure nothing; a minute."""
    _part(session, "tests/benchmarks")


@nox.session
def audit(session: nox.Session) -> None:
    """`lockstep audit` on the scripts that it is held to; minutes. `-- -m "not slow"`: a smoke test."""
    _part(session, "tests/audit")


@nox.session
def reproduce(session: nox.Session) -> None:
    """`lockstep reproduce` on scripts; minutes. `-- -m "not slow"`: a smoke test."""
    _part(session, "tests/reproduce")


@nox.session
def linter(session: nox.Session) -> None:
    """The package lockstep-lint."""
    session.run(
        "pytest", "-c", "packages/lockstep_lint/pyproject.toml", "packages/lockstep_lint/tests", *session.posargs
    )


@nox.session
def site(session: nox.Session) -> None:
    """The pages as a site in both languages, and its links; `-- FOLDER`, or build/site. Half a minute."""
    session.run(sys.executable, "docs/make_site.py", *(session.posargs or ["build/site"]))


@nox.session
def test(session: nox.Session) -> None:
    """The tests that run everywhere; minutes."""
    session.run("pytest", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """The tests that take longer than a few seconds each, the built wheel's among them."""
    _marked(session, "slow and not gpu and not realdata and not integration")


@nox.session
def integration(session: nox.Session) -> None:
    """With real launchers and networks; `.ci/install-launchers` fetches them. What is missing is skipped, and said."""
    _marked(session, "integration and not gpu and not realdata")


@nox.session
def fuzz(session: nox.Session) -> None:
    """Random configurations: verify's verdict against what train leaves, for two minutes; prints its seed."""
    session.run(sys.executable, "-m", "tests.fuzz_law", *(session.posargs or ["--seconds", "120"]))


@nox.session
def matrix(session: nox.Session) -> None:
    """Random pairs and triples of settings against a loop by hand, for two minutes; `-- --pairs all`: all pairs."""
    session.run(sys.executable, "-m", "tests.matrix", *(session.posargs or ["--seconds", "120"]))


@nox.session
def hostile(session: nox.Session) -> None:
    """Random hostile models, losses, optimizers and sets, judged by runs on 1, 2 and 3 processes; minutes."""
    session.run(sys.executable, "-m", "tests.hostile", *(session.posargs or ["--count", "50"]))


@nox.session
def exhaustive(session: nox.Session) -> None:
    """All families of networks, 10,000 damaged run folders, 1,000 kills, 500 resizes, 42 planted faults; hours."""
    session.run(sys.executable, "-m", "tests.training.families")
    session.run(sys.executable, "-m", "tests.parallel.exact_families")
    session.run(sys.executable, "-m", "tests.damages", "--count", "10000")
    session.run(sys.executable, "-m", "tests.kills", "--kills", "1000")
    session.run(sys.executable, "-m", "tests.kills", "--simultaneous", "50")
    session.run(sys.executable, "-m", "tests.resizes", "--count", "500")
    session.run(sys.executable, "-m", "tests.planted")


@nox.session
def gpu(session: nox.Session) -> None:
    """What needs a CUDA device."""
    _marked(session, "gpu")


@nox.session
def realdata(session: nox.Session) -> None:
    """On the official MNIST and CIFAR-10 in LOCKSTEP_DATA (`python tests/fetch_real_data.py DIR` fills a folder)."""
    _marked(session, "realdata and not gpu")


@nox.session
def bench(session: nox.Session) -> None:
    """One benchmark by name, as `nox -s bench -- order`, and the page of all results; without a name their list."""
    scripts = {path.stem: path for path in sorted(BENCHMARKS.glob("*.py")) if path.stem not in NOT_BENCHMARKS}
    if not session.posargs:
        for name, path in scripts.items():
            print(f"{name:<14} {(ast.get_docstring(ast.parse(path.read_text())) or '').splitlines()[0]}")
        return
    name, *arguments = session.posargs
    if name not in scripts:
        session.error(f"there is no benchmark {name!r}, only {', '.join(scripts)}")
    session.run(sys.executable, str(scripts[name]), *arguments)
    session.run(sys.executable, str(BENCHMARKS / "page.py"))


def _part(session: nox.Session, folder: str) -> None:
    """All tests of a folder that need no special machine."""
    markers = [] if "-m" in session.posargs else ["-m", "not integration and not gpu and not realdata"]
    session.run("pytest", "-rs", folder, *markers, *session.posargs)


def _marked(session: nox.Session, markers: str) -> None:
    session.run("pytest", "-rs", "-m", markers, *session.posargs)
