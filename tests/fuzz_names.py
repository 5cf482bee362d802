"""Names out of files, as a stranger may write them, through every place where one leaves the program.

    python -m tests.fuzz_names [COUNT] [SEED]

Names stand in weights, journals, configs, tables, lock files, scripts and on the disk. A command may refuse them; it
may write nothing elsewhere, show nothing that a terminal obeys, no formula in a CSV file and no tag of theirs in a
page, and end by no error of Python's. `PLACES` lists them all: what a new command shows of a name is added there.
"""

import csv
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lockstep.checkpoint import weights
from lockstep.checkpoint.weights import Card
from lockstep.cli import main
from lockstep.distributed.files import to_json
from tests.commands import reports
from tests.inference.runs import config, leave_a_run
from tests.inference.test_hostile_names import FORMULA, obeyed

PIECES = (
    *("../", "..", "/", "\\", "~", "$(touch escaped)", "`touch escaped`", ";touch escaped;", "CON", "aux", "C:", "a:b"),
    *("\x1b[2J", "\x1b]0;t\x07", "\x9b1m", "\u202e", "\u2066", "\u200f", "\u061c", "\u2028", "\0", "\r", "\n", "\t"),
    *("=", "+", "-", "@", "\uff1d", "|", "'", '"', "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "&lt;"),
    *("{{7*7}}", "%s", "%n", "{0}", "[bold red]", "[/]", "[link=http://x]y[/link]", "$\\frac", "a", "cat", "\u732b"),
    *("\u00e9", "e\u0301", "\udcff", "\udce9", "\ud800", "\U000e0001", "\ufeff", "\u00ad", "\x7f", "\x08", "#", " "),
    *("https://x/", "s3://b"),
)
CPU = ("--nproc", "1", "--device", "cpu", "--workers", "0")
ONCE = ("--epochs", "1", "--image-size", "16", "--model", "digits_net", "--law", "off", *CPU)
Words = tuple[object, ...]


class Names:
    """What a seed makes: names, and below `root` what holds them."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.rng = root, random.Random(seed)
        root.mkdir()
        self.run = leave_a_run(_made(root / "run"))
        self.pictures = self.run / "data/val"

    def name(self) -> str:
        """One that has room in a folder's name once it is escaped."""
        while True:
            text = "".join(self.rng.choices(PIECES, k=self.rng.randint(1, 4)))
            if len(text.encode("utf-8", "surrogatepass")) * 3 < 250:
                return text

    def on_disk(self, ending: str = "") -> str:
        """One as a file system takes it."""
        text = os.fsencode(self.name().replace("/", "_").replace("\0", "0").replace("\ud800", ""))
        return os.fsdecode(text[:100] if text.strip(b".") else b"x" + text) + ending

    def plain(self) -> str:
        """One that UTF-8 can write."""
        return self.name().encode("utf-8", "ignore").decode().replace("\0", "")

    def weights(self, classes: tuple[str, ...] = ()) -> Path:
        """The run's, sealed as anybody can seal them, with names of classes."""
        source, path = self.run / "weights/best.safetensors", self.root / "stranger.safetensors"
        names = classes or tuple({self.name(): None for _ in range(12)})[:4]
        weights.write_sealed(load_file(source), path, replace(Card.read(source), classes=names).to_metadata())
        return path

    def folders(self) -> tuple[Path, Path]:
        """Weights and pictures of the same classes, which are folders' names."""
        classes = tuple(f"{k}{self.on_disk()}" for k in range(4))
        data = self.root / self.on_disk("set")
        for name, folder in zip(classes, sorted(self.pictures.iterdir()), strict=True):
            shutil.copytree(folder, data / name)
        return self.weights(classes), data

    def journal(self) -> Path:
        """A run's folder, with names wherever its config and journal have some."""
        folder, values = self.root / self.on_disk("run"), config(self.run / "data").to_dict()
        values = json.loads(to_json(values))
        values["recipe"], values["data"]["dataset"], values["model"]["model"] = (
            self.name().replace(":", "") for _ in range(3)
        )
        begun = reports.run(0.0, config=values) | {"notes": [self.name()], "devices": [self.name()]}
        records = [
            begun | {"versions": {self.name(): self.name()}, "recipe": self.name()},
            reports.step(1.0, 5), reports.evaluation(2.0, 5, 0), reports.classes(2.0, 5, [self.name() for _ in "abcd"]),
            {"kind": "fault", "time": 3.0, "fault": self.name(), "step": 5, "cause": self.name(), "ranks": [0]},
            {"kind": "law", "message": self.name()}, {"kind": "stop", "time": 3.0, "step": 5, "reason": self.name()},
            reports.end(4.0, 5, status=self.rng.choice([self.name(), "failed"]), error=self.name()),
        ]  # fmt: skip
        shutil.copytree(self.run, folder)
        (folder / "config.json").write_text(json.dumps(values))
        (folder / "journal.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
        return folder

    def state_dict(self, ending: str) -> Path:
        path, made = self.root / f"keys{ending}", {self.plain() or "k": torch.ones(2) for _ in range(3)}
        if ending == ".pt":
            torch.save({**made, **({self.plain(): 3} if self.rng.random() < 0.5 else {})}, path)
        else:
            save_file(made, path)
        return path

    def table(self) -> Path:
        path = self.root / self.on_disk(".csv")
        real = [os.path.relpath(each, self.root) for each in sorted(self.pictures.rglob("*.png"))]
        with path.open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["path", "label", "split"])
            for k in range(6):
                split = self.rng.choice(["train", "val", self.plain()])
                rows.writerow([self.rng.choice([real[k], self.plain()]), self.plain(), split])
        return path

    def broken(self) -> Path:
        folder = _made(self.root / "broken" / self.on_disk("c"))
        (folder / self.on_disk(".png")).write_bytes(b"nothing")
        return folder.parent

    def locked(self) -> Path:
        folder = reports.leave(self.root / self.on_disk("locked"), [reports.run(0.0)])
        for name in ("lock", "lock.json"):
            (folder / name).write_text(json.dumps({"host": self.name(), "pid": 1, "since": self.name()}))
        return folder

    def script(self) -> Path:
        path = self.root / self.on_disk(".py")
        path.write_text(
            "from torch.utils.data import DistributedSampler\n"
            f"x = {self.name()!a}\ndef f(ds):\n    s = DistributedSampler(ds)\n    for e in (1, 2):\n        pass\n"
        )
        return path


# by the place the command line that shows or writes a name there; `out`: where it may write
PLACES: dict[str, Callable[[Names, Path], Words]] = {
    "predict": lambda s, _: ("predict", s.weights(), s.pictures, "--top", 4, *CPU),
    "predict --format csv": lambda s, _: ("predict", s.weights(), s.pictures, "--top", 4, "--format", "csv", *CPU),
    "predict --format jsonl": lambda s, _: ("predict", s.weights(), s.pictures, "--format", "jsonl", *CPU),
    "predict --sort-into": lambda s, o: ("predict", s.weights(), s.pictures, "--sort-into", o / "sorted", *CPU),
    "predict --file": lambda s, o: ("predict", *s.folders(), "--format", "csv", "--file", o / "x.csv", *CPU),
    "predict, a file that is not there": lambda s, _: ("predict", s.run, s.root / s.on_disk(".png"), *CPU),
    "predict, a broken picture": lambda s, _: ("predict", s.run, s.broken(), *CPU),
    "export --to onnx": lambda s, o: ("export", s.weights(), "--to", "onnx", "--out", o / "x.onnx"),
    "export --to safetensors": lambda s, o: ("export", s.weights(), "--to", "safetensors", "--out", o / "x.st"),
    "export --to torch": lambda s, o: ("export", s.weights(), "--to", "torch", "--out", o / "x.pt"),
    "eval": lambda s, _: ("eval", *_data(s.folders()), *CPU),
    "eval, other classes": lambda s, _: ("eval", s.weights(), "--data", s.folders()[1], *CPU),
    "eval --report csv": lambda s, o: ("eval", *_data(s.folders()), "--report", o / "x.csv", *CPU),
    "eval --report json": lambda s, o: ("eval", *_data(s.folders()), "--report", o / "x.json", *CPU),
    "eval of a run": lambda s, _: ("eval", s.journal(), *CPU),
    "show": lambda s, _: ("show", s.journal()),
    "show --toml": lambda s, _: ("show", s.journal(), "--toml"),
    "runs": lambda s, _: ("runs", s.journal().parent),
    "runs --json": lambda s, _: ("runs", s.journal().parent, "--json"),
    "diff": lambda s, _: ("diff", s.journal(), s.run),
    "diff --json": lambda s, _: ("diff", s.journal(), s.run, "--json"),
    "watch": lambda s, _: ("watch", s.journal(), "--once"),
    "watch, a lock": lambda s, _: ("watch", s.locked(), "--once"),
    "report": lambda s, o: ("report", s.journal(), "--no-pictures", "--out", o / "x.html"),
    "report of two": lambda s, o: ("report", s.journal(), s.run, "--out", o / "x.html"),
    "report --json": lambda s, o: ("report", s.journal(), "--json", o / "x.json", "--out", o / "x.html"),
    "preview": lambda s, o: ("preview", s.journal(), "--out", o / "x.png"),
    "train --config": lambda s, o: ("train", "--config", s.journal() / "config.json", "--out", o / "run", *CPU),
    "train --init, safetensors": lambda s, o: ("train", "digits", "--init", s.state_dict(".safetensors"), *_once(o)),
    "train --init, torch": lambda s, o: ("train", "digits", "--init", s.state_dict(".pt"), *_once(o)),
    "train, a table": lambda s, o: ("train", "folder", "--dataset", f"table:{s.table()}", *_once(o)),
    "train, folders": lambda s, o: ("train", "folder", "--data-dir", s.folders()[1], "--val-fraction", 0.3, *_once(o)),
    "launch-script": lambda s, _: ("launch-script", "slurm", "--config", s.journal() / "config.json"),
    "resize": lambda s, _: ("resize", s.journal(), "--nproc", 2),
    "lint": lambda s, _: ("lint", s.script()),
    "lint --format json": lambda s, _: ("lint", s.script(), "--format", "json"),
    "a recipe": lambda s, _: ("train", s.name().replace(":", "") or "x"),
    "a model": lambda s, o: ("train", "digits", "--model", s.name().replace(":", "") or "x", "--out", o / "run"),
    "a flag": lambda s, _: ("train", "digits", f"--{s.name()}"),
}


def _data(weights_and_folder: tuple[Path, Path]) -> Words:
    return weights_and_folder[0], "--data", weights_and_folder[1]


def _once(out: Path) -> Words:
    return *ONCE, "--out", out / "run"


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


@contextmanager
def written_to(root: Path) -> Iterator[tuple[Path, Path]]:
    """Within, standard output and error are files, strict about UTF-8 as a terminal's."""
    kept, paths = (sys.stdout, sys.stderr), (root / "stdout", root / "stderr")
    with (
        paths[0].open("w", encoding="utf-8") as out,
        paths[1].open("w", encoding="utf-8", errors="backslashreplace") as err,
    ):
        sys.stdout, sys.stderr = out, err
        try:
            yield paths
        finally:
            sys.stdout, sys.stderr = kept


def problems(place: str, seed: int) -> list[str]:
    """What is wrong with a place by the names of a seed."""
    with tempfile.TemporaryDirectory() as folder:
        return list(_problems(place, Names(Path(folder).resolve() / "names", seed)))


def _problems(place: str, names: Names) -> Iterator[str]:
    out, here = _made(names.root / "out"), Path.cwd()
    words = [str(word) for word in PLACES[place](names, out)]
    os.chdir(_made(names.root / "cwd"))
    before, raw, code = {*names.root.parent.rglob("*")}, "", 0
    try:
        with written_to(names.root.parent) as texts:
            try:
                main(words)
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                raw = traceback.format_exc()
    finally:
        os.chdir(here)
    shown = [text.read_bytes().decode("utf-8", "surrogateescape") for text in texts]
    if raw or code not in (0, 1, 2) or "Traceback" in shown[1]:
        yield f"exit code {code}: {raw or shown[1][-1000:]}"
    made = {*names.root.parent.rglob("*")} - before - {*texts}
    if outside := [each for each in made if not each.is_relative_to(out) and "__pycache__" not in each.parts]:
        yield f"written elsewhere: {outside}"
    written = (path for path in made if path.suffix in (".csv", ".json", ".html"))
    files = {path: path.read_text("utf-8", "surrogateescape") for path in written}
    for where, text in (("stdout", shown[0]), ("stderr", shown[1]), *files.items()):
        if marks := obeyed(text) - {"\n", "\r", "\t"} - ({"\ufeff"} if str(where).endswith(".csv") else set()):
            yield f"{where} has {marks}"
        if str(where).endswith(".csv") or (where == "stdout" and "csv" in place):
            cells = [each for row in csv.reader(io.StringIO(text)) for each in row]
            if formulas := [each for each in cells if FORMULA.match(each) and not _is_number(each)]:
                yield f"{where} has the formulas {formulas}"
        if re.search(r"<script>alert|<img src=x", text) and str(where).endswith(".html"):
            yield f"{where} has a name's tag"


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        return bool(str(float(text)))
    return False


if __name__ == "__main__":
    count, first = [*map(int, sys.argv[1:]), *(10, 0)[len(sys.argv) - 1 :]]
    torch.set_num_threads(1)
    found = 0
    for number in range(first, first + count):
        for each in PLACES:
            for line in problems(each, number):
                found += 1
                print(f"{each}, seed {number}: {line}")
    print(f"{len(PLACES)} places by {count} seed(s) from {first} on: {found} problem(s)")
    sys.exit(bool(found))
