"""Numbers that are told, compared and reduced, in programs that differ by a line: (codes, what it is, program)."""

NUMBERS: list[tuple[str, str, str]] = [
    (
        "LS203",
        "meter-per-batch",
        """\
class Meter:
    def __init__(self):
        self.sum = 0.0; self.count = 0
    def update(self, value, n=1):
        self.sum += value * n; self.count += n
    def all_reduce(self):
        t = torch.tensor([self.sum, self.count]); dist.all_reduce(t); self.sum, self.count = t.tolist()
    @property
    def avg(self):
        return self.sum / self.count
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        model.eval(); meter = Meter()
        with torch.no_grad():
            for x, y in test_loader:
                meter.update(F.cross_entropy(model(x), y).item())  # wrong
                meter.update(F.cross_entropy(model(x), y).item(), len(y))  # right
        meter.all_reduce()
        if rank == 0:
            print(meter.avg)
STOP
""",
    ),
    (
        "LS203",
        "reduce-mean-local-acc",
        """\
def evaluate(model, loader, world):
    model.eval(); right = n = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum().item(); n += len(y)
    acc = torch.tensor(right / n)  # wrong
    dist.all_reduce(acc, op=dist.ReduceOp.AVG)  # wrong
    return acc.item()  # wrong
    t = torch.tensor([right, n]); dist.all_reduce(t)  # right
    return (t[0] / t[1]).item()  # right
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = evaluate(model, test_loader, world)
        if rank == 0:
            print(acc)
STOP
""",
    ),
    (
        "LS203",
        "helper-reduces-mean",
        """\
def world_mean(value):
    t = torch.tensor(value); dist.all_reduce(t); return t.item() / dist.get_world_size()
def world_sum(value):
    t = torch.tensor(value); dist.all_reduce(t); return t.item()
def evaluate(model, loader):
    model.eval(); right = 0; n = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum().item(); n += len(y)
    return world_mean(right / n)  # wrong
    return world_sum(right) / world_sum(n)  # right
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = evaluate(model, test_loader)
        if rank == 0:
            print(acc)
STOP
""",
    ),
    (
        "LS203",
        "caller-reduces",
        """\
def world_mean(value):
    t = torch.tensor(value); dist.all_reduce(t); return t.item() / dist.get_world_size()
def evaluate(model, loader):
    model.eval(); right = 0; n = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum().item(); n += len(y)
    return right / n  # wrong
    t = torch.tensor([right, n]); dist.all_reduce(t)  # right
    return (t[0] / t[1]).item()  # right
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = world_mean(evaluate(model, test_loader))  # wrong
        acc = evaluate(model, test_loader)  # right
        if rank == 0:
            print(acc)
STOP
""",
    ),
    (
        "LS203",
        "self-attrs",
        """\
class Val:
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
    def run(self):
        self.model.eval(); self.loss = torch.zeros(()); self.n = torch.zeros(())
        with torch.no_grad():
            for x, y in self.loader:
                self.loss += F.cross_entropy(self.model(x), y)  # wrong
                self.n += 1  # wrong
                self.loss += F.cross_entropy(self.model(x), y, reduction="sum")  # right
                self.n += len(y)  # right
        dist.all_reduce(self.loss); dist.all_reduce(self.n)
        return (self.loss / self.n).item()
def main():
START
    val = Val(model, test_loader)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        loss = val.run()
        if rank == 0:
            print(loss)
STOP
""",
    ),
    (
        "LS203",
        "batch-acc-list",
        """\
def evaluate(model, loader):
    model.eval(); accs = []; sizes = []
    with torch.no_grad():
        for x, y in loader:
            accs.append((model(x).argmax(1) == y).float().mean())  # wrong
            accs.append((model(x).argmax(1) == y).float().sum()); sizes.append(len(y))  # right
    acc = torch.stack(accs).mean()  # wrong
    dist.all_reduce(acc)  # wrong
    return acc.item() / dist.get_world_size()  # wrong
    t = torch.stack([torch.stack(accs).sum(), torch.tensor(float(sum(sizes)))])  # right
    dist.all_reduce(t)  # right
    return (t[0] / t[1]).item()  # right
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = evaluate(model, test_loader)
        if rank == 0:
            print(acc)
STOP
""",
    ),
    (
        "LS203",
        "mean-of-rank-means-gather",
        """\
def evaluate(model, loader):
    model.eval(); right = n = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum().item(); n += len(y)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, right / n)  # wrong
    dist.all_gather_object(parts, (right, n))  # right
    return sum(parts) / len(parts)  # wrong
    return sum(a for a, _ in parts) / sum(b for _, b in parts)  # right
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = evaluate(model, test_loader)
        if rank == 0:
            print(acc)
STOP
""",
    ),
    (
        "LS203",
        "criterion-object-batches-counter",
        """\
def evaluate(model, loader, criterion):
    model.eval(); stats = {"loss": torch.zeros(()), "n": torch.zeros(())}
    with torch.no_grad():
        for x, y in loader:
            stats["loss"] += criterion(model(x), y)  # wrong
            stats["n"] += 1  # wrong
            stats["loss"] += criterion(model(x), y) * len(y)  # right
            stats["n"] += len(y)  # right
    for v in stats.values():
        dist.all_reduce(v)
    return (stats["loss"] / stats["n"]).item()
def main():
START
    crit = nn.CrossEntropyLoss()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        loss = evaluate(model, test_loader, crit)
        if rank == 0:
            print(loss)
STOP
""",
    ),
    (
        "LS203",
        "reduce-each-batch-mean",
        """\
def evaluate(model, loader):
    model.eval(); total = 0.0; n = 0.0
    with torch.no_grad():
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)  # wrong
            loss = F.cross_entropy(model(x), y, reduction="sum")  # right
            total += loss.item()
            n += len(y)  # right
    t = torch.tensor([total, len(loader)])  # wrong
    t = torch.tensor([total, n])  # right
    dist.all_reduce(t)
    return (t[0] / t[1]).item()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        loss = evaluate(model, test_loader)
        if rank == 0:
            print(loss)
STOP
""",
    ),
    (
        "LS206",
        "helper-dropped",
        """\
def average(value):
    t = torch.as_tensor(value, dtype=torch.float32).clone()
    dist.all_reduce(t)
    t /= dist.get_world_size()
    return t.item()
def train(model, loader, opt):
    total = 0.0
    model.train()
    for x, y in loader:
        opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
        total += loss.item()
    mean = total / len(loader)
    average(mean)  # wrong
    mean = average(mean)  # right
    return mean
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        loss = train(model, loader, opt)
        if rank == 0:
            print(loss)
STOP
""",
    ),
    (
        "LS206",
        "reduced-name-ignored",
        """\
def reduce_mean(t):
    t = t.clone(); dist.all_reduce(t); return t / dist.get_world_size()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train(); total = torch.zeros(())
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
            total += loss.detach()
        reduced = reduce_mean(total)
        if rank == 0:
            print((total / len(loader)).item())  # wrong
            print((reduced / len(loader)).item())  # right
STOP
""",
    ),
    (
        "LS206",
        "functional-collective",
        """\
import torch.distributed._functional_collectives as funcol
from torch.distributed.nn.functional import all_reduce
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train(); total = torch.zeros(())
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
            total += loss.detach()
        all_reduce(total)  # wrong
        total = all_reduce(total)  # right
        if rank == 0:
            print((total / len(loader)).item())
STOP
""",
    ),
    (
        "LS206",
        "gathered-ignored",
        """\
def evaluate(model, loader):
    model.eval(); right = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    parts = [torch.zeros(2) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, right)
    right = torch.stack(parts).sum(0)  # right
    return (right[0] / right[1]).item()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = evaluate(model, test_loader)
        if rank == 0:
            print(acc)
STOP
""",
    ),
    (
        "LS206",
        "accelerator-reduce-dropped",
        """\
from accelerate import Accelerator
def main():
    acc = Accelerator()
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1 * acc.num_processes)
    loader = DataLoader(make(640), batch_size=8, shuffle=True, drop_last=True)
    model, opt, loader = acc.prepare(model, opt, loader)
    for epoch in range(3):
        total = torch.zeros((), device=acc.device)
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); acc.backward(loss); opt.step()
            total += loss.detach()
        acc.reduce(total, reduction="mean")  # wrong
        total = acc.reduce(total, reduction="mean")  # right
        acc.print(total.item() / len(loader))
    acc.end_training()
main()
""",
    ),
    (
        "LS206",
        "self-fabric-dropped",
        """\
from lightning.fabric import Fabric
class T:
    def __init__(self):
        self.fab = Fabric(devices=2); self.fab.launch(); self.fab.seed_everything(1)
    def run(self):
        model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1 * self.fab.world_size)
        model, opt = self.fab.setup(model, opt)
        loader = self.fab.setup_dataloaders(DataLoader(make(640), batch_size=8, shuffle=True, drop_last=True))
        for epoch in range(3):
            loader.sampler.set_epoch(epoch)
            total = torch.zeros(())
            for x, y in loader:
                opt.zero_grad(); loss = F.cross_entropy(model(x), y); self.fab.backward(loss); opt.step()
                total += loss.detach()
            self.fab.all_reduce(total)  # wrong
            total = self.fab.all_reduce(total)  # right
            self.fab.print(total.item() / len(loader))
T().run()
""",
    ),
    (
        "LS206",
        "item-reduced",
        """\
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train(); total = 0.0
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
            total += loss.item()
        dist.all_reduce(torch.tensor(total))  # wrong
        t = torch.tensor(total); dist.all_reduce(t); total = t.item() / world  # right
        if rank == 0:
            print(total / len(loader))
STOP
""",
    ),
    (
        "LS206",
        "class-method-returns",
        """\
class Comm:
    def mean(self, t):
        t = t.detach().clone()
        dist.all_reduce(t)
        return t / dist.get_world_size()
def main():
START
    comm = Comm()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train(); total = torch.zeros(())
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
            total += loss.detach()
        comm.mean(total)  # wrong
        total = comm.mean(total)  # right
        if rank == 0:
            print((total / len(loader)).item())
STOP
""",
    ),
    (
        "LS205",
        "captured-before-reduce",
        """\
def main():
    dist.init_process_group("gloo"); rank = dist.get_rank(); world = dist.get_world_size()
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    held = make(100); test_loader = DataLoader(Subset(held, range(rank, 100, world)), batch_size=16)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    best = 0.0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        model.eval(); hits = torch.zeros(1); seen = torch.zeros(1)
        with torch.no_grad():
            for x, y in test_loader:
                hits += (model(x).argmax(1) == y).sum(); seen += len(y)
        own = (hits / seen).item()
        dist.all_reduce(hits); dist.all_reduce(seen)
        acc = (hits / seen).item()
        if rank == 0:
            print(f"epoch {epoch} acc {acc}")
        if own > best:  # wrong
        if acc > best:  # right
            best = own  # wrong
            best = acc  # right
            if rank == 0:
                torch.save(model.module.state_dict(), "best.pt")
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS104 LS205",
        "semantic-best-name",
        """\
def validate(model, loader):
    model.eval(); hits = torch.zeros(1); seen = torch.zeros(1)
    with torch.no_grad():
        for x, y in loader:
            hits += (model(x).argmax(1) == y).sum(); seen += len(y)
    dist.all_reduce(hits); dist.all_reduce(seen)  # right
    return (hits / seen).item()
class Trainer:
    def __init__(self, model, opt, loader, test_loader, sampler):
        self.model, self.opt, self.loader, self.test_loader, self.sampler = model, opt, loader, test_loader, sampler
        self.top = 0.0
    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for x, y in self.loader:
                self.opt.zero_grad(); F.cross_entropy(self.model(x), y).backward(); self.opt.step()
            score = validate(self.model, self.test_loader)
            if score > self.top:
                self.top = score
                if dist.get_rank() == 0:
                    torch.save(self.model.module.state_dict(), "best.pt")
def main():
    dist.init_process_group("gloo"); rank = dist.get_rank(); world = dist.get_world_size()
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    held = make(100); test_loader = DataLoader(Subset(held, range(rank, 100, world)), batch_size=16)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    Trainer(model, opt, loader, test_loader, sampler).fit(3)
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS104 LS205",
        "early-stopper-class",
        """\
class Stopper:
    def __init__(self, patience):
        self.patience, self.lowest, self.bad = patience, float("inf"), 0
    def __call__(self, value):
        if value < self.lowest:
            self.lowest, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.patience
def validate(model, loader):
    model.eval(); loss = torch.zeros(1); seen = torch.zeros(1)
    with torch.no_grad():
        for x, y in loader:
            loss += F.cross_entropy(model(x), y, reduction="sum"); seen += len(y)
    dist.all_reduce(loss); dist.all_reduce(seen)  # right
    return (loss / seen).item()
def main():
    dist.init_process_group("gloo"); rank = dist.get_rank(); world = dist.get_world_size()
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    held = make(100); test_loader = DataLoader(Subset(held, range(rank, 100, world)), batch_size=16)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    stop = Stopper(5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        val = validate(model, test_loader)
        if stop(val):
            break
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS104 LS205",
        "dict-metrics",
        """\
def evaluate(model, loader):
    model.eval(); out = {"loss": 0.0, "correct": 0, "n": 0}
    with torch.no_grad():
        for x, y in loader:
            logits = model(x)
            out["loss"] += F.cross_entropy(logits, y, reduction="sum").item()
            out["correct"] += (logits.argmax(1) == y).sum().item()
            out["n"] += y.size(0)
    t = torch.tensor([out["loss"], out["correct"], out["n"]], dtype=torch.float64)  # right
    dist.all_reduce(t)  # right
    return {"loss": (t[0] / t[2]).item(), "acc": (t[1] / t[2]).item()}  # right
    return {"loss": out["loss"] / out["n"], "acc": out["correct"] / out["n"]}  # wrong
def main():
    dist.init_process_group("gloo"); rank = dist.get_rank(); world = dist.get_world_size()
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    held = make(100); test_loader = DataLoader(Subset(held, range(rank, 100, world)), batch_size=16)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    state = {"epoch": 0, "best": None}
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        metrics = evaluate(model, test_loader)
        if state["best"] is None or metrics["acc"] > state["best"]:
            state["best"] = metrics["acc"]
            if rank == 0:
                torch.save(model.module.state_dict(), "best.pt")
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS104 LS205",
        "meter-object",
        """\
class Meter:
    def __init__(self):
        self.sum = 0.0; self.count = 0
    def update(self, value, n):
        self.sum += value * n; self.count += n
    @property
    def avg(self):
        return self.sum / max(self.count, 1)
    def all_reduce(self):
        t = torch.tensor([self.sum, self.count]); dist.all_reduce(t); self.sum, self.count = t.tolist()
def evaluate(model, loader):
    model.eval(); acc = Meter()
    with torch.no_grad():
        for x, y in loader:
            acc.update((model(x).argmax(1) == y).float().mean().item(), len(y))
    acc.all_reduce()  # right
    return acc.avg
def main():
    dist.init_process_group("gloo"); rank = dist.get_rank(); world = dist.get_world_size()
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    held = make(100); test_loader = DataLoader(Subset(held, range(rank, 100, world)), batch_size=16)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    best_acc = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = evaluate(model, test_loader)
        is_best = acc > best_acc
        best_acc = max(acc, best_acc)
        if is_best and rank == 0:
            torch.save(model.module.state_dict(), "best.pt")
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS104 LS205",
        "accelerate",
        """\
from accelerate import Accelerator
def main():
    accelerator = Accelerator()
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1 * accelerator.num_processes)
    loader = DataLoader(make(640), batch_size=8, shuffle=True); val = DataLoader(make(100), batch_size=8)
    model, opt, loader, val = accelerator.prepare(model, opt, loader, val)
    best = 0
    for epoch in range(3):
        model.train()
        for x, y in loader:
            opt.zero_grad(); accelerator.backward(F.cross_entropy(model(x), y)); opt.step()
        model.eval(); right = []
        for x, y in val:
            with torch.no_grad():
                p = model(x).argmax(1)
            p, y = accelerator.gather_for_metrics((p, y))  # right
            right.append(p == y)
        acc = torch.cat(right).float().mean().item()
        if acc > best:
            best = acc
            accelerator.wait_for_everyone()
            accelerator.save_model(model, "best")
    accelerator.end_training()
main()
""",
    ),
    (
        "LS104 LS205",
        "fabric",
        """\
from lightning.fabric import Fabric
def main():
    fabric = Fabric(devices=2); fabric.launch(); fabric.seed_everything(1)
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1 * fabric.world_size)
    model, opt = fabric.setup(model, opt)
    loader = fabric.setup_dataloaders(DataLoader(make(640), batch_size=8, shuffle=True))
    val = fabric.setup_dataloaders(DataLoader(make(100), batch_size=8))  # wrong
    val = DataLoader(Subset(make(100), range(fabric.global_rank, 100, fabric.world_size)), batch_size=8)  # right
    best = float("inf")
    for epoch in range(3):
        model.train()
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(); fabric.backward(F.cross_entropy(model(x), y)); opt.step()
        model.eval(); losses = torch.zeros(2)
        with torch.no_grad():
            for x, y in val:
                losses += torch.stack([F.cross_entropy(model(x), y, reduction="sum"), torch.tensor(len(y))])
        losses = fabric.all_reduce(losses, reduce_op="sum")  # right
        value = (losses[0] / losses[1]).item()
        if value < best:
            best = value
            fabric.save("best.ckpt", {"model": model})
