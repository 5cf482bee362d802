"""One page of all results, docs/benchmarks.md, and docs/zh/benchmarks.md in Chinese, out of benchmarks/results/*.json.

    python benchmarks/page.py [--results DIR] [--out FILE]

A result file holds its tables under the key "tables" (common.table) and where they were taken under "environment".
Results of one environment stand under it, in the order of ORDER. The Chinese words are page_zh.toml's, and their page
goes to zh/ beside FILE.
"""

import argparse
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import RESULTS, cell

OUT = Path(__file__).parents[1] / "docs" / "benchmarks.md"
CHINESE = Path(__file__).with_name("page_zh.toml")
ORDER = (
    "against",
    "overhead",
    "agreement",
    "throughput",
    "data",
    "photos",
    "order",
    "features",
    "exact",
    "law",
    "checkpoint",
    "forecast",
    "slow_link",
    "cifar10_speed",
    "rare",
    "small_sets",
    "gpu",
)
AIMS = {  # what a result was meant to be, and why it is not where it is not
    "overhead": "Aims: TrainStep at most 1.05 times the loop by hand, the whole training loop at most 1.2 times (both "
    "missed). TrainStep leaves out what torch's Python does around a backward pass and an update where nobody hears "
    "of it, which makes up for a part of the keys of draws, the seeds of shards, the loss in float64 and 15 checks. "
    "What the loop adds is "
    "order, loading, the ledger, a record in the journal every ten steps and the question whether to stop. It is "
    "constant: a step of the digits recipe, the smallest, takes a millisecond.",
    "agreement": "Speeds are compared of what trains the same experiment, and of nothing else.",
    "throughput": "Aims: first in every row, and on MNIST 1.2 times the tutorials' way in fp32 and 1.6 times in bf16. "
    "Much of the lead on MNIST is memory: Lockstep keeps what a step frees, where malloc gives large "
    "blocks back and maps them anew. Whether it does depends on how a process's heap happens to lie, so "
    "one raw loop can be faster than the same loop beside it (1x2 fp32). 1.6 in bf16 is missed: "
    "Lockstep's own step waits for data 1.5 % of its time (`lockstep compare mnist`), and the network, "
    "which is left, is everybody's.",
    "against": "The older tree drew dropout and its like by rank, so that they changed with the number of processes; "
    "now they are keyed by sample. Aims: four "
    "processes at most 1.3 times as long to their first step as one, a checkpoint of ResNet-50 with "
    "AdamW at most 50 ms, exact mode 1.05 times DDP, the step 1.05 times the loop by hand and the whole "
    "loop 1.2 times.",
    "data": "Aim: 10 times torchvision's way, and no slower than a DataLoader on a folder.",
    "photos": "Aims: from the second epoch on at least 50 times as fast as stored photos of 12 megapixels, and 3 "
    "times as a DataLoader on 500x375; a first epoch with the cache at most 1.1 times as long as one without it.",
    "exact": "Aim: at most 1.05. The integers are added in memory that both processes map: gloo moves 8-byte integers "
    "about three times as slowly as 4-byte floats.",
    "law": "Aim: less than 2 % of a run of 1,000 steps. A check takes the batch again, in parts, and now and then once "
    "more, to see what rounding does; the first one looks at threads and at a single process besides.",
    "forecast": "Aim: within 15 %.",
    "slow_link": "What each variant gives up is in [slow links](slow-links.md).",
    "small_sets": "Aim: the defaults end within 3 points of the best of the sweep. With 300 to 2,500 pictures to "
    "validate on, one to three points are chance.",
    "cifar10_speed": "Aim: a mean of 94 % within 8 minutes on two CPU cores. Two seeds can't tell 93.97 % from "
    "it: the standard error of their mean is 0.09 points.",
}
HEAD = """# Benchmarks

Each table was made by one command, named under it; the figures with their environment are in
[benchmarks/results](../benchmarks/results). `python benchmarks/page.py` writes this page.

Sides that train have the same initial weights, order of samples, batch, optimizer and number of threads, and their
weights are compared before the timing. Sides take turns, in rounds, and a ratio is the median of the rounds' ratios
with its 95 % bootstrap interval in brackets, because absolute times on shared machines are only a hint. The noise
floor is a side against itself, measured in the same way: a ratio inside it says that no difference was seen.
"""


