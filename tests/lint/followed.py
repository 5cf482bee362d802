"""What is followed to where it is used: looked-up functions, handed-on networks, told schedules: (codes, program).

Each program has @@ in it, and stands here with the wrong piece and with the right one.
"""

FOLLOWED: list[tuple[str, dict[str, str]]] = []


def pair(codes: str, text: str, wrong: str, right: str, beside: str = "", **others: str) -> None:
    """Enter a program with its wrong piece, in which `codes` are found, and with its right one; `beside`: in both."""
    FOLLOWED.append((f"{codes} {beside}".strip(), {"train": text.replace("@@", wrong), **others}))
    FOLLOWED.append((beside, {"train": text.replace("@@", right), **others}))


TOLD = """\
import functools, timm
from timm.scheduler import CosineLRScheduler
from torch.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmRestarts, StepLR
KINDS = {"cosine": functools.partial(CosineAnnealingLR, eta_min=1e-6), "step": StepLR}
def main(args):
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make(640), batch_size=8, shuffle=True)
    n = 0
    s = MADE
    for epoch in range(args.epochs):
        for i, (x, y) in enumerate(loader):
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
            n += 1
            BATCH
        EPOCH
main(None)
"""


def told(wrong: tuple[str, str, str], right: tuple[str, str, str]) -> None:
    for codes, pieces in (("LS210", wrong), ("", right)):
        text = TOLD
        for name, piece in zip(("MADE", "BATCH", "EPOCH"), pieces, strict=True):
            text = text.replace(name, piece)
        FOLLOWED.append((codes, {"train": text}))


IN_EPOCHS = "CosineLRScheduler(opt, t_initial=args.epochs, warmup_t=5)"
LONG = "CosineLRScheduler(opt, args.epochs * len(loader), warmup_t=5)"
IN_UPDATES = LONG.replace("warmup_t=5", "t_in_epochs=False")
told((IN_EPOCHS, "s.step(n)", "pass"), (IN_EPOCHS, "pass", "s.step(epoch + 1)"))
told((IN_EPOCHS, "s.step(epoch * len(loader) + i)", "pass"), (IN_EPOCHS, "s.step(epoch + i / len(loader))", "pass"))
told((IN_EPOCHS, "s.step_update(n)", "pass"), (IN_EPOCHS, "s.step_update(n)", "s.step(epoch)"))
told((LONG, "pass", "s.step(epoch)"), (IN_UPDATES, "s.step_update(num_updates=n)", "s.step(epoch)"))
told((IN_UPDATES, "pass", "s.step(epoch)"), (IN_UPDATES, "s.step_update(n)", "pass"))
told(
    (IN_EPOCHS.replace("warmup_t=5", "t_in_epochs=False"), "s.step_update(n)", "pass"),
    (IN_EPOCHS.replace("warmup_t=5", "t_in_epochs=args.by_epoch"), "s.step_update(n)", "pass"),
)
told(
    ("CosineAnnealingWarmRestarts(opt, T_0=args.epochs)", "s.step(n)", "pass"),
    ("CosineAnnealingWarmRestarts(opt, T_0=args.epochs)", "s.step(n / len(loader))", "pass"),
)
told(
    ('KINDS["cosine"](opt, T_max=args.epochs)', "s.step()", "pass"),
    ('KINDS["cosine"](opt, T_max=args.epochs)', "pass", "s.step()"),
)
told(
    ('getattr(torch.optim.lr_scheduler, "StepLR")(opt, args.step_epochs)', "s.step()", "pass"),
    ("getattr(torch.optim.lr_scheduler, args.kind)(opt, args.step_epochs)", "s.step()", "pass"),
)

LENGTH = """\
import math
class Config:
    epochs = 20
    batch_size = 32  # of each GPU
def main(cfg):
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    train = make(6400); sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=cfg.batch_size, sampler=sampler)
    model = DDP(Net()); opt = torch.optim.AdamW(model.parameters(), lr=1e-3 * world)
    per_epoch = @@
    s = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-3 * world, epochs=cfg.epochs, steps_per_epoch=per_epoch)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step(); s.step()
    dist.destroy_process_group()
main(Config())
"""
pair("LS210", LENGTH, "math.ceil(len(train) / cfg.batch_size)", "math.ceil(len(train) / (cfg.batch_size * world))")
pair("LS210", LENGTH, "len(loader.dataset) // cfg.batch_size", "len(loader.dataset) // world // cfg.batch_size")
pair("LS210", LENGTH, "len(train) // cfg.batch_size + 1", "len(train) // cfg.total_batch_size + 1")