main()
""",
    ),
    (
        "LS104 LS205",
        "checkpointer-other-file",
        """\
from keeper import Keeper
def evaluate(model, loader):
    model.eval(); right = n = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum().item(); n += len(y)
    t = torch.tensor([right, n])  # right
    dist.all_reduce(t)  # right
    right, n = t.tolist()  # right
    return right / n
def main():
    dist.init_process_group("gloo"); rank = dist.get_rank(); world = dist.get_world_size()
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    held = make(100); test_loader = DataLoader(Subset(held, range(rank, 100, world)), batch_size=16)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    keeper = Keeper("out", rank)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        keeper.offer(evaluate(model, test_loader), model)
    dist.destroy_process_group()
main()
--- keeper
import torch
class Keeper:
    def __init__(self, folder, rank):
        self.folder, self.rank, self.value = folder, rank, -1.0
    def offer(self, value, model):
        if value <= self.value:
            return
        self.value = value
        if self.rank == 0:
            torch.save(model.module.state_dict(), f"{self.folder}/best.pt")
""",
    ),
    (
        "LS204",
        "after-loop-class-attr",
        """\
class Trainer:
    def __init__(self, model, opt, loader, sampler):
        self.model, self.opt, self.loader, self.sampler = model, opt, loader, sampler
        self.running = 0.0
    def epoch(self):
        self.running = 0.0
        self.model.train()
        for x, y in self.loader:
            self.opt.zero_grad(); loss = F.cross_entropy(self.model(x), y); loss.backward(); self.opt.step()
            self.running += loss.detach()
    def report(self, epoch):
        mean = self.running / len(self.loader)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)  # right
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean:.4f}")
    def fit(self, n):
        for epoch in range(n):
            self.sampler.set_epoch(epoch)
            self.epoch()
            self.report(epoch)