@dataclass(frozen=True)
class Words:
    """What a language's page says around the figures, and where it lies. The names are those of page_zh.toml."""

    head: str = HEAD
    aims: Mapping[str, str] = field(default_factory=lambda: AIMS)
    texts: Mapping[str, str] = field(default_factory=dict)
    """Titles, columns, notes and cells: English with {} for what varies, and this language's."""
    environment: str = "Environment not recorded"
    peers: str = " With {}."
    stop: str = ", "
    end: str = "."
    root: str = ".."
    """The tree's root, from the page's folder."""

    def told(self, text: str) -> str:
        """A text in this language, by the longest of `texts` that fits it; one that none fits as it is."""
        for english in sorted(self.texts, key=len, reverse=True):
            if found := re.fullmatch("(.+?)".join(map(re.escape, english.split("{}"))), text):
                return self.texts[english].format(*found.groups())
        return text


ENGLISH = Words()


def chinese() -> Words:
    return Words(root="../..", **tomllib.loads(CHINESE.read_text(encoding="utf-8")))


def markdown(found: Mapping[str, Any], words: Words = ENGLISH) -> str:
    """A table (common.table) as Markdown, with its notes."""
    columns = found["columns"]
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *found["rows"]]
    text = "\n".join(
        "| " + " | ".join(words.told(cell(value)).replace("|", "\\|") for value in line) + " |" for line in lines
    )
    return "\n\n".join([f"### {words.told(found['title'])}", text, *map(words.told, found["notes"])])


def place(stem: str) -> tuple[int, str]:
    """Results stand in the order of ORDER, by the beginning of their names; others come last."""
    return next((i for i, name in enumerate(ORDER) if stem.startswith(name)), len(ORDER)), stem


def described(environment: Mapping[str, Any], words: Words = ENGLISH) -> str:
    """An environment as a line."""
    parts = [environment.get("cpu", "")]
    if environment.get("device", "cpu") != "cpu":
        parts.append(environment["device"])
    parts.append(words.told(f"{environment['cores']} cores") if "cores" in environment else "")
    names = [name for name in environment if name not in ("cpu", "device", "cores")]
    return words.stop.join(filter(None, [*parts, *(f"{name} {environment[name]}" for name in names)]))


def script(stem: str) -> str:
    """The script that makes a result: the file whose name the result's begins with."""
    names = sorted((path.stem for path in Path(__file__).parent.glob("*.py")), key=len, reverse=True)
    return next((name for name in names if stem.replace("-", "_").startswith(name)), stem)


def page(results: Mapping[str, Mapping[str, Any]], words: Words = ENGLISH) -> str:
    """The page of results by file name (without .json)."""
    places: dict[str, list[str]] = {}
    for stem in sorted(results, key=place):
        places.setdefault(described(results[stem].get("environment", {}), words), []).append(stem)
    parts = [words.head]
    for environment, stems in places.items():
        parts.append(f"## {environment or words.environment}\n")
        for stem in stems:
            parts += [markdown(each, words) + "\n" for each in results[stem]["tables"]]
            parts += [words.aims[stem] + "\n"] if stem in words.aims else []
            peers = words.stop.join(f"{name} {version}" for name, version in results[stem].get("peers", {}).items())
            versions = words.peers.format(peers) if peers else ""
            file = f"[{stem}.json]({words.root}/benchmarks/results/{stem}.json)"
            parts.append(f"`python benchmarks/{script(stem)}.py`{words.stop}{file}{words.end}{versions}\n")
    return "\n".join(parts)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """All results that have tables; says which have none."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    for stem in [stem for stem, result in found.items() if "tables" not in result]:
        print(f"{stem}.json has no tables: left out")
        del found[stem]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    results = read(args.results)
    for out, words in ((args.out, ENGLISH), (args.out.parent / "zh" / args.out.name, chinese())):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page(results, words), encoding="utf-8")
        print(f"written to {out}")


if __name__ == "__main__":
    main()
