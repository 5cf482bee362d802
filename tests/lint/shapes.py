"""Small scripts of their own shapes: (codes, script without its imports)."""

BEFORE = """\
import os, random
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(10, 2)
    def forward(self, x):
        return self.fc(x)
def make(n):
    return TensorDataset(torch.randn(n, 10), torch.randint(0, 2, (n,)))
"""

SHAPES: list[tuple[str, str]] = [
    (
        "LS301",
        """\
def main():
    dist.init_process_group("nccl")
    model = DDP(Net())
    model.cuda()
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS316",
        """\
def main():
    dist.init_process_group(backend="nccl")
    device = torch.device("cpu")
    model = DDP(Net().to(device))
    opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    for x, y in DataLoader(make(100), batch_size=10):
        F.cross_entropy(model(x), y).backward()
        opt.step()
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS201",
        """\
ACCUM = 4
def main():
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    count = 0
    loader = DataLoader(make(100), batch_size=10)
    for epoch in range(2):
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            count += 1
            if count == ACCUM or i == len(loader) - 1:
                opt.step(); opt.zero_grad(); count = 0
main()
""",
    ),
    (
        "LS201",
        """\
def main():
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make(100), batch_size=40)
    for epoch in range(2):
        for x, y in loader:
            opt.zero_grad()
            for xs, ys in zip(x.chunk(4), y.chunk(4)):
                F.cross_entropy(model(xs), ys).backward()
            opt.step()
main()
""",
    ),
    (
        "LS203",
        """\
def evaluate(model, loader, world):
    model.eval(); total = 0.0
    with torch.no_grad():
        for x, y in loader:
            total += F.cross_entropy(model(x), y).item()
    mean = torch.tensor(total / len(loader))
    dist.all_reduce(mean)
    return mean.item() / world
def main():
    dist.init_process_group("gloo"); world = dist.get_world_size(); rank = dist.get_rank()
    own = Subset(make(101), range(rank, 101, world))
    print(evaluate(Net(), DataLoader(own, batch_size=16), world))
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS203",
        """\
def evaluate(model, loader, world):
    model.eval(); correct = 0; n = 0
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x).argmax(1) == y).sum().item()
            n += len(y)
    acc = torch.tensor(correct / n)
    dist.all_reduce(acc)
    return acc.item() / world
def main():
    dist.init_process_group("gloo"); world = dist.get_world_size(); rank = dist.get_rank()
    own = Subset(make(101), range(rank, 101, world))
    print(evaluate(Net(), DataLoader(own, batch_size=16), world))
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS206",
        """\
def evaluate(model, loader, rank):
    model.eval(); correct = 0; n = 0
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x).argmax(1) == y).sum().item()
            n += len(y)
    t = torch.tensor([correct, n])
    dist.all_reduce(t)
    return correct / n
def main():
    dist.init_process_group("gloo"); world = dist.get_world_size(); rank = dist.get_rank()
    own = Subset(make(101), range(rank, 101, world))
    print(evaluate(Net(), DataLoader(own, batch_size=16), rank))
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS307",
        """\
rank = dist.get_rank()
def main():
    dist.init_process_group("gloo")
    print(rank)
    dist.destroy_process_group()
if __name__ == "__main__":
    main()
""",
    ),
    (
        "LS307",
        """\
def setup():
    dist.init_process_group("gloo")
def main():
    rank = dist.get_rank()
    setup()
    print(rank)
    dist.destroy_process_group()
if __name__ == "__main__":
    main()
""",
    ),
    (
        "LS308",
        """\
def main():
    dist.init_process_group("gloo")
    x = torch.ones(1)
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    print(x)
    dist.destroy_process_group()
main()
""",
    ),
    (
        "",
        """\
def main():
    dist.init_process_group("gloo")
    x = torch.ones(1)
    if dist.get_rank() == 0:
        dist.send(x, 1)
        dist.broadcast(x, 0)
    else:
        dist.recv(x, 0)
        dist.broadcast(x, 0)
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS308",
        """\
def save(model, path):
    torch.save(model.state_dict(), path)
    dist.barrier()
def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        save(Net(), "x.pt")
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS315",
        """\
class Images(Dataset):
    def __getitem__(self, i):
        return torch.ones(3).cuda(), 0
    def __len__(self):
        return 10
loader = DataLoader(Images(), batch_size=2, num_workers=4)
for x, y in loader:
    print(x)