def main():
    dist.init_process_group("gloo"); world = dist.get_world_size()
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    Trainer(model, opt, loader, sampler).fit(3)
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS204",
        "writer-tensorboard",
        """\
from torch.utils.tensorboard import SummaryWriter
def main():
    dist.init_process_group("gloo"); rank = dist.get_rank(); world = dist.get_world_size()
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    writer = SummaryWriter() if rank == 0 else None
    for epoch in range(3):
        sampler.set_epoch(epoch)
        hits = torch.zeros(()); seen = torch.zeros(())
        for x, y in loader:
            out = model(x)
            opt.zero_grad(); F.cross_entropy(out, y).backward(); opt.step()
            hits += (out.argmax(1) == y).sum(); seen += y.numel()
        dist.all_reduce(hits); dist.all_reduce(seen)  # right
        if writer is not None:
            writer.add_scalar("train/acc", hits / seen, epoch)
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS204",
        "tuple-return",
        """\
def train(model, loader, opt):
    total = 0.0; right = 0; n = 0
    model.train()
    for x, y in loader:
        out = model(x); loss = F.cross_entropy(out, y)
        opt.zero_grad(); loss.backward(); opt.step()
        total += loss.item() * len(y); right += (out.argmax(1) == y).sum().item(); n += len(y)
    sums = torch.tensor([total, right, n], dtype=torch.float64)  # right
    dist.all_reduce(sums)  # right
    total, right, n = sums.tolist()  # right
    return total / n, right / n
