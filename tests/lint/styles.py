"""Faults in the styles that people write, and their innocent twins: (name, code, program with @@, wrong, right)."""

STYLES: list[tuple[str, str, str, str, str]] = []


def add(name: str, code: str, text: str, wrong: str, right: str) -> None:
    STYLES.append((name, code, text, wrong, right))


def put(text: str, *pairs: str) -> str:
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        text = text.replace(old, new)
    return text


add(
    "continue-lt",
    "LS202",
    """
def train(model, loader, opt, k):
    n = 0
    for epoch in range(3):
        n = 0
        opt.zero_grad()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y) / k
            loss.backward()
            n += 1
            if n < k:
                continue
            opt.step(); opt.zero_grad()
            n = 0
        @@
def main():
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, DataLoader(make(100), batch_size=8, shuffle=True), opt, 4)
main()
""",
    "pass",
    "if n > 0: opt.step()",
)
add(
    "lightning-manual",
    "LS202",
    """
import lightning as L
class Lit(L.LightningModule):
    def __init__(self, accum=4):
        super().__init__()
        self.automatic_optimization = False
        self.accum = accum; self.net = Net()
    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        x, y = batch
        loss = F.cross_entropy(self.net(x), y) / self.accum
        self.manual_backward(loss)
        if (batch_idx + 1) % self.accum == 0@@:
            opt.step(); opt.zero_grad()
    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)
trainer = L.Trainer(max_epochs=3)
trainer.fit(Lit(), DataLoader(make(100), batch_size=8, shuffle=True))
""",
    "",
    " or self.trainer.is_last_batch",
)
add(
    "lightning-manual-hook",
    "LS202",
    """
import lightning as L
class Lit(L.LightningModule):
    def __init__(self, accum=4):
        super().__init__()
        self.automatic_optimization = False
        self.accum = accum; self.net = Net()
    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.manual_backward(loss / self.accum)
        if (batch_idx + 1) % self.accum:
            return
        opt.step(); opt.zero_grad()
    def on_train_epoch_end(self):
        @@
    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)
trainer = L.Trainer(max_epochs=3)
trainer.fit(Lit(), DataLoader(make(100), batch_size=8, shuffle=True))
""",
    "self.log('a', 1.0)",
    "opt = self.optimizers(); opt.step(); opt.zero_grad()",
)
add(
    "divmod",
    "LS202",
    """
@dataclass
class Config:
    accum: int = 8
    epochs: int = 3
class Trainer:
    def __init__(self, cfg, model, loader):
        self.cfg = cfg; self.model = model; self.loader = loader
        self.opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    def run_epoch(self):
        self.model.train()
        for step, (x, y) in enumerate(self.loader, start=1):
            loss = F.cross_entropy(self.model(x), y)
            (loss / self.cfg.accum).backward()
            if @@step % self.cfg.accum:
                continue
            self.opt.step()
            self.opt.zero_grad(set_to_none=True)
    def run(self):
        for _ in range(self.cfg.epochs):
            self.run_epoch()
Trainer(Config(), Net(), DataLoader(make(100), batch_size=8, shuffle=True)).run()
""",
    "",
    "step != len(self.loader) and ",
)
add(
    "countdown",
    "LS202",
    put(
        """
def main(k=4):
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make(100), batch_size=8, shuffle=True@@)
    for epoch in range(3):
        left = k
        for x, y in loader:
            loss = F.cross_entropy(model(x), y) / k
            loss.backward()
            left -= 1
            if left == 0:
                opt.step(); opt.zero_grad()
                left = k
        if epoch == 0: print(epoch)
        @@@
main()
""",
        "@@@",
        "@@",
        "shuffle=True@@",
        "shuffle=True",
    ),
    "pass",
    "if left < k: opt.step(); opt.zero_grad()",
)
add(
    "micro-list",
    "LS202",
    """
def main(k=4):
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make(100), batch_size=8, shuffle=True)
    for epoch in range(3):
        pending = []
        for batch in loader:
            pending.append(batch)
            if len(pending) == k:
                for x, y in pending:
                    (F.cross_entropy(model(x), y) / len(pending)).backward()
                opt.step(); opt.zero_grad()
                pending = []
        @@
main()
""",
    "print(epoch)",
    """if pending:
            for x, y in pending:
                (F.cross_entropy(model(x), y) / len(pending)).backward()
            opt.step(); opt.zero_grad()""",
)
add(
    "attr-counter",
    "LS202",
    """
class Engine:
    def __init__(self, model, accum):
        self.model = model; self.accum = accum; self.n = 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step(self, batch):
        x, y = batch
        loss = F.cross_entropy(self.model(x), y) / self.accum
        loss.backward()
        self.n += 1
        if self.n < self.accum:
            return
        self.flush()
    def flush(self):
        self.optimizer.step(); self.optimizer.zero_grad(); self.n = 0
    def epoch(self, loader):
        self.n = 0
        for batch in loader:
            self.step(batch)
        @@
e = Engine(Net(), 4)
loader = DataLoader(make(100), batch_size=8, shuffle=True)
for epoch in range(3):
    e.epoch(loader)
""",
    "pass",
    "self.flush()",
)
add(
    "lightning-list",
    "LS203",
    """
import lightning as L
class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net(); self.losses = []
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)
    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.losses.append(loss)
    def on_validation_epoch_end(self):
        self.log("val_loss", torch.stack(self.losses).mean(), sync_dist=True)
        self.losses.clear()
    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)
train, val = (datasets.CIFAR10("d", train=t, transform=transforms.ToTensor()) for t in (True, False))
trainer = L.Trainer(max_epochs=3, devices=4)
trainer.fit(Lit(), DataLoader(train, batch_size=64, shuffle=True), DataLoader(val, batch_size=@@))
""",
    "256",
    "250",
)
add(
    "ddp-list-attr",
    "LS203",
    """
class Trainer:
    def __init__(self, loader, model):
        self.loader = loader; self.model = model
        self.opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
        self.losses = []
    def epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        self.losses = []
        for x, y in self.loader:
            self.opt.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward(); self.opt.step()
            self.losses.append(loss.item())
        mean = torch.tensor(sum(self.losses) / len(self.losses))
        dist.all_reduce(mean); mean /= dist.get_world_size()
        print("loss", mean.item())
def main():
    dist.init_process_group("gloo")
    data = make(1000)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data)@@)
    t = Trainer(loader, DDP(Net()))
    for epoch in range(3): t.epoch(epoch)
    dist.destroy_process_group()
main()
""",
    "",
    ", drop_last=True",
)
add(
    "ddp-dict-sum",
    "LS203",
    """
def main():
    dist.init_process_group("gloo")
    data = make(1000)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        stats = {"loss": 0.0, "n": 0}
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward(); opt.step()
            stats["loss"] += loss.item()@@
        t = torch.tensor([stats["loss"], stats["n"]])
        dist.all_reduce(t)
        print("loss", (t[0] / t[1]).item())
    dist.destroy_process_group()
main()
""",
    '; stats["n"] += 1',
    ' * len(y); stats["n"] += len(y)',
)
add(
    "defaultdict-list",
    "LS203",
    """
from collections import defaultdict
def main():
    dist.init_process_group("gloo")
    data = make(1000)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler@@)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        history = defaultdict(list)
        for x, y in loader:
            opt.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward(); opt.step()
            history["loss"].append(loss.item())
            history["acc"].append((out.argmax(1) == y).float().mean().item())
        means = torch.tensor([np.mean(history["loss"]), np.mean(history["acc"])])
        dist.all_reduce(means, op=dist.ReduceOp.AVG)
        print("loss", means[0].item(), "acc", means[1].item())
    dist.destroy_process_group()
main()
""",
    "",
    ", drop_last=True",
)
add(
    "object-attr",
    "LS204",
    """
class State:
    def __init__(self):
        self.total = 0.0; self.count = 0
class Trainer:
    def __init__(self, loader, model):
        self.loader = loader; self.model = model; self.state = State()
        self.opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    def epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        self.state = State()
        for x, y in self.loader:
            self.opt.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward(); self.opt.step()
            self.state.total += loss.item() * len(y)
            self.state.count += len(y)
        @@
    def report(self, epoch):
        if dist.get_rank() == 0:
            print("epoch", epoch, "loss", self.state.total / self.state.count)
def main():
    dist.init_process_group("gloo")
    data = make(1000)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    t = Trainer(loader, DDP(Net()))
    for epoch in range(3):
        t.epoch(epoch); t.report(epoch)
    dist.destroy_process_group()
main()
""",
    "pass",
    "s = self.state; t = torch.tensor([s.total, s.count]); dist.all_reduce(t); s.total, s.count = t.tolist()",
)
add(
    "object-attr-outside",
    "LS204",
    """
class Trainer:
    def __init__(self, loader, model):
        self.loader = loader; self.model = model
        self.opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    def epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        self.total = 0.0; self.count = 0
        for x, y in self.loader:
            self.opt.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward(); self.opt.step()
            self.total += loss.item() * len(y)
            self.count += len(y)
        @@
def main():
    dist.init_process_group("gloo")
    data = make(1000)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    t = Trainer(loader, DDP(Net()))
    for epoch in range(3):
        t.epoch(epoch)
        if dist.get_rank() == 0:
            print("epoch", epoch, "loss", t.total / t.count)
    dist.destroy_process_group()
main()
""",
    "pass",
    "t = torch.tensor([self.total, self.count]); dist.all_reduce(t); self.total, self.count = t.tolist()",
)
add(
    "ignite-state",
    "LS204",
    """
import ignite.distributed as idist
from ignite.engine import Engine, Events
def training(local_rank):
    data = make(1000)
    loader = idist.auto_dataloader(data, batch_size=8 * idist.get_world_size(), shuffle=True)
    model = idist.auto_model(Net()); opt = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    def step(engine, batch):
        x, y = batch
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward(); opt.step()
        engine.state.total += loss.item() * len(y)
        engine.state.seen += len(y)
    trainer = Engine(step)
    @trainer.on(Events.EPOCH_STARTED)
    def begin(engine):
        loader.sampler.set_epoch(engine.state.epoch)
        engine.state.total = 0.0; engine.state.seen = 0
    @trainer.on(Events.EPOCH_COMPLETED)
    def tell(engine):
        @@
        if idist.get_rank() == 0:
            print("loss", total / seen)
    trainer.run(loader, max_epochs=3)
with idist.Parallel(backend="gloo") as p:
    p.run(training)
""",
    "total, seen = engine.state.total, engine.state.seen",
    "total, seen = idist.all_reduce(engine.state.total), idist.all_reduce(engine.state.seen)",
)
S = """
def main():
    dist.init_process_group("gloo")
    tf = transforms.ToTensor()
    sets = {"train": datasets.SVHN("d", "train", tf), "val": datasets.SVHN("d", "test", tf)}
    BUILD
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    for epoch in range(3):
        loaders["train"].sampler.set_epoch(epoch)
        for x, y in loaders["train"]:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
    dist.destroy_process_group()
main()
"""
add(
    "dictcomp-sampler",
    "LS102",
    put(
        S,
        "BUILD",
        """samplers = {k: DistributedSampler(@@) for k in sets}
    loaders = {k: DataLoader(sets[k], batch_size=8, sampler=samplers[k]) for k in sets}""",
    ),
    'sets["train"]',
    "sets[k]",
)
add(
    "dictcomp-items",
    "LS102",
    put(
        S,
        "BUILD",
        """loaders = {k: DataLoader(d, batch_size=8, sampler=DistributedSampler(@@)) for k, d in sets.items()}""",
    ),
    'sets["train"]',
    "d",
)
add(
    "kwargs-sampler",
    "LS102",
    put(
        S,
        "BUILD",
        """common = dict(batch_size=8, sampler=DistributedSampler(sets["train"]), num_workers=2)
    loaders = {"train": DataLoader(sets["train"], **common), "val": DataLoader(sets["val"], @@)}""",
    ),
    "**common",
    '**{**common, "sampler": DistributedSampler(sets["val"])}',
)
add(
    "kwargs-loop",
    "LS102",
    put(
        S,
        "BUILD",
        """loaders = {}
    for name, data in sets.items():
        kwargs = {"batch_size": 8}
        kwargs["sampler"] = DistributedSampler(@@)
        loaders[name] = DataLoader(data, **kwargs)""",
    ),
    'sets["train"]',
    "data",
)
add(
    "kwargs-update",
    "LS102",
    put(
        S,
        "BUILD",
        """kwargs = {"batch_size": 8}
    kwargs.update(sampler=DistributedSampler(sets["train"]))
    loaders = {"train": DataLoader(sets["train"], **kwargs)}
    @@
    loaders["val"] = DataLoader(sets["val"], **kwargs)""",
    ),
    "pass",
    'kwargs.update(sampler=DistributedSampler(sets["val"]))',
)
D = """
def main():
    dist.init_process_group("gloo")
    tf = transforms.ToTensor()
    train, val = datasets.CIFAR10("d", train=True, transform=tf), datasets.CIFAR10("d", train=False, transform=tf)
    sampler = DistributedSampler(train)
    share = Subset(val, range(dist.get_rank(), len(val), dist.get_world_size()))
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    val_loader = DataLoader(share, batch_size=8)
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        model.eval()
BODY
    dist.destroy_process_group()
main()
"""


