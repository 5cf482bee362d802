"""What people write about checkpoints: (codes, script without its head), a wrong one beside a right one."""

HEAD = """\
def parts():
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, opt, DataLoader(make(64), batch_size=8, shuffle=True)
"""
MEMBERS = """\
class Files:
    def __init__(self, path, **members):
        self.path = path
        self.members = members
    def keep(self, done):
        state = {name: part.state_dict() for name, part in self.members.items()}
        state["done"] = done
        torch.save(state, self.path / "last.pt")
    def restore(self):
        state = torch.load(self.path / "last.pt", map_location="cpu")
        for name, part in self.members.items():
            part.load_state_dict(state[name])
        return state["done"]
def main(args):
    model, opt, loader = parts()
    plan = torch.optim.lr_scheduler.StepLR(opt, 10)
    files = Files(args.path, MEMBERS)
    first = 0
    if args.resume:
        first = files.restore()
    for epoch in range(FIRST):
        fit(loader, model, opt)
        plan.step()
        files.keep(epoch + 1)
"""
ALL = "net=model, o=opt, rate=plan"
REGISTERED = """\
class Keeper:
    def __init__(self):
        self.things = {}
    def register(self, name, thing):
        self.things[name] = thing
    def save(self, epoch):
        torch.save({"epoch": epoch, **{k: v.state_dict() for k, v in self.things.items()}}, "run.pt")
    def resume(self):
        state = torch.load("run.pt", map_location="cpu")
        for k, v in self.things.items():
            v.load_state_dict(state[k])
        return state["epoch"] + 1
def main(args):
    model, opt, loader = parts()
    keeper = Keeper()
    keeper.register("net", model)
    REGISTER
    start = keeper.resume() if args.resume else 0
    for epoch in range(start, 9):
        fit(loader, model, opt)
        keeper.save(epoch)
"""
INHERITED = """\
class Base:
    def __init__(self, model, opt):
        self.model, self.opt, self.begun = model, opt, 0
    def state_dict(self):
        return {"net": self.model.state_dict(), OPTIM"epoch": self.begun}
    def load_state_dict(self, state):
        self.model.load_state_dict(state["net"])
        BACK
    def resume(self, path):
        self.load_state_dict(torch.load(path, map_location="cpu"))
class Trainer(Base):
    def run(self, loader):
        for epoch in range(RANGE):
            fit(loader, self.model, self.opt)
            self.begun = epoch + 1
            torch.save(self.state_dict(), "latest.pt")
def main(args):
    model, opt, loader = parts()
    trainer = Trainer(model, opt)
    if args.resume:
        trainer.resume(args.resume)
    trainer.run(loader)
"""
SNAPSHOT = """\
from dataclasses import asdict, dataclass
@dataclass
class Snapshot:
    net: dict
    FIELD
    epoch: int
def main(args):
    model, opt, loader = parts()
    start = 0
    if os.path.exists("snapshot.pt"):
        old = Snapshot(**torch.load("snapshot.pt", map_location="cpu"))
        model.load_state_dict(old.net)
        start = old.epoch
    for epoch in range(start, 9):
        fit(loader, model, opt)
        torch.save(asdict(Snapshot(net=model.state_dict(), GIVEN epoch=epoch + 1)), "snapshot.pt")
"""
STEPS = """\
def main(args):
    model, opt, loader = parts()
    scaler = torch.amp.GradScaler("cuda")
    step = 0
    if args.resume_from:
        saved = torch.load(args.resume_from, map_location="cpu")
        model.load_state_dict(saved["model"]); opt.load_state_dict(saved["opt"])
        STEP
    batches = iter(loader)
    while step < 1000:
        x, y = next(batches)
        opt.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(opt); scaler.update()
        step += 1
        if step % 100 == 0:
            state = dict(model=model.state_dict(), opt=opt.state_dict(), step=step)
            SCALER
            torch.save(state, "run.pt")
"""
LOOKED_UP = """\
class Run:
    KEPT = NAMES
    def __init__(self):
        self.model, self.opt, self.loader = parts()
        self.epoch = 0
    def keep(self):
        state = {"epoch": self.epoch}
        for name in self.KEPT:
            state[name] = getattr(self, name).state_dict()
        torch.save(state, "last.pt")
    def go_on(self):
        state = torch.load("last.pt", map_location="cpu")
        for name in self.KEPT:
            getattr(self, name).load_state_dict(state[name])
        self.epoch = state["epoch"] + 1
    def train(self):
        while self.epoch < 9:
            fit(self.loader, self.model, self.opt)
            self.keep()
            self.epoch += 1
def main(args):
    run = Run()
    if args.go_on:
        run.go_on()
    run.train()
"""
TEACHER = """\
def main(args):
    model, opt, loader = parts()
    other = torch.nn.Linear(10, 2)
    NETWORK.load_state_dict(torch.load(args.checkpoint, map_location="cpu")["ENTRY"])
    for epoch in range(9):
        fit(loader, model, opt)
        torch.save(model.state_dict(), "weights.pt")
"""
PRETRAINED = """\
def main(args):
    model, opt, loader = parts()
    checkpoint = torch.load(args.checkpoint, map_location="cpu")
    model.load_state_dict(checkpoint["model"], strict=False)
    EPOCH
    for epoch in range(9):
        fit(loader, model, opt)
        torch.save(model.state_dict(), "weights.pt")
"""
RATES = """\
class Warm:
    def __init__(self, opt):
        self.opt, self.n = opt, 0
    def step(self):
        self.n += 1
        for group in self.opt.param_groups:
            group["lr"] = 0.1 * min(1, self.n / 500)
def main(args):
    model, opt, loader = parts()
    rates = Warm(opt)
    start = 0
    if args.resume:
        state = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(state["model"]); opt.load_state_dict(state["opt"]); start = state["epoch"]
    for epoch in range(start, 9):
        fit(loader, model, opt)
        rates.step()
        torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "epoch": epoch + 1KEPT}, "last.pt")
"""
BROUGHT = """\
def main(args):
    model, opt, loader = parts()
    state = torch.load(args.resume, map_location="cpu") if args.resume else None
    start = state["epoch"] if state else 0
    plan = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 9AT)
    if state:
        model.load_state_dict(state["model"]); opt.load_state_dict(state["opt"])
    for epoch in range(start, 9):
        fit(loader, model, opt)
        plan.step()
        torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "epoch": epoch + 1}, "last.pt")
"""
BEGINS = """\
def restore(path, model, opt):
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"]); opt.load_state_dict(state["opt"])
    return state["epoch"], state["best"]
def main(args):
    model, opt, loader = parts()
    epoch, best = 0, 0.0
    if args.resume:
        RESTORE
    LOOP
        fit(loader, model, opt)
        MORE
        torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "epoch": epoch, "best": best}, "last.pt")
"""
KNOWN = "epoch, best = restore(args.resume, model, opt)"
DROPPED = "_, best = restore(args.resume, model, opt)"
ENGINE = """\
class Engine:
    def __init__(self, args):
        self.model, self.opt, self.loader = parts()
        self.first = 0
        if args.resume:
            self.load(args.resume)
    def load(self, path):
        state = torch.load(path, map_location="cpu")
        self.model.load_state_dict(state["model"]); self.opt.load_state_dict(state["opt"])
        START
    def fit(self, epochs):
        for epoch in RANGE:
            fit(self.loader, self.model, self.opt)
            torch.save(dict(model=self.model.state_dict(), opt=self.opt.state_dict(), epoch=epoch + 1), "last.pt")
def main(args):
    Engine(args).fit(9)
"""
RANKS = """\
from pathlib import Path
import json, shutil
BEST = Path("out") / "best.pt"
def train(model, loader, opt, rank):
    best = 0.0
    for epoch in range(9):
        fit(loader, model, opt)
        right = torch.zeros(1)
        dist.all_reduce(right)
        if right.item() > best:
            best = right.item()
            if rank == 0:
                SAVE
        LATER
def main():
    dist.init_process_group("gloo")
    model, opt, loader = parts()
    model = DDP(model)
    train(model, loader, opt, dist.get_rank())
    AFTER
    LOAD
    dist.destroy_process_group()
"""
SAVE = "torch.save(model.module.state_dict(), BEST)"
LOAD = 'model.module.load_state_dict(torch.load(BEST, map_location="cpu"))'
STOPPER = """\
class Stopper:
    def __init__(self, path, main):
        self.path, self.main, self.best = path, main, None
    def __call__(self, value, model):
        if self.best is None or value < self.best:
            self.best = value
            self.keep(model)
    def keep(self, model):
        if self.main:
            torch.save(model.state_dict(), self.path)
        WAIT
    def back(self, model):
        model.load_state_dict(torch.load(self.path, map_location="cpu"))
def main(args):
    dist.init_process_group("gloo")
    model, opt, loader = parts()
    ddp = DDP(model)
    stopper = Stopper(args.path, dist.get_rank() == 0)
    for epoch in range(9):
        fit(loader, ddp, opt)
        stopper(epoch, model)
    stopper.back(model)
    dist.destroy_process_group()
"""
SPLIT = """\
import json
def split(n, rank):
    if rank == 0:
        with open("split.json", "w") as file:
            json.dump(torch.randperm(n).tolist(), file)
    WAIT
    with open("split.json") as file:
        return json.load(file)
def main():
    dist.init_process_group("gloo")
    order = split(64, dist.get_rank())
    model, opt, loader = parts()
    fit(loader, DDP(model), opt)
    dist.destroy_process_group()
"""
UNPICKLED = """\
OTHER
LOADING = dict(map_location="cpu", weights_only=SAFE)
def main(path, model):
    model.load_state_dict(CALL)
"""
APART = """\
def main(args):
    model, opt, loader = parts()
    first = 0
    if args.resume:
        model.load_state_dict(torch.load("net.pt", map_location="cpu"))
        BACK
    for epoch in range(first, 9):
        fit(loader, model, opt)
        KEEP
"""
OTHERS = """\
def main():
    dist.init_process_group("gloo")
    model, opt, loader = parts()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "init.pt")
        FIRST
    else:
        SECOND
        model.load_state_dict(torch.load("init.pt", map_location="cpu"))
    fit(loader, DDP(model), opt)
    dist.destroy_process_group()
"""
FABRIC = """\
from lightning.fabric import Fabric
def main(args):
    fabric = Fabric(devices=2)
    model, opt, loader = parts()
    model, opt = fabric.setup(model, opt)
    state = {"model": model, KEPT"epoch": 0}
    if args.resume:
        fabric.load(args.resume, state)
    start_epoch = state["epoch"]
    for epoch in range(FROM):
        for x, y in loader:
            opt.zero_grad(); fabric.backward(F.cross_entropy(model(x), y)); opt.step()
        state["epoch"] = epoch + 1
        fabric.save("last.ckpt", state)
"""
LIGHTNING = """\
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
class Lit(L.LightningModule):
    def training_step(self, batch, i):
        return F.cross_entropy(self.net(batch[0]), batch[1])
def main(args):
    trainer = L.Trainer(devices=2, callbacks=[ModelCheckpoint("out", save_weights_only=ALONE)])
    MODEL
    trainer.fit(model, DataLoader(make(64))PATH)
"""
PLAIN = "model = Lit()"
AGAIN = "model = Lit.load_from_checkpoint(args.resume) if args.resume else Lit()"
IGNITE = """\
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint
def main(args):
    model, opt, loader = parts()
    def step(engine, batch):
        opt.zero_grad(); F.cross_entropy(model(batch[0]), batch[1]).backward(); opt.step()
    trainer = Engine(step)
    kept = {"model": model, "opt": opt, "trainer": trainer}
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(kept, "out"))
    if args.resume:
        Checkpoint.load_objects(to_load=LOADED, checkpoint=torch.load(args.resume, map_location="cpu"))
    trainer.run(loader, max_epochs=9)
"""


