"""no_sync with the forward pass in it and without: (codes, script without its imports)."""

LOOP = """\
from contextlib import nullcontext, ExitStack, contextmanager
DEFINED
def main(k):
    dist.init_process_group("gloo")
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    data = make(640); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    crit = nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % k == 0 or i + 1 == len(loader)
PASS
            if last:
                opt.step(); opt.zero_grad()
    dist.destroy_process_group()
main(4)
"""
LOSS = "loss = crit(model(x), y) / k\n"
WITH = "with nullcontext() if last else model.no_sync():\n    "
QUIET = "def quiet(m, on):\n    return nullcontext() if on else m.no_sync()"
MANAGER = """\
@contextmanager
def quiet(m, on):
    if on:
        yield
    else:
        with m.no_sync():
            yield
"""
LOSS_OF = "def loss_of(m, c, x, y):\n    return c(m(x), y)"
BACK = "def back(loss):\n    loss.backward()"
BACK_IN = "def back(m, VALUE, last):\n    with nullcontext() if last else m.no_sync():\n        VALUEBACK"
ONE = "def one(m, c, x, y, k):\n    loss = c(m(x), y) / k\n    loss.backward()"
STACK = "with ExitStack() as stack:\n    if not last:\n        stack.enter_context(model.no_sync())\n    "


def _of(codes: str, *parts: str, defined: str = "") -> tuple[str, str]:
    body = "".join("            " + line for line in "".join(parts).splitlines(keepends=True))
    return codes, LOOP.replace("DEFINED", defined).replace("PASS", body.rstrip())


METHODS = """\
class T:
    def __init__(self, loader, k):
        self.loader = loader; self.k = k
        self.net = DDP(Net()); self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1 * dist.get_world_size())
    def forward(self, x, y):
        self.loss = F.cross_entropy(self.net(x), y) / self.k
    def back(self):
        self.loss.backward()
    def fit(self):
        for epoch in range(3):
            self.loader.sampler.set_epoch(epoch)
            for i, (x, y) in enumerate(self.loader):
                last = (i + 1) % self.k == 0 or i + 1 == len(self.loader)
                self.forward(x, y)
                if last:
                    self.back(); self.opt.step(); self.opt.zero_grad()
                else:
                    with self.net.no_sync():
                        self.back()
def main():
    dist.init_process_group("gloo")
    data = make(640)
    T(DataLoader(data, batch_size=8, sampler=DistributedSampler(data)), 4).fit()
    dist.destroy_process_group()
main()
"""
ACCUMULATE = """\
from accelerate import Accelerator
def main():
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1 * accelerator.num_processes)
    loader = DataLoader(make(640), batch_size=8, shuffle=True)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    for epoch in range(3):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            with accelerator.accumulate(model):
                accelerator.backward(loss)
                opt.step(); opt.zero_grad()
main()
"""

SPARING: list[tuple[str, str]] = [
    _of("LS312", LOSS, WITH, "loss.backward()"),
    _of("", WITH, LOSS, "    loss.backward()"),
    _of("LS312", "ctx = nullcontext() if last else model.no_sync()\n", LOSS, "with ctx:\n    loss.backward()"),
    _of("", "ctx = nullcontext() if last else model.no_sync()\nwith ctx:\n    ", LOSS, "    loss.backward()"),
    _of("LS312", "out = model(x)\n", WITH, "loss = crit(out, y) / k\n    loss.backward()"),
    _of("LS312", "loss = crit(model(x), y)\n", WITH, "loss = loss / k\n    loss.backward()"),
    _of("LS312", LOSS, "if last:\n    loss.backward()\nelse:\n    with model.no_sync():\n        loss.backward()"),
    _of("LS312", LOSS, "with quiet(model, last):\n    loss.backward()", defined=QUIET),
    _of("", "with quiet(model, last):\n    ", LOSS, "    loss.backward()", defined=QUIET),
    _of("LS312", LOSS, "with quiet(model, last):\n    loss.backward()", defined=MANAGER),
    _of("", "with quiet(model, last):\n    ", LOSS, "    loss.backward()", defined=MANAGER),
    _of("LS312", LOSS, STACK, "loss.backward()"),
    _of("", STACK, LOSS, "    loss.backward()"),
    _of("LS312", "loss = loss_of(model, crit, x, y)\n", WITH, "(loss / k).backward()", defined=LOSS_OF),
    _of("", WITH, "loss = loss_of(model, crit, x, y)\n    (loss / k).backward()", defined=LOSS_OF),
    _of(
        "LS312",
        LOSS,
        "back(model, loss, last)",
        defined=BACK_IN.replace("VALUEBACK", "loss.backward()").replace("VALUE", "loss"),
    ),
    _of(
        "",
        "back(model, lambda: crit(model(x), y) / k, last)",
        defined=BACK_IN.replace("VALUEBACK", "f().backward()").replace("VALUE", "f"),
    ),
    _of("LS312", LOSS, WITH, "back(loss)", defined=BACK),
    _of("", WITH, "one(model, crit, x, y, k)", defined=ONE),
    _of("LS312", LOSS, WITH, "scaler.scale(loss).backward()"),
    ("LS312", METHODS),
    ("LS312", ACCUMULATE),
]
