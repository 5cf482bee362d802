"""Which samples an epoch has, by weights that change from epoch to epoch: what the network gets wrong comes more often.

python examples/own_loops/own_sampler.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

import lockstep as ls


def main(world: ls.World) -> list[float]:
    drawn = torch.Generator().manual_seed(0)
    images, labels = torch.randn(600, 1, 8, 8, generator=drawn), torch.arange(600) % 3
    images[torch.arange(600), 0, labels] += 1  # a brighter row for each class
    train_set, val_set = TensorDataset(images[:450], labels[:450]), TensorDataset(images[450:], labels[450:])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 3))
    model = ls.parallelize(net.to(world.device), world)
    step = ls.TrainStep(model, F.cross_entropy, torch.optim.AdamW(model.parameters(), lr=3e-3))
    weights, losses = torch.ones(450), []
    for epoch in range(4):
        ids = torch.multinomial(weights, 450, replacement=True, generator=drawn)  # the same on every rank
        train, val = ls.loaders((Subset(train_set, ids.tolist()), val_set), world, batch_size=64, workers=0)
        for batch in train.epoch(epoch):  # its order, and what dropout draws, are the epoch's
            step(batch)
        losses.append(ls.evaluate(model, val, world).loss)
        weights = 0.1 + wrong(net, images[:450], labels[:450])
    world.print(losses)
    return losses


@torch.no_grad()
def wrong(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """1 where the network is wrong, [n]; each rank looks at all samples, so that all agree."""
    net.eval()
    device = next(net.parameters()).device
    found = torch.cat([net(part.to(device)).argmax(1).cpu() for part in images.split(64)])
    net.train()
    return (found != labels).float()


if __name__ == "__main__":
    ls.launch(main)