def main():
    dist.init_process_group("gloo"); rank = dist.get_rank(); world = dist.get_world_size()
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    rows = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        loss, acc = train(model, loader, opt)
        rows.append({"epoch": epoch, "loss": loss, "acc": acc})
        if rank == 0:
            with open("log.txt", "a") as f:
                f.write(f"{epoch} {loss} {acc}\\n")
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS204",
        "hook-callback",
        """\
class Log:
    def __init__(self):
        self.total, self.count = 0.0, 0
    def after_step(self, trainer):
        self.total += trainer.loss.item(); self.count += 1
    def after_epoch(self, trainer):
        mean = torch.tensor(self.total / self.count)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)  # right
        if dist.get_rank() == 0:
            print(f"epoch {trainer.epoch} loss {mean.item():.3f}")
        self.total, self.count = 0.0, 0
class Trainer:
    def __init__(self, model, opt, loader, sampler, hooks):
        self.model, self.opt, self.loader, self.sampler, self.hooks = model, opt, loader, sampler, hooks
    def fit(self, n):
        for self.epoch in range(n):
            self.sampler.set_epoch(self.epoch)
            for x, y in self.loader:
                self.opt.zero_grad(); self.loss = F.cross_entropy(self.model(x), y)
                self.loss.backward(); self.opt.step()
                for hook in self.hooks:
                    hook.after_step(self)
            for hook in self.hooks:
                hook.after_epoch(self)
def main():
    dist.init_process_group("gloo"); world = dist.get_world_size()
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    Trainer(model, opt, loader, sampler, [Log()]).fit(3)
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS204",
        "periodic-window",
        """\
