"""Speed-ups out of nothing: one and the same training, timed in two ways that an unfair table mixes up.

    python examples/why/false_speedups.py     some seconds

Model, hardware and number of processes are equal in every pair. What remains is how it was measured.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

READ_S = 0.004  # what a picture waits for its disk


class Pictures(Dataset[Tensor]):
    """Pictures that come from a slow disk."""

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(READ_S)
        return torch.full((1, 8, 8), float(index))


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def steps(batch: int, images: int) -> Callable[[], None]:
    """An epoch of so many images in batches."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pictures, labels = torch.zeros(batch, 1, 8, 8), torch.zeros(batch, dtype=torch.int64)

    def epoch() -> None:
        for _ in range(images // batch):
            optimizer.zero_grad()
            F.cross_entropy(model(pictures), labels).backward()
            optimizer.step()

    return epoch


def drain(batches: Iterable[Tensor]) -> None:
    for _ in batches:
        pass


def loading(workers: int) -> float:
    """Seconds for an epoch of loading, once the workers are there."""
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: they sleep
    batches = iter(DataLoader(Pictures(), batch_size=16, num_workers=workers))
    next(batches)
    return seconds(lambda: drain(batches))


def main() -> None:
    torch.set_num_threads(1)
    cold, epoch = seconds(steps(16, 16)), steps(16, 16)
    epoch()
    pairs = {
        "first step against a later one": (cold, seconds(epoch)),
        "2 loader workers against 8": (loading(2), loading(8)),
    }
    small, large = steps(16, 12_800), steps(64, 12_800)
    times = [(seconds(small), seconds(large)) for _ in range(5)]
    pairs["batch 16 against batch 64"] = (
        statistics.median(a for a, _ in times),
        statistics.median(b for _, b in times),
    )
    whole, part = steps(64, 12_800 + 3_200), steps(64, 12_800 + 800)
    times = [(seconds(whole), seconds(part)) for _ in range(5)]
    pairs["all evaluated against a quarter"] = tuple(statistics.median(column) for column in zip(*times, strict=True))
    for name, (slow, fast) in pairs.items():
        print(f"{name:<32} {slow * 1e3:8.1f} ms {fast * 1e3:8.1f} ms   x {slow / fast:.2f}")


if __name__ == "__main__":
    main()
