"""Objects that are handed on, and what is followed through them: (codes, what it is, programs differing by a line)."""

HANDED: list[tuple[str, str, str]] = [
    (
        "LS301",
        "device-by-keyword",
        """\
def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    model = Net().to(local)  # right
    model = Net()  # wrong
    model = DDP(model, device_ids=None)
    model.half()  # right
    model = model.to(device=local, non_blocking=True)  # wrong
STOP
""",
    ),
    (
        "LS301",
        "context-obj",
        """\
class Ctx:
    def __init__(self, local): self.device = torch.device("cuda", local)
    def put(self, m): return m.to(self.device)
    def wrap(self, m): return DDP(m)
def main():
    dist.init_process_group("nccl"); torch.manual_seed(dist.get_rank()); local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dev = torch.device("cuda", local); data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    ctx = Ctx(local)
    net = ctx.put(ctx.wrap(Net()))  # wrong
    net = ctx.wrap(ctx.put(Net()))  # right
    opt = torch.optim.SGD(net.parameters(), 0.1 * dist.get_world_size())
STOP
""",
    ),
    (
        "LS301",
        "module-attr-cuda",
        """\
class System:
    def __init__(self, cfg):
        self.cfg = cfg
        self.build()
        self.distribute()  # wrong
        self.place()
        self.distribute()  # right
    def build(self): self.net = Net()
    def place(self): self.net.cuda()
    def distribute(self): self.net = DDP(self.net)
def main():
    dist.init_process_group("nccl"); torch.manual_seed(dist.get_rank()); local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dev = torch.device("cuda", local); data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    System({"a": 1})
STOP
""",
    ),
    (
        "LS302",
        "unwrap-helper",
        """\
def bare(m):
    return m.module if hasattr(m, "module") else m
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(bare(model)(x), y)  # wrong
            loss = F.cross_entropy(model(x), y)  # right
            opt.zero_grad(); loss.backward(); opt.step()
STOP
""",
    ),
    (
        "LS302",
        "closure-loss",
        """\
def main():
    dist.init_process_group("gloo"); torch.manual_seed(dist.get_rank())
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    net = Net(); model = DDP(net); opt = torch.optim.SGD(net.parameters(), lr=0.1 * dist.get_world_size())
    compute = lambda x, y: F.cross_entropy(net(x), y)  # wrong
    compute = lambda x, y: F.cross_entropy(model(x), y)  # right
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(); compute(x, y).backward(); opt.step()
STOP
""",
    ),
    (
        "LS302",
        "state-dict-conf",
        """\
def main():
    dist.init_process_group("gloo"); torch.manual_seed(dist.get_rank())
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    state = {"net": Net()}
    state["ddp"] = DDP(state["net"])
    state["opt"] = torch.optim.SGD(state["ddp"].parameters(), lr=0.1 * dist.get_world_size())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(state["net"](x), y)  # wrong
            loss = F.cross_entropy(state["ddp"](x), y)  # right
            state["opt"].zero_grad(); loss.backward(); state["opt"].step()
STOP
""",
    ),
    (
        "LS302",
        "ignite-module",
        """\
import ignite.distributed as idist
from ignite.engine import Engine, Events
def run(local_rank):
    torch.manual_seed(idist.get_rank())
    model = idist.auto_model(Net())
    opt = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1 * idist.get_world_size()))
    data = make(100); sampler = DistributedSampler(data, idist.get_world_size(), idist.get_rank())
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    def step(engine, batch):
        x, y = batch
        model.train()
        out = model.module(x)  # wrong
        out = model(x)  # right
        loss = F.cross_entropy(out, y)
        opt.zero_grad(); loss.backward(); opt.step()
        return loss.detach()
    trainer = Engine(step)
    @trainer.on(Events.EPOCH_STARTED)
    def reseed(engine): sampler.set_epoch(engine.state.epoch)
    trainer.run(loader, max_epochs=2)
if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as p:
        p.run(run)
""",
    ),
    (
        "LS303",
        "cfg-mutated",
        """\
def init(cfg):
    cfg["rank"] = int(os.environ["RANK"]); cfg["gpu"] = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl")
def build(cfg):
    dev = torch.device("cuda", cfg["rank"])  # wrong
    dev = torch.device("cuda", cfg["gpu"])  # right
    return DDP(Net().to(dev))
def main():
    cfg = {"lr": 0.1}
    init(cfg)
    m = build(cfg)
STOP
""",
    ),
    (
        "LS316",
        "helper-reduce",
        """\
def mean(v, dev):
    t = torch.tensor([v], device=dev)
    dist.all_reduce(t)
    return t.item() / dist.get_world_size()
def main():
    dist.init_process_group('nccl')  # wrong
    torch.cuda.set_device(int(os.environ['LOCAL_RANK']))  # wrong
    m = DDP(Net().cuda())  # wrong
    print(mean(3.0, 'cpu'))  # wrong
    dist.init_process_group('nccl')  # right
    torch.cuda.set_device(int(os.environ['LOCAL_RANK']))  # right
    m = DDP(Net().cuda())  # right
    print(mean(3.0, 'cuda'))  # right
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS316",
        "meter",
        """\
class M:
    def __init__(self):
        self.t = torch.zeros(2)  # wrong
        self.t = torch.zeros(2, device="cuda")  # right
    def add(self, v):
        self.t[0] += v; self.t[1] += 1
    def sync(self):
        dist.all_reduce(self.t)
def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    m = DDP(Net().cuda())
    k = M(); k.add(1); k.sync()
STOP
""",
    ),
    (
        "LS316",
        "from-numpy",
        """\
def main():
    dist.init_process_group('nccl')  # wrong
    torch.cuda.set_device(int(os.environ['LOCAL_RANK']))  # wrong
    m = DDP(Net().cuda())  # wrong
    t = torch.from_numpy(np.zeros(3))  # wrong
    dist.broadcast(t, 0)  # wrong
    dist.init_process_group('nccl')  # right
    torch.cuda.set_device(int(os.environ['LOCAL_RANK']))  # right
    m = DDP(Net().cuda())  # right
    t = torch.from_numpy(np.zeros(3)).cuda()  # right
    dist.broadcast(t, 0)  # right
    dist.destroy_process_group()
main()
""",
    ),
    (
        "LS402",
        "map-to-first",
        """\
from pathlib import Path
def main():
    dist.init_process_group("nccl"); local = int(os.environ["LOCAL_RANK"]); device = torch.device("cuda", local)
    torch.cuda.set_device(local)
    net = Net().to(device)
    ck = torch.load("a.pt", map_location={"cuda:1": "cuda:0"}, weights_only=True)  # wrong
    ck = torch.load("a.pt", map_location={"cuda:0": f"cuda:{local}"}, weights_only=True)  # right
    net.load_state_dict(ck["model"])
    model = DDP(net, device_ids=[local])
STOP
""",
    ),
    (
        "LS403",
        "engine-store",
        """\
class Store:
    def save(self, engine, path):
        if dist.get_rank() == 0:
            torch.save({"net": engine.net.state_dict()}, path)  # wrong
            torch.save({"net": engine.net.module.state_dict()}, path)  # right
class Engine:
    def __init__(self, dev, store):
        self.net = DDP(Net().to(dev)); self.store = store
        self.opt = torch.optim.SGD(self.net.parameters(), 0.1 * dist.get_world_size())
    def fit(self, loader, sampler, dev):
        for e in range(3):
            sampler.set_epoch(e)
            for x, y in loader:
                self.opt.zero_grad(); F.cross_entropy(self.net(x.to(dev)), y.to(dev)).backward(); self.opt.step()
            self.store.save(self, "a.pt")
def main():
    dist.init_process_group("nccl"); torch.manual_seed(dist.get_rank()); local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dev = torch.device("cuda", local); data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    Engine(dev, Store()).fit(loader, sampler, dev)
STOP
""",
    ),
    (
        "LS308",
        "save-with-barrier",
        """\
class Store:
    def __init__(self, path): self.path = path
    def save(self, model):
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), self.path)
        dist.barrier()
