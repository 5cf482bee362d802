"""`lockstep index`: build the index of a data set in shards, so that a run finds it."""

from dataclasses import dataclass

from lockstep.commands.shared.arguments import one_name, parse
from lockstep.config.fields import Count


@dataclass(frozen=True)
class Indexing:
    """How many shards are read at once."""

    jobs: Count = 0
    """Shards that are read at once (0: one for each core)."""


def main(args: list[str]) -> int:
    """Index every part of a data set: what has no index yet, or has changed since."""
    about = "Build the index of webdataset's tar files. What is killed goes on where it was."
    names, chosen = parse(Indexing(), args, about)
    url = one_name("index", "folder, pattern or address of shards", names, "'photos/train-{000..099}.tar'")
    from lockstep.data.shard_index import build
    from lockstep.data.shards import find_parts
    from lockstep.data.sources import resolve_data_dir
    from lockstep.distributed.output import status
    from lockstep.distributed.proc import cores

    parts, _ = find_parts(f"shards:{url.removeprefix('shards:')}", resolve_data_dir(""))
    for split, shards in parts.items():

        def report(done: int, total: int, split: str = split) -> None:
            status(f"indexing {split}: {done:,} of {total:,} shards")

        index = build(shards, chosen.jobs or cores(), report)
        size = sum(size for _, size, *_ in index.shards) / 1e6
        print(f"{split}: {len(index):,} samples in {len(index.shards):,} shard(s), {size:,.1f} MB; index: {index.path}")
    return 0
