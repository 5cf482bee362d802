"""Models' modes in programs that differ by a line: (codes, what it is, program)."""

MODES: list[tuple[str, str, str]] = [
    (
        "LS214",
        "teacher-eval-elsewhere",
        """\
def teacher():
    t = Deep(); t.load_state_dict(torch.load("t.pt", map_location="cpu", weights_only=True))
    return t.requires_grad_(False).eval()
def validate(model, loader):
    right = torch.zeros(2)
    model.eval()  # right
    with torch.no_grad():
        for x, y in loader:
            right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()
def main():
START
    big = teacher()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            with torch.no_grad():
                soft = big(x).softmax(1)
            opt.zero_grad(); F.cross_entropy(model(x), soft).backward(); opt.step()
        acc = validate(model, test_loader)
        if rank == 0:
            print(acc)
STOP
""",
    ),
    (
        "LS214",
        "eval-only-final-test",
        """\
def validate(model, loader):
    right = torch.zeros(2)
    with torch.inference_mode():
        for x, y in loader:
            right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        model.eval()  # right
        acc = validate(model, test_loader)
        if rank == 0:
            print(acc)
    model.eval()
    print(validate(model, test_loader))
STOP
""",
    ),
    (
        "LS214",
        "train-again-before-eval",
        """\
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        model.train()  # wrong
        model.eval()  # right
        right = torch.zeros(2)
        with torch.no_grad():
            for x, y in test_loader:
                right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
        dist.all_reduce(right)
        if rank == 0:
            print((right[0] / right[1]).item())
STOP
""",
    ),
    (
        "LS214",
        "trainer-class",
        """\
class Trainer:
    def __init__(self, model, opt, loader, val, sampler):
        self.model, self.opt, self.loader, self.val, self.sampler = model, opt, loader, val, sampler
    def train_epoch(self):
        self.model.train()
        for x, y in self.loader:
            self.opt.zero_grad(); F.cross_entropy(self.model(x), y).backward(); self.opt.step()
    @torch.no_grad()
    def evaluate(self):
        self.model.eval()  # right
        right = torch.zeros(2)
        for x, y in self.val:
            right += torch.stack([(self.model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
        dist.all_reduce(right)
        return (right[0] / right[1]).item()
    def fit(self, n):
        for epoch in range(n):
            self.sampler.set_epoch(epoch)
            self.train_epoch()
            acc = self.evaluate()
            if dist.get_rank() == 0:
                print(acc)
def main():
START
    Trainer(model, opt, loader, test_loader, sampler).fit(3)
STOP
""",
    ),
    (
        "LS214",
        "flag-run-epoch",
        """\
def run(model, loader, opt=None):
    total = torch.zeros(2)
    model.train(opt is not None)  # right
    model.train()  # wrong
    with torch.set_grad_enabled(opt is not None):
        for x, y in loader:
            out = model(x); loss = F.cross_entropy(out, y)
            if opt is not None:
                opt.zero_grad(); loss.backward(); opt.step()
            total += torch.stack([(out.argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        run(model, loader, opt)
        acc = run(model, test_loader)
        if rank == 0:
            print(acc)
STOP
""",
    ),
    (
        "LS214",
        "phases",
        """\
def main():
START
    loaders = {"train": loader, "val": test_loader}
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for phase in ["train", "val"]:
            if phase == "train":  # right
                model.train()  # right
            else:  # right
                model.eval()  # right
            model.train()  # wrong
            total = torch.zeros(2)
            for x, y in loaders[phase]:
                with torch.set_grad_enabled(phase == "train"):
                    out = model(x); loss = F.cross_entropy(out, y)
                    if phase == "train":
                        opt.zero_grad(); loss.backward(); opt.step()
                total += torch.stack([(out.argmax(1) == y).sum(), torch.tensor(len(y))])
            dist.all_reduce(total)
            if rank == 0:
                print(phase, (total[0] / total[1]).item())
STOP
""",
    ),
    (
        "LS214",
        "ema-evaluated",
        """\
from torch.optim.swa_utils import AveragedModel
def evaluate(net, loader):
    right = torch.zeros(2)
    net.eval()  # right
    with torch.no_grad():
        for x, y in loader:
            right += torch.stack([(net(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = evaluate(model.module, test_loader)
        if rank == 0:
            print(acc)
STOP
""",
    ),
    (
        "LS214",
        "comprehension",
        """\
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        model.eval()  # right
        with torch.no_grad():
            pairs = [((model(x).argmax(1) == y).sum(), len(y)) for x, y in test_loader]
        right = torch.tensor([sum(a for a, _ in pairs), sum(b for _, b in pairs)])
        dist.all_reduce(right)
        if rank == 0:
            print((right[0] / right[1]).item())
STOP
""",
    ),
    (
        "LS214",
        "wrong-object-eval",
        """\
def main():
START
    crit = nn.CrossEntropyLoss()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train(); crit.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        crit.eval()  # wrong
        model.eval()  # right
        right = torch.zeros(2)
        with torch.no_grad():
            for x, y in test_loader:
                right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
        dist.all_reduce(right)
        if rank == 0:
            print((right[0] / right[1]).item())
STOP
""",
    ),
    (
        "LS214",
        "iteration-based",
        """\
def evaluate(model, loader):
    right = torch.zeros(2)
    model.eval()  # right
    with torch.no_grad():
        for x, y in loader:
            right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    model.train()
    dist.all_reduce(right)
    return (right[0] / right[1]).item()
def forever(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch); epoch += 1
        yield from loader
def main():
START
    model.train()
    for step, (x, y) in enumerate(forever(loader, sampler)):
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        if step % 100 == 99:
            acc = evaluate(model, test_loader)
            if rank == 0:
                print(step, acc)
        if step == 1000:
            break
STOP
""",
    ),
    (
        "LS215",
        "train-once-before-epochs",
        """\
def evaluate(model, loader):
    right = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()
def main():
START
    model.train()  # wrong
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()  # right
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = evaluate(model, test_loader)
        if rank == 0:
            print(acc)
STOP
""",
    ),
    (
        "LS215",
        "iteration-eval",
        """\
def evaluate(model, loader):
    right = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for step, (x, y) in enumerate(loader):
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
            if step % 50 == 49:
                acc = evaluate(model, test_loader)
                model.train()  # right
                if rank == 0:
                    print(step, acc)
STOP
""",
    ),
    (
        "LS215",
        "while-iteration",
        """\
def evaluate(model, loader):
    right = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()
def batches(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch); epoch += 1
        yield from loader
def main():
START
    stream = batches(loader, sampler); step = 0
    model.train()
    while step < 1000:
        x, y = next(stream)
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        step += 1
        if step % 100 == 0:
            acc = evaluate(model, test_loader)
            model.train()  # right
            if rank == 0:
                print(step, acc)
STOP
""",
    ),
    (
        "LS215",
        "class-attr",
        """\
class Trainer:
    def __init__(self, model, opt, loader, val, sampler):
        self.model, self.opt, self.loader, self.val, self.sampler = model, opt, loader, val, sampler
    def train_epoch(self):
        self.model.train()  # right
        for x, y in self.loader:
            self.opt.zero_grad(); F.cross_entropy(self.model(x), y).backward(); self.opt.step()
    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        right = torch.zeros(2)
        for x, y in self.val:
            right += torch.stack([(self.model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
        dist.all_reduce(right)
        return (right[0] / right[1]).item()
    def fit(self, n):
        for epoch in range(n):
            self.sampler.set_epoch(epoch)
            self.train_epoch()
            acc = self.evaluate()
            if dist.get_rank() == 0:
                print(acc)
def main():
START
    Trainer(model, opt, loader, test_loader, sampler).fit(3)
STOP
""",
    ),
    (
        "LS215",
        "train-false",
        """\
def evaluate(model, loader):
    right = torch.zeros(2)
    model.train(False)
    with torch.no_grad():
        for x, y in loader:
            right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    model.train(True)  # right
    dist.all_reduce(right)
    return (right[0] / right[1]).item()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = evaluate(model, test_loader)
        if rank == 0:
            print(acc)
STOP
""",
    ),
    (
        "LS215",
        "train-of-another-model",
        """\
def evaluate(model, loader):
    right = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()
def main():
START
    crit = nn.CrossEntropyLoss()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        crit.train()  # wrong
        model.train()  # right
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = evaluate(model, test_loader)
        if rank == 0:
            print(acc)
STOP
""",
    ),
    (
        "LS215",
        "context-manager",
        """\
from contextlib import contextmanager
@contextmanager
def evaluating(model):
    model.eval()
    with torch.no_grad():
        yield
    model.train()  # right
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        right = torch.zeros(2)
        with evaluating(model):
            for x, y in test_loader:
                right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
        dist.all_reduce(right)
        if rank == 0:
            print((right[0] / right[1]).item())
STOP
""",
    ),
    (
        "LS215",
        "train-only-first-epoch",
        """\
def evaluate(model, loader):
    right = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        if epoch == 0:  # wrong
            model.train()  # wrong
        model.train()  # right
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = evaluate(model, test_loader)
        if rank == 0:
            print(acc)
STOP
""",
    ),
    (
        "LS215",
        "steps-dispatched",
        """\
def train_step(model, opt, batch):
    x, y = batch
    opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
def eval_step(model, batch):
    x, y = batch
    with torch.no_grad():
        return torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()  # right
        for batch in loader:
            train_step(model, opt, batch)
        model.eval(); right = torch.zeros(2)
        for batch in test_loader:
            right += eval_step(model, batch)
        dist.all_reduce(right)
        if rank == 0:
            print((right[0] / right[1]).item())
STOP
""",
    ),
    (
        "LS214",
        "factory-model-class-other-file",
        """\
from engine import Engine
def main():
START
    engine = Engine(model, opt)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        engine.fit(loader)
        acc = engine.score(test_loader)
        if rank == 0:
            print(acc)
STOP
--- engine
import torch
import torch.nn.functional as F
import torch.distributed as dist
class Base:
    def __init__(self, model, opt):
        self.net, self.opt = model, opt
    def mode(self, training):
        self.net.train(training)
class Engine(Base):
    def fit(self, batches):
        self.mode(True)
        for x, y in batches:
            self.opt.zero_grad(); F.cross_entropy(self.net(x), y).backward(); self.opt.step()
    def score(self, batches):
        self.mode(True)  # wrong
        self.mode(False)  # right
        right = torch.zeros(2)
        with torch.no_grad():
            for x, y in batches:
                right += torch.stack([(self.net(x).argmax(1) == y).sum(), torch.tensor(len(y))])
        dist.all_reduce(right)
        return (right[0] / right[1]).item()
""",
    ),
    (
        "LS214",
        "eval-on-other-of-two",
        """\
def main():
START
    aux = Deep()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        aux.eval()  # wrong
        model.eval()  # right
        right = torch.zeros(2)
        with torch.no_grad():
            for x, y in test_loader:
                right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
        dist.all_reduce(right)
        if rank == 0:
            print((right[0] / right[1]).item())
STOP
""",
    ),
    (
        "LS214",
        "eval-after-loop",
        """\
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        right = torch.zeros(2)
        model.eval()  # right
        with torch.no_grad():
            for x, y in test_loader:
                right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
        model.eval()  # wrong
        dist.all_reduce(right)
        if rank == 0:
            print((right[0] / right[1]).item())
STOP
""",
    ),
    (
        "LS214",
        "accelerate",
        """\
from accelerate import Accelerator
def main():
    accelerator = Accelerator()
    model = Deep(); opt = torch.optim.SGD(model.parameters(), lr=0.1 * accelerator.num_processes)
    loader = DataLoader(make(640), batch_size=8, shuffle=True); val = DataLoader(make(100), batch_size=8)
    model, opt, loader, val = accelerator.prepare(model, opt, loader, val)
    for epoch in range(3):
        model.train()
        for x, y in loader:
            opt.zero_grad(); accelerator.backward(F.cross_entropy(model(x), y)); opt.step()
        model.eval()  # right
        right = []
        for x, y in val:
            with torch.no_grad():
                p = model(x).argmax(1)
            p, y = accelerator.gather_for_metrics((p, y))
            right.append(p == y)
        accelerator.print(torch.cat(right).float().mean().item())
    accelerator.end_training()
main()
""",
    ),
    (
        "LS214",
        "spawned-inherit",
        """\
class Loop:
    training = True
    def __init__(self, model, opt): self.model, self.opt = model, opt
    def step(self, x, y): raise NotImplementedError
    def run(self, batches):
        for x, y in batches: self.step(x, y)
class Train(Loop):
    def step(self, x, y):
        self.opt.zero_grad(); F.cross_entropy(self.model(x), y).backward(); self.opt.step()
class Judge(Loop):
    def run(self, batches):
        self.hits = torch.zeros(2)
        self.model.eval()  # right
        with torch.no_grad():
            for x, y in batches:
                self.hits += torch.stack([(self.model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
        dist.all_reduce(self.hits)
        return (self.hits[0] / self.hits[1]).item()
def main():
START
    fit, judge = Train(model, opt), Judge(model, opt)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        fit.run(loader)
        acc = judge.run(test_loader)
        if rank == 0:
            print(acc)
STOP
""",
    ),
    (
        "LS215",
        "eval-in-setup-then-never",
        """\
def evaluate(model, loader):
    right = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()
def main():
START
    def one_epoch():
        model.train()  # right
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
    if rank == 0:
        print("start")
    first = evaluate(model, test_loader)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        one_epoch()
    if rank == 0:
        print(first)
STOP
""",
    ),
    (
        "LS215",
        "module-top-level",
        """\
def evaluate(model, loader):
    right = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()
dist.init_process_group("gloo"); rank = dist.get_rank(); world = dist.get_world_size()
torch.manual_seed(rank)
data = make(640); sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
test_loader = DataLoader(Subset(make(101), range(rank, 101, world)), batch_size=16)
net = Deep(); net.train()
ddp = DDP(net); opt = torch.optim.AdamW(ddp.parameters(), lr=0.1 * world)
for epoch in range(3):
    sampler.set_epoch(epoch)
    ddp.train()  # right
    for x, y in loader:
        opt.zero_grad(); F.cross_entropy(ddp(x), y).backward(); opt.step()
    acc = evaluate(net, test_loader)
    if rank == 0:
        print(acc)
dist.destroy_process_group()
""",
    ),
    (
        "LS215",
        "every-k-epochs",
        """\
def evaluate(model, loader):
    right = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()
def main():
START
    model.train()
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        if epoch % 5 == 4:
            acc = evaluate(model, test_loader)
            model.train()  # right
            if rank == 0:
                print(acc)
STOP
""",
    ),
    (
        "LS215",
        "hook-object",
        """\
class Judge:
    def __init__(self, model, loader): self.model, self.loader = model, loader
    def after_epoch(self, epoch):
        self.model.eval()
        right = torch.zeros(2)
        with torch.no_grad():
            for x, y in self.loader:
                right += torch.stack([(self.model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
        dist.all_reduce(right)
        self.model.train()  # right
        if dist.get_rank() == 0:
            print(epoch, (right[0] / right[1]).item())
class Trainer:
    def __init__(self, model, opt, loader, sampler, hooks):
        self.model, self.opt, self.loader, self.sampler, self.hooks = model, opt, loader, sampler, hooks
    def fit(self, n):
        self.model.train()
        for epoch in range(n):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.opt.zero_grad(); F.cross_entropy(self.model(x), y).backward(); self.opt.step()
            for hook in self.hooks:
                hook.after_epoch(epoch)
def main():
START
    Trainer(model, opt, loader, sampler, [Judge(model, test_loader)]).fit(3)
STOP
""",
    ),
    (
        "LS215",
        "train-after-only-on-rank0",
        """\
def evaluate(model, loader):
    right = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()
def main():
START
    model.train()
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = evaluate(model, test_loader)
        if rank == 0:
            print(acc)
            model.train()  # wrong
        model.train()  # right
STOP
""",
    ),
]