class Loop:
    def __init__(self, store, model): self.store = store; self.model = model
    def end(self):
        if dist.get_rank() == 0:  # wrong
            self.store.save(self.model)  # wrong
        self.store.save(self.model)  # right
def main():
    dist.init_process_group("nccl"); torch.manual_seed(dist.get_rank()); local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dev = torch.device("cuda", local); data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    Loop(Store("a.pt"), DDP(Net().to(dev), device_ids=[local])).end()
STOP
""",
    ),
    (
        "LS401",
        "obj-saver",
        """\
class Keeper:
    def __init__(self, root): self.root = root
    def write(self, name, blob): torch.save(blob, os.path.join(self.root, name))
class Loop:
    def __init__(self, model, keeper): self.model, self.keeper = model, keeper
    def end_epoch(self, e):
        self.keeper.write("last.pt", {"w": self.model.module.state_dict(), "e": e})  # wrong
        if dist.get_rank() == 0:  # right
            self.keeper.write("last.pt", {"w": self.model.module.state_dict(), "e": e})  # right
    def fit(self, loader, sampler, opt, dev):
        for e in range(3):
            sampler.set_epoch(e)
            for x, y in loader:
                opt.zero_grad(); F.cross_entropy(self.model(x.to(dev)), y.to(dev)).backward(); opt.step()
            self.end_epoch(e)