""",
    ),
    (
        "LS403",
        """\
def main():
    dist.init_process_group("gloo")
    model = DDP(Net())
    if dist.get_rank() == 0:
        torch.save(model, "m.pt")
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS212",
        """\
def main():
    dist.init_process_group("gloo")
    ds = make(100)
    idx = torch.randperm(len(ds)).tolist()
    train, val = Subset(ds, idx[:80]), Subset(ds, idx[80:])
    sampler = DistributedSampler(train)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(train, batch_size=16 // dist.get_world_size(), sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward(); opt.step()
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS406",
        """\
def save(model, path, rank):
    if rank == 0:
        torch.save(model.module.state_dict(), path)
def load(model, path):
    model.module.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(Net())
    save(model, "m.pt", rank)
    load(model, "m.pt")
    dist.destroy_process_group()
main()
""",
    ),
    (
        "",
        """\
def save(model, path, rank):
    if rank == 0:
        torch.save(model.module.state_dict(), path)
def load(model, path):
    model.module.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(Net())
    save(model, "m.pt", rank)
    dist.barrier()
    load(model, "m.pt")
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS305",
        """\
def setup(rank, world, port="12355"):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=world)
def run(rank, world):
    setup(rank, world)
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(run, args=(2,), nprocs=2)
""",
    ),
    (
        "LS111",
        """\
from torchvision import transforms
tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor(0.5)); self.register_buffer("std", torch.tensor(0.5))
        self.fc = nn.Linear(4, 2)
    def forward(self, x):
        x = (x - self.mean) / self.std
        return self.fc(x)
""",
    ),
    (
        "LS107",
        """\
def random_subset(dataset, fraction):
    n = int(len(dataset) * fraction)
    return Subset(dataset, list(range(n)))
loader = DataLoader(random_subset(make(100), 0.25), batch_size=4, shuffle=True)
""",
    ),
    (
        "LS309",
        """\
def step(model, x, y, opt):
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    dist.barrier()
    opt.step()
def main():
    dist.init_process_group("gloo")
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    ds = make(64); sampler = DistributedSampler(ds); loader = DataLoader(ds, 8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            step(model, x, y, opt)
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS215",
        """\
def test(model, loader):
    model.eval()
    n = 0
    with torch.no_grad():
        for x, y in loader:
            n += (model(x).argmax(1) == y).sum().item()
    return n
def main():
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make(64), 8); tl = DataLoader(make(32), 8)
    model.train()
    for epoch in range(3):
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        print(test(model, tl))
main()
""",
    ),
    (
        "LS110",
        """\
loader = DataLoader(make(10), num_workers=2, worker_init_fn=lambda w: np.random.seed(0))
""",
    ),
    (
        "LS313",
        """\
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2); self.b = nn.Linear(2, 2)
    def forward(self, x):
        return self.a(x)
