"""How a global batch is cut: which of its samples pass through the model together, and on which rank."""

from dataclasses import dataclass
from functools import cached_property

from lockstep.processes.world import World, share_of


@dataclass(frozen=True)
class Piece:
    """A run of the global batch that this rank takes through the model in one pass."""

    micro: int  # number of the micro-batch, or in exact mode of the slice, that it belongs to: the same on every N
    key: int  # differs for all pieces of a step, over all ranks
    rows: slice  # of the global batch
    members: int  # samples of that micro-batch, over all ranks

    @cached_property  # asked several times a step
    def size(self) -> int:
        """Samples in it; 0 on a rank that has none."""
        return int(self.rows.stop - self.rows.start)


def micro_batches(count: int, accumulate: int, world: World, group: int = 1) -> tuple[Piece, ...]:
    """This rank's share of each of `accumulate` micro-batches of a global batch of `count` samples.

    The global batch is cut first and each micro-batch shared out then, so that a micro-batch has the same members on
    any number of ranks: batch statistics over all ranks (`--batch-norm global`) mean the same on every N. It is cut
    between groups of `group` consecutive samples alone, of which the last may be a short one.
    """
    pieces = []
    groups = -(-count // group)
    cuts = min(accumulate, groups)
    for m in range(cuts):
        micro = share_of(groups, m, cuts)
        mine = world.share(micro.stop - micro.start)
        start, stop = micro.start + mine.start, micro.start + mine.stop
        rows = slice(min(start * group, count), min(stop * group, count))
        members = min(micro.stop * group, count) - micro.start * group
        pieces.append(Piece(m, m * world.size + world.rank, rows, members))
    return tuple(pieces)


def slices(count: int, total: int, world: World, level: bool = False) -> tuple[Piece, ...]:
    """This rank's slices of a global batch of `count` samples cut into `total`: whole ones, one after the other.

    `level`: as many on every rank, by one without a sample where others have one more.
    """
    cuts = min(total, count)
    mine = ((v, share_of(count, v, cuts)) for v in range(cuts)[world.share(cuts)])
    pieces = [Piece(v, v, rows, rows.stop - rows.start) for v, rows in mine]
    if level and len(pieces) < -(-cuts // world.size):
        pieces.append(Piece(total, total + world.rank, slice(count, count), 0))
    return tuple(pieces)