def main():
    dist.init_process_group("gloo"); rank = dist.get_rank(); world = dist.get_world_size()
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        window = torch.zeros(())
        for i, (x, y) in enumerate(loader):
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
            window += loss.detach()
        window /= len(loader)
        window = reduce_mean(window)  # right
        if rank == 0:
            print("loss", float(window))
    dist.destroy_process_group()
def reduce_mean(t):
    t = t.clone(); dist.all_reduce(t); return t / dist.get_world_size()
main()
""",
    ),
    (
        "LS204",
        "accelerate-log",
        """\
from accelerate import Accelerator
def main():
    accelerator = Accelerator(log_with="tensorboard")
    accelerator.init_trackers("run")
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1 * accelerator.num_processes)
    loader = DataLoader(make(640), batch_size=8, shuffle=True)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    for epoch in range(3):
        total = 0
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); accelerator.backward(loss); opt.step()
            total += loss.detach().float()
        mean = total / len(loader)  # wrong
        mean = accelerator.reduce(total, "mean") / len(loader)  # right
        accelerator.log({"train_loss": mean.item()}, step=epoch)
    accelerator.end_training()
main()
""",
    ),
    (
        "LS203",
        "lightning-none",
        """\
def batch_loss(model, x, y):
    return F.cross_entropy(model(x), y)  # wrong
    return F.cross_entropy(model(x), y, reduction="sum")  # right