def b(text: str) -> str:
    return D.replace("BODY", "\n".join("        " + line for line in text.strip("\n").splitlines()))


add(
    "sum-gen",
    "LS104",
    b("""
with torch.no_grad():
    right = sum((model(x).argmax(1) == y).sum() for x, y in val_loader)
    @@
print("accuracy", right.item() / len(val))"""),
    "pass",
    "dist.all_reduce(right)",
)
add(
    "sum-gen-fn",
    "LS104",
    """
@torch.no_grad()
def accuracy(model, loader):
    return sum((model(x).argmax(1) == y).sum().item() for x, y in loader) / len(loader.dataset)
"""
    + b("""
acc = accuracy(model, val_loader)
@@
if dist.get_rank() == 0: print("accuracy", acc)"""),
    "pass",
    "t = torch.tensor(acc * len(share)); dist.all_reduce(t); acc = t / len(val)",
)
add(
    "listcomp-cat",
    "LS104",
    b("""
with torch.no_grad():
    hits = torch.cat([model(x).argmax(1) == y for x, y in val_loader])
    counts = torch.tensor([hits.sum(), len(hits)])
    @@
print(f"accuracy {counts[0] / counts[1]:.3f}")"""),
    "pass",
    "dist.all_reduce(counts)",
)
add(
    "mean-gen",
    "LS104",
    b("""
with torch.no_grad():
    acc = np.mean([(model(x).argmax(1) == y).float().mean().item() for x, y in val_loader])
    @@
print(f"accuracy {acc:.3f}")"""),
    "pass",
    "acc = np.mean(gather(acc))",
)
A = """
import albumentations as A
from albumentations.pytorch import ToTensorV2
import cv2
class Pets(Dataset):
    def __init__(self, files, labels, tf=None):
        self.files = files; self.labels = labels; self.tf = tf
    def __len__(self):
        return len(self.files)
    def __getitem__(self, i):
        img = cv2.cvtColor(cv2.imread(self.files[i]), cv2.COLOR_BGR2RGB)
        DIV
        if self.tf:
            img = self.tf(image=img)["image"]
        AFTER
        return img, self.labels[i]
def main():
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    tf = A.Compose([A.Resize(224, 224), A.HorizontalFlip(), A.Normalize(mean=mean, std=stdMORE), ToTensorV2()])
    loader = DataLoader(Pets(glob.glob("x/*.jpg"), [0] * 10, tf), batch_size=8, shuffle=True)
    model = models.resnet18(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
main()
"""
add(
    "alb-div",
    "LS111",
    put(A, "DIV", "img = img.astype(np.float32) / 255.0", "AFTER", "pass", "MORE", "@@"),
    "",
    ", max_pixel_value=1.0",
)
add(
    "alb-div-twin",
    "LS111",
    put(A, "DIV", "@@", "AFTER", "pass", "MORE", ""),
    "img = img.astype('float32'); img /= 255",
    "img = img.astype('float32')",
)
add(
    "alb-div-after", "LS111", put(A, "DIV", "pass", "AFTER", "@@", "MORE", ""), "img = img / 255.0", "img = img.float()"
)
add(
    "alb-tofloat",
    "LS111",
    put(
        A,
        "A.HorizontalFlip(), ",
        "A.HorizontalFlip(), A.ToFloat(max_value=255), ",
        "DIV",
        "pass",
        "AFTER",
        "pass",
        "MORE",
        "@@",
    ),
    "",
    ", max_pixel_value=1.0",
)
T = """
class Mine(Dataset):
    def __init__(self, files, tf): self.files = files; self.tf = tf
    def __len__(self): return len(self.files)
    def __getitem__(self, i):
        from PIL import Image
        img = Image.open(self.files[i]).convert("RGB")
        img = self.tf(img)
        @@
        return img, 0
def main():
    tf = transforms.Compose([transforms.Resize(224), transforms.ToTensor()])
    loader = DataLoader(Mine(glob.glob("x/*.jpg"), tf), batch_size=8, shuffle=True)
    model = models.resnet18(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
main()
"""
add("own-set-255", "LS111", T, "img = img / 255.0", "img = img * 2 - 1")
M = """
def main():
    tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    data = datasets.MNIST("d", train=True, transform=tf)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for x, y in loader:
            @@
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
main()
"""
add("loop-255", "LS111", M, "x = x.float() / 255", "x = x.float()")
add("loop-div_", "LS111", M, "x = x.cuda().float().div_(255)", "x = x.cuda()")
add("loop-05", "LS111", M, "x = (x - 0.5) / 0.5", "x = x.flatten(1)")
R = """
def build(cfg, n):
    model = DDP(Net())
    BODY
    return model, opt
def main(cfg):
    dist.init_process_group("gloo")
    n = dist.get_world_size()
    data = make(1000); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=@@, sampler=sampler)
    model, opt = build(cfg, n)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
    dist.destroy_process_group()
CALL
"""
CFG = """
@dataclass
class Config:
    lr: float = 0.1
    batch: int = 256
"""
add(
    "fn-config-n",
    "LS209",
    CFG
    + R.replace("BODY", "opt = torch.optim.SGD(model.parameters(), lr=cfg.lr * n)").replace("CALL", "main(Config())"),
    "cfg.batch // n",
    "cfg.batch",
)
add(
    "fn-set-config",
    "LS209",
    CFG
    + """
def scale(cfg, n):
    cfg.lr = cfg.lr * n
"""
    + R.replace("BODY", "opt = torch.optim.SGD(model.parameters(), lr=cfg.lr)")
    .replace("model, opt = build", "scale(cfg, n)\n    model, opt = build")
    .replace("CALL", "main(Config())"),
    "cfg.batch // n",
    "cfg.batch",
)
add(
    "fn-set-config-aug-both",
    "LS209",
    CFG
    + """
def scale(cfg, n):
    cfg.lr *= n
    @@
"""
    + R.replace("@@", "cfg.batch")
    .replace("BODY", "opt = torch.optim.SGD(model.parameters(), lr=cfg.lr)")
    .replace("data = make", "scale(cfg, n); data = make")
    .replace("CALL", "main(Config())"),
    "cfg.batch //= n",
    "pass",
)
add(
    "twice-mult",
    "LS209",
    CFG
    + R.replace("@@", "cfg.batch")
    .replace("BODY", "cfg.lr = cfg.lr * n\n    opt = torch.optim.SGD(model.parameters(), lr=cfg.lr@@)")
    .replace("CALL", "main(Config())"),
    " * n",
    "",
)
add(
    "linear-256",
    "LS209",
    CFG
    + R.replace("BODY", "opt = torch.optim.SGD(model.parameters(), lr=cfg.lr * cfg.batch * n / 256)").replace(
        "CALL", "main(Config())"
    ),
    "cfg.batch // n",
    "cfg.batch",
)
add(
    "ns-fn",
    "LS208",
    """
def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--batch_size", type=int, default=64)
    return p.parse_args()
"""
    + R.replace("BODY", "opt = torch.optim.SGD(model.parameters(), lr=cfg.lr)").replace("CALL", "main(get_args())"),
    "cfg.batch_size",
    "cfg.batch_size // n",
)
add(
    "best-dict",
    "LS205",
    put(
        D,
        "BODY",
        """
        right = seen = 0
        with torch.no_grad():
            for x, y in val_loader:
                right += (model(x).argmax(1) == y).sum().item(); seen += len(y)
        own = right / seen
        t = torch.tensor([right, seen]); dist.all_reduce(t)
        history.append(t[0].item() / t[1].item())
        if @@ > best["acc"]:
            best["acc"] = history[-1]
            if dist.get_rank() == 0: torch.save(model.module.state_dict(), "b.pt")
""",
        "for epoch in",
        "history = []; best = {'acc': 0}\n    for epoch in",
    ),
    "own",
    "history[-1]",
)
add(
    "dropped",
    "LS206",
    put(
        D,
        "BODY",
        """
        right = torch.zeros(()); seen = torch.zeros(())
        with torch.no_grad():
            for x, y in val_loader:
                right += (model(x).argmax(1) == y).sum(); seen += len(y)
        acc = average(right, seen@@
        if dist.get_rank() == 0: print("accuracy", acc)
""",
        "def main",
        """def average(a, b):
    both = torch.stack([a, b])
    dist.all_reduce(both)
    return (RET).item()
def main""",
        "RET",
        "a / b@@",
        "seen@@",
        "seen)",
        "a / b@@",
        "@@",
    ),
    "a / b",
    "both[0] / both[1]",
)
add(
    "clip-fn",
    "LS207",
    """
def update(scaler, loss, opt, params, clip=1.0):
    opt.zero_grad()
    scaler.scale(loss).backward()
    @@
    nn.utils.clip_grad_norm_(params, clip)
    scaler.step(opt); scaler.update()
model = Net().cuda(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
for epoch in range(3):
    for x, y in DataLoader(make(100), batch_size=8, shuffle=True):
        with torch.autocast("cuda"):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
        update(scaler, loss, opt, list(model.parameters()))
""",
    "pass",
    "scaler.unscale_(opt)",
)
add(
    "clip-class",
    "LS207",
    """
class Amp:
    def __init__(self, opt, clip): self.opt = opt; self.clip = clip; self.scaler = torch.cuda.amp.GradScaler()
    def __call__(self, loss, params):
        self.opt.zero_grad()
        self.scaler.scale(loss).backward()
        if self.clip:
            @@
            torch.nn.utils.clip_grad_value_(params, self.clip)
        self.scaler.step(self.opt)
        self.scaler.update()
model = Net().cuda(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
amp = Amp(opt, 1.0)
for epoch in range(3):
    for x, y in DataLoader(make(100), batch_size=8, shuffle=True):
        with torch.autocast("cuda"):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
        amp(loss, model.parameters())
""",
    "pass",
    "self.scaler.unscale_(self.opt)",
)
add(
    "epoch-end-outputs",
    "LS203",
    """
import pytorch_lightning as pl
class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__(); self.net = Net()
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)
    def validation_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x)
        loss = F.cross_entropy(out, y)
        return {"val_loss": loss, "n": len(y)}
    def validation_epoch_end(self, outputs):
        avg_loss = @@
        self.log("val_loss", avg_loss, sync_dist=True)
    def val_dataloader(self):
        val = datasets.MNIST("d", train=False, transform=transforms.ToTensor())
        return DataLoader(val, batch_size=128)
    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)
trainer = pl.Trainer(max_epochs=3, devices=8, strategy="ddp")
trainer.fit(Lit(), DataLoader(make(1000), batch_size=8, shuffle=True))
""",
    'torch.stack([x["val_loss"] for x in outputs]).mean()',
    'sum(x["val_loss"] * x["n"] for x in outputs) / sum(x["n"] for x in outputs)',
)
JUDGED = """
class Evaluator:
    def __init__(self, model, loader):
        self.model = model; self.loader = loader
    def run(self):
        self.right = 0; self.n = 0
        self.model.eval()
        with torch.no_grad():
            for x, y in self.loader:
                self.right += (self.model(x).argmax(1) == y).sum().item(); self.n += len(y)
def main():
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    test = datasets.CIFAR10("d", train=False, transform=transforms.ToTensor())
    loader = DataLoader(Subset(test, range(rank, len(test), n)), batch_size=8)
    ev = Evaluator(DDP(Net()), loader)
    ev.run()
    @@
    if rank == 0: print("accuracy", right / seen)
    dist.destroy_process_group()
main()
"""
add(
    "read-outside",
    "LS104",
    JUDGED,
    "right, seen = ev.right, ev.n",
    "t = torch.tensor([ev.right, ev.n]); dist.all_reduce(t); right, seen = t.tolist()",
)
add(
    "ignite-judge-state",
    "LS104",
    """
import ignite.distributed as idist
from ignite.engine import Engine, Events
def training(local_rank):
    model = idist.auto_model(Net())
    n = idist.get_world_size()
    test = datasets.CIFAR10("d", train=False, transform=transforms.ToTensor())
    sampler = DistributedSampler(test, num_replicas=n, rank=idist.get_rank(), drop_last=True)
    loader = DataLoader(test, batch_size=8, sampler=sampler)
    @torch.no_grad()
    def judge(engine, batch):
        model.eval()
        x, y = batch
        engine.state.right += (model(x).argmax(1) == y).sum().item()
        engine.state.seen += len(y)
    judging = Engine(judge)
    @judging.on(Events.STARTED)
    def begin(engine):
        engine.state.right = 0; engine.state.seen = 0
    judging.run(loader)
    right, seen = judging.state.right, judging.state.seen
    @@
    if idist.get_rank() == 0:
        print("accuracy", right / seen)
with idist.Parallel(backend="gloo") as p:
    p.run(training)
""",
    "pass",
    "right, seen = idist.all_reduce(right), idist.all_reduce(seen)",
)
PETS = """
import albumentations as A
from albumentations.pytorch import ToTensorV2
import cv2
class Pets(Dataset):
    def __init__(self, files, labels, tf=None):
        self.files = files; self.labels = labels; self.tf = tf
    def __len__(self):
        return len(self.files)
    def __getitem__(self, i):
        img = cv2.imread(self.files[i])
        @@
        return img, self.labels[i]
def main():
    tf = A.Compose([A.Resize(224, 224), A.Normalize(), ToTensorV2()])
    loader = DataLoader(Pets(glob.glob("x/*.jpg"), [0] * 10, tf), batch_size=8, shuffle=True)
    model = models.resnet18(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
main()
"""
add("alb-inline", "LS111", PETS, 'img = self.tf(image=img / 255.0)["image"]', 'img = self.tf(image=img)["image"]')
add(
    "alb-back",
    "LS111",
    PETS,
    'img = img / 255.0; img = self.tf(image=img)["image"]',
    'img = img / 255.0\n        img = (img * 255).astype("uint8"); img = self.tf(image=img)["image"]',
)
add(
    "alb-if-max",
    "LS111",
    PETS,
    'img = img / 255.0\n        out = self.tf(image=img)\n        img = out["image"]',
    'if img.max() > 255: img = img / 255\n        out = self.tf(image=img)\n        img = out["image"]',
)
add(
    "alb-other",
    "LS111",
    PETS,
    'img = self.tf(image=img)["image"]\n        img = img.float().div(255)',
    'mask = cv2.imread(self.files[i] + ".png") / 255\n        img = self.tf(image=img, mask=mask)["image"]',
)
