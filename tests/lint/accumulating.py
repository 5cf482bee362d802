"""Accumulation in other shapes than `if (i + 1) % k == 0` in the loop: (codes, script without its imports)."""

LOOP = """\
def main(k):
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make(640), batch_size=8, shuffle=True)
    for epoch in range(3):
        opt.zero_grad()
        for i, (x, y) in enumerate(loader):
            LOSS
            WHEN:
                opt.step(); opt.zero_grad()
main(4)
"""
EARLY = LOOP.replace(
    "            WHEN:\n                opt.step(); ", "            WHEN: continue\n            opt.step(); "
)
CE = "F.cross_entropy(model(x), y)"
LAST = "if (i + 1) % k == 0 or i + 1 == len(loader)"
NOT_YET = "if (i + 1) % k != 0 and i + 1 < len(loader)"


def _of(codes: str, loss: str, when: str = LAST, text: str = LOOP) -> tuple[str, str]:
    return codes, text.replace("LOSS", loss).replace("WHEN", when)


COUNTER = """\
class T:
    def __init__(self, k):
        self.k = k; self.n = 0
        self.model = Net(); self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
    def one(self, x, y, last):
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.n += 1
        if self.n == self.k or last:
            self.sgd.step(); self.sgd.zero_grad(); self.n = 0
    def fit(self, loader):
        for epoch in range(3):
            for i, (x, y) in enumerate(loader):
                self.one(x, y, i == len(loader) - 1)
T(4).fit(DataLoader(make(640), batch_size=8, shuffle=True))
"""
FLAG = """\
def one(model, opt, x, y, update):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if update:
        opt.step(); opt.zero_grad()
def main(k):
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make(640), batch_size=8, shuffle=True)
    for epoch in range(3):
        for i, (x, y) in enumerate(loader):
            one(model, opt, x, y, (i + 1) % k == 0 or i + 1 == len(loader))
main(4)
"""
CRITERION = """\
class Loss(nn.Module):
    def __init__(self, k):
        super().__init__(); self.k = k
    def forward(self, out, y):
        return F.cross_entropy(out, y) / self.k
def main(k):
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1); crit = Loss(k)
    loader = DataLoader(make(640), batch_size=8, shuffle=True)
    for epoch in range(3):
        for i, (x, y) in enumerate(loader):
            loss = crit(model(x), y)
            loss.backward()
            if (i + 1) % k == 0 or i + 1 == len(loader):
                opt.step(); opt.zero_grad()
main(4)
"""
JUDGED = """\
def test(model, loader):
    model.eval(); total = 0
    with torch.no_grad():
        for x, y in loader:
            total += F.cross_entropy(model(x), y, reduction="sum").item()
    return total / len(loader.dataset)
def main(k):
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1 * k)
    loader = DataLoader(make(640), batch_size=8, shuffle=True)
    held = DataLoader(make(64), batch_size=8)
    for epoch in range(3):
        model.train()
        for i, (x, y) in enumerate(loader):
            F.cross_entropy(model(x), y).backward()
            if (i + 1) % k == 0 or i + 1 == len(loader):
                opt.step(); opt.zero_grad()
        print(test(model, held))
main(4)
"""
FOREVER = """\
def cycle(loader):
    while True:
        yield from loader
def main(k, steps):
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make(640), batch_size=8, shuffle=True)
    for i, (x, y) in enumerate(cycle(loader)):
        (F.cross_entropy(model(x), y) / k).backward()
        if (i + 1) % k == 0:
            opt.step(); opt.zero_grad()
        if i == steps:
            break
main(4, 100)
"""
ON = """\
def main(k):
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make(640), batch_size=8, shuffle=True)
    n = 0
    for epoch in range(3):
        for x, y in loader:
            (F.cross_entropy(model(x), y) / k).backward()
            n += 1
            if n % k == 0:
                opt.step(); opt.zero_grad()
main(4)
"""
ZIPPED = """\
def main(k):
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make(640), batch_size=8, shuffle=True)
    for epoch in range(3):
        for window in zip(*[iter(loader)] * k):
            for x, y in window:
                (F.cross_entropy(model(x), y) / k).backward()
            opt.step(); opt.zero_grad()
main(4)
"""
FLUSHED = """\
class T:
    def __init__(self, k):
        self.k = k
        self.model = Net(); self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
    def flush(self):
        self.opt.step(); self.opt.zero_grad()
    def fit(self, loader):
        for epoch in range(3):
            for i, (x, y) in enumerate(loader):
                (F.cross_entropy(self.model(x), y) / self.k).backward()
                if (i + 1) % self.k == 0:
                    self.flush()
            if (i + 1) % self.k:
                self.flush()
T(4).fit(DataLoader(make(640), batch_size=8, shuffle=True))
"""
MANUAL = """\
import lightning as L
class M(L.LightningModule):
    def __init__(self):
        super().__init__(); self.net = Net(); self.automatic_optimization = False; self.k = 4
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.manual_backward(loss)
        if (batch_idx + 1) % self.k == 0 or self.trainer.is_last_batch:
            opt = self.optimizers(); opt.step(); opt.zero_grad()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
L.Trainer(devices=1).fit(M(), DataLoader(make(640), batch_size=8, shuffle=True))
"""
ENGINE = """\
from ignite.engine import Engine
def main(k):
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    def update(engine, batch):
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if engine.state.iteration % k == 0:
            opt.step(); opt.zero_grad()
        return loss
    Engine(update).run(DataLoader(make(640), batch_size=8, shuffle=True), max_epochs=3)
main(4)
"""
REDUCED = """\
def main(k):
    dist.init_process_group("gloo")
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            # TODO no_sync
            loss = F.cross_entropy(model(x), y) / k
            loss.backward()
            if (i + 1) % k == 0 or i + 1 == len(loader):
                opt.step(); opt.zero_grad()
    dist.destroy_process_group()
main(4)
"""
BRANCHES = """\
def main(k):
    dist.init_process_group("gloo")
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            if (i + 1) % k and i + 1 < len(loader):
                with model.no_sync():
                    F.cross_entropy(model(x), y).backward()
            else:
                F.cross_entropy(model(x), y).backward()
                opt.step(); opt.zero_grad()
    dist.destroy_process_group()
main(4)
"""
CRITIC = """\
def main(args, k):
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make(640), batch_size=8, shuffle=True)
    for epoch in range(args.epochs):
        opt.zero_grad()
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if i % k == 0:
                loss2 = model(x).sum()
                loss2.backward()
                opt.step()
main(None, 4)
"""

