"""What sending less gives on a link of 100 Mbit/s: ResNet-18 on CIFAR-10, two hosts, one thread each.

    python benchmarks/slow_link.py --data-dir DIR                        all variants, about 20 minutes on two cores
    python benchmarks/slow_link.py --data-dir DIR --variants bf16        those whose name holds the word
    python benchmarks/slow_link.py --quick                               try it out: digits, a minute; writes nothing

The hosts are two network namespaces, both ends of the link behind a token bucket: that needs root, `ip` and `tc`. Every
variant trains the same 8,192 images in the same 64 steps, and evaluates once. Milliseconds a step are the median over
the journal's windows of eight steps, but the first. Bytes a step come from the link's own counters, read when the
journal says that step 16 and step 64 are done: with all headers, without the start and the evaluation. Variants
that are measured again replace their rows in results/slow_link.json.
"""

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import RESULTS, print_table, table, write
from forecast import Commands, Place, places
from namespaces import missing

VARIANTS: dict[str, tuple[str, ...]] = {
    "plain DDP": (),
    "--compress fp16": ("--compress", "fp16"),
    "--compress bf16": ("--compress", "bf16"),
}
FULL = ("cifar10", "--batch-size", "128", "--fraction", "0.164", "--warmup-epochs", "0.2", "--precision", "bf16")
QUICK = ("digits", "--batch-size", "16", "--fraction", "0.72", "--warmup-epochs", "0.2")
MBIT = 100  # of the link
STEPS, EVERY, FIRST = 64, 8, 16  # of a run; of a window; from where bytes are counted
SAME = (
    *("--epochs", "1", "--drop-last", "--nproc", "1", "--threads", "1", "--device", "cpu", "--checkpoint-every", "0"),
    *("--log-every", str(EVERY)),
)
_PATIENCE_S = 900.0  # for one variant
_POLL_S = 0.02  # a step's gradients begin to move long after the record of the step before it


def records(journal: Path) -> list[dict[str, Any]]:
    """The journal's whole lines so far."""
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True) if journal.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def measure(where: Sequence[Place], task: Sequence[str], flags: Sequence[str], folder: Path) -> dict[str, Any]:
    """One variant's run: step times, bytes by rank, accuracy."""
    out = folder / "-".join(["run", *flags])
    counts: dict[int, list[int]] = {}
    deadline = time.monotonic() + _PATIENCE_S
    with Commands(where, "train", *task, *SAME, *flags, "--out", str(out)) as commands:
        while STEPS not in counts:
            if time.monotonic() > deadline or not commands.running:
                raise RuntimeError(f"the run did not come to step {STEPS}: {commands.printed()}")
            time.sleep(_POLL_S)
            reached = max((r["step"] for r in records(out / "journal.jsonl") if r["kind"] == "step"), default=0)
            if reached in (FIRST, STEPS) and reached not in counts:
                counts[reached] = [place.host.sent_bytes for place in where if place.host]
        commands.wait()
    return row(flags, records(out / "journal.jsonl"), counts)


def row(flags: Sequence[str], journal: list[dict[str, Any]], counts: dict[int, list[int]]) -> dict[str, Any]:
    """What is kept of a run."""
    batch = journal[0]["config"]["batch_size"]
    windows = [batch / r["images_per_s"] * 1e3 for r in journal if r["kind"] == "step"][1:]
    per_step = [(last - first) / (STEPS - FIRST) for first, last in zip(counts[FIRST], counts[STEPS], strict=True)]
    end = journal[-1]
    return {
        "flags": list(flags),
        "step_ms": statistics.median(windows),
        "windows_ms": windows,
        "sent_bytes_per_step": per_step,  # by rank
        "received_bytes_per_step": per_step[::-1],
        "top1": end["top1"],
        "loss": end["loss"],
        "samples": end["samples"],
        "seconds": end["seconds"],
        "ledger_sha256": end["ledger_sha256"],
    }


def tabled(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All variants beside plain DDP."""
    plain = rows.get("plain DDP")
    columns = ["variant", "ms a step", "of plain", "MB a step, sent by rank 0 / 1", "of plain", "top-1", "loss"]
    cells = []
    for name, found in rows.items():
        megabytes = [count / 1e6 for count in found["sent_bytes_per_step"]]
        cells.append(
            [
                name,
                f"{found['step_ms']:,.0f}",
                f"{found['step_ms'] / plain['step_ms']:.2f}" if plain else None,
                " / ".join(f"{count:.3g}" for count in megabytes),
                f"{sum(megabytes) / sum(plain['sent_bytes_per_step']) * 1e6:.3f}" if plain else None,
                f"{found['top1']:.2%}",
                f"{found['loss']:.3f}",
            ]
        )
    samples = ", ".join(sorted({f"{found['samples']:,}" for found in rows.values()}))
    notes = [
        f"One run each of {STEPS} steps ({samples} images), seed 0; 2 processes of one thread on 2 hosts. Step: median "
        f"window of {EVERY} but the first. Bytes: the link's counters from step {FIRST} to {STEPS}, with headers; what "
        "one rank sends the other receives.",
        "Accuracy after so few steps says that a variant learns, not how far it gets.",
    ]
    return table("A link of 100 Mbit/s: send less, or less often", columns, cells, notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default="", help="a word that the variant's name holds (default: all)")
    parser.add_argument("--quick", action="store_true", help="digits instead of CIFAR-10; keeps no result")
    parser.add_argument("--data-dir", default="", help="default: $LOCKSTEP_DATA, else ./data")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is open is closed
    if lacking := missing():
        sys.exit(f"not measured: {lacking}")
    chosen = {name: flags for name, flags in VARIANTS.items() if args.variants in name}
    if not chosen:
        sys.exit(f"no variant has {args.variants!r} in its name; there are {', '.join(VARIANTS)}")
    task = QUICK if args.quick else FULL
    place = ["--data-dir", str(Path(args.data_dir).absolute())] if args.data_dir else []
    path = RESULTS / "slow_link.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() and not args.quick else {}
    for name, flags in chosen.items():
        with ExitStack() as stack:
            where = stack.enter_context(places(MBIT))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-slow-link-")))
            found = rows[name] = measure(where, [*task, *place], flags, folder)
        print(f"{name}: {found['step_ms']:,.0f} ms a step, top-1 {found['top1']:.2%}", flush=True)
        rows = {each: rows[each] for each in VARIANTS if each in rows}
        if not args.quick:
            kept = {"task": task, "link_mbit": MBIT, "rows": rows, "tables": [tabled(rows)]}
            write("slow_link", kept)
    print_table(tabled(rows))


if __name__ == "__main__":
    main()