def ranks(save: str = SAVE, later: str = "", after: str = "", load: str = LOAD) -> str:
    text = RANKS.replace("SAVE", save, 1).replace("LATER", later or "pass").replace("AFTER", after or "pass")
    return text.replace("LOAD", load)


def begins(loop: str, restore: str = KNOWN, more: str = "pass") -> str:
    return BEGINS.replace("RESTORE", restore).replace("LOOP", loop).replace("MORE", more)


def engine(start: str, over: str) -> str:
    return ENGINE.replace("START", start).replace("RANGE", over)


def unpickled(call: str, safe: str = "True", other: str = "") -> str:
    return UNPICKLED.replace("CALL", call).replace("SAFE", safe).replace("OTHER", other)


CASES = [
    ("", MEMBERS.replace("FIRST", "first, 9").replace("MEMBERS", ALL)),
    ("LS404", MEMBERS.replace("FIRST", "first, 9").replace("MEMBERS", "net=model, o=opt")),
    ("LS404", MEMBERS.replace("FIRST", "first, 9").replace("MEMBERS", "net=model, rate=plan")),
    ("", REGISTERED.replace("REGISTER", 'keeper.register("o", opt)')),
    ("LS404", REGISTERED.replace("REGISTER", "pass")),
    (
        "",
        INHERITED.replace("OPTIM", '"o": self.opt.state_dict(), ')
        .replace("BACK", 'self.begun = state["epoch"]')
        .replace("RANGE", "self.begun, 9"),
    ),
    (
        "LS404",
        INHERITED.replace("OPTIM", "").replace("BACK", 'self.begun = state["epoch"]').replace("RANGE", "self.begun, 9"),
    ),
    (
        "LS407",
        INHERITED.replace("OPTIM", '"o": self.opt.state_dict(), ')
        .replace("BACK", 'self.begun = state["epoch"]')
        .replace("RANGE", "9"),
    ),
    ("", SNAPSHOT.replace("FIELD", "momenta: dict").replace("GIVEN", "momenta=opt.state_dict(),")),
    ("LS404", SNAPSHOT.replace("FIELD", "size: int").replace("GIVEN", "size=8,")),
    ("", STEPS.replace("STEP", 'step = saved["step"]').replace("SCALER", 'state["s"] = scaler.state_dict()')),
    ("", STEPS.replace("STEP", 'step = saved["step"]').replace("SCALER", "state.update(amp=scaler.state_dict())")),
    ("LS404", STEPS.replace("STEP", 'step = saved["step"]').replace("SCALER", "pass")),
    ("LS407", STEPS.replace("STEP", "pass").replace("SCALER", 'state["s"] = scaler.state_dict()')),
    ("", LOOKED_UP.replace("NAMES", '("model", "opt")')),
    ("LS404", LOOKED_UP.replace("NAMES", '("model",)')),
    ("", TEACHER.replace("NETWORK", "other").replace("ENTRY", "best")),
    ("", PRETRAINED.replace("EPOCH", "pass")),
    ("LS404", PRETRAINED.replace("EPOCH", 'print(checkpoint["epoch"])')),
    ("LS404", RATES.replace("KEPT", "")),
    ("", RATES.replace("KEPT", ', "n": rates.n')),
    ("LS404", BROUGHT.replace("AT", "")),
    ("", BROUGHT.replace("AT", ", last_epoch=start - 1")),
    ("", begins("for epoch in range(epoch, 9):")),
    ("LS407", begins("for epoch in range(9):")),
    ("LS407", begins("for epoch in range(9):", DROPPED)),
    ("LS407", begins("for epoch in range(1, 10):", DROPPED)),
    ("", begins("for _ in range(9 - epoch):", more="epoch += 1")),
    ("", begins("while epoch < 9:", more="epoch += 1")),
    ("LS407", begins("while epoch < 9:", DROPPED, "epoch += 1")),
    ("", begins("for n in range(9 - epoch):")),
    ("LS407", begins("import itertools\n    for epoch in itertools.count():", DROPPED)),
    ("", begins("import itertools\n    for epoch in itertools.count(epoch):")),
    ("", begins("first = epoch\n    for epoch in range(9):\n        if epoch < first: continue")),
    ("LS407", begins("first = epoch\n    first = 0\n    for epoch in range(first, 9):")),
    ("LS407", engine("pass", "range(epochs)")),
    ("LS407", engine('self.first = state["epoch"]', "range(epochs)")),
    ("LS407", engine('first = state["epoch"]', "range(self.first, epochs)")),
    ("", engine('self.first = state["epoch"]', "range(self.first, epochs)")),
    ("", engine('self.first = state["epoch"]', "list(range(epochs))[self.first:]")),
    ("LS406", ranks()),
    ("", ranks(later="dist.barrier()")),
    ("", ranks(after="dist.barrier()")),
    ("", ranks(load='if dist.get_rank() == 0:\n        print(torch.load(BEST, map_location="cpu"))')),
    ("", ranks(load='model.module.load_state_dict(torch.load("first.pt", map_location="cpu"))')),
    ("", ranks(after="fit(loader, model, opt)")),
    (
        "LS406",
        ranks(load='weights = torch.load("out/best.pt", map_location="cpu")', save='torch.save(1, "out/best.pt")'),
    ),
    ("LS406", ranks(save='torch.save(1, "last.pt"); shutil.copyfile("last.pt", BEST)')),
    ("LS406", ranks(save='torch.save(1, "best.tmp"); os.replace("best.tmp", BEST)')),
    ("LS406", STOPPER.replace("WAIT", "pass")),
    ("", STOPPER.replace("WAIT", "dist.barrier()")),
    ("LS406", SPLIT.replace("WAIT", "pass")),
    ("", SPLIT.replace("WAIT", "dist.barrier()")),
    ("", SPLIT.replace("WAIT", "while not os.path.exists('done'): time.sleep(1)")),
    ("", unpickled("torch.load(path, **LOADING)")),
    ("LS405", unpickled("torch.load(path, **LOADING)", "False")),
    (
        "LS405",
        unpickled("read(path)", other="from functools import partial\nread = partial(torch.load, weights_only=False)"),
    ),
    ("", unpickled("read(path)", other="from functools import partial\nread = partial(torch.load, weights_only=True)")),
    ("LS405", unpickled("torch.load(path, pickle_module=dill)", other="import dill")),
    ("LS405", unpickled("joblib.load(path)", other="import joblib")),
    ("LS405", unpickled("pickle.Unpickler(open(path, 'rb')).load()", other="import pickle")),
    ("LS405", unpickled("torch.load(path)", other="os.environ['TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'] = '1'")),
    ("LS405", unpickled("np.load(path, allow_pickle=True).item()['model']")),
    ("", FABRIC.replace("KEPT", '"opt": opt, ').replace("FROM", "start_epoch, 9")),
    ("LS404", FABRIC.replace("KEPT", "").replace("FROM", "start_epoch, 9")),
    ("LS407", FABRIC.replace("KEPT", '"opt": opt, ').replace("FROM", "9")),
    ("", FABRIC.replace("KEPT", '"opt": opt, ').replace("FROM", "9 - start_epoch")),
    ("", LIGHTNING.replace("ALONE", "False").replace("MODEL", PLAIN).replace("PATH", ", ckpt_path=args.resume")),
    ("LS404", LIGHTNING.replace("ALONE", "True").replace("MODEL", PLAIN).replace("PATH", ", ckpt_path=args.resume")),
    ("", LIGHTNING.replace("ALONE", "True").replace("MODEL", PLAIN).replace("PATH", "")),
    ("LS407", LIGHTNING.replace("ALONE", "False").replace("MODEL", AGAIN).replace("PATH", "")),
    ("", LIGHTNING.replace("ALONE", "False").replace("MODEL", AGAIN.replace("resume", "init")).replace("PATH", "")),
    ("", IGNITE.replace("LOADED", "kept")),
    ("LS407", IGNITE.replace("LOADED", '{"model": model, "opt": opt}')),
    ("", IGNITE.replace("LOADED", '{"model": model}')),
    ("LS404", APART.replace("BACK", "pass").replace("KEEP", 'torch.save(model.state_dict(), "net.pt")')),
    (
        "",
        APART.replace("BACK", 'opt.load_state_dict(torch.load("opt.pt")); first = torch.load("opt.pt")[1]').replace(
            "KEEP",
            'torch.save(model.state_dict(), "net.pt"); torch.save((opt.state_dict(), epoch), "opt.pt")',
        ),
    ),
    ("LS404", APART.replace("BACK", "pass").replace("KEEP", 'torch.save(obj={"net": model.state_dict()}, f="net.pt")')),
    (
        "",
        APART.replace("BACK", 'first = torch.load("net.pt")["epoch"]').replace(
            "KEEP", 'kept = {"net": 1, "o": opt.state_dict()}; torch.save(kept | {"epoch": epoch}, "net.pt")'
        ),
    ),
    ("", APART.replace("BACK", "pass").replace("KEEP", 'torch.save(args.state, "net.pt")')),
    (
        "LS407",
        APART.replace("BACK", 'first = torch.load("net.pt")["epoch"]')
        .replace("range(first, 9)", "tqdm(range(9))")
        .replace("KEEP", 'torch.save((model.state_dict(), opt.state_dict(), epoch), "net.pt")'),
    ),
    ("LS406", OTHERS.replace("FIRST", "pass").replace("SECOND", "pass")),
    ("", OTHERS.replace("FIRST", "dist.barrier()").replace("SECOND", "dist.barrier()")),
    (
        "LS406",
        SPLIT.replace("json.dump(torch.randperm(n).tolist(), file)", "file.write(str(n))").replace("WAIT", "pass"),
    ),
]
