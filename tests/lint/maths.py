"""Sums, rates and modes by way of partials, closures, callbacks and objects: (codes, what it is, program)."""

MATHS: list[tuple[str, str, str]] = [
    (
        "LS214",
        "loaders-by-partial",
        """\
import functools
class Task:
    def __init__(self, rank, world):
        self.feed = functools.partial(DataLoader, batch_size=8, num_workers=2)
        data = make(640); self.sampler = DistributedSampler(data)
        self.train_data = self.feed(data, sampler=self.sampler, drop_last=True)
        self.val_data = self.feed(Subset(make(101), range(rank, 101, world)))
        self.model = DDP(Deep()); self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1 * world)
    def validate(self):
        self.model.eval()  # right
        tally = torch.zeros(2)
        with torch.no_grad():
            for x, y in self.val_data:
                tally[0] += (self.model(x).argmax(1) == y).sum(); tally[1] += len(y)
        dist.all_reduce(tally)
        return (tally[0] / tally[1]).item()
    def run(self, rank):
        for epoch in range(3):
            self.sampler.set_epoch(epoch); self.model.train()
            for x, y in self.train_data:
                self.opt.zero_grad(); F.cross_entropy(self.model(x), y).backward(); self.opt.step()
            top = self.validate()
            if rank == 0:
                print(top)
def main():
    dist.init_process_group("gloo"); rank = dist.get_rank(); world = dist.get_world_size()
    torch.manual_seed(rank)
    Task(rank, world).run(rank)
STOP
""",
    ),
    (
        "LS207",
        "closure-of-a-factory",
        """\
def make_step(net, opt, scaler):
    def step(x, y):
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)  # right
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt); scaler.update()
        return loss.detach()
    return step
def main():
START
    step = make_step(model, opt, torch.amp.GradScaler("cuda"))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        losses = [step(x, y) for x, y in loader]
STOP
""",
    ),
    (
        "LS201",
        "step-handed-in",
        """\
def one(model, x, y, k):
    loss = F.cross_entropy(model(x), y)
    (loss / k).backward()  # right
    loss.backward()  # wrong
def epoch_of(model, loader, opt, body, k):
    for i, (x, y) in enumerate(loader):
        body(model, x, y, k)
        if (i + 1) % k == 0 or i + 1 == len(loader):
            opt.step(); opt.zero_grad()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        with model.no_sync():
            pass
        epoch_of(model, loader, opt, one, 4)
STOP
""",
    ),
    (
        "LS210",
        "scheduler-in-a-callback",
        """\
class Callback:
    def on_batch_end(self, run): ...
    def on_epoch_end(self, run): ...
class Rate(Callback):
    def __init__(self, scheduler):
        self.scheduler = scheduler
    def on_epoch_end(self, run):  # right
    def on_batch_end(self, run):  # wrong
        self.scheduler.step()
class Say(Callback):
    def on_batch_end(self, run):
        pass
    def on_epoch_end(self, run):
        print("done")
class Run:
    def __init__(self, model, opt, loader, callbacks):
        self.model, self.opt, self.loader, self.callbacks = model, opt, loader, callbacks
    def fit(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.opt.zero_grad(); F.cross_entropy(self.model(x), y).backward(); self.opt.step()
                for each in self.callbacks:
                    each.on_batch_end(self)
            for each in self.callbacks:
                each.on_epoch_end(self)
def main(epochs=30):
START
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=epochs)
    Run(model, opt, loader, [Rate(scheduler), Say()]).fit(epochs)
STOP
""",
    ),
    # --- more
    (
        "LS204",
        "report-method",
        """\
class Trainer:
    def __init__(self, model, opt, loader, rank):
        self.model, self.opt, self.loader, self.rank = model, opt, loader, rank
    def one(self):
        total = torch.zeros(2)
        for x, y in self.loader:
            self.opt.zero_grad(); loss = F.cross_entropy(self.model(x), y); loss.backward(); self.opt.step()
            total[0] += loss.detach() * len(y); total[1] += len(y)
        dist.all_reduce(total)  # right
        return (total[0] / total[1]).item()
    def report(self, epoch, loss):
        if self.rank == 0:
            print(f"{epoch} {loss}")
    def run(self):
        for epoch in range(3):
            self.loader.sampler.set_epoch(epoch); self.model.train()
            loss = self.one()
            self.report(epoch, loss)
def main():
START
    Trainer(model, opt, loader, rank).run()
STOP
""",
    ),
    (
        "LS204",
        "history-json",
        """\
import json
def main():
START
    history = {"loss": [], "acc": []}
    for epoch in range(3):
        sampler.set_epoch(epoch); model.train(); total = torch.zeros(3)
        for x, y in loader:
            opt.zero_grad(); out = model(x); loss = F.cross_entropy(out, y); loss.backward(); opt.step()
            total += torch.stack([loss.detach() * len(y), (out.argmax(1) == y).sum(), torch.tensor(len(y))])
        dist.all_reduce(total)  # right
        history["loss"].append((total[0] / total[2]).item()); history["acc"].append((total[1] / total[2]).item())
    if rank == 0:
        with open("history.json", "w") as f:
            json.dump(history, f)
STOP
""",
    ),
    (
        "LS204",
        "decorated-logger",
        """\
import functools
def master_only(f):
    @functools.wraps(f)
    def inner(*args, **kwargs):
        if dist.get_rank() == 0:
            return f(*args, **kwargs)
    return inner
@master_only
def emit(epoch, **values):
    print(epoch, " ".join(f"{k}={v:.3f}" for k, v in values.items()))
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch); model.train(); running, seen = 0.0, 0
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
            running += loss.item() * len(y); seen += len(y)
        t = torch.tensor([running, seen]); dist.all_reduce(t); running, seen = t.tolist()  # right
        emit(epoch, loss=running / seen)
STOP
""",
    ),
    (
        "LS204",
        "generator-of-losses",
        """\
def steps(model, loader, opt):
    for x, y in loader:
        opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
        yield loss.detach()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch); model.train()
        losses = torch.stack(list(steps(model, loader, opt)))
        mean = losses.mean()
        dist.all_reduce(mean); mean /= world  # right
        if rank == 0:
            print(epoch, mean.item())
STOP
""",
    ),
    (
        "LS204",
        "comprehension-of-losses",
        """\
def step(model, opt, x, y):
    opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
    return loss.detach()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch); model.train()
        losses = torch.stack([step(model, opt, x, y) for x, y in loader])
        mean = losses.mean()
        dist.all_reduce(mean); mean /= world  # right
        if rank == 0:
            print(epoch, mean.item())
STOP
""",
    ),
    (
        "LS204",
        "hvd-like-callback",
        """\
class Printer:
    def on_epoch_end(self, epoch, logs):
        if dist.get_rank() == 0:
            print(epoch, logs)
class Other:
    def on_epoch_end(self, epoch, logs):
        pass
def main():
START
    hooks = [Printer(), Other()]
    for epoch in range(3):
        sampler.set_epoch(epoch); model.train(); total = torch.zeros(2)
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
            total[0] += loss.detach() * len(y); total[1] += len(y)
        dist.all_reduce(total)  # right
        logs = {"loss": (total[0] / total[1]).item()}
        for hook in hooks:
            hook.on_epoch_end(epoch, logs)
STOP
""",
    ),
    (
        "LS104 LS205",
        "best-in-callback",
        """\
class Keep:
    def __init__(self):
        self.best = 0.0
    def on_epoch_end(self, run):
        if run.accuracy > self.best:
            self.best = run.accuracy
            if run.rank == 0:
                torch.save(run.model.module.state_dict(), "best.pt")
class Quiet:
    def on_epoch_end(self, run):
        pass
class Run:
    def __init__(self, model, opt, loader, test_loader, rank):
        self.model, self.opt, self.loader, self.test_loader, self.rank = model, opt, loader, test_loader, rank
        self.hooks = [Keep(), Quiet()]; self.accuracy = 0.0
    def test(self):
        self.model.eval(); hits = torch.zeros(2)
        with torch.no_grad():
            for x, y in self.test_loader:
                hits[0] += (self.model.module(x).argmax(1) == y).sum(); hits[1] += len(y)
        dist.all_reduce(hits)  # right
        return (hits[0] / hits[1]).item()
    def fit(self):
        for epoch in range(3):
            self.loader.sampler.set_epoch(epoch); self.model.train()
            for x, y in self.loader:
                self.opt.zero_grad(); F.cross_entropy(self.model(x), y).backward(); self.opt.step()
            self.accuracy = self.test()
            for hook in self.hooks:
                hook.on_epoch_end(self)
def main():
START
    Run(model, opt, loader, test_loader, rank).fit()
STOP
""",
    ),
    (
        "LS205",
        "early-then-reduced",
        """\
def test(model, loader):
    model.eval(); hits = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            hits[0] += (model(x).argmax(1) == y).sum(); hits[1] += len(y)
    return hits
def main():
START
    best = 0.0
    for epoch in range(3):
        sampler.set_epoch(epoch); model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        hits = test(model.module, test_loader)
        own = (hits[0] / hits[1]).item()  # wrong
        dist.all_reduce(hits)
        acc = (hits[0] / hits[1]).item()
        own = acc  # right
        if own > best:
            best = own
            if rank == 0:
                torch.save(model.module.state_dict(), "best.pt")
        if rank == 0:
            print(epoch, acc)
STOP
""",
    ),
    (
        "LS104 LS205",
        "sorted-topk",
        """\
import heapq
def main():
START
    kept = []
    for epoch in range(3):
        sampler.set_epoch(epoch); model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        model.eval(); hits = torch.zeros(2)
        with torch.no_grad():
            for x, y in test_loader:
                hits[0] += (model.module(x).argmax(1) == y).sum(); hits[1] += len(y)
        dist.all_reduce(hits)  # right
        score = (hits[0] / hits[1]).item()
        if len(kept) < 3 or score > min(kept):
            kept.append(score); kept = sorted(kept)[-3:]
            if rank == 0:
                torch.save(model.module.state_dict(), f"top{epoch}.pt")
STOP
""",
    ),
    (
        "LS201",
        "islice-group",
        """\
import itertools
def main(k=4):
START
    for epoch in range(3):
        sampler.set_epoch(epoch); stream = iter(loader)
        while group := list(itertools.islice(stream, k)):
            opt.zero_grad()
            for n, (x, y) in enumerate(group):
                model.require_backward_grad_sync = n == len(group) - 1
                loss = F.cross_entropy(model(x), y) / len(group)  # right
                loss = F.cross_entropy(model(x), y)  # wrong
                loss.backward()
            opt.step()
STOP
""",
    ),
    (
        "LS202",
        "range-floor",
        """\
def main(k=4):
START
    updates = len(loader) // k  # wrong
    updates = -(-len(loader) // k)  # right
    for epoch in range(3):
        sampler.set_epoch(epoch); stream = iter(loader)
        for _ in range(updates):
            opt.zero_grad()
            for n in range(k):
                try:  # right
                    x, y = next(stream)  # right
                except StopIteration:  # right
                    break  # right
                x, y = next(stream)  # wrong
                model.require_backward_grad_sync = n == k - 1
                (F.cross_entropy(model(x), y) / k).backward()
            opt.step()
STOP
""",
    ),
    (
        "LS202",
        "list-of-batches",
        """\
def main(k=4):
START
    for epoch in range(3):
        sampler.set_epoch(epoch); group = []
        for batch in loader:
            group.append(batch)
            if len(group) < k:
                continue
            opt.zero_grad()
            for n, (x, y) in enumerate(group):
                model.require_backward_grad_sync = n == len(group) - 1
                (F.cross_entropy(model(x), y) / len(group)).backward()
            opt.step(); group = []
        if group:  # right
            opt.zero_grad()  # right
            for x, y in group:  # right
                (F.cross_entropy(model(x), y) / len(group)).backward()  # right
            opt.step()  # right
STOP
""",
    ),
    (
        "LS202",
        "method-predicate",
        """\
class Every:
    def __init__(self, k, total):
        self.k, self.total = k, total
    def __call__(self, i):
        return (i + 1) % self.k == 0  # wrong
        return (i + 1) % self.k == 0 or i + 1 == self.total  # right
def main(k=4):
START
    due = Every(k, len(loader))
    with model.no_sync():
        pass
    for epoch in range(3):
        sampler.set_epoch(epoch); opt.zero_grad()
        for i, (x, y) in enumerate(loader):
            (F.cross_entropy(model(x), y) / k).backward()
            if due(i):
                opt.step(); opt.zero_grad()
STOP
""",
    ),
    (
        "LS202",
        "windows-class",
        """\
class Windows:
    def __init__(self, loader, k):
        self.loader, self.k = loader, k
    def __iter__(self):
        held = []
        for batch in self.loader:
            held.append(batch)
            if len(held) == self.k:
                yield held
                held = []
        if held:  # right
            yield held  # right
def main(k=4):
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for group in Windows(loader, k):
            opt.zero_grad()
            for n, (x, y) in enumerate(group):
                model.require_backward_grad_sync = n == len(group) - 1
                (F.cross_entropy(model(x), y) / len(group)).backward()
            opt.step()
STOP
""",
    ),
    (
        "LS203",
        "running-mean",
        """\
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch); model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        model.eval(); mean = torch.zeros(()); n = 0
        sums = torch.zeros(2)  # right
        with torch.no_grad():
            for x, y in test_loader:
                loss = F.cross_entropy(model.module(x), y)
                n += 1; mean += (loss - mean) / n  # wrong
                sums += torch.stack([loss * len(y), torch.tensor(float(len(y)))])  # right
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)  # wrong
        dist.all_reduce(sums); mean = sums[0] / sums[1]  # right
        if rank == 0:
            print(mean.item())
STOP
""",
    ),
    (
        "LS207",
        "helper-clip",
        """\
def clip(model, limit):
    total = torch.norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]))
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(min(1.0, limit / (total + 1e-6)))
def main():
START
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            with torch.autocast("cuda"):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)  # right
            clip(model, 1.0)
            scaler.step(opt); scaler.update()
STOP
""",
    ),
    (
        "LS207",
        "callback-clip",
        """\
class Clip:
    def __init__(self, limit):
        self.limit = limit
    def after_backward(self, run):
        run.scaler.unscale_(run.opt)  # right
        nn.utils.clip_grad_norm_(run.model.parameters(), self.limit)
class Nothing:
    def after_backward(self, run):
        pass
class Run:
    def __init__(self, model, opt, loader):
        self.model, self.opt, self.loader = model, opt, loader
        self.scaler = torch.amp.GradScaler("cuda"); self.hooks = [Clip(1.0), Nothing()]
    def epoch(self):
        for x, y in self.loader:
            self.opt.zero_grad()
            with torch.autocast("cuda"):
                loss = F.cross_entropy(self.model(x), y)
            self.scaler.scale(loss).backward()
            for hook in self.hooks:
                hook.after_backward(self)
            self.scaler.step(self.opt); self.scaler.update()
def main():
START
    run = Run(model, opt, loader)
    for epoch in range(3):
        sampler.set_epoch(epoch); run.epoch()
STOP
""",
    ),
    (
        "LS210",
        "while-steps",
        """\
def cycle(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1
def main(total=10000):
START
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=total)  # right
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=total // len(loader))  # wrong
    step = 0
    for x, y in cycle(loader, sampler):
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step(); sched.step()
        step += 1
        if step == total:
            break
STOP
""",
    ),
    (
        "LS210",
        "accum-updates",
        """\
def main(epochs=30, k=4):
START
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs * len(loader))  # wrong
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs * -(-len(loader) // k))  # right
    with model.no_sync():
        pass
    for epoch in range(epochs):
        sampler.set_epoch(epoch); opt.zero_grad()
        for i, (x, y) in enumerate(loader):
            (F.cross_entropy(model(x), y) / k).backward()
            if (i + 1) % k == 0 or i + 1 == len(loader):
                opt.step(); opt.zero_grad(); sched.step()
STOP
""",
    ),
    (
        "LS210",
        "world-divided",
        """\
def main(epochs=30):
START
    total = epochs * len(loader)  # right
    total = epochs * len(loader) * world  # wrong
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, total)
    for epoch in range(epochs):
        sampler.set_epoch(epoch); model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
            sched.step()
STOP
""",
    ),
    (
        "LS210",
        "partial-scheduler",
        """\
import functools
def main(epochs=30):
START
    schedule_of = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=epochs)
    sched = schedule_of(opt)
    for epoch in range(epochs):
        sampler.set_epoch(epoch); model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
            sched.step()  # wrong
        sched.step()  # right
STOP
""",
    ),
    (
        "LS214",
        "other-model-eval",
        """\
import copy
def main():
START
    ema = torch.optim.swa_utils.AveragedModel(model.module)
    for epoch in range(3):
        sampler.set_epoch(epoch); model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step(); ema.update_parameters(model.module)
        model.eval()  # wrong
        ema.eval()  # right
        hits = torch.zeros(2)
        with torch.no_grad():
            for x, y in test_loader:
                hits[0] += (ema(x).argmax(1) == y).sum(); hits[1] += len(y)
        dist.all_reduce(hits)
        if rank == 0:
            print((hits[0] / hits[1]).item())
STOP
""",
    ),
    (
        "LS214",
        "decorated-eval",
        """\
import functools
def evaluating(f):
    @functools.wraps(f)
    def inner(model, *args):
        model.eval()  # right
        with torch.no_grad():
            return f(model, *args)
    return inner
@evaluating
def accuracy(model, loader):
    hits = torch.zeros(2)
    for x, y in loader:
        hits[0] += (model(x).argmax(1) == y).sum(); hits[1] += len(y)
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch); model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = accuracy(model.module, test_loader)
        if rank == 0:
            print(acc)
STOP
""",
    ),
    (
        "LS214",
        "generator-of-outputs",
        """\
def outputs(model, loader):
    with torch.inference_mode():
        for x, y in loader:
            yield model(x), y
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch); model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        model.eval()  # right
        hits = torch.zeros(2)
        for out, y in outputs(model.module, test_loader):
            hits[0] += (out.argmax(1) == y).sum(); hits[1] += len(y)
        dist.all_reduce(hits)
        if rank == 0:
            print((hits[0] / hits[1]).item())
STOP
""",
    ),
]
