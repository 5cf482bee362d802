"""Batch, rate and N, in the shapes that scripts write them: (code, wrong, right), the last two (old, new) of a base."""

START = """\
import argparse
from dataclasses import dataclass
from functools import partial
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
@dataclass
class Config:
    batch: int = 32  # for each GPU
    lr: float = 0.1  # for one GPU, times their number
TABLE = {
    "batch": 32,  # per GPU
    "lr": 0.1,  # for a single GPU
}
def scaled(lr):
    return lr * dist.get_world_size()
def climb(n):
    def factor(step):
        return min(1.0, (step + 1) / n)
    return factor
def climb_by(n, ranks):
    def factor(step):
        return 1 + min(1.0, step / n) * (ranks - 1)
    return factor
def build(name, params, lr):
    return OPTIMIZERS[name](params, lr=lr)
def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.1)
    return parser.parse_args()
def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    args, cfg = options(), Config()
    data = make(64)
    sampler = DistributedSampler(data)
    model = DDP(Net())
    BODY
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
    dist.destroy_process_group()
main()
"""
SHORT = {
    "LOADER(": "loader = DataLoader(data, sampler=sampler, batch_size=",
    "RATE(": "opt = torch.optim.SGD(model.parameters(), lr=",
}

# code, the lines that make a loader, a model and an optimizer; the same with nothing wrong
ADJUSTING: list[tuple[str, str, str]] = [
    # both adjusted
    (
        "LS209",
        "LOADER(64 // world); RATE(0.1); s = lr_scheduler.CyclicLR(opt, 0.01, 0.1 * world)",
        "LOADER(64 // world); RATE(0.1)",
    ),
    (
        "LS209",
        "LOADER(64 // world); RATE(0.1)\n    for g in opt.param_groups:\n        g['lr'] *= world",
        "LOADER(64 // world); RATE(0.1)",
    ),
    (
        "LS209",
        "LOADER(64 // world); RATE(0.1)\n    for g in opt.param_groups:\n        g['lr'] = g['lr'] * world",
        "LOADER(64 // world); RATE(0.1)",
    ),
    ("LS209", "LOADER(64 // world); RATE(scaled(0.1))", "LOADER(64); RATE(scaled(0.1))"),
    ("LS209", "LOADER(64 // world); RATE(0.1 * world**0.5)", "LOADER(64); RATE(0.1 * world**0.5)"),
    (
        "LS209",
        "LOADER(64 // world); opt = torch.optim.SGD([{'params': model.parameters(), 'lr': 0.1 * world}])",
        "LOADER(64 // world); opt = torch.optim.SGD([{'params': model.parameters(), 'lr': 0.1}])",
    ),
    (
        "LS209",
        "LOADER(64 // world); opt = getattr(torch.optim, 'SGD')(model.parameters(), lr=0.1 * world)",
        "LOADER(64); opt = getattr(torch.optim, 'SGD')(model.parameters(), lr=0.1 * world)",
    ),
    (
        "LS209",
        "LOADER(64 // world); opt = build('sgd', model.parameters(), 0.1 * world)",
        "LOADER(64); opt = build('sgd', model.parameters(), 0.1 * world)",
    ),
    (
        "LS209",
        "LOADER(64 // world); opt = partial(torch.optim.SGD, lr=0.1 * world)(model.parameters())",
        "LOADER(64 // world); opt = partial(torch.optim.SGD, lr=0.1)(model.parameters())",
    ),
    (
        "LS209",
        "LOADER(64 // world); o = {'lr': 0.1}; o['lr'] *= world; RATE(o['lr'])",
        "LOADER(64); o = {'lr': 0.1}; o['lr'] *= world; RATE(o['lr'])",
    ),
    (
        "LS209",
        "LOADER(64 // world); RATE(0.1); s = lr_scheduler.LinearLR(opt, 1.0, end_factor=float(world))",
        "LOADER(64 // world); RATE(0.1); s = lr_scheduler.LinearLR(opt, 1 / world, end_factor=1.0)",
    ),
    (
        "LS209",
        "LOADER(64 // world); RATE(0.1); s = lr_scheduler.LambdaLR(opt, lambda e: min(1, e / 5) * world)",
        "LOADER(64 // world); RATE(0.1); s = lr_scheduler.LambdaLR(opt, lambda e: min(1, e / (5 * world)))",
    ),
    (
        "LS209",
        "LOADER(64); RATE(0.1 * world); s = lr_scheduler.LambdaLR(opt, lambda e: min(1, e / 5) * world)",
        "LOADER(64); RATE(0.1 * world); s = lr_scheduler.LambdaLR(opt, climb(5 * len(loader)))",
    ),
    (
        "LS209",
        "LOADER(args.batch_size // world); RATE(args.lr * args.batch_size * world / 256)",
        "LOADER(args.batch_size // world); RATE(args.lr * args.batch_size / 256)",
    ),
    (
        "LS209",
        "args.batch_size //= world; args.lr *= world; LOADER(args.batch_size); RATE(args.lr)",
        "args.batch_size //= world; LOADER(args.batch_size); RATE(args.lr * args.batch_size * world / 256)",
    ),
    (
        "LS209",
        "loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 64 // world, True)); RATE(0.1 * world)",
        "loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 64, True)); RATE(0.1 * world)",
    ),
    # neither
    (
        "LS208",
        "LOADER(64); opt = getattr(torch.optim, 'SGD')(model.parameters(), lr=0.1)",
        "LOADER(64 // world); opt = getattr(torch.optim, 'SGD')(model.parameters(), lr=0.1)",
    ),
    (
        "LS208",
        "LOADER(64); opt = build('sgd', model.parameters(), 0.1)",
        "LOADER(64); opt = build('sgd', model.parameters(), scaled(0.1))",
    ),
    (
        "LS208",
        "LOADER(64); opt = torch.optim.SGD([{'params': model.parameters(), 'lr': 0.1}])",
        "LOADER(64); opt = torch.optim.SGD([{'params': model.parameters(), 'lr': 0.1 * world}])",
    ),
    ("LS208", "LOADER(cfg.batch); RATE(cfg.lr)", "LOADER(cfg.batch); RATE(cfg.lr * world)"),
    ("LS208", "LOADER(TABLE['batch']); RATE(TABLE['lr'])", "LOADER(64); RATE(TABLE['lr'] * world)"),
    (
        "LS208",
        "LOADER(64); RATE(0.1); s = lr_scheduler.LambdaLR(opt, climb(5 * len(loader)))",
        "LOADER(64); RATE(0.1); s = lr_scheduler.LambdaLR(opt, climb_by(5 * len(loader), world))",
    ),
    (
        "LS208",
        "LOADER(64); RATE(0.1)",
        "LOADER(64); RATE(0.1); s = lr_scheduler.CyclicLR(opt, 0.01, max_lr=0.1 * world)",
    ),
    (
        "LS208",
        "per_gpu = 64; LOADER(per_gpu); lr = 0.1 * per_gpu / 256; RATE(lr)",
        "per_gpu = 64; LOADER(per_gpu); lr = 0.1 * per_gpu * world / 256; RATE(lr)",
    ),
    ("LS208", "LOADER(64); RATE(0.1)", "per_gpu = 64; LOADER(per_gpu); RATE(0.1)"),
]
