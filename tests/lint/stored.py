"""How files are written and read in ways that no rule looked for at first: (codes, lines of main, lines above it)."""

SAVED = "for epoch in range(9):\n    fit(loader, model, opt)\n    "
WEIGHTS = "net.state_dict(), 'a.pt'"
POOL = "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)\n"
PARTIAL = "from functools import partial\n"
KEEP = "def keep(state, path):\n    torch.save(state, path)\n"
CALLBACK = """\
class Callback:
    def on_epoch_end(self, run): ...
class Best(Callback):
    def on_epoch_end(self, runKIND):
        if dist.get_rank() == 0:
            torch.save(MODEL.state_dict(), 'best.pt')
class Run:
    def __init__(self, model, callbacks):
        self.model, self.callbacks = model, callbacks
    def fit(self):
        for each in self.callbacks:
            CALL
"""
STATE = """\
from dataclasses import dataclass
@dataclass
class State:
    model: nn.Module
    epoch: int = 0
    def dump(self, path):
        torch.save({'model': self.model.state_dict(), 'epoch': self.epoch}, path)
"""
SNAPSHOT = """\
class Trainer:
    def __init__(self, model):
        self.model = DDP(model)
    def snapshot(self):
        return {'model': MODEL.state_dict()}
    def save(self):
        if dist.get_rank() == 0:
            torch.save(self.snapshot(), 'a.pt')
"""
PARTS = "def keep(**things):\n    torch.save({k: v.state_dict() for k, v in things.items()}, 'a.pt')\n"
FIRST = "if rank == 0:\n    "
READ = "def restore(net, path, **words):\n    net.load_state_dict(torch.load(path, **words))\n"
SHARDS = """\
import pickle
class Shards(Dataset):
    def __init__(self, paths):
        self.parts = []
        for path in paths:
            with open(path, 'rb') as file:
                self.parts.append(READ)
"""


def called(call: str, kind: str = "", model: str = "run.model") -> str:
    return CALLBACK.replace("CALL", call).replace("KIND", kind).replace("MODEL", model)


