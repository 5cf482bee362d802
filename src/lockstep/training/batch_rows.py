"""Which rows of a global batch a part of it has, and how ranks exchange them."""

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed.world import shard_of

Rows = tuple[int, int, int]  # the number of a micro-batch, and rows (start, stop) of the global batch


def micro_batches(ranges: list[list[tuple[int, int]]]) -> list[Rows]:
    """The rows of the whole micro-batches."""
    return [(i, shards[0][0], shards[-1][1]) for i, shards in enumerate(zip(*ranges, strict=True))]


def moved_boundaries(ranges: list[list[tuple[int, int]]], group: int) -> list[list[tuple[int, int]]]:
    """[ranks][shards] of other boundaries, where shares are large enough, each taken by the next rank."""
    ranks, found = len(ranges), []
    for shards in zip(*ranges, strict=True):
        ends = [shards[0][0], *(stop for _, stop in shards)]
        smallest = min(b - a for a, b in pairwise(ends)) // group
        by = max(smallest // 4, int(smallest >= 3)) * group
        inner = [end + (by if k % 2 else -by) for k, end in enumerate(ends[1:-1], 1)]
        found.append([*zip([ends[0], *inner], [*inner, ends[-1]], strict=True)])
    return [[shards[(rank + 1) % ranks] for shards in found] for rank in range(ranks)]


def cut(start: int, stop: int, group: int, number: int, single: bool) -> list[tuple[int, int]]:
    """Rows (start, stop) in so many parts, unlike processes' shares; none is empty.

    `single`: a single group of samples by itself too, as a process may have one; else the last part is larger. Of
    three the middle one is half, so that two ranks are ready at the same time.
    """
    groups = -(-(stop - start) // group)
    rest = min(1 if single else max(2, groups // 16), groups - 1)
    parts = [shard_of(groups - rest, k, number) for k in range(number)]
    if number == 3:
        quarters = [shard_of(groups - rest, k, 4) for k in range(4)]
        parts = [quarters[0], slice(quarters[1].start, quarters[2].stop), quarters[3]]
    last = slice(groups - rest if single else parts.pop().start, groups)
    return [(start + p.start * group, min(start + p.stop * group, stop)) for p in (*parts, last) if p.start < p.stop]


def all_rows(mine: Tensor, ranks: int) -> Tensor:
    """The rows [k, n] of every rank, [ranks k, n], by the host."""
    values = mine.double() if mine.is_floating_point() else mine.long()
    found = [torch.empty_like(values) for _ in range(ranks)]
    dist.all_gather(found, values)
    return torch.cat(found).to(mine.dtype)


def exchange(values: Tensor, have: list[list[tuple[int, int]]], want: list[list[tuple[int, int]]], rank: int) -> Tensor:
    """The rows of a global batch that this rank wants, from the ranks that have them; all call it together.

    Args:
        values: [b, ...], the rows that this rank has, in the order of its ranges.
        have, want: [ranks][ranges] of rows (start, stop).
    """

    def common(rows: tuple[int, int], others: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        for start, stop in others:
            if max(rows[0], start) < min(rows[1], stop):
                yield max(rows[0], start), min(rows[1], stop)

    operations, received, first = [], dict[int, Tensor](), 0
    for start, stop in have[rank]:
        for other in range(len(have)):
            for a, b in common((start, stop), want[other]):
                part = values[first + a - start : first + b - start].contiguous()
                if other == rank:
                    received[a] = part
                else:
                    operations.append(dist.P2POp(dist.isend, part, other))
        first += stop - start
    for other in range(len(have)):
        for rows in have[other]:
            for a, b in common(rows, want[rank]) if other != rank else ():
                received[a] = values.new_empty(b - a, *values.shape[1:])
                operations.append(dist.P2POp(dist.irecv, received[a], other))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return torch.cat([values[:0], *(received[a] for a in sorted(received))])
