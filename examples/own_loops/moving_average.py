"""A script with mixup, a moving average of the weights, a schedule and mixed precision, as a loop of your own.

python examples/own_loops/moving_average.py            all cores, or all GPUs
python examples/own_loops/moving_average.py bf16       in mixed precision
"""

import math
import sys

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lockstep as ls


def main(world: ls.World, precision: str = "fp32", folder: str = "") -> list[float]:
    torch.manual_seed(0)
    train, val = ls.loaders("digits", world, batch_size=64, mixup=0.2)  # labels: float32 [b, 10], a part of each class
    conv = nn.Conv2d(1, 16, 3, bias=False)
    net = nn.Sequential(conv, nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
    model = ls.parallelize(net.to(world.device), world)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    whole = 4 * train.order.samples_per_epoch
    step = ls.TrainStep(
        model,
        nn.CrossEntropyLoss(label_smoothing=0.1),
        optimizer,
        precision=precision,  # autocast, and with "fp16" a gradient scaler
        clip_norm=1.0,
        schedule=lambda samples: 0.5 + 0.5 * math.cos(math.pi * samples / whole),  # of the samples seen, not of steps
    )
    checkpoints = ls.Checkpoints(folder, model, optimizer, world, ema=average) if folder else None
    done = checkpoints.resume() if checkpoints else 0
    losses = []
    for epoch in range(done // len(train), 4):
        for batch in train.epoch(epoch, done % len(train)):
            step(batch)
            average.update_parameters(net)  # after each step, on each process alike
            done += 1
        metrics = ls.evaluate(average, val, world, precision)
        world.print(f"epoch {epoch + 1}: {metrics}")
        losses.append(metrics.loss)
        if checkpoints:
            checkpoints.save(done)
    if checkpoints:
        checkpoints.close()
    return losses


if __name__ == "__main__":
    ls.launch(main, *sys.argv[1:])
