"""Schedules stepped as often as they were made for, and not: (codes, script without its imports)."""

import re

LOOPS = """\
def main(args):
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    data = make(640)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    n = len(loader)
    s = SCHEDULE
    for epoch in range(args.epochs):
        for i, (x, y) in enumerate(loader):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            BATCH
        EPOCH
main(None)
"""
# what a schedule is made for, and whether that counts the batches ("batch"), the epochs, or nothing that is known
MADE = [
    ("CosineAnnealingLR(opt, args.epochs)", "epoch"),
    ("CosineAnnealingLR(opt, args.epochs * n)", "batch"),
    ("CosineAnnealingLR(opt, args.epochs * n // len(loader))", "epoch"),
    ("CosineAnnealingLR(opt, args.t_max)", ""),
    ("CosineAnnealingLR(opt, args.max_steps)", ""),
    ("CosineAnnealingWarmRestarts(opt, args.epochs)", "epoch"),
    ("StepLR(opt, args.lr_step_epochs)", "epoch"),
    ("MultiStepLR(opt, [int(args.epochs * f) for f in (0.5, 0.75)])", "epoch"),
    ("MultiStepLR(opt, [k * n for k in (30, 60)])", "batch"),
    ("OneCycleLR(opt, 0.1, total_steps=args.epochs)", "epoch"),
    ("OneCycleLR(opt, 0.1, epochs=args.epochs, steps_per_epoch=1)", "epoch"),
    ("OneCycleLR(opt, 0.1, epochs=args.epochs, steps_per_epoch=n)", "batch"),
    ("PolynomialLR(opt, len(data) // 8 * args.epochs)", "batch"),
    ("PolynomialLR(opt, args.epochs * args.steps_per_epoch)", "batch"),
    ("LambdaLR(opt, lambda e: 1 - e / args.epochs)", "epoch"),
    ("LambdaLR(opt, lambda i: min(1.0, i / (args.warmup_epochs * n)))", "batch"),
    ("SequentialLR(opt, [LinearLR(opt, 0.1, 1.0, 500), CosineAnnealingLR(opt, args.epochs - 1)], [500])", "epoch"),
]
# any more than that: what stands after a batch, and after an epoch
OTHERS = [
    ("", "LambdaLR(opt, lambda i: 0.1 ** (i // n // args.decay_epochs))", "s.step()", "pass"),
    ("", "CosineAnnealingLR(opt, args.epochs)", "if i == n - 1: s.step()", "pass"),
    ("", "CosineAnnealingWarmRestarts(opt, args.epochs)", "s.step(epoch + i / n)", "pass"),
    ("", "ReduceLROnPlateau(opt, patience=5)", "pass", "s.step(1.0)"),
    ("LS210", "ReduceLROnPlateau(opt, patience=5)", "s.step(1.0)", "pass"),
    ("", "ExponentialLR(opt, 0.9999)", "s.step()", "pass"),
    ("LS210", "ExponentialLR(opt, 0.95)", "s.step()", "pass"),
    ("LS210", "CosineAnnealingLR(opt, args.epochs)", "s.step()", "s.step()"),
    (
        "",
        "OneCycleLR(opt, 0.1, args.epochs * n) if args.one else StepLR(opt, 30)",
        "if args.one: s.step()",
        "if not args.one: s.step()",
    ),
]


def _script(schedule: str, batch: str, epoch: str) -> str:
    text = LOOPS.replace("SCHEDULE", schedule).replace("BATCH", batch).replace("EPOCH", epoch)
    names = ", ".join(sorted(set(re.findall(r"\w+LR\b|CosineAnnealingWarmRestarts|ReduceLROnPlateau", schedule))))
    return f"from torch.optim.lr_scheduler import {names}\n{text}"


CONSTRUCTED = """\
class Warm(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, opt, total):
        self.total = total
        super().__init__(opt)
    def get_lr(self):
        return [b * (1 - self.last_epoch / self.total) for b in self.base_lrs]
class Trainer:
    def __init__(self, args):
        self.args = args
        self.model = Net(); self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(make(640), batch_size=8, shuffle=True)
        self.sched = self.schedule()
    def schedule(self):
        return Warm(self.opt, self.args.epochs * len(self.loader))
    def one(self, x, y):
        self.opt.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.opt.step()
        BATCH
    def fit(self):
        for epoch in range(self.args.epochs):
            for x, y in self.loader:
                self.one(x, y)
            EPOCH
Trainer(None).fit()
"""
SHARED = """\
from accelerate import Accelerator
def main(args):
    accelerator = Accelerator()
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1 * accelerator.num_processes)
    loader = DataLoader(make(640), batch_size=8, shuffle=True)
    before = args.epochs * len(loader)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    after = args.epochs * len(loader)
    s = accelerator.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(opt.optimizer, T_max=LENGTH))
    for epoch in range(args.epochs):
        loader.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            opt.step()
            s.step()
main(None)
"""
SOME = """\
def main(args):
    dist.init_process_group("gloo")
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    s = torch.optim.lr_scheduler.StepLR(opt, 30)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        if WHO:
            s.step()
    dist.destroy_process_group()
main(None)
"""

SCHEDULES: list[tuple[str, str]] = [
    *(("" if unit in ("batch", "") else "LS210", _script(made, "s.step()", "pass")) for made, unit in MADE),
    *(("" if unit in ("epoch", "") else "LS210", _script(made, "pass", "s.step()")) for made, unit in MADE),
    *((codes, _script(made, batch, epoch)) for codes, made, batch, epoch in OTHERS),
    ("LS210", CONSTRUCTED.replace("BATCH", "pass").replace("EPOCH", "self.sched.step()")),
    ("", CONSTRUCTED.replace("BATCH", "self.sched.step()").replace("EPOCH", "pass")),
    ("LS210", SHARED.replace("LENGTH", "after")),
    ("", SHARED.replace("LENGTH", "before")),
    ("", SHARED.replace("LENGTH", "after * accelerator.num_processes")),
    ("LS210", SOME.replace("WHO", "dist.get_rank() == 0")),
    ("", SOME.replace("WHO", "epoch > 3")),
]