def evaluate(model, loader):
    model.eval(); total = torch.zeros(()); n = 0
    with torch.no_grad():
        for x, y in loader:
            total += batch_loss(model, x, y)
            n += 1  # wrong
            n += len(y)  # right
    t = torch.stack([total, torch.tensor(float(n))])
    dist.all_reduce(t)
    return (t[0] / t[1]).item()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        loss = evaluate(model, test_loader)
        if rank == 0:
            print(loss)
STOP
""",
    ),
    (
        "LS203",
        "np-mean-list",
        """\
def evaluate(model, loader, device="cpu"):
    model.eval(); losses = []; sizes = []
    with torch.no_grad():
        for x, y in loader:
            losses.append(F.cross_entropy(model(x), y).item())  # wrong
            losses.append(F.cross_entropy(model(x), y, reduction="sum").item()); sizes.append(len(y))  # right
    mean = torch.tensor(np.mean(losses))  # wrong
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)  # wrong
    return mean.item()  # wrong
    t = torch.tensor([sum(losses), sum(sizes)]); dist.all_reduce(t)  # right
    return (t[0] / t[1]).item()  # right
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        loss = evaluate(model, test_loader)
        if rank == 0:
            print(loss)
STOP
""",
    ),
    (
        "LS203",
        "enumerate-running-mean",
        """\