NETS = """\
from torchvision import models
class Trainer:
    def __init__(self, gpu):
        self.net = models.resnet18(num_classes=10).cuda(gpu)
        @@
        self.opt = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
def main(gpu):
    dist.init_process_group("nccl")
    Trainer(gpu)
    nets = [models.resnet18(num_classes=10), models.resnet50(num_classes=10)]
    for k in range(len(nets)):
        ONE
    dist.destroy_process_group()
main(int(os.environ["LOCAL_RANK"]))
"""
CONVERT, WRAP = "self.net = nn.SyncBatchNorm.convert_sync_batchnorm(self.net)", "self.ddp = DDP(self.net)"
pair("LS213", NETS.replace("ONE", "pass"), f"{WRAP}\n        {CONVERT}", f"{CONVERT}\n        {WRAP}")
NETS = NETS.replace("@@", WRAP).replace("ONE", "@@")
CONVERT, WRAP = "nets[k] = nn.SyncBatchNorm.convert_sync_batchnorm(nets[k])", "nets[k] = DDP(nets[k].cuda())"
pair("LS213", NETS, f"{WRAP}\n        {CONVERT}", f"{CONVERT}\n        {WRAP}")
pair("LS301", NETS, "nets[k] = DDP(nets[k])\n        nets[k] = nets[k].cuda(gpu)", f"{WRAP}\n        nets[k].cuda(gpu)")

HELD = """\
class WithLoss(nn.Module):
    def __init__(self, net, crit):
        super().__init__()
        self.net, self.crit = net, crit
    def forward(self, x, y):
        return self.crit(self.net(x), y)
class Distilled(nn.Module):
    def __init__(self, teacher, student):
        super().__init__()
        self.teacher = teacher; self.student = student
    def forward(self, x, y):
        with torch.no_grad():
            soft = self.teacher(x)
        return F.kl_div(self.student(x).log_softmax(1), soft.softmax(1)) + F.cross_entropy(self.student(x), y)
def main():
    dist.init_process_group("gloo")
    net = Net(); model = DDP(net)
    step = @@
    opt = torch.optim.SGD(net.parameters(), lr=0.1 * dist.get_world_size())
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(); step(x, y).backward(); opt.step()
    dist.destroy_process_group()
main()
"""
pair("LS302", HELD, "WithLoss(net, nn.CrossEntropyLoss())", "WithLoss(model, nn.CrossEntropyLoss())")
pair("LS302", HELD, "Distilled(Net(), net)", "Distilled(net, model)")

FRESH = """\
from torchvision import models
def build():
    return models.resnet18(num_classes=10)
def fit(model, loader, opt):
    model.train()
    for x, y in loader:
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
@torch.no_grad()
def score(model, loader):
    ok = n = 0
    for x, y in loader:
        ok += (model(x).argmax(1) == y).sum().item(); n += len(y)
    return ok / n
def main():
    model = build(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    train, val, test = DataLoader(make(64), 8, shuffle=True), DataLoader(make(32), 8), DataLoader(make(16), 8)
    best = 0
    for epoch in range(3):
        fit(model, train, opt)
        model.eval()
        if (found := score(model, val)) > best:
            best = found
            torch.save(model.state_dict(), "best.pt")
    final = build()
    final.load_state_dict(torch.load("best.pt", map_location="cpu", weights_only=True))
    @@
main()
"""
pair("LS214", FRESH, 'print("test", score(final, test))', 'final.eval()\n    print("test", score(final, test))')
pair("LS214", FRESH, 'print("test", score(final, test))', 'print("test", score(final.eval(), test))')
LOOP = """with torch.no_grad():
        for x, y in test:
            print((final(x).argmax(1) == y).float().mean())"""
pair("LS214", FRESH, LOOP, f"final.eval()\n    {LOOP}")

ASKED = """\
from dataclasses import dataclass, field
from functools import cached_property
def world():
    return dist.get_world_size()
@dataclass
class Env:
    rank: int = FACTORY
    name: str = "run"
class Log:
    @cached_property
    def first(self):
        return dist.get_rank() == 0
    def tell(self, text):
        if self.first:
            print(text)
def main():
    BEFORE
    dist.init_process_group("gloo")
    AFTER
    DDP(Net())
    dist.destroy_process_group()
main()
"""
for factory in ("dist.get_rank", "lambda: dist.get_rank()", "world"):
    made = ASKED.replace("FACTORY", f"field(default_factory={factory})")
    FOLLOWED.append(("LS307", {"train": made.replace("BEFORE", "env = Env()").replace("AFTER", "print(env)")}))
    FOLLOWED.append(("", {"train": made.replace("BEFORE", "env = Env(rank=0)").replace("AFTER", "print(env)")}))
    FOLLOWED.append(("", {"train": made.replace("BEFORE", "pass").replace("AFTER", "print(Env())")}))