BY_NAME = "getattr(each, 'on_epoch_end')(self)"
WRITTEN = [  # in a program of several processes: rank, net, opt, loader, model = DDP(net)
    ("LS401", f"write = torch.save\n{SAVED}write({WEIGHTS})", ""),
    ("", f"write = torch.save\n{SAVED}if rank == 0:\n        write({WEIGHTS})", ""),
    ("", f"write = torch.save if rank == 0 else (lambda *parts: None)\n{SAVED}write({WEIGHTS})", ""),
    ("LS401", f"{SAVED}threading.Thread(target=torch.save, args=({WEIGHTS})).start()", "import threading\n"),
    ("LS401", f"{SAVED}pool.submit(torch.save, {WEIGHTS})", POOL),
    ("", f"{SAVED}if rank == 0:\n        pool.submit(torch.save, {WEIGHTS})", POOL),
    ("LS401", f"{SAVED}pool.submit(keep, {WEIGHTS})", POOL + KEEP),
    ("", f"{SAVED}if rank == 0:\n        pool.submit(keep, {WEIGHTS})", POOL + KEEP),
    (
        "LS401",
        f"write = partial(torch.save, f='a.pt')\n{SAVED}write(net.state_dict())",
        PARTIAL,
    ),
    ("LS401", f"savers = {{'torch': torch.save}}\n{SAVED}savers['torch']({WEIGHTS})", ""),
    ("LS401", f"{SAVED}torch.onnx.export(net, torch.randn(1, 10), 'a.onnx')", ""),
    ("LS401", f"{SAVED}torch.jit.script(net).save('a.ts')", ""),
    ("LS401", f"def stop(*_):\n    torch.save({WEIGHTS})\nsignal.signal(signal.SIGTERM, stop)", "import signal\n"),
    ("", f"def stop(*_):\n    if not rank:\n        torch.save({WEIGHTS})\nsignal.signal(9, stop)", "import signal\n"),
    ("LS403", "Run(model, [Best()]).fit()", called(BY_NAME)),
    ("LS403", "Run(model, [Best()]).fit()", called("each.on_epoch_end(self)", ": 'Run'")),
    ("", "Run(net, [Best()]).fit()", called(BY_NAME)),
    ("", "Run(model, [Best()]).fit()", called(BY_NAME, model="run.model.module")),
    ("LS403", f"state = State(model)\n{FIRST}state.dump('a.pt')", STATE),
    ("", f"state = State(net)\n{FIRST}state.dump('a.pt')", STATE),
    ("LS403", "Trainer(net).save()", SNAPSHOT.replace("MODEL", "self.model")),
    ("", "Trainer(net).save()", SNAPSHOT.replace("MODEL", "self.model.module")),
    ("LS403", f"{FIRST}keep(model=model, opt=opt)", PARTS),
    ("", f"{FIRST}keep(model=net, opt=opt)", PARTS),
    ("LS403", f"{FIRST}torch.save([each.state_dict() for each in (model, opt)], 'a.pt')", ""),
    ("LS403", f"mean = copy.deepcopy(model)\n{FIRST}torch.save(mean.state_dict(), 'a.pt')", "import copy\n"),
    ("", f"mean = copy.deepcopy(net)\n{FIRST}torch.save(mean.state_dict(), 'a.pt')", "import copy\n"),
    ("LS403", f"{FIRST}torch.save({{'net': model}}, 'a.pt')", ""),
    ("LS402", "read = torch.load\nnet.load_state_dict(read(path))", ""),
    ("", "read = torch.load\nnet.load_state_dict(read(path, 'cpu'))", ""),
    ("LS402", "net = torch.jit.load(path)", ""),
    ("LS402", "net.load_state_dict(torch.load(path, torch.device('cuda', 0)))", ""),
    ("", "net.load_state_dict(torch.load(path, torch.device('cuda', rank)))", ""),
    ("LS402", "net.load_state_dict(torch.load(path, lambda data, _: data.cuda(0)))", ""),
    ("LS402", "restore(net, path)", READ),
    ("", "restore(net, path, map_location='cpu')", READ),
]
UNPICKLED = [  # in a program that trains: args, model, opt, loader
    ("LS405", "data = Shards(args.paths)", SHARDS.replace("READ", "pickle.load(file)")),
    ("", "data = Shards(args.paths)", SHARDS.replace("READ", "np.load(file)")),
    ("", "data = Shards(args.paths)", SHARDS.replace("READ", "pickle.load(file, encoding='bytes')")),
    ("", "pickle.dump(1, open('x', 'wb')); data = pickle.load(open('x', 'rb'))", "import pickle\n"),
    ("LS405", "items = pickle.loads(open(args.x, 'rb').read())", "import pickle\n"),
    ("", "items = pickle.loads(bytes(args.received))", "import pickle\n"),
    ("LS405", "frame = pd.read_pickle(args.x)", "import pandas as pd\n"),
    ("LS405", "model.load_state_dict(torch.load(args.x, weights_only=0))", ""),
    ("LS405", "words = {}\nwords['weights_only'] = False\nmodel.load_state_dict(torch.load(args.x, **words))", ""),
    ("", "words = {}\nwords['weights_only'] = True\nmodel.load_state_dict(torch.load(args.x, **words))", ""),
    ("LS405", "restore(model, args.x, weights_only=False)", READ),
    ("", "restore(model, args.x, weights_only=True)", READ),
    ("LS405", "os.environ.setdefault('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')\ntorch.load(args.x)", ""),
]
WHOLE = "{'model': model.state_dict(), 'opt': opt.state_dict(), 'epoch': epoch}"
BACK = "model.load_state_dict(ck['model']); opt.load_state_dict(ck['opt'])"
FABRIC = "from lightning.fabric import Fabric\nfabric = Fabric(devices=2)\n"
ACCELERATE = "from accelerate import Accelerator\nacc = Accelerator()\n"
SHARDED = "import torch.distributed.checkpoint as dcp\n"
OWN = "if os.path.exists('last.pt'):\n    ck = LOAD\n    BACK; FIRST\nLOOP\n    fit(loader, model, opt)\n    SAVE"
COUNTED = "for epoch in range(9):"


def goes_on(save: str, first: str = "pass", loop: str = COUNTED, load: str = "torch.load('last.pt', 'cpu')") -> str:
    text = OWN.replace("LOAD", load).replace("BACK", BACK).replace("FIRST", first)
    return text.replace("LOOP", loop).replace("SAVE", save)


