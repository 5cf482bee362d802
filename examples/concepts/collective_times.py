"""What three ways to add gradients cost by their formulas: a ring, a tree, one parameter server.

python examples/concepts/collective_times.py
"""

from math import ceil, log2

ALPHA = 10e-6  # seconds until a message's first byte arrives
BETA = 100e9 / 8  # bytes a second of one link, in each direction


def ring(ranks: int, size: float) -> float:
    """Seconds: 2 (N - 1) messages of n / N bytes, one after the other."""
    return 2 * (ranks - 1) * (ALPHA + size / ranks / BETA)


def tree(ranks: int, size: float) -> float:
    """Seconds: up and down ceil(log2 N) levels, whole tensors, not cut into pieces."""
    return 2 * ceil(log2(ranks)) * (ALPHA + size / BETA)


def server(ranks: int, size: float) -> float:
    """Seconds: N gradients through the server's one link in, then N copies of the weights through it out."""
    return 2 * (ALPHA + ranks * size / BETA)


if __name__ == "__main__":
    print(f"{'tensor':>16} {'ranks':>6} {'ring ms':>9} {'tree ms':>9} {'server ms':>10}")
    for name, size in (("4 KiB", 4096), ("102 MB", 102.2e6)):
        for ranks in (4, 8, 64):
            ring_ms, tree_ms, server_ms = (1e3 * way(ranks, size) for way in (ring, tree, server))
            print(f"{name:>16} {ranks:>6} {ring_ms:>9.3f} {tree_ms:>9.3f} {server_ms:>10.3f}")