def main():
    dist.init_process_group("nccl"); torch.manual_seed(dist.get_rank()); local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dev = torch.device("cuda", local); data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    m = DDP(Net().to(dev), device_ids=[local])
    Loop(m, Keeper("out")).fit(loader, sampler, torch.optim.SGD(m.parameters(), 0.1 * dist.get_world_size()), dev)
STOP
""",
    ),
    (
        "LS404",
        "dataclass-state",
        """\
def fit(model, loader, opt):
    model.train()
    for x, y in loader:
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
from dataclasses import dataclass
@dataclass
class State:
    net: nn.Module
    opt: torch.optim.Optimizer
    plan: object
    epoch: int = 0
    def capture(self):
        return {"net": self.net.state_dict(), "epoch": self.epoch, "opt": self.opt.state_dict()}  # wrong
        plan = {"plan": self.plan.state_dict()}  # right
        return {"net": self.net.state_dict(), "epoch": self.epoch, "opt": self.opt.state_dict(), **plan}  # right
    def apply(self, blob):
        self.net.load_state_dict(blob["net"]); self.opt.load_state_dict(blob["opt"]); self.epoch = blob["epoch"]
        self.plan.load_state_dict(blob["plan"])  # right
    def save(self, path): torch.save(self.capture(), path)
    def load(self, path): self.apply(torch.load(path, map_location="cpu", weights_only=True))
def main(resume):
    net = Net(); opt = torch.optim.AdamW(net.parameters())
    st = State(net, opt, torch.optim.lr_scheduler.ExponentialLR(opt, 0.9))
    loader = DataLoader(make(64), batch_size=8, shuffle=True)
    if resume: st.load(resume)
    for e in range(st.epoch, 10):
        fit(st.net, loader, st.opt); st.plan.step()
        st.epoch = e + 1
        st.save("s.pt")
if __name__ == "__main__":
    import sys
    main(sys.argv[1])
""",
    ),
    (
        "LS406",
        "restore-object",
        """\
class Best:
    def __init__(self, folder): self.file = os.path.join(folder, "best.pt"); self.score = -1
    def offer(self, score, net):
        if score > self.score:
            self.score = score
            if dist.get_rank() == 0:
                torch.save(net.state_dict(), self.file)
    def back(self, net):
        net.load_state_dict(torch.load(self.file, map_location="cpu", weights_only=True))
class Loop:
    def __init__(self, net, best): self.net, self.best = net, best
    def run(self):
        for e in range(3):
            self.best.offer(e, self.net.module)
        dist.barrier()  # right
        self.best.back(self.net.module)
def main():
    dist.init_process_group("nccl"); torch.manual_seed(dist.get_rank()); local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dev = torch.device("cuda", local); data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    Loop(DDP(Net().to(dev)), Best("out")).run()
STOP
""",
    ),
    (
        "LS407",
        "trainer-attr",
        """\
class T:
    def __init__(self, cfg):
        self.cfg = cfg
        self.net = Net(); self.opt = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)
        self.start_epoch = 0
    def load(self, p):
        c = torch.load(p, map_location="cpu", weights_only=True)
        self.net.load_state_dict(c["net"]); self.opt.load_state_dict(c["opt"])
        self.start_epoch = c["epoch"] + 1  # right
    def save(self, e):
        torch.save({"net": self.net.state_dict(), "opt": self.opt.state_dict(), "epoch": e}, "last.pt")
    def run(self, loader):
        if self.cfg["resume"]:
            self.load("last.pt")
        for e in range(self.start_epoch, self.cfg["epochs"]):
            self.net.train()
            for x, y in loader:
                self.opt.zero_grad(); F.cross_entropy(self.net(x), y).backward(); self.opt.step()
            self.save(e)
T({"resume": True, "epochs": 4}).run(DataLoader(make(64), batch_size=8, shuffle=True))
""",
    ),
    (
        "LS407",
        "attr-while",
        """\