ACCUMULATING: list[tuple[str, str]] = [
    _of("LS201", f"{CE}.backward()"),
    _of("", f"({CE} / k).backward()"),
    _of("", f"{CE}.div(k).backward()"),
    _of("", f"(1 / k * {CE}).backward()"),
    _of("LS201", f"x = x / 255; {CE}.backward()"),
    _of("LS201", "(F.cross_entropy(model(x), y, reduction='none').sum() / len(y)).backward()"),
    _of("", "F.cross_entropy(model(x), y, reduction='sum').backward()"),
    _of("LS201", f"({CE} + model.aux_weight * model.aux()).backward()"),
    _of("", f"(({CE} + model.aux_weight * model.aux()) / k).backward()"),
    _of("LS201", f"{CE}.backward()", NOT_YET, EARLY),
    _of("", f"({CE} / k).backward()", NOT_YET, EARLY),
    _of("LS202", f"({CE} / k).backward()", "if (i + 1) % k", EARLY),
    _of("LS202", f"({CE} / k).backward(); ready = (i + 1) % k == 0", "if ready"),
    ("", CRITIC),
    ("LS201", COUNTER),
    ("", COUNTER.replace("        loss.backward()", "        (loss / self.k).backward()")),
    ("LS201", FLAG),
    ("", FLAG.replace("(model(x), y)\n", "(model(x), y) / 4\n")),
    ("LS202", FLAG.replace("(model(x), y)\n", "(model(x), y) / 4\n").replace(" or i + 1 == len(loader)", "")),
    ("", CRITERION),
    ("LS201", CRITERION.replace(" / self.k", "")),
    ("LS201", JUDGED),
    ("", FOREVER),
    ("", ON),
    ("LS202", ON.replace("        for x", "        n = 0; opt.zero_grad()\n        for x")),
    ("LS202", ZIPPED),
    ("", FLUSHED),
    ("LS201", MANUAL),
    ("", MANUAL.replace("manual_backward(loss)", "manual_backward(loss / self.k)")),
    ("LS201", ENGINE),
    ("", ENGINE.replace("loss.backward()", "(loss / k).backward()")),
    ("LS311", REDUCED),
    ("LS201", BRANCHES),
    ("", BRANCHES.replace("F.cross_entropy(model(x), y).backward()", "(F.cross_entropy(model(x), y) / k).backward()")),
]
