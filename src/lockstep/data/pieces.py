"""How a global batch is cut: which of its samples pass through the model together, and on which rank."""

from dataclasses import dataclass

from lockstep.processes.world import World, share_of


@dataclass(frozen=True)
class Piece:
    """A run of the global batch that this rank takes through the model in one pass."""

    micro: int  # number of the micro-batch, or in exact mode of the slice, that it belongs to: the same on every N
    key: int  # differs for all pieces of a step, over all ranks
    rows: slice  # of the global batch

    @property
    def size(self) -> int:
        """Samples in it; 0 on a rank that has none."""
        return int(self.rows.stop - self.rows.start)


def micro_batches(count: int, accumulate: int, world: World) -> tuple[Piece, ...]:
    """This rank's share of each of `accumulate` micro-batches of a global batch of `count` samples.

    The global batch is cut first and each micro-batch shared out then, so that a micro-batch has the same members on
    any number of ranks: batch statistics over all ranks (`sync_bn`) mean the same on every N.
    """
    pieces = []
    cuts = min(accumulate, count)
    for m in range(cuts):
        micro = share_of(count, m, cuts)
        mine = world.share(micro.stop - micro.start)
        rows = slice(micro.start + mine.start, micro.start + mine.stop)
        pieces.append(Piece(m, m * world.size + world.rank, rows))
    return tuple(pieces)


def slices(count: int, total: int, world: World) -> tuple[Piece, ...]:
    """This rank's slices of a global batch of `count` samples cut into `total`: whole ones, one after the other."""
    cuts = min(total, count)
    return tuple(Piece(v, v, share_of(count, v, cuts)) for v in range(cuts)[world.share(cuts)])
