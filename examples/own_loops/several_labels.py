"""Several labels a picture in a loop of your own: which quarters of a picture are bright.

python examples/own_loops/several_labels.py
"""

import torch
from torch import Tensor, nn

import lockstep as ls


def pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy pictures [count, 1, 8, 8] and labels float [count, 4]: 1 for each quarter that is bright."""
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.rand(count, 4, generator=drawn).round()
    quarters = labels.view(count, 1, 2, 2).repeat_interleave(4, 2).repeat_interleave(4, 3)
    return quarters + torch.randn(count, 1, 8, 8, generator=drawn), labels


def main(world: ls.World) -> list[float]:
    torch.manual_seed(0)
    train, val = ls.loaders((pictures(400, 0), pictures(200, 1)), world, batch_size=50)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    model = ls.parallelize(net.to(world.device), world)
    step = ls.TrainStep(model, nn.BCEWithLogitsLoss(), torch.optim.AdamW(model.parameters(), lr=3e-3))
    losses = []
    for epoch in train.epochs(5):
        for batch in epoch:
            step(batch)  # batch.labels: float32 [b, 4]
        metrics = ls.evaluate(model, val, world)  # mAP; top-1: the likeliest label is one of the picture's
        world.print(metrics)
        losses.append(metrics.loss)
    return losses


if __name__ == "__main__":
    ls.launch(main)
