"""What some of lint's faults cost on the digits: one fault at a time, everything else equal, five seeds.

    python examples/lint/costs.py
    python examples/lint/costs.py --seeds 2

A network of two layers with batch norm and dropout, 900 digits to train on and 896 to test. Seconds on any CPU.
"""

import argparse
import functools
from collections.abc import Callable
from importlib.resources import files

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TRAIN, TEST, BATCH, EPOCHS = 900, 896, 64, 10  # batch norm wants no last batch of one
Data = tuple[Tensor, Tensor]  # float [n, 64], about 0 to 1; int64 [n]


def digits() -> tuple[Data, Data]:
    """The bundled digits, in an order of their own: to train on, and to test."""
    raw = b"".join((files("lockstep.data") / "digits" / f"{part}.bin").read_bytes() for part in ("train", "test"))
    records = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, 65)  # one byte of label, 64 of pixels
    records = records[torch.randperm(len(records), generator=torch.Generator().manual_seed(0))]
    images, labels = records[:, 1:].double() / 255, records[:, 0].long()
    return (images[:TRAIN], labels[:TRAIN]), (images[TRAIN : TRAIN + TEST], labels[TRAIN : TRAIN + TEST])


def normalised(images: Tensor) -> Tensor:
    """Mean 0 and spread 1."""
    return (images - 0.3058) / 0.3761


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)
    ).double()


def train(
    data: Data, seed: int, *, batch: int = BATCH, parts: int = 1, times: int = 1, freeze: bool = False
) -> nn.Module:
    """Ten epochs of SGD: `parts` passes a step, a loss `times` too large, and with `freeze` eval() after epoch 1."""
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = normalised(data[0]), data[1]
    for epoch in range(EPOCHS):
        model.train(not freeze or epoch == 0)
        for ids in torch.randperm(len(images)).split(batch):
            optimizer.zero_grad()
            for part in ids.chunk(parts):
                (F.cross_entropy(model(images[part]), labels[part]) * times * len(part) / len(ids)).backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def top1(model: nn.Module, data: Data, batch: int = 256) -> float:
    """The share of right answers in percent, the model being in whatever mode it is."""
    pieces = zip(normalised(data[0]).split(batch), data[1].split(batch), strict=True)
    return 100 * sum((model(images).argmax(1) == labels).sum().item() for images, labels in pieces) / len(data[1])


def by_class(data: Data) -> Data:
    """As a folder of classes has them: all of one class, then all of the next."""
    order = data[1].argsort(stable=True)
    return data[0][order], data[1][order]


def cut(data: Data, ids: slice) -> Data:
    return data[0][ids], data[1][ids]


def main(seeds: int) -> None:
    data, test = digits()
    quarter, twice = slice(TRAIN // 4), (normalised(test[0]), test[1])
    whole = cut(data, slice(TRAIN // BATCH * BATCH))  # whole batches: a rest of 4 has no 4 parts for batch norm
    right = functools.cache(lambda seed: train(data, seed))
    rows: dict[str, Callable[[int], float]] = {
        "right": lambda seed: top1(right(seed), test),
        "LS106 evaluated on the training set": lambda seed: top1(right(seed), data),
        "LS107 a random quarter of the set": lambda seed: top1(train(cut(data, quarter), seed), test),
        "LS107 its first quarter, sorted by class": lambda seed: top1(train(cut(by_class(data), quarter), seed), test),
        "LS111 trained as it should be, tested on images normalised twice": lambda seed: top1(right(seed), twice),
        "LS201 4 passes a step, divided": lambda seed: top1(train(whole, seed, parts=4), test),
        "LS201 4 passes a step, not divided": lambda seed: top1(train(whole, seed, parts=4, times=4), test),
        "LS214 without eval(), batches of 256": lambda seed: top1(right(seed).train(), test),
        "LS214 without eval(), batches of 4": lambda seed: top1(right(seed).train(), test, batch=4),
        "LS215 eval() after epoch 1, for good": lambda seed: top1(train(data, seed, freeze=True), test),
        "LS302 rank 0 of 4, unwrapped": lambda seed: top1(train(cut(whole, slice(0, None, 4)), seed, batch=16), test),
        "LS403 weights that were not loaded": lambda seed: top1(train(cut(data, slice(0)), seed), test),
    }
    print(f"{TRAIN} digits to train on, {TEST} to test, {EPOCHS} epochs, {seeds} seeds\n top-1  lowest  highest")
    for name, result in rows.items():
        found = [result(seed) for seed in range(seeds)]
        print(f"{sum(found) / seeds:6.2f} {min(found):7.2f} {max(found):8.2f}  {name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    main(parser.parse_args().seeds)