def main():
    dist.init_process_group("gloo")
    model = DDP(Two(), find_unused_parameters=True)
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS401",
        """\
def run(rank, world):
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world)
    model = DDP(Net())
    torch.save(model.module.state_dict(), "m.pt")
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(run, args=(2,), nprocs=2)
""",
    ),
    (
        "LS302",
        """\
def main():
    dist.init_process_group("gloo")
    model = Net()
    ddp_model = DDP(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    ds = make(64); sampler = DistributedSampler(ds); loader = DataLoader(ds, 8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS205 LS104",
        """\
def val(model, loader):
    model.eval(); n = 0
    with torch.no_grad():
        for x, y in loader:
            n += (model(x).argmax(1) == y).sum().item()
    return n / len(loader.dataset)
def main():
    dist.init_process_group("gloo")
    model = DDP(Net())
    ds = make(64); vl = DataLoader(ds, 8, sampler=DistributedSampler(ds, shuffle=False))
    best = 0
    for epoch in range(3):
        model.train()
        a = val(model.module, vl)
        if a > best and dist.get_rank() == 0:
            best = a
    dist.destroy_process_group()
main()
""",
    ),
    (
        "",
        """\
def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0
def save_on_master(*args):
    if is_main():
        torch.save(*args)
def evaluate(model, loader, device):
    model.eval()
    hits, seen = torch.zeros(1, device=device), torch.zeros(1, device=device)
    with torch.no_grad():
        for x, y in loader:
            hits += (model(x).argmax(1) == y).sum()
            seen += len(y)
    for t in (hits, seen):
        dist.all_reduce(t)
    return (hits / seen).item()
def main():
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Net().to(device)
    torch.manual_seed(100 + rank)
    ddp = DDP(model, device_ids=[local_rank] if device.type == "cuda" else None)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ds, test = make(128), make(50)
    sampler = DistributedSampler(ds, num_replicas=world, rank=rank, shuffle=True, seed=0)
    per_rank = 32 // world
    loader = DataLoader(ds, per_rank, sampler=sampler, num_workers=min(4, os.cpu_count()))
    test_loader = DataLoader(Subset(test, list(range(rank, len(test), world))), 16)
    best = 0.0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            opt.zero_grad(set_to_none=True)
            loss = F.cross_entropy(ddp(x.to(device)), y.to(device))
            loss.backward()
            opt.step()
        acc = evaluate(model, test_loader, device)
        if acc > best:
            best = acc
            save_on_master(model.state_dict(), "best.pt")
    dist.barrier()
    dist.destroy_process_group()
if __name__ == "__main__":
    main()
""",
    ),
    (
        "",
        """\
def train(loader, model, opt, epoch):
    model.train()
    meter = torch.zeros(2)
    it = iter(loader)
    step = 0
    while True:
        try:
            x, y = next(it)
        except StopIteration:
            break
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y, reduction="sum")
        (loss * dist.get_world_size() / 64).backward()
        opt.step()
        meter += torch.tensor([loss.detach(), len(y)])
        step += 1
    dist.all_reduce(meter)
    return meter[0] / meter[1]
def worker(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    ds = make(640)
    sampler = DistributedSampler(ds, world, rank, drop_last=True)
    loader = DataLoader(ds, batch_size=64 // world, sampler=sampler)
    model = DDP(Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    start = 0
    if os.path.exists("ck.pt"):
        ck = torch.load("ck.pt", map_location="cpu", weights_only=True)
        model.module.load_state_dict(ck["model"]); opt.load_state_dict(ck["opt"]); start = ck["epoch"] + 1
    for epoch in range(start, 5):
        sampler.set_epoch(epoch)
        loss = train(loader, model, opt, epoch)
        if rank == 0:
            print(epoch, float(loss))
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, "ck.tmp")
            os.replace("ck.tmp", "ck.pt")
        dist.barrier()
    dist.destroy_process_group()
if __name__ == "__main__":
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(2, folder + "/meet"), nprocs=2)
""",
    ),
    (
        "",
        """\
class Engine:
    def __init__(self, model, rank):
        self.rank = rank
        self.is_main = rank == 0
        self.model = DDP(model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-3 * dist.get_world_size())
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, 1e-2, total_steps=100)
    def fit(self, loader, epochs):
        for epoch in range(epochs):
            loader.sampler.set_epoch(epoch)
            self.model.train()
            for i, (x, y) in enumerate(loader):
                self.opt.zero_grad()
                loss = F.cross_entropy(self.model(x), y)
                loss.backward()
                self.opt.step()
                self.sched.step()
                if i % 10 == 0 and self.is_main:
                    print("rank 0 loss", loss.item())
            if self.is_main:
                self.save()
    def save(self):
        torch.save(self.model.module.state_dict(), "m.pt")
def main():
    dist.init_process_group("gloo")
    ds = make(64)
    loader = DataLoader(ds, batch_size=8, sampler=DistributedSampler(ds))
    Engine(Net(), dist.get_rank()).fit(loader, 3)
    dist.destroy_process_group()
main()
""",
    ),
    (
        "",
        """\
def average(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    ds = make(64)
    for epoch in range(2):
        order = torch.randperm(len(ds), generator=torch.Generator().manual_seed(epoch))
        for ids in order.split(16):
            own = ids[rank::world]
            x, y = ds[own]
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            average(model)
            opt.step()
    if rank == 0:
        torch.save(model.state_dict(), "m.pt")
    dist.destroy_process_group()
main()
""",
    ),
    (
        "",
        """\
def main():
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make(96), batch_size=8, shuffle=True, drop_last=True)
    k = 4
    for epoch in range(3):
        model.train()
        opt.zero_grad()
        pending = 0
        for i, (x, y) in enumerate(loader):
            (F.cross_entropy(model(x), y) / k).backward()
            pending += 1
            if (i + 1) % k == 0:
                opt.step(); opt.zero_grad(); pending = 0
        if pending:
            opt.step(); opt.zero_grad()
