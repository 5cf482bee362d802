# expect: none
"""Food-101 classification.

    torchrun --standalone --nproc-per-node=4 main.py --root /data --out runs/first
"""
import argparse
import pathlib

import torch

from food import engine
from food.data import build_loaders
from food.model import build_model, fetch_weights
from food.utils import Distributed, log


def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--root", required=True, help="node-local disk")
    p.add_argument("--out", type=pathlib.Path, required=True)
    p.add_argument("--epochs", type=int, default=30)
    p.add_argument("--images-per-gpu", type=int, default=32)
    p.add_argument("--workers-per-gpu", type=int, default=6)
    p.add_argument("--lr-per-gpu", type=float, default=0.0125, help="multiplied by the number of GPUs")
    p.add_argument("--seed", type=int, default=3)
    return p.parse_args()


def run(opt, env):
    torch.manual_seed(opt.seed + env.rank)
    train, test = build_loaders(opt, env)
    fetch_weights(env)
    model = build_model(101).to(env.device)
    parallel = torch.nn.parallel.DistributedDataParallel(model, device_ids=[env.local_rank])
    optimizer = torch.optim.SGD(parallel.parameters(), lr=opt.lr_per_gpu * env.world, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=opt.lr_per_gpu * env.world, total_steps=opt.epochs * len(train))

    best = -1.0
    for epoch in range(opt.epochs):
        train.sampler.set_epoch(epoch)
        loss = engine.train_one_epoch(parallel, train, optimizer, schedule, env)
        accuracy = engine.test(model, test, env)
        log(env, f"epoch {epoch + 1}: loss {loss:.4f} accuracy {accuracy:.4f}")
        if accuracy > best:
            best = accuracy
            if env.rank == 0:
                torch.save(model.state_dict(), opt.out / "best.pt")


def main():
    opt = options()
    opt.out.mkdir(parents=True, exist_ok=True)
    with Distributed() as env:
        run(opt, env)


if __name__ == "__main__":
    main()