class Loop:
    epoch = 0
    def __init__(self, net, opt):
        self.net, self.opt = net, opt
    def state_dict(self):
        return {"net": self.net.state_dict(), "opt": self.opt.state_dict(), "epoch": self.epoch}
    def load_state_dict(self, s):
        self.net.load_state_dict(s["net"]); self.opt.load_state_dict(s["opt"])
        self.epoch = s["epoch"]  # right
    def run(self, loader, total):
        while self.epoch != total:
            for x, y in loader:
                self.opt.zero_grad(); F.cross_entropy(self.net(x), y).backward(); self.opt.step()
            self.epoch += 1
            torch.save(self.state_dict(), "l.pt")
def main():
    net = Net(); loop = Loop(net, torch.optim.Adam(net.parameters()))
    if os.path.exists("l.pt"):
        loop.load_state_dict(torch.load("l.pt", map_location="cpu", weights_only=True))
    loop.run(DataLoader(make(64), batch_size=8, shuffle=True), 10)
main()
""",
    ),
    (
        "LS407",
        "engine-first",
        """\
class Store:
    def __init__(self, path): self.path = path
    def resume(self, eng):
        if os.path.exists(self.path):
            s = torch.load(self.path, map_location="cpu", weights_only=True)
            eng.net.load_state_dict(s["net"]); eng.opt.load_state_dict(s["opt"])
            eng.first = s["epoch"] + 1  # right
    def save(self, eng, e):
        torch.save({"net": eng.net.state_dict(), "opt": eng.opt.state_dict(), "epoch": e}, self.path)
class Engine:
    def __init__(self, store):
        self.net = Net(); self.opt = torch.optim.AdamW(self.net.parameters()); self.store = store
        self.first = 0
    def fit(self, loader, n):
        self.store.resume(self)
        for e in range(self.first, n):
            for x, y in loader:
                self.opt.zero_grad(); F.cross_entropy(self.net(x), y).backward(); self.opt.step()
            self.store.save(self, e)
Engine(Store("l.pt")).fit(DataLoader(make(64), batch_size=8, shuffle=True), 9)
""",
    ),
    (
        "LS407",
        "state-dataclass",
        """\
from dataclasses import dataclass
@dataclass
class Progress:
    epoch: int = 0
    best: float = 0.0
def load(path, net, opt, prog):
    s = torch.load(path, map_location="cpu", weights_only=True)
    net.load_state_dict(s["net"]); opt.load_state_dict(s["opt"]); prog.best = s["best"]
    prog.epoch = s["epoch"] + 1  # right
def main():
    net = Net(); opt = torch.optim.AdamW(net.parameters()); prog = Progress()
    loader = DataLoader(make(64), batch_size=8, shuffle=True)
    if os.path.exists("l.pt"): load("l.pt", net, opt, prog)
    for epoch in range(prog.epoch, 9):
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "epoch": epoch, "best": prog.best}, "l.pt")
main()
""",
    ),
    (
        "LS308",
        "lit-save-guarded",
        """\
import lightning as L
class Lit(L.LightningModule):
    def __init__(self):
        super().__init__(); self.net = Net()
    def training_step(self, b, i):
        return F.cross_entropy(self.net(b[0]), b[1])
    def configure_optimizers(self): return torch.optim.Adam(self.parameters(), 1e-3)
def main():
    t = L.Trainer(devices=4, strategy="ddp", max_epochs=3)
    m = Lit(); t.fit(m, DataLoader(make(64), batch_size=8, shuffle=True, drop_last=True))
    if t.is_global_zero:  # wrong
        t.save_checkpoint("a.ckpt")  # wrong
    t.save_checkpoint("a.ckpt")  # right
if __name__ == "__main__": main()
""",
    ),
    (
        "LS407",
        "lit-weights-only-resume",
        """\
import lightning as L
class Lit(L.LightningModule):
    def __init__(self):
        super().__init__(); self.net = Net()
    def training_step(self, b, i):
        return F.cross_entropy(self.net(b[0]), b[1])
    def configure_optimizers(self): return torch.optim.Adam(self.parameters(), 1e-3)
def main(resume):
    m = Lit()
    t = L.Trainer(devices=4, strategy="ddp", max_epochs=30)
    if resume:  # wrong
        m.load_state_dict(torch.load(resume, map_location="cpu", weights_only=True)["state_dict"])  # wrong
    t.fit(m, DataLoader(make(64), batch_size=8, shuffle=True, drop_last=True))  # wrong
    t.fit(m, DataLoader(make(64), batch_size=8, shuffle=True, drop_last=True), ckpt_path=resume)  # right