ASKED = ASKED.replace("FACTORY", "0").replace("AFTER", "log.tell('begun')").replace("BEFORE", "log = Log()\n    @@")
pair("LS307", ASKED, "log.tell('beginning')", "print('beginning')")

SPARED = """\
from contextlib import nullcontext
def quiet(model, last):
    return nullcontext() if last else model.no_sync()
def main(k):
    dist.init_process_group("gloo")
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % k == 0 or i + 1 == len(loader)
            with @@:
                (F.cross_entropy(model(x), y) / k).backward()
            if last:
                opt.step(); opt.zero_grad()
    dist.destroy_process_group()
main(4)
"""
pair("LS311", SPARED, "nullcontext()", "quiet(model, last)")

CHOSEN = """\
import argparse
from torchvision import models
parser = argparse.ArgumentParser()
parser.add_argument("--arch", default="@@")
args = parser.parse_args()
def main():
    dist.init_process_group("gloo")
    DDP(LOOKED_UP(num_classes=10), find_unused_parameters=True)
    dist.destroy_process_group()
main()
"""
for looked_up in ("getattr(models, args.arch)", "models.__dict__[args.arch]", "models.get_model(args.arch)"):
    text = CHOSEN.replace("LOOKED_UP", looked_up).replace("(args.arch)(", "(args.arch, ")
    pair("LS313", text, "resnet50", "googlenet")
pair("LS313", CHOSEN.replace("LOOKED_UP", 'getattr(models, "@@")'), "resnet18", "googlenet")

ON_CPU = """\
def gathered(x):
    out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x)
    return torch.cat(out)
def mean(loss, n):
    both = @@
    dist.all_reduce(both)
    return both
def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    seen = []
    for _ in range(3):
        seen.append(torch.ones(2).cuda()CPU)
    seen = torch.cat(seen)
    print(gathered(seen), mean(torch.ones(1).cuda(), 3))
    dist.destroy_process_group()
main()
"""
ALL_THERE = ON_CPU.replace("CPU", "")
pair("LS316", ALL_THERE, "torch.stack([torch.tensor(1.0), torch.tensor(n)])", "torch.stack([loss, loss])")
pair("LS316", ALL_THERE, "torch.tensor([1.0, n]) / len('ab')", "torch.tensor([1.0, n]).cuda() / len('ab')")
pair("LS316", ON_CPU.replace("@@", "loss * n").replace("CPU", "@@"), ".cpu()", "")

DEVICE = """\
from dataclasses import dataclass, field
@dataclass
class Place:
    rank: int = field(default_factory=lambda: int(os.environ["RANK"]))
    here: int = field(default_factory=lambda: int(os.environ["LOCAL_RANK"]))
    @property
    def device(self):
        return torch.device(f"cuda:{self.@@}")
def main():
    place = Place()
    dist.init_process_group("nccl")
    DDP(Net().to(place.device))
    dist.destroy_process_group()
main()
"""
pair("LS303", DEVICE, "rank", "here")

URL = """\
URL = "tcp://127.0.0.1:{port}"
def main(rank, n, port):
    dist.init_process_group("gloo", init_method=URL.format(port=@@), rank=rank, world_size=n)
    DDP(Net())
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(main, args=(2, int(os.environ["PORT"])), nprocs=2)
"""
pair("LS305", URL, "29500", "port")

TABLE = """\
class Schedules:
    def __init__(self, cfg):
        self.cfg = cfg
    def build(self, opt, loader):
        table = {"cosine": self.cosine, "step": self.falling}
        return table[self.cfg.schedule](opt, len(loader))
    def cosine(self, opt, n):
        return torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=self.cfg.epochs * n)
    def falling(self, opt, n):
        return torch.optim.lr_scheduler.StepLR(opt, self.cfg.step_epochs * n)
def main(cfg):
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    loader = DataLoader(make(640), batch_size=8, shuffle=True)
    schedule = Schedules(cfg).build(opt, loader)
    for epoch in range(cfg.epochs):
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        @@
main(None)
"""
pair("LS210", TABLE, "schedule.step()", "pass")
pair("LS210", TABLE.replace("table[self.cfg.schedule]", "table.get(self.cfg.schedule)"), "schedule.step()", "pass")

DECLARED = """\
import argparse
parser = argparse.ArgumentParser()
for name, default in (("--@@", 0), ("--epochs", 3)):
    parser.add_argument(name, type=int, default=default)
args = parser.parse_args()
def main():
    torch.cuda.set_device(LOCAL)
    dist.init_process_group("nccl")
    DDP(Net().cuda())
    dist.destroy_process_group()
main()
"""
FOLLOWED.append(("LS304", {"train": DECLARED.replace("@@", "local_rank").replace("LOCAL", "args.local_rank")}))
STARTED = 'int(os.environ["LOCAL_RANK"])'
FOLLOWED.append(("", {"train": DECLARED.replace("@@", "local_rank").replace("LOCAL", STARTED)}))

