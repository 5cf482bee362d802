"""Which samples an epoch over shards gives: on 1, 2 and 3 processes, and stopped on 2 and gone on with on 3.

    python benchmarks/ledgers.py [--samples 1003] [--batch 24] [--stop 17] [--workers 2]

Beside Lockstep: webdataset, LitData and Streaming as their own pages set them up, those that are installed. An epoch is
read by real processes; each side keeps and takes back its state in its own words. Of each side: how many samples an
epoch of N processes gives twice and how many never, whether each step's global batch is the same on every N, and what
the epoch that went on with another number of processes repeated and lost. Prints its table, writes no file.
"""

import argparse
import io
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from common import print_table, table
from PIL import Image
from tests.ranks import RankFailed, run_ranks
from torch.utils.data import DataLoader

from lockstep import World

Ids = list[list[int]]  # of a rank: the samples of each step
EACH = 50  # samples in a shard


def _jpeg() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    return file.getvalue()


# ---- Each side writes its files, and gives a rank's batches from its state on, and what makes its state after them.


def write_tar(folder: Path, samples: int) -> None:
    """Tar files, as webdataset writes them."""
    import webdataset

    picture = _jpeg()
    for split, count in (("train", samples), ("val", 2)):
        with webdataset.ShardWriter(str(folder / f"{split}-%04d.tar"), maxcount=EACH, encoder=False, verbose=0) as out:
            for k in range(count):
                out.write({"__key__": f"{k:08}", "jpg": picture, "cls": str(k).encode()})


def lockstep(world: World, folder: Path, batch: int, workers: int, state: Any) -> tuple[Iterator[list[int]], Any]:
    import lockstep as ls

    loader, _ = ls.loaders(f"shards:{folder}", world, batch_size=batch, seed=0, workers=workers)
    done = int(state or 0)
    return (batch.ids.tolist() for batch in loader.epoch(0, done)), lambda steps: done + steps


def _label(sample: dict[str, Any]) -> tuple[int]:
    return (int(sample["cls"]),)


def webdataset(world: World, folder: Path, batch: int, workers: int, state: Any) -> tuple[Iterator[list[int]], Any]:
    """It has no state: the epoch is begun again."""
    import webdataset

    files = sorted(map(str, folder.glob("train-*.tar")))
    found = webdataset.WebDataset(files, shardshuffle=len(files), nodesplitter=webdataset.split_by_node, seed=0)
    found = found.shuffle(100, seed=0).map(_label).batched(batch // world.size)
    loader = DataLoader(found, batch_size=None, num_workers=workers)
    return ([int(k) for k in ids] for (ids,) in islice(loader, int(state or 0), None)), lambda _: 0


def webdataset_skipping(world: World, folder: Path, batch: int, workers: int, state: Any) -> tuple[Any, Any]:
    """As many batches of each process are passed over as steps are done."""
    found, _ = webdataset(world, folder, batch, workers, state)
    return found, lambda steps: int(state or 0) + steps


def write_litdata(folder: Path, samples: int) -> None:
    import litdata

    writer = litdata.streaming.writer.BinaryWriter(str(folder), chunk_size=EACH)
    for k in range(samples):
        writer[k] = k
    writer.done()
    writer.merge()


def litdata(world: World, folder: Path, batch: int, workers: int, state: Any) -> tuple[Iterator[list[int]], Any]:
    import litdata

    found = litdata.StreamingDataset(str(folder), shuffle=True, seed=0)
    loader = litdata.StreamingDataLoader(found, batch_size=batch // world.size, num_workers=workers)
    if state is not None:
        loader.load_state_dict(state)
    return (ids.tolist() for ids in loader), lambda _: loader.state_dict()


def write_streaming(folder: Path, samples: int) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"id": "int"}, size_limit=EACH * 20) as out:
        for k in range(samples):
            out.write({"id": k})


def streaming(world: World, folder: Path, batch: int, workers: int, state: Any) -> tuple[Iterator[list[int]], Any]:
    from streaming import StreamingDataLoader, StreamingDataset

    each = batch // world.size
    found = StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=0, batch_size=each, num_canonical_nodes=1)
    loader = StreamingDataLoader(found, batch_size=each, num_workers=workers)
    if state is not None:
        loader.load_state_dict(state)
    return (batch["id"].tolist() for batch in loader), lambda _: loader.state_dict()


