"""Clipping before and after the scaler's unscale_: (codes, script without its imports)."""

LOOP = """\
DEFINED
def main(args):
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make(640), batch_size=8, shuffle=True)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(3):
        for i, (x, y) in enumerate(loader):
            opt.zero_grad()
PASS
main(None)
"""
SCALED = "scaler.scale(F.cross_entropy(model(x), y)).backward()\n"
PLAIN = "F.cross_entropy(model(x), y).backward()\n"
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
CLAMP = "for p in model.parameters(): p.grad.clamp_(-1, 1)\n"
UNSCALE = "scaler.unscale_(opt)\n"
STEP = "scaler.step(opt); scaler.update()\n"
HELPER = "def clip(m):\n    nn.utils.clip_grad_norm_(m.parameters(), 1.0)"
UPDATE = "def update(m, o, s):\n    PASS\n    nn.utils.clip_grad_norm_(m.parameters(), 1.0)\n    s.step(o); s.update()"
RENAMED = "from torch.nn.utils import clip_grad_norm_ as bound"


def _of(codes: str, *parts: str, defined: str = "") -> tuple[str, str]:
    body = "".join("            " + line for line in "".join(parts).splitlines(keepends=True))
    return codes, LOOP.replace("DEFINED", defined).replace("PASS", body.rstrip())


def _if(*parts: str, test: str = "args.amp") -> str:
    lines = "".join(parts).splitlines()
    return f"if {test}:\n" + "".join(f"    {line}\n" for line in lines)


METHODS = """\
class Trainer:
    def __init__(self):
        self.net = Net(); self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.amp = torch.amp.GradScaler("cuda")
    def backward(self, loss):
        self.amp.scale(loss).backward()
    def update(self):
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.amp.step(self.opt); self.amp.update(); self.opt.zero_grad()
    def fit(self, loader):
        for epoch in range(3):
            for x, y in loader:
                self.backward(F.cross_entropy(self.net(x), y))
                self.update()
Trainer().fit(DataLoader(make(640), batch_size=8, shuffle=True))
"""
HOOK = """\
import lightning as L
class M(L.LightningModule):
    def __init__(self):
        super().__init__(); self.net = Net()
    def training_step(self, batch, i):
        x, y = batch
        return F.cross_entropy(self.net(x), y)
    def on_after_backward(self):
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
L.Trainer(devices=1, precision="16-mixed").fit(M(), DataLoader(make(640), batch_size=8, shuffle=True))
"""
CALLED = """\
class NativeScaler:
    def __init__(self):
        self._scaler = torch.cuda.amp.GradScaler()
    def __call__(self, loss, opt, parameters, clip=None):
        self._scaler.scale(loss).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        self._scaler.step(opt)
        self._scaler.update()
def main():
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1); loss_scaler = NativeScaler()
    for epoch in range(3):
        for x, y in DataLoader(make(640), batch_size=8, shuffle=True):
            opt.zero_grad()
            loss_scaler(F.cross_entropy(model(x), y), opt, model.parameters(), 1.0)
main()
"""

CLIPPING: list[tuple[str, str]] = [
    _of("LS207", SCALED, CLIP, STEP),
    _of("", SCALED, UNSCALE, CLIP, STEP),
    _of("LS207", SCALED, CLIP, UNSCALE, STEP),
    _of("LS207", SCALED, "clip(model)\n", STEP, defined=HELPER),
    _of("", SCALED, UNSCALE, "clip(model)\n", STEP, defined=HELPER),
    _of("LS207", SCALED, "update(model, opt, scaler)\n", defined=UPDATE.replace("PASS", "pass")),
    _of("", SCALED, "update(model, opt, scaler)\n", defined=UPDATE.replace("PASS", "s.unscale_(o)")),
    _of("LS207", SCALED, CLAMP, STEP),
    _of("", SCALED, UNSCALE, CLAMP, STEP),
    _of("LS207", SCALED, "bound(model.parameters(), 1.0)\n", STEP, defined=RENAMED),
    _of("", SCALED, UNSCALE, "bound(model.parameters(), 1.0)\n", STEP, defined=RENAMED),
    _of("", _if(SCALED, UNSCALE, CLIP, STEP), _if(PLAIN, CLIP, "opt.step()", test="not args.amp")),
    _of("", _if(SCALED, STEP), _if(PLAIN, CLIP, "opt.step()", test="not args.amp")),
    _of("", _if(PLAIN, CLIP, "opt.step()\ncontinue\n", test="not args.amp"), SCALED, STEP),
    _of("LS207", _if(SCALED), _if(PLAIN, test="not args.amp"), CLIP, _if(STEP), _if("opt.step()", test="not args.amp")),
    _of("", SCALED, "for p in model.parameters(): p.grad.div_(scaler.get_scale())\n", CLIP, STEP),
    ("LS207", METHODS),
    ("", METHODS.replace("def update(self):", "def update(self):\n        self.amp.unscale_(self.opt)")),
    ("LS207", HOOK),
    ("", HOOK.replace("on_after_backward(self)", "on_before_optimizer_step(self, opt)")),
    ("LS207", CALLED),
    ("", CALLED.replace("clip is not None:", "clip is not None:\n            self._scaler.unscale_(opt)")),
]