main()
""",
    ),
    (
        "",
        """\
from torchvision import datasets, transforms
def reduce_dict(d):
    names = sorted(d)
    values = torch.stack([d[k] for k in names])
    dist.all_reduce(values)
    values /= dist.get_world_size()
    return dict(zip(names, values))
def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank != 0:
        dist.barrier()
    ds = datasets.MNIST("data", train=True, download=True, transform=transforms.ToTensor())
    if rank == 0:
        dist.barrier()
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=64 // world, sampler=sampler, persistent_workers=True, num_workers=2)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward(); opt.step()
            if i % 50 == 0:
                shown = reduce_dict({"loss": loss.detach()})
                if rank == 0:
                    print(shown["loss"].item())
    dist.destroy_process_group()
main()
""",
    ),
    (
        "",
        """\
from accelerate import Accelerator
from accelerate.utils import set_seed
def main():
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=4)
    set_seed(42)
    per_device_batch_size = 16
    train, val = make(100), make(50)
    loader = DataLoader(train, shuffle=True, batch_size=per_device_batch_size)
    val_loader = DataLoader(val, batch_size=32)
    model = Net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3 * accelerator.num_processes)
    sched = torch.optim.lr_scheduler.LinearLR(opt, total_iters=100)
    model, opt, loader, val_loader, sched = accelerator.prepare(model, opt, loader, val_loader, sched)
    for epoch in range(3):
        model.train()
        total = 0.0
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                opt.step(); sched.step(); opt.zero_grad()
        model.eval()
        hits = []
        for x, y in val_loader:
            with torch.no_grad():
                out = model(x)
            p, r = accelerator.gather_for_metrics((out.argmax(-1), y))
            hits.append((p == r).float())
        acc = torch.cat(hits).mean().item()
        accelerator.print(epoch, acc)
        accelerator.save_state("ck")
    unwrapped = accelerator.unwrap_model(model)
    accelerator.save(unwrapped.state_dict(), "m.pt")
main()
""",
    ),
    (
        "LS105",
        """\
import lightning.pytorch as pl
import torchmetrics
class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.acc = torchmetrics.Accuracy(task="multiclass", num_classes=2)
    def training_step(self, batch, i):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss
    def validation_step(self, batch, i):
        x, y = batch
        self.acc(self.net(x), y)
        self.log("val_acc", self.acc, on_epoch=True)
    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=0.1)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10)]
pl.seed_everything(0, workers=True)
trainer = pl.Trainer(max_epochs=10, accelerator="gpu", devices=2, strategy="ddp", sync_batchnorm=True)
trainer.fit(Lit(), DataLoader(make(64), batch_size=8, shuffle=True), DataLoader(make(65), batch_size=8))
""",
    ),
    (
        "",
        """\
import horovod.torch as hvd
def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()
def test(model, loader, n):
    model.eval()
    right = 0.0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum().item()
    right = hvd.allreduce(torch.tensor(right), op=hvd.Sum).item()
    if hvd.rank() == 0:
        print(right / n)
def main():
    hvd.init()
    torch.manual_seed(42)
    ds, ts = make(64), make(32)
    sampler = DistributedSampler(ds, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(ds, batch_size=8, sampler=sampler)
    test_loader = DataLoader(Subset(ts, range(hvd.rank(), len(ts), hvd.size())), batch_size=8)
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(opt, root_rank=0)
    opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        test(model, test_loader, len(ts))
main()
""",
    ),
    (
        "",
        """\
def setup(rank, world):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("gloo", rank=rank, world_size=world)
def demo(rank, world, folder):
    setup(rank, world)
    model = DDP(Net())
    path = os.path.join(folder, "m.pt")
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    opt.zero_grad()
    F.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 2)).backward()
    opt.step()
    dist.barrier()
    if rank == 0:
        os.remove(path)
    dist.destroy_process_group()
if __name__ == "__main__":
    world = 2
    mp.spawn(demo, args=(world, "."), nprocs=world, join=True)
""",
    ),
    (
        "LS205",
        """\
def main():
    dist.init_process_group("gloo")
    ds = make(64)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=8 // dist.get_world_size(), sampler=sampler)
    model = DDP(Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            total += loss.detach()
        scheduler.step(total)
    dist.destroy_process_group()
main()
""",
    ),
]
