"""Steps, sums and rates of strangers, each beside its right twin: (codes, what it is, program), as in maths.py."""

STRANGE: list[tuple[str, str, str]] = [
    (
        "LS210",
        "dataclass-run-warmup",
        """\
from dataclasses import dataclass
from torch.optim.lr_scheduler import SequentialLR, LinearLR, CosineAnnealingLR
import argparse
@dataclass
class Run:
    model: nn.Module
    opt: torch.optim.Optimizer
    sched: SequentialLR
    epoch: int = 0
def one_epoch(run, loader):
    run.model.train()
    for x, y in loader:
        run.opt.zero_grad(); F.cross_entropy(run.model(x), y).backward(); run.opt.step()
        run.sched.step()  # wrong
def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=100); p.add_argument("--warmup", type=int, default=5)
    args = p.parse_args()
START
    parts = [LinearLR(opt, 0.01, total_iters=args.warmup), CosineAnnealingLR(opt, args.epochs - args.warmup)]
    sched = SequentialLR(opt, parts, [args.warmup])
    run = Run(model, opt, sched)
    while run.epoch < args.epochs:
        sampler.set_epoch(run.epoch)
        one_epoch(run, loader)
        run.sched.step()  # right
        run.epoch += 1
STOP
""",
    ),
    (
        "LS210",
        "accelerate-unprepared-but-global-len",
        """\
from accelerate import Accelerator
def main():
    acc = Accelerator()
    model = Deep(); opt = torch.optim.SGD(model.parameters(), lr=0.1 * acc.num_processes)
    dl = DataLoader(make(640), batch_size=8, shuffle=True, drop_last=True)
    epochs = 5
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs * len(dl))
    model, opt, dl = acc.prepare(model, opt, dl)  # wrong
    model, opt, dl, sched = acc.prepare(model, opt, dl, sched)  # right
    for epoch in range(epochs):
        for x, y in dl:
            acc.backward(F.cross_entropy(model(x), y)); opt.step(); sched.step(); opt.zero_grad()
main()
""",
    ),
    (
        "LS210",
        "accelerate-divided-twice",
        """\
from accelerate import Accelerator
import math
def build(opt, n, epochs):
    total = epochs * n
    return torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=total)
def main():
    acc = Accelerator()
    model = Deep(); opt = torch.optim.SGD(model.parameters(), lr=0.1 * acc.num_processes)
    dl = DataLoader(make(640), batch_size=8, shuffle=True, drop_last=True)
    epochs = 5
    sched = build(opt, math.ceil(len(dl) / acc.num_processes), epochs)  # wrong
    sched = build(opt, len(dl), epochs)  # right
    model, opt, dl, sched = acc.prepare(model, opt, dl, sched)
    for epoch in range(epochs):
        for x, y in dl:
            acc.backward(F.cross_entropy(model(x), y)); opt.step(); sched.step(); opt.zero_grad()
main()
""",
    ),
    (
        "LS210",
        "lambda-in-class-per-batch",
        """\
class WarmCos:
    def __init__(self, warm, epochs): self.warm, self.epochs = warm, epochs
    def __call__(self, epoch):
        if epoch < self.warm: return (epoch + 1) / self.warm
        import math
        return 0.5 * (1 + math.cos(math.pi * (epoch - self.warm) / (self.epochs - self.warm)))
def main():
START
    epochs = 30
    sched = torch.optim.lr_scheduler.LambdaLR(opt, WarmCos(3, epochs))
    for e in range(epochs):
        sampler.set_epoch(e)
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
            sched.step()  # wrong
        sched.step()  # right
STOP
""",
    ),
    (
        "LS210",
        "lightning-manual-step-in-training-st",
        """\
import lightning as L
class Lit(L.LightningModule):
    def __init__(self, lr, max_epochs):
        super().__init__(); self.save_hyperparameters(); self.net = Deep(); self.automatic_optimization = False
    def training_step(self, batch, i):
        opt = self.optimizers(); sched = self.lr_schedulers()
        opt.zero_grad(); self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1])); opt.step()
        sched.step()  # wrong
    def on_train_epoch_end(self):  # right
        self.lr_schedulers().step()  # right
    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=self.hparams.max_epochs)
        return [opt], [sched]
L.Trainer(max_epochs=30).fit(Lit(0.1, 30), DataLoader(make(100), batch_size=8, shuffle=True))
""",
    ),
    (
        "LS210",
        "ignite-handler",
        """\
from ignite.engine import Engine, Events
def main():
START
    epochs = 30
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=epochs)
    def step(engine, batch):
        x, y = batch
        opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
        return loss.item()
    trainer = Engine(step)
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda e: sampler.set_epoch(e.state.epoch))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda e: sched.step())  # wrong
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda e: sched.step())  # right
    trainer.run(loader, max_epochs=epochs)
STOP
""",
    ),
    (
        "LS204",
        "reduced-loss-but-accuracy-not",
        """\
def train(model, loader, opt):
    tot, cor, n = torch.zeros(()), torch.zeros(()), torch.zeros(())
    for x, y in loader:
        p = model(x); loss = F.cross_entropy(p, y); opt.zero_grad(); loss.backward(); opt.step()
        tot += loss.detach() * len(y); cor += (p.argmax(1) == y).sum(); n += len(y)
    acc = cor / n  # wrong
    for t in (tot, cor, n): dist.all_reduce(t)
    acc = cor / n  # right
    return (tot / n).item(), acc.item()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        tl, ta = train(model, loader, opt)
        if rank == 0: print(epoch, tl, ta)
STOP
""",
    ),
    (
        "LS205",
        "dict-of-both",
        """\
def validate(net, dl):
    net.eval(); t = torch.zeros(2)
    with torch.no_grad():
        for x, y in dl:
            t[0] += (net(x).argmax(1) == y).sum(); t[1] += len(y)
    own = (t[0] / t[1]).item()
    dist.all_reduce(t)
    return {"select": own, "accuracy": (t[0] / t[1]).item()}  # wrong
    return {"select": (t[0] / t[1]).item(), "accuracy": (t[0] / t[1]).item()}  # right
def main():
START
    best = 0.
    for e in range(3):
        sampler.set_epoch(e); model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        res = validate(model, test_loader)
        if rank == 0:
            print(res["accuracy"])
            if res["select"] > best:
                best = res["select"]; torch.save(model.module.state_dict(), "best.pt")
STOP
""",
    ),
    (
        "LS205",
        "saver-object-with-is-better",
        """\
class Saver:
    def __init__(self): self.top = -1.
    def offer(self, score, model):
        if score > self.top:
            self.top = score
            if dist.get_rank() == 0: torch.save(model.module.state_dict(), "best.pt")
@torch.no_grad()
def evaluate(model, dl):
    model.eval(); c = torch.zeros(()); n = torch.zeros(())
    for x, y in dl:
        c += (model(x).argmax(1) == y).sum(); n += len(y)
    mine = c / n
    dist.all_reduce(c); dist.all_reduce(n)
    return mine, c / n
def main():
START
    saver = Saver()
    for e in range(30):
        sampler.set_epoch(e); model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        mine, acc = evaluate(model, test_loader)
        if rank == 0: print("acc", acc.item())
        saver.offer(mine, model)  # wrong
        saver.offer(acc, model)  # right
STOP
""",
    ),
    (
        "",
        "times-and-counts-returned",
        """\
import time
def train(model, loader, opt):
    data_time = 0.; seen = 0; tot = torch.zeros(()); t0 = time.perf_counter()
    for x, y in loader:
        dt = time.perf_counter() - t0
        data_time += dt
        loss = F.cross_entropy(model(x), y); opt.zero_grad(); loss.backward(); opt.step()
        tot += loss.detach(); seen += len(y); t0 = time.perf_counter()
    dist.all_reduce(tot)
    return {"loss": tot.item() / len(loader) / dist.get_world_size(), "data": data_time, "seen": seen}
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        out = train(model, loader, opt)
        if rank == 0: print(out["loss"], out["data"], out["seen"])
STOP
""",
    ),
    (
        "",
        "returns-local-sums-which-the-caller-",
        """\
def evaluate(model, dl):
    model.eval(); s = torch.zeros(()); n = torch.zeros(())
    with torch.no_grad():
        for x, y in dl: s += (model(x).argmax(1) == y).sum(); n += len(y)
    dist.all_reduce(n)
    return s, n
def main():
START
    best = 0.
    for epoch in range(3):
        sampler.set_epoch(epoch); model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        s, n = evaluate(model, test_loader)
        dist.all_reduce(s)
        acc = (s / n).item()
        if rank == 0:
            print("accuracy", acc)
            if acc > best:
                best = acc; torch.save(model.module.state_dict(), "b.pt")
STOP
""",
    ),
    (
        "",
        "helper-handed-the-sums-reduces-insid",
        """\
def finish(s, n):
    t = torch.tensor([s, n]); dist.all_reduce(t); s, n = t.tolist()
    return s / n
def evaluate(model, dl):
    model.eval(); s = n = 0; l = torch.zeros(())
    with torch.no_grad():
        for x, y in dl:
            o = model(x); s += (o.argmax(1) == y).sum().item(); n += len(y); l += F.cross_entropy(o, y, reduction="sum")
    dist.all_reduce(l)
    return finish(s, n), l.item()
def main():
START
    best = 0.
    for epoch in range(3):
        sampler.set_epoch(epoch); model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc, l = evaluate(model, test_loader)
        if rank == 0:
            print("accuracy", acc, l)
            if acc > best:
                best = acc; torch.save(model.module.state_dict(), "b.pt")
STOP
""",
    ),
    (
        "",
        "object-that-reduces-later",
        """\
class Score:
    def __init__(self): self.s = self.n = 0
    def take(self, s, n): self.s += s; self.n += n
    def value(self):
        t = torch.tensor([self.s, self.n]); dist.all_reduce(t); return (t[0] / t[1]).item()
def evaluate(model, dl, score):
    model.eval(); l = torch.zeros(()); s = n = 0
    with torch.no_grad():
        for x, y in dl:
            o = model(x); l += F.cross_entropy(o, y, reduction="sum"); s += (o.argmax(1) == y).sum().item(); n += len(y)
    dist.all_reduce(l)
    score.take(s, n)
    return l.item()
def main():
START
    best = 0.
    for epoch in range(3):
        sampler.set_epoch(epoch); model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        sc = Score(); l = evaluate(model, test_loader, sc); acc = sc.value()
        if rank == 0:
            print("accuracy", acc, l)
            if acc > best:
                best = acc; torch.save(model.module.state_dict(), "b.pt")
STOP
""",
    ),
    (
        "",
        "lightning-manual-with-step-schedule-",
        """\
import lightning as L
class Lit(L.LightningModule):
    def __init__(self, lr): super().__init__(); self.net = Deep(); self.lr = lr; self.automatic_optimization = False
    def training_step(self, batch, i):
        opt = self.optimizers(); opt.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1])); opt.step()
        self.lr_schedulers().step()
    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=self.lr)
        total = self.trainer.estimated_stepping_batches
        return [opt], [torch.optim.lr_scheduler.OneCycleLR(opt, self.lr, total_steps=total)]
L.Trainer(max_epochs=3).fit(Lit(0.1), DataLoader(make(100), batch_size=8, shuffle=True))
""",
    ),
    (
        "LS201",
        "loss-divided-in-place",
        """\
def main():
START
    k = 4
    for epoch in range(3):
        sampler.set_epoch(epoch)
        with model.no_sync():
            pass
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y)
            loss.div_(k)  # right
            loss.backward()
            if (i + 1) % k == 0 or i + 1 == len(loader):
                opt.step(); opt.zero_grad()
STOP
""",
    ),
    (
        "LS201",
        "parts-divided-in-place",
        """\
import math
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        with model.no_sync():
            pass
        for x, y in loader:
            opt.zero_grad()
            for i in range(0, len(x), 4):
                xs = x[i:i + 4]; ys = y[i:i + 4]
                loss = F.cross_entropy(model(xs), ys)
                loss.div_(math.ceil(float(len(x)) / 4))  # right
                loss.backward()
            opt.step()
STOP
""",
    ),
    (
        "LS203",
        "own-meter-default-n",
        """\
class Avg:
    def __init__(self): self.s, self.c = 0., 0
    def update(self, v, n=1): self.s += v * n; self.c += n
    def sync(self):
        t = torch.tensor([self.s, self.c]); dist.all_reduce(t); self.s, self.c = t.tolist()
    @property
    def value(self): return self.s / self.c
@torch.no_grad()
def evaluate(model, dl):
    model.eval(); meter = Avg(); crit = nn.CrossEntropyLoss()
    for x, y in dl:
        meter.update(crit(model(x), y).item())  # wrong
        meter.update(crit(model(x), y).item(), len(y))  # right
    meter.sync(); return meter.value
def main():
START
    for e in range(30):
        sampler.set_epoch(e); model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        a = evaluate(model, test_loader)
        if rank == 0: print("loss", a)
STOP
""",
    ),
    (
        "LS203",
        "attribute-sums-in-class",
        """\
class Trainer:
    def __init__(self, m, o, l, v): self.m, self.o, self.l, self.v = m, o, l, v; self.crit = nn.CrossEntropyLoss()
    @torch.no_grad()
    def validate(self):
        self.m.eval(); self.total = torch.zeros(()); self.count = torch.zeros(())
        for x, y in self.v:
            self.total += self.crit(self.m(x), y)  # wrong
            self.count += 1  # wrong
            self.total += self.crit(self.m(x), y) * len(y)  # right
            self.count += len(y)  # right
        dist.all_reduce(self.total); dist.all_reduce(self.count)
        return (self.total / self.count).item()
    def train(self):
        self.m.train()
        for x, y in self.l:
            self.o.zero_grad(); self.crit(self.m(x), y).backward(); self.o.step()
def main():
START
    t = Trainer(model, opt, loader, test_loader)
    for e in range(3):
        sampler.set_epoch(e); t.train(); v = t.validate()
        if rank == 0: print(v)
STOP
""",
    ),
    (
        "LS204",
        "own-meter-reduce-missing-class-train",
        """\
class Trainer:
    def __init__(self, m, o, l): self.m, self.o, self.l, self.history = m, o, l, []
    def reduce(self, a, b):
        t = torch.tensor([a, b]); dist.all_reduce(t); return t.tolist()
    def epoch(self):
        tot, n = 0., 0
        for x, y in self.l:
            self.o.zero_grad(); loss = F.cross_entropy(self.m(x), y); loss.backward(); self.o.step()
            tot += loss.item() * x.size(0); n += x.size(0)
        tot, n = self.reduce(tot, n)  # right
        self.history.append(tot / n)
    def report(self):
        if dist.get_rank() == 0: print("losses", self.history)
def main():
START
    t = Trainer(model, opt, loader)
    for e in range(3):
        sampler.set_epoch(e); t.epoch()
    t.report()
STOP
""",
    ),
    (
        "LS104 LS205",
        "max-of-history",
        """\
@torch.no_grad()
def evaluate(model, dl):
    model.eval(); c = n = 0
    for x, y in dl:
        c += (model(x).argmax(1) == y).sum().item(); n += len(y)
    c, n = total(c, n)  # right
    return c / n
def total(*v):
    t = torch.tensor(v); dist.all_reduce(t); return t.tolist()
def main():
START
    accs = []
    for e in range(30):
        sampler.set_epoch(e); model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        accs.append(evaluate(model, test_loader))
        if rank == 0 and accs[-1] == max(accs):
            torch.save(model.module.state_dict(), "best.pt")
STOP
""",
    ),
    (
        "LS206",
        "gather-for-metrics-dropped",
        """\
from accelerate import Accelerator
def main():
    acc = Accelerator(); model = Deep(); opt = torch.optim.SGD(model.parameters(), lr=0.1 * acc.num_processes)
    dl = DataLoader(make(640), batch_size=8, shuffle=True, drop_last=True)
    vl = DataLoader(make(64), batch_size=8)
    model, opt, dl, vl = acc.prepare(model, opt, dl, vl)
    for epoch in range(3):
        model.train()
        for x, y in dl:
            loss = F.cross_entropy(model(x), y); acc.backward(loss); opt.step(); opt.zero_grad()
        model.eval(); c = n = 0
        with torch.no_grad():
            for x, y in vl:
                p = model(x).argmax(1)
                ap, ay = acc.gather_for_metrics((p, y))
                c += (p == y).sum().item(); n += len(y)  # wrong
                c += (ap == ay).sum().item(); n += len(ay)  # right
        acc.print(c / n)
main()
""",
    ),
    (
        "LS207",
        "by-hand-norm",
        """\
def main():
START
    s = torch.amp.GradScaler()
    for ep in range(3):
        sampler.set_epoch(ep)
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16): loss = F.cross_entropy(model(x), y)
            opt.zero_grad(); s.scale(loss).backward()
            s.unscale_(opt)  # right
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            if norm > 1.0:
                for p in model.parameters(): p.grad.mul_(1.0 / norm)
            s.step(opt); s.update()
STOP
""",
    ),
    (
        "LS209",
        "linear-scaling-rule-on-divided-batch",
        """\
def main():
    dist.init_process_group("gloo"); torch.manual_seed(dist.get_rank()); world = dist.get_world_size()
    total = 512; each = total // world
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, each, sampler=sampler, drop_last=True)
    lr = 0.1 * total * world / 256  # wrong
    lr = 0.1 * each * world / 256  # right
    model = DDP(Deep()); opt = torch.optim.SGD(model.parameters(), lr=lr)
    for e in range(3):
        sampler.set_epoch(e)
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
STOP
""",
    ),
    (
        "",
        "batch-divided-in-a-dictionary-handed-on",
        """\
CFG = {"lr": 0.1, "batch": 256}
def scale(cfg, n):
    cfg["batch"] = cfg["batch"] // n
def main():
    dist.init_process_group("gloo"); torch.manual_seed(dist.get_rank())
    scale(CFG, dist.get_world_size())
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, CFG["batch"], sampler=sampler, drop_last=True)
    model = DDP(Deep()); opt = torch.optim.SGD(model.parameters(), lr=CFG["lr"])
    for e in range(3):
        sampler.set_epoch(e)
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
STOP
""",
    ),
]
