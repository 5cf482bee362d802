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
]
