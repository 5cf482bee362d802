"""`lockstep watch`: follow a run from another terminal, or another machine that sees its folder. Imports no torch."""

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lockstep.commands.shared.arguments import one_name, parse
from lockstep.config.fields import require
from lockstep.config.flags import split_arguments
from lockstep.errors import EXIT_FAILURE, UserError
from lockstep.processes.lock import writer
from lockstep.watch.follow import Follower, Story
from lockstep.watch.outside import JOURNAL, look, run_folders
from lockstep.watch.progress import ProgressBar

_RESTART_S = 60.0  # that a run on another machine, whose lock stays, may take to start again after a failure
_WORDS = {
    "killed": "killed: its process is gone and left no end; the same command with --out goes on from its checkpoint",
    "silent": "silent: its last line is old, and whether its process on another machine lives can't be told from here",
}


@dataclass(frozen=True)
class Watching:
    """How to follow."""

    every: float = 1.0
    """Seconds between two looks at the journal."""
    once: bool = False
    """Tell what there is, and end."""

    def __post_init__(self) -> None:
        require(0.05 <= self.every <= 3600, f"--every {self.every:g} is not 0.05 to 3600", "Give seconds, as 1.")


def main(args: list[str]) -> int:
    """Follow a run until it ends."""
    names, rest = split_arguments(args, Watching)
    about = (
        "Follow a run by its journal, until it ends; without RUN the newest one below runs/. Exit code 0: it came "
        "to its end; 1: it stopped, failed or was killed before."
    )
    chosen: Watching = parse(Watching, Watching(), rest, "lockstep watch [RUN]", about)
    folder = Path(one_name("watch", "run folder", names) or _newest())
    if not (folder / JOURNAL).is_file() and writer(folder) not in ("here", "elsewhere"):
        raise UserError(f"{folder} holds no run", "Name a run folder; `lockstep runs` lists them.")
    bar = ProgressBar(0, 1, enabled=True)
    with closing(bar):
        bar.write(f"run folder {folder}")
        return _follow(folder, chosen, bar)


def _newest() -> Path:
    """The run below runs/ that began last, those that run before the others."""
    now = time.time()
    found = [run for folder in run_folders(Path("runs")) if (run := look(folder, now)) is not None]
    if not found:
        raise UserError("watch needs a run folder: there is none below runs/", "As `lockstep watch runs/mine`.")
    return max(found, key=lambda run: (run.state == "running", run.began or 0.0)).folder


def _follow(folder: Path, chosen: Watching, bar: ProgressBar) -> int:
    follower, story = Follower(folder / JOURNAL), Story()
    failed_at, warned = None, False
    while True:
        who = writer(folder)
        gone = who in ("none", "killed")  # before the last look: what it wrote last is then there to read
        news = _news(follower)
        for record in news:
            for line in story.take(record):
                bar.write(line)
        ended = story.last.get("kind") == "end"
        if ended and story.last.get("status") == "completed":
            return 0
        if (shown := story.line()) is not None and not ended:
            bar.show(*shown)
        if who == "elsewhere" and not warned and not news and _state(folder) == "silent":
            bar.write(_WORDS["silent"])
            warned = True
        failed_at = (failed_at or time.monotonic()) if ended else None
        waited = failed_at is not None and time.monotonic() - failed_at > _RESTART_S
        if gone or waited or chosen.once:
            if not ended and gone:
                bar.write(_WORDS["killed"])
            return EXIT_FAILURE if ended or gone else 0
        time.sleep(chosen.every)


def _state(folder: Path) -> str:
    run = look(folder, time.time())
    return run.state if run is not None else ""


def _news(follower: Follower) -> list[dict[str, object]]:
    """The new records; none while the file is not there, as before the first, or can't be read for a moment."""
    try:
        return follower.news()
    except OSError:
        return []