def evaluate(model, loader):
    model.eval(); acc = torch.zeros(()); seen = 0
    with torch.no_grad():
        for i, (x, y) in enumerate(loader):
            hit = (model(x).argmax(1) == y).float()
            acc += hit.mean()  # wrong
            acc += hit.sum(); seen += len(y)  # right
    acc = acc / (i + 1)  # wrong
    dist.all_reduce(acc)
    seen = torch.tensor(seen); dist.all_reduce(seen)  # right
    return acc.item() / dist.get_world_size()  # wrong
    return acc.item() / seen.item()  # right
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = evaluate(model, test_loader)
        if rank == 0:
            print(acc)
STOP
""",
    ),
    (
        "LS203",
        "share-size-len-dataset",
        """\
def evaluate(model, loader, whole):
    model.eval(); right = torch.zeros(())
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum()
    acc = right / len(loader.dataset)  # wrong
    dist.all_reduce(acc, op=dist.ReduceOp.AVG)  # wrong
    dist.all_reduce(right); acc = right / whole  # right
    return acc.item()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = evaluate(model, test_loader, len(held))
        if rank == 0:
            print(acc)
STOP
""",
    ),
    (
        "LS203",
        "accelerate-gather-means",
        """\
from accelerate import Accelerator
def main():
    accelerator = Accelerator()
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1 * accelerator.num_processes)
    loader = DataLoader(make(640), batch_size=8, shuffle=True, drop_last=True)
    held = make(101)
    own = range(accelerator.process_index, 101, accelerator.num_processes)
    val = DataLoader(Subset(held, own), batch_size=16)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    for epoch in range(3):
        model.train()
        for x, y in loader:
            opt.zero_grad(); accelerator.backward(F.cross_entropy(model(x), y)); opt.step()
        model.eval(); right = torch.zeros(()); n = torch.zeros(())
        with torch.no_grad():
            for x, y in val:
                right += (model(x).argmax(1) == y).sum(); n += len(y)
        acc = accelerator.gather(right / n).mean()  # wrong
        acc = accelerator.gather(right).sum() / accelerator.gather(n).sum()  # right
        accelerator.print(acc.item())
    accelerator.end_training()
main()
""",
    ),
    (
        "LS204",
        "method-returns-dict-logger",
        """\
import logging
log = logging.getLogger("x")
class Trainer:
    def __init__(self, model, opt, loader, sampler):
        self.model, self.opt, self.loader, self.sampler = model, opt, loader, sampler
    def train_epoch(self):
        self.model.train(); loss_sum = 0.0; n = 0
        for x, y in self.loader:
            self.opt.zero_grad(); loss = F.cross_entropy(self.model(x), y); loss.backward(); self.opt.step()
            loss_sum += loss.item() * len(y); n += len(y)
        t = torch.tensor([loss_sum, n]); dist.all_reduce(t); loss_sum, n = t.tolist()  # right
        return {"train_loss": loss_sum / n}
    def fit(self, n):
        for epoch in range(n):
            self.sampler.set_epoch(epoch)
            stats = {}
            stats.update(self.train_epoch())
            if dist.get_rank() == 0:
                log.info("epoch %d: %s", epoch, stats)
def main():
START
    Trainer(model, opt, loader, sampler).fit(3)
STOP
""",
    ),
    (
        "LS204",
        "history-then-json",
        """\
import json
def train(model, loader, opt):
    total = 0.0
    model.train()
    for x, y in loader:
        opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
        total += loss.item()
    t = torch.tensor(total); dist.all_reduce(t); total = t.item() / dist.get_world_size()  # right
    return total / len(loader)
def main():
START
    history = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        history.append(train(model, loader, opt))
    if rank == 0:
        with open("history.json", "w") as f:
            json.dump(history, f)
STOP
""",
    ),
    (
        "LS204",
        "csv-writer",
        """\