PORT = """\
BASE = 29500
def main():
    os.environ["MASTER_PORT"] = str(@@)
    dist.init_process_group("gloo")
    DDP(Net())
    dist.destroy_process_group()
main()
"""
pair("LS305", PORT, "BASE + 2 * 11", 'BASE + int(os.environ["JOB"]) % 1000')

WRITER = """\
class Silent:
    def add(self, name, value):
        pass
class Writer(Silent):
    def add(self, name, value):
        REDUCED
        print(name, value)
def main():
    dist.init_process_group("gloo")
    writer = Writer() if dist.get_rank() == 0 else None
    loss = torch.ones(1)
    BEFORE
    if writer is not None:
        writer.add("loss", loss)
    dist.destroy_process_group()
main()
"""
FOLLOWED.append(("LS308", {"train": WRITER.replace("REDUCED", "dist.all_reduce(value)").replace("BEFORE", "pass")}))
FOLLOWED.append(("", {"train": WRITER.replace("REDUCED", "pass").replace("BEFORE", "dist.all_reduce(loss)")}))

COLLATE = """\
class Collate:
    def __init__(self, device):
        self.device = device
    def __call__(self, batch):
        x, y = zip(*batch)
        return torch.stack(x).to(self.device), torch.stack(y)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
for x, y in DataLoader(make(64), batch_size=8, num_workers=4, collate_fn=Collate(@@)):
    print(x.to(device), y)
"""
pair("LS315", COLLATE, "device", '"cpu"')
pair("LS315", COLLATE, '"cuda"', "torch.device('cpu')")

CHILD = """\
import multiprocessing
def work(rank):
    @@
def main():
    model = Net().cuda()
    child = multiprocessing.Process(target=work, args=(0,))
    child.start(); print(model); child.join()
if __name__ == "__main__":
    main()
"""
pair("LS315", CHILD, 'print(torch.ones(1, device="cuda"))', 'print("written by", rank)')

ALL_SUMS = """\
def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    stats = {"right": torch.tensor(3)@@, "seen": torch.tensor(4)@@}
    for each in stats.values():
        dist.all_reduce(each)
    print(stats)
    dist.destroy_process_group()
main()
"""
pair("LS316", ALL_SUMS, "", ".cuda()")

OWN_LENGTH = """\
def main(args):
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    train = make(6400); sampler = DistributedSampler(train)
    own = args.batch_size // world
    loader = DataLoader(train, batch_size=own, sampler=sampler)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    s = torch.optim.lr_scheduler.CosineAnnealingLR(opt, len(@@) // own * args.epochs)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step(); s.step()
    dist.destroy_process_group()
main(None)
"""
pair("LS210", OWN_LENGTH, "train", "sampler")

UNSURE = """\
class Drop(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.drop = nn.Linear(10, 2), nn.Dropout(0.5)
    def forward(self, x):
        return self.drop(self.fc(x))
def main():
    model = Drop(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(make(64), 8, shuffle=True):
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
    torch.save(model.state_dict(), "a.pt")
def @@(times):
    net = Drop(); right = 0
    net.load_state_dict(torch.load("a.pt", map_location="cpu", weights_only=True))
    with torch.no_grad():
        for x, y in DataLoader(make(32), 8):
            right += (torch.stack([net(x) for _ in range(times)]).mean(0).argmax(1) == y).sum()
    return right
main(); print(@@(8))
"""
pair("LS214", UNSURE, "accuracy", "mc_dropout")

DECORATED = """\
import functools
def on_first(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args) if FIRST else None
    return inner
def grouped(backend):
    def decorate(function):
        def inner(*args):
            dist.init_process_group(backend)
            function(*args)
            dist.destroy_process_group()
        return inner
    return decorate
@on_first
def tell(text):
    print(text)
@@
@grouped("gloo")
def work():
    DDP(Net())
    tell(dist.get_world_size())
work()
"""
ASKS, KNOWS = "dist.get_rank() == 0", 'os.environ["RANK"] == "0"'
pair("LS307", DECORATED.replace("FIRST", ASKS), 'tell("beginning")', 'print("beginning")')
pair("LS307", DECORATED.replace("@@", 'tell("beginning")').replace("FIRST", "@@"), ASKS, KNOWS)

OPTIONS_LENGTH = LENGTH.replace("cfg.batch_size", 'cfg["batch"]').replace("cfg.epochs", 'cfg["epochs"]')
pair("LS210", OPTIONS_LENGTH, 'len(train) // cfg["batch"]', 'len(train) // (cfg["batch"] * world)')
