"""Right programs that come near a fault of numbers told or of modes: (what it is, program)."""

INNOCENT: list[tuple[str, str]] = [
    (
        "timing",
        """\
import time
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        begin = time.time(); waited = 0.0; seen = 0; smooth = 0.0; end = time.time()
        for x, y in loader:
            waited += time.time() - end
            smooth = 0.9 * smooth + 0.1 * (time.time() - end)
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
            seen += len(y); end = time.time()
        if rank == 0:
            print(f"epoch {epoch}: {time.time() - begin:.1f} s, waited {waited:.1f} s, {seen} images, {smooth} s each")
STOP
""",
    ),
    (
        "one-process-path",
        """\
def evaluate(model, loader, several):
    model.eval(); right = n = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum().item(); n += len(y)
    if not several:
        return right / n
    t = torch.tensor([right, n]); dist.all_reduce(t)
    right, n = t.tolist()
    return right / n
def main():
START
    best = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = evaluate(model, test_loader, world > 1)
        if acc > best:
            best = acc
            if rank == 0: torch.save(model.module.state_dict(), "b.pt")
STOP
""",
    ),
    (
        "else-path",
        """\
def evaluate(model, loader):
    model.eval(); right = torch.zeros(()); n = torch.zeros(())
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum(); n += len(y)
    if dist.is_initialized():
        both = torch.stack([right, n])
        dist.all_reduce(both)
        acc = (both[0] / both[1]).item()
    else:
        acc = (right / n).item()
    print_once(acc)
    return acc
def print_once(acc):
    if dist.get_rank() == 0: print(acc)
def main():
START
    best = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = evaluate(model, test_loader)
        if acc > best:
            best = acc
            if rank == 0: torch.save(model.module.state_dict(), "b.pt")
STOP
""",
    ),
    (
        "says-its-own",
        """\
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
            total += loss.detach()
        mine = total.item() / len(loader)
        dist.all_reduce(total)
        print(f"rank {rank}: local loss {mine}")
        if rank == 0: print("mean", total.item() / world / len(loader))
STOP
""",
    ),
    (
        "teacher-evaluated-first",
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
    teacher = Deep(); teacher.load_state_dict(torch.load("t.pt", map_location="cpu", weights_only=True))
    teacher.requires_grad_(False)
    acc = evaluate(teacher, test_loader)
    if rank == 0: print("teacher", acc)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            soft = teacher(x).softmax(1)
            opt.zero_grad(); F.cross_entropy(model(x), soft).backward(); opt.step()
        acc = evaluate(model, test_loader)
        if rank == 0: print(acc)
STOP
""",
    ),
    (
        "correlated-conditions",
        """\
def evaluate(model, loader):
    right = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()
def main(check=True):
START
    model.train()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        if epoch % 2 == 0:
            acc = evaluate(model, test_loader)
            if rank == 0: print(acc)
        if epoch % 2 == 0:
            model.train()
STOP
""",
    ),
    (
        "train-at-while-top",
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
    step = 0; epoch = 0
    while step < 100:
        sampler.set_epoch(epoch); epoch += 1
        for x, y in loader:
            model.train()
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
            step += 1
            if step % 10 == 0:
                acc = evaluate(model, test_loader)
                if rank == 0: print(acc)
            if step >= 100: break
STOP
""",
    ),
    (
        "frozen-bn-finetune",
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
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d): m.eval()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = evaluate(model, test_loader)
        if rank == 0: print(acc)
STOP
""",
    ),
    (
        "finetune-eval-mode",
        """\
def evaluate(model, loader):
    right = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()
def tune(model, loader, opt):
    model.eval()
    for x, y in loader:
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        tune(model, loader, opt)
        acc = evaluate(model, test_loader)
        if rank == 0: print(acc)
STOP
""",
    ),
    (
        "bn-update",
        """\
def evaluate(model, loader):
    right = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()
def update_bn(loader, model):
    model.train()
    with torch.no_grad():
        for x, y in loader:
            model(x)
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        update_bn(loader, model)
        acc = evaluate(model, test_loader)
        if rank == 0: print(acc)
STOP
""",
    ),
    (
        "mode-restored",
        """\
from contextlib import contextmanager
@contextmanager
def evaluating(net):
    was = net.training
    net.eval()
    try:
        yield net
    finally:
        net.train(was)
def main():
START
    model.train()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        right = torch.zeros(2)
        with evaluating(model), torch.no_grad():
            for x, y in test_loader:
                right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
        dist.all_reduce(right)
        if rank == 0: print((right[0] / right[1]).item())
STOP
""",
    ),
    (
        "train-loss-in-train-mode-no-backward-branch",
        """\
def run(model, loader, opt, training):
    total = torch.zeros(2)
    model.train(training)
    with torch.set_grad_enabled(training):
        for x, y in loader:
            out = model(x); loss = F.cross_entropy(out, y)
            if training:
                opt.zero_grad(); loss.backward(); opt.step()
            total += torch.stack([(out.argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        run(model, loader, opt, True)
        acc = run(model, test_loader, None, False)
        if rank == 0: print(acc)
STOP
""",
    ),
    (
        "keyword-phase-enum",
        """\
def run(phase, model, loader, opt):
    total = torch.zeros(2)
    is_train = phase == "train"
    model.train() if is_train else model.eval()
    for x, y in loader:
        with torch.set_grad_enabled(is_train):
            out = model(x)
            if is_train:
                opt.zero_grad(); F.cross_entropy(out, y).backward(); opt.step()
        total += torch.stack([(out.argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        run("train", model, loader, opt)
        acc = run("val", model, test_loader, opt)
        if rank == 0: print(acc)
STOP
""",
    ),
    (
        "getattr-mode",
        """\
def run(phase, model, loader, opt):
    total = torch.zeros(2)
    if phase == "train":
        model.train()
        grad = torch.enable_grad()
    else:
        model.eval()
        grad = torch.no_grad()
    with grad:
        for x, y in loader:
            out = model(x)
            if phase == "train":
                opt.zero_grad(); F.cross_entropy(out, y).backward(); opt.step()
            total += torch.stack([(out.argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
def main():
START
    loaders = {"train": loader, "val": test_loader}
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for phase in loaders:
            acc = run(phase, model, loaders[phase], opt)
            if rank == 0: print(phase, acc)
STOP
""",
    ),
    (
        "ema-copy",
        """\
import copy
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
    ema = copy.deepcopy(model.module)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
            with torch.no_grad():
                for a, b in zip(ema.parameters(), model.module.parameters()): a.lerp_(b, 0.01)
        acc = evaluate(ema, test_loader)
        if rank == 0: print(acc)
STOP
""",
    ),
    (
        "eval-once-then-exit",
        """\
def evaluate(model, loader):
    right = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()
def main(only_test=False):
START
    if only_test:
        acc = evaluate(model, test_loader)
        if rank == 0: print(acc)
        dist.destroy_process_group()
        return
    model.train()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
    acc = evaluate(model, test_loader)
    if rank == 0: print(acc)
STOP
""",
    ),
    (
        "two-stage",
        """\
def evaluate(model, loader):
    right = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()
def pretrain(model, loader, opt):
    model.train()
    for x, y in loader:
        opt.zero_grad(); F.mse_loss(model(x), x[:, :2]).backward(); opt.step()
def main():
START
    sampler.set_epoch(0)
    pretrain(model, loader, opt)
    acc = evaluate(model, test_loader)
    if rank == 0: print(acc)
    head = nn.Linear(2, 2); second = torch.optim.SGD(head.parameters(), lr=0.1 * world); both = DDP(head)
    for epoch in range(1, 3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            with torch.no_grad(): z = model(x)
            second.zero_grad(); F.cross_entropy(both(z), y).backward(); second.step()
STOP
""",
    ),
    (
        "gathered-weighted",
        """\
def evaluate(model, loader):
    model.eval(); right = n = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum().item(); n += len(y)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {"acc": right / n, "n": n})
    return sum(p["acc"] * p["n"] for p in parts) / sum(p["n"] for p in parts)
def main():
START
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        acc = evaluate(model, test_loader)
        if rank == 0: print(acc)
STOP
""",
    ),
    (
        "meter-synced-later",
        """\
class Meter:
    def __init__(self): self.total = torch.zeros(2)
    def add(self, value, n): self.total += torch.tensor([value * n, n])
    def value(self):
        t = self.total.clone(); dist.all_reduce(t); return (t[0] / t[1]).item()
def main():
START
    meter = Meter()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
            meter.add(loss.item(), len(y))
        mean = meter.value()
        if rank == 0: print(mean)
STOP
""",
    ),
    (
        "wrapper-comm-class",
        """\
class Comm:
    @staticmethod
    def sum(x):
        x = torch.as_tensor(x, dtype=torch.float64); dist.all_reduce(x); return x
def main():
START
    best = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train(); loss_sum = 0.0; n = 0
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
            loss_sum += loss.item() * len(y); n += len(y)
        mean = Comm.sum(loss_sum) / Comm.sum(n)
        if mean < best:
            best = mean
            if rank == 0: torch.save(model.module.state_dict(), "b.pt")
        if rank == 0: print(mean.item(), n)
STOP
""",
    ),
    (
        "rank0-only-eval",
        """\
def evaluate(model, loader):
    model.eval(); right = n = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum().item(); n += len(y)
    return right / n
def main():
START
    whole = DataLoader(held, batch_size=16); top = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
        if rank == 0:
            acc = evaluate(model.module, whole)
            if acc > top:
                top = acc
                torch.save(model.module.state_dict(), "b.pt")
        dist.barrier()
STOP
""",
    ),
]