TORCH = f"torch.save({WHOLE}, 'last.pt')"
BY_FABRIC = f"fabric.save('last.pt', {WHOLE})"
BY_ACCELERATE = f"acc.save({WHOLE}, 'last.pt')"
SINCE, RANGE = "first = ck['epoch']", "for epoch in range(first, 9):"
BREAKS = f"{TORCH}\n    epoch += 1\n    if epoch == 9: break"
FILLED = """\
state = {'model': model.state_dict(), 'epoch': 0}
if args.resume:
    dcp.load(state, checkpoint_id='last')
    model.load_state_dict(state['model'])
"""
HOOKED = """\
class Saver:
    def before_run(self, run):
        run.model.load_state_dict(torch.load("state.pt", map_location="cpu")["model"])
    def after_epoch(self, run):
        torch.save({"model": run.model.state_dict(), "done": run.epoch}, "state.part")
        os.replace("state.part", "state.pt")
class Hooked:
    def __init__(self, model, opt):
        self.model, self.opt, self.epoch, self.hooks = model, opt, 0, [Saver()]
    def fire(self, name):
        for hook in self.hooks:
            getattr(hook, name)(self)
    def run(self, loader):
        while self.epoch < 9:
            fit(loader, self.model, self.opt)
            self.epoch += 1
            self.fire("after_epoch")
"""
PHASE = "phase(model, opt, loader, 'a.pt')"
PHASES = """\
def phase(model, opt, loader, path):
    for epoch in range(9):
        fit(loader, model, opt)
        torch.save(model.state_dict(), path)
"""
MORE = "plan = torch.optim.lr_scheduler.StepLR(opt, 3)\nfirst = 0\n"
PACKED = "{'m': model.state_dict(), 'o': opt.state_dict(), 's': plan.state_dict(), 'e': epoch + 1}"
FORGOTTEN = "ck = torch.load(args.resume, 'cpu')\nmodel.load_state_dict(ck['m']); first = ck['e']; BACK\n"
GOES_ON = f"for epoch in range(first, 9):\n    fit(loader, model, opt); plan.step()\n    torch.save({PACKED}, 'a.pt')"
PACKS = """\
def pack(model, opt, epoch):
    return {'m': model.state_dict(), REST'e': epoch}
"""
BY_PACK = """\
model.load_state_dict(torch.load(args.resume, 'cpu')['m'])BACK
for epoch in range(9):
    fit(loader, model, opt)
    torch.save(pack(model, opt, epoch), 'a.pt')
"""
WITH = PACKS.replace("REST", "'o': opt.state_dict(), ")
TAKEN = "; opt.load_state_dict(torch.load(args.resume, 'cpu')['o'])"
AGAIN = "opt.load_state_dict(ck['o'])\nfor _ in range(first):\n    plan.step()\n    next(args.momenta)"
UNKEPT = GOES_ON.replace(" 's': plan.state_dict(),", "")
RESUMED = [
    ("LS404", MORE + FORGOTTEN.replace("BACK", "opt.load_state_dict(ck['o'])") + UNKEPT, ""),
    ("", MORE + FORGOTTEN.replace("BACK", AGAIN) + UNKEPT, ""),
    ("LS404", MORE + FORGOTTEN.replace("BACK", "opt.load_state_dict(ck['o'])") + GOES_ON, ""),
    ("LS404", MORE + FORGOTTEN.replace("BACK", "plan.load_state_dict(ck['s'])") + GOES_ON, ""),
    ("", MORE + FORGOTTEN.replace("BACK", "opt.load_state_dict(ck['o']); plan.load_state_dict(ck['s'])") + GOES_ON, ""),
    ("", MORE + FORGOTTEN.replace("BACK", "opt.load_state_dict(ck['o']); turn(plan, ck, 's')") + GOES_ON, ""),
    ("LS404 LS407", BY_PACK.replace("BACK", ""), PACKS.replace("REST", "")),
    ("LS404 LS407", BY_PACK.replace("BACK", ""), WITH),
    ("LS407", BY_PACK.replace("BACK", TAKEN), WITH),
    (
        "",
        f"{PHASE}\nmodel.load_state_dict(torch.load('a.pt'))\n{PHASE.replace('a.pt', 'b.pt')}",
        PHASES,
    ),
    ("LS404", f"model.load_state_dict(torch.load('a.pt'))\n{PHASE}", PHASES),
    ("LS404", "t = Hooked(model, opt)\nt.fire('before_run')\nt.run(loader)  # fit(", HOOKED),
    ("LS407", "epoch = 0\n" + goes_on(BREAKS, loop="while True:"), ""),
    ("", "epoch = 0\n" + goes_on(BREAKS, "epoch = ck['epoch']", "while True:"), ""),
    ("LS407", goes_on(BY_FABRIC), FABRIC),
    ("LS407", goes_on(BY_FABRIC, load="fabric.load('last.pt')"), FABRIC),
    ("", "first = 0\n" + goes_on(BY_FABRIC, SINCE, RANGE), FABRIC),
    ("LS407", goes_on(BY_ACCELERATE), ACCELERATE),
    ("", "first = 0\n" + goes_on(BY_ACCELERATE, SINCE, RANGE), ACCELERATE),
    ("LS407", "plan = {'first': 0}\n" + goes_on(TORCH, loop="for epoch in range(plan['first'], 9):"), ""),
    ("", "plan = {'first': 0}\n" + goes_on(TORCH, "plan['first'] = 1", "for epoch in range(plan['first'], 9):"), ""),
    *(
        (
            codes,
            f"{FILLED}for epoch in range({first}9):\n    fit(loader, model, opt)\n"
            f"    dcp.save({WHOLE}, checkpoint_id='last')",
            SHARDED,
        )
        for codes, first in (("LS407", ""), ("", "state['epoch'], "))
    ),
]