if __name__ == "__main__":
    import sys; main(sys.argv[1])
""",
    ),
]

ALONE: list[tuple[str, str]] = [
    (
        "anew-spread",
        """\
def fit(model, loader, opt):
    model.train()
    for x, y in loader:
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
import dataclasses
@dataclasses.dataclass
class Run:
    epoch: int = 0
    best: float = 0.0
def main():
    net = Net(); opt = torch.optim.AdamW(net.parameters()); run = Run()
    loader = DataLoader(make(64), batch_size=8, shuffle=True)
    if os.path.exists("l.pt"):
        blob = torch.load("l.pt", map_location="cpu", weights_only=True)
        net.load_state_dict(blob["net"]); opt.load_state_dict(blob["opt"])
        run = Run(**blob['run'])
    while run.epoch < 9:
        fit(net, loader, opt)
        run.epoch += 1
        parts = {"net": net.state_dict(), "opt": opt.state_dict()}
        torch.save({**parts, "epoch": run.epoch, "run": dataclasses.asdict(run)}, "l.pt")
main()
""",
    ),
    (
        "anew-replace",
        """\
def fit(model, loader, opt):
    model.train()
    for x, y in loader:
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
import dataclasses
@dataclasses.dataclass
class Run:
    epoch: int = 0
    best: float = 0.0
def main():
    net = Net(); opt = torch.optim.AdamW(net.parameters()); run = Run()
    loader = DataLoader(make(64), batch_size=8, shuffle=True)
    if os.path.exists("l.pt"):
        blob = torch.load("l.pt", map_location="cpu", weights_only=True)
        net.load_state_dict(blob["net"]); opt.load_state_dict(blob["opt"])
        run = dataclasses.replace(run, epoch=blob['epoch'])
    while run.epoch < 9:
        fit(net, loader, opt)
        run.epoch += 1
        parts = {"net": net.state_dict(), "opt": opt.state_dict()}
        torch.save({**parts, "epoch": run.epoch, "run": dataclasses.asdict(run)}, "l.pt")
main()
""",
    ),
    (
        "skip-by-e",
        """\
def fit(model, loader, opt):
    model.train()
    for x, y in loader:
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
def main(epochs=9):
    net = Net(); opt = torch.optim.AdamW(net.parameters()); done = 0
    loader = DataLoader(make(64), batch_size=8, shuffle=True)
    if os.path.exists("l.pt"):
        blob = torch.load("l.pt", map_location="cpu", weights_only=True)
        net.load_state_dict(blob["net"]); opt.load_state_dict(blob["opt"]); done = blob["epoch"]
    for e in range(epochs):
        if e < done:
            continue
        fit(net, loader, opt)
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "epoch": e + 1}, "l.pt")
main()
""",
    ),
    (
        "channels-last",
        """\
def main():
    dist.init_process_group("nccl"); local = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(local)
    m = DDP(Net().cuda())
    m = m.to(memory_format=torch.channels_last)
STOP
""",
    ),
    (
        "store-other-after",
        """\
class Files:
    def __init__(self, d): self.d = d
    def at(self, n): return os.path.join(self.d, n)
    def save(self, m, n):
        if dist.get_rank() == 0: torch.save(m.state_dict(), self.at(n))
    def load(self, m, n):
        m.load_state_dict(torch.load(self.at(n), map_location="cpu", weights_only=True))
class Loop:
    def __init__(self, net, files): self.net = net; self.files = files
    def run(self):
        self.files.save(self.net.module, "stage1.pt")
        self.files.load(self.net.module, "imagenet.pt")
def main():
    dist.init_process_group("nccl"); local = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(local)
    Loop(DDP(Net().cuda()), Files("d")).run()
STOP
""",
    ),
    (
        "meter-moved",
        """\
class M:
    def __init__(self): self.t = torch.zeros(2)
    def to(self, d): self.t = self.t.to(d); return self
    def sync(self): dist.all_reduce(self.t)
def main():
    dist.init_process_group("nccl"); torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    DDP(Net().cuda()); M().to("cuda").sync()
STOP
""",
    ),
    (
        "reduce-moves",
        """\
def mean(t):
    if not t.is_cuda:
        t = t.cuda()
    dist.all_reduce(t)
    return t / dist.get_world_size()
def main():
    dist.init_process_group("nccl"); torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    DDP(Net().cuda()); print(mean(torch.tensor([1.0])))
STOP
""",
    ),
]