import csv
def main():
START
    out = csv.writer(open("log.csv", "w")) if rank == 0 else None
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
            total += loss.detach()
        dist.all_reduce(total)  # right
        if out is not None:
            out.writerow([epoch, total.item() / len(loader)])
STOP
""",
    ),
    (
        "LS204",
        "mlflow-tqdm",
        """\
import mlflow
from tqdm import tqdm
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        losses = []
        for x, y in tqdm(loader, disable=rank != 0):
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
            losses.append(loss.item())
        mean = torch.tensor(losses).mean()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)  # right
        if rank == 0:
            mlflow.log_metric("train_loss", float(mean), step=epoch)
STOP
""",
    ),
    (
        "LS204",
        "running-ema",
        """\
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        smooth = None
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
            smooth = loss.detach() if smooth is None else 0.9 * smooth + 0.1 * loss.detach()
        dist.all_reduce(smooth, op=dist.ReduceOp.AVG)  # right
        if rank == 0:
            print("loss", smooth.item())
STOP
""",
    ),
    (
        "LS206",
        "dict-helper-dropped",
        """\
def reduce_dict(d):
    names = sorted(d); values = torch.stack([d[k] for k in names])
    dist.all_reduce(values); values /= dist.get_world_size()
    return dict(zip(names, values))
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(()); hits = torch.zeros(())
        for x, y in loader:
            out = model(x)
            opt.zero_grad(); loss = F.cross_entropy(out, y); loss.backward(); opt.step()
            total += loss.detach(); hits += (out.argmax(1) == y).sum()
        stats = {"loss": total / len(loader), "acc": hits / len(data)}
        reduce_dict(stats)  # wrong
        stats = reduce_dict(stats)  # right
        if rank == 0:
            print(stats)
STOP
""",
    ),
    (
        "LS206",
        "float-function",
        """\
def total_over_ranks(value):
    buffer = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(buffer)
    return buffer.item()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        model.eval(); right = 0
        with torch.no_grad():
            for x, y in test_loader:
                right += (model(x).argmax(1) == y).sum().item()
        everyones = total_over_ranks(right)
        if rank == 0:
            print(right / len(held))  # wrong
            print(everyones / len(held))  # right
STOP
""",
    ),
    (
        "LS206",
        "idist",
        """\
import ignite.distributed as idist
def main():
    idist.initialize("gloo")
    data = make(640); loader = idist.auto_dataloader(data, batch_size=8, shuffle=True, drop_last=True)
    model = idist.auto_model(Net())
    opt = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1 * idist.get_world_size()))
    torch.manual_seed(idist.get_rank())
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
            total += loss.detach()
        idist.all_reduce(total)  # wrong
        total = idist.all_reduce(total)  # right
        if idist.get_rank() == 0:
            print(total.item() / len(loader))
    idist.finalize()
main()
""",
    ),
    (
        "LS104 LS205",
        "self-best-method",
        """\
class Trainer:
    def __init__(self, model, opt, loader, val, sampler):
        self.model, self.opt, self.loader, self.val, self.sampler = model, opt, loader, val, sampler
        self.best = None
    def validate(self):
        self.model.eval(); self.right = self.seen = 0
        with torch.no_grad():
            for x, y in self.val:
                self.right += (self.model(x).argmax(1) == y).sum().item(); self.seen += len(y)
        t = torch.tensor([self.right, self.seen]); dist.all_reduce(t); self.right, self.seen = t.tolist()  # right
    def keep(self):
        score = self.right / self.seen
        if self.best is None or score > self.best:
            self.best = score
            if dist.get_rank() == 0:
                torch.save(self.model.module.state_dict(), "b.pt")
    def fit(self, n):
        for epoch in range(n):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for x, y in self.loader:
                self.opt.zero_grad(); F.cross_entropy(self.model(x), y).backward(); self.opt.step()
            self.validate()
            self.keep()
def main():
START
    Trainer(model, opt, loader, test_loader, sampler).fit(3)
STOP
""",
    ),
    (
        "LS205",
        "train-loss-best",
        """\
def main():
START
    best = float("inf")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
            total += loss.detach()
        dist.all_reduce(total)  # right
        if total.item() < best:
            best = total.item()
            if rank == 0:
                torch.save(model.module.state_dict(), "b.pt")
STOP
""",
    ),
]