SIDES: dict[str, tuple[Callable[[Path, int], None], Callable[..., tuple[Iterator[list[int]], Any]]]] = {
    "lockstep": (write_tar, lockstep),
    "webdataset, begun again": (write_tar, webdataset),
    "webdataset, batches skipped": (write_tar, webdataset_skipping),
    "litdata": (write_litdata, litdata),
    "streaming": (write_streaming, streaming),
}


def part(world: World, name: str, folder: Path, batch: int, workers: int, state: Any, stop: int) -> tuple[Ids, Any]:
    """On a rank: the samples of at most `stop` steps, and the state after them."""
    batches, keep = SIDES[name][1](world, folder, batch, workers, state)
    ids = list(islice(batches, stop))
    return ids, keep(len(ids))


def together(parts: list[tuple[Ids, Any]]) -> tuple[list[tuple[int, ...]], str]:
    """The global batch of each step, and how many steps the ranks differ by, in words."""
    steps = [len(ids) for ids, _ in parts]
    batches = [
        tuple(sorted(k for ids, _ in parts for k in (ids[n] if n < len(ids) else ()))) for n in range(max(steps))
    ]
    return batches, "" if len(set(steps)) == 1 else f"ranks have {min(steps)} to {max(steps)} steps"


def counted(batches: list[tuple[int, ...]], samples: int) -> str:
    """How many samples come again, and how many never."""
    times = Counter(k for ids in batches for k in ids)
    return f"{sum(times.values()) - len(times)} / {samples - len(times)}"


def same(epochs: list[list[tuple[int, ...]]]) -> str:
    """How many steps have the same global batch in all epochs."""
    number = sum(len({*batches}) == 1 for batches in zip(*epochs, strict=False))
    return f"{number} of {max(map(len, epochs))}"


def measure(name: str, samples: int, batch: int, stop: int, workers: int) -> list[str]:
    """A side's row."""
    with tempfile.TemporaryDirectory(prefix="lockstep-ledgers-") as place:
        folder = Path(place, "set")
        folder.mkdir()
        os.environ["XDG_CACHE_HOME"] = place
        SIDES[name][0](folder, samples)

        def run(ranks: int, state: Any, steps: int) -> list[tuple[Ids, Any]]:
            return run_ranks(part, ranks, name, folder, batch, workers, state, steps, timeout=240)

        row, notes, epochs = [name], list[str](), []
        for ranks in (1, 2, 3):
            batches, note = together(run(ranks, None, 10**9))
            epochs.append(batches)
            row.append(counted(batches, samples))
            notes += [f"N = {ranks}: {note}"] if note else []
        row.append(same(epochs))
        first = run(2, None, stop)
        try:
            second, note = together(run(3, first[0][1], 10**9))
            whole = together(first)[0] + second
            row += [counted(whole, samples), same([epochs[0], whole])]
            notes += [f"going on: {note}"] if note else []
        except RankFailed as error:
            row += ["refused", str(error).strip().splitlines()[-1][:100]]
        return [*row, "; ".join(notes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1003)
    parser.add_argument("--batch", type=int, default=24, help="of all processes together")
    parser.add_argument("--stop", type=int, default=17, help="steps on 2 processes, before 3 go on")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(SIDES), choices=list(SIDES))
    args = parser.parse_args()
    assert args.batch % math.lcm(1, 2, 3) == 0, "a batch that three numbers of processes share"
    rows = []
    for name in args.only:
        try:
            rows.append(measure(name, args.samples, args.batch, args.stop, args.workers))
        except ModuleNotFoundError as missing:
            print(f"{name}: not measured: {missing}")
    columns = ["side", "N = 1", "N = 2", "N = 3", "same batches", "2 -> 3", "same then", ""]
    notes = [
        f"{args.samples:,} samples, shards of {EACH}, global batch {args.batch}, {args.workers} workers; "
        f"stopped after {args.stop} steps. Samples that come again / that never come."
    ]
    print_table(table("The samples of one epoch", columns, rows, notes))


if __name__ == "__main__":
    main()
