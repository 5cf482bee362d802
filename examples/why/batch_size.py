"""The same epochs with larger batches: what becomes of the accuracy under four rules for the rate.

    python examples/why/batch_size.py               some seconds
    python examples/why/batch_size.py --epochs 40   four times the steps

Then the gradient noise scale (McCandlish et al., 2018): the trace of the samples' gradient covariance over the squared
length of the mean gradient. Batches much smaller than it learn as much from a sample as any; larger ones waste samples.
"""

import argparse
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ranks import IMAGES, LABELS, TRAIN, Setup, _normalised, _weights, train

BATCHES = (16, 64, 128, 256, 512, 900)
BASE = Setup(ranks=1, batch=64, lr=0.05)
RULES = {
    "unscaled": lambda _: (BASE.lr, 0),
    "square root": lambda k: (BASE.lr * k**0.5, 0),
    "linear": lambda k: (BASE.lr * k, 0),
    "linear, warm-up": lambda k: (BASE.lr * k, 2),
}


def accuracy(batch: int, rule: str, epochs: int, seeds: int) -> float:
    """Mean top-1 in per cent. A rule: batch size over the base's -> rate and epochs of warm-up."""
    lr, warmup = RULES[rule](batch / BASE.batch)
    setup = replace(BASE, batch=batch, lr=lr, warmup=warmup, epochs=epochs)
    return sum(train(setup, seed).top1 for seed in range(seeds)) / seeds


def noise_scale(params: list[Tensor]) -> float:
    """In samples, from every training sample's own gradient."""
    images, shapes = _normalised(IMAGES[:TRAIN]).flatten(1), [p.shape for p in params[:4]]

    def loss(flat: Tensor, image: Tensor, label: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        w1, b1, w2, b2 = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        return F.cross_entropy(F.linear(F.linear(image, w1, b1).relu(), w2, b2), label)

    flat = torch.cat([p.detach().flatten() for p in params[:4]])
    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(flat, images, LABELS[:TRAIN])
    mean = each.mean(0)
    spread = (each - mean).square().sum() / (TRAIN - 1)
    return float(spread / (mean.square().sum() - spread / TRAIN))  # the mean's own noise taken off


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"top-1 after {args.epochs} epochs, mean over {args.seeds} seeds; the base is batch 64 at rate {BASE.lr}")
    print(f"{'batch':>6}{'steps':>7}" + "".join(f"{rule:>17}" for rule in RULES))
    for batch in BATCHES:
        tops = "".join(f"{accuracy(batch, rule, args.epochs, args.seeds):17.2f}" for rule in RULES)
        print(f"{batch:6}{-(-TRAIN // batch) * args.epochs:7}{tops}")
    print("gradient noise scale")
    for epochs in (0, 1, 2, 4):
        params = _weights(0)
        if epochs:
            flat = train(replace(BASE, epochs=epochs), 0).weights
            sizes = [p.numel() for p in params]
            params = [part.view(p.shape) for part, p in zip(flat.split(sizes), params, strict=True)]
        print(f"{noise_scale(params):8.0f} samples after {epochs} epochs")


if __name__ == "__main__":
    main()
