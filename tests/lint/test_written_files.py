"""Files that every rank writes, through hooks, savers and decorators; and the same on one rank."""

from pathlib import Path

import pytest

from tests.lint.shapes import BEFORE
from tests.lint.test_rules import codes_in

SCRIPT = """\
import pickle
from safetensors.torch import save_file
def on_rank(number):
    def decorate(function):
        def inner(*args):
            if dist.get_rank() == number:
                return function(*args)
        return inner
    return decorate
class Alone:
    def __init__(self, function):
        self.function = function
    def __call__(self, *args):
        if dist.get_rank() == 0:
            return self.function(*args)
DECORATOR
def keep(state, path):
    torch.save(state, path)
class Hook:
    def after_epoch(self, run): pass
class Keep(Hook):
    def after_epoch(self, run):
        CHECK
        torch.save(run.model.module.state_dict(), "last.pt")
class Runner:
    def __init__(self, model):
        self.model, self.hooks = model, []
    def register(self, hook):
        self.hooks.append(hook)
    def call(self, name):
        for hook in self.hooks:
            getattr(hook, name)(self)
class Saver:
    def __init__(self, writes, path):
        self.writes, self.path = writes, path
    def __call__(self, state):
        if WRITES:
            torch.save(state, self.path)
def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = Net()
    run = Runner(DDP(net))
    flags = {"writes": rank == 0}
    BODY
    dist.destroy_process_group()
if __name__ == "__main__":
    main()
"""
LIGHTNING = """\
import lightning as L
class Mod(L.LightningModule):
    def __init__(self):
        super().__init__(); self.net = Net()
    def training_step(self, batch, idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])
    def on_train_epoch_end(self):
        SAVE
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
def main():
    L.seed_everything(1)
    trainer = L.Trainer(devices=2, strategy="ddp", max_epochs=2)
    trainer.fit(Mod(), DataLoader(make(64), batch_size=8, shuffle=True))
if __name__ == "__main__":
    main()
"""
ALL = [
    'run.register(Keep())\nrun.call("after_epoch")',
    "run.register(Keep())\nfor hook in run.hooks:\n    hook.after_epoch(run)",
    'saver = Saver(rank == 0, "last.pt")\nsaver(net.state_dict())',
    'with open("last.pkl", "wb") as file:\n    pickle.dump(net.state_dict(), file)',
    'save_file(net.state_dict(), "last.safetensors")',
    'torch.jit.save(torch.jit.script(net), "last.ts")',
    'net.save_pretrained("last")',
]
ONE = [
    'if rank == 0:\n    run.register(Keep())\nrun.call("after_epoch")',
    'run.register(Keep())\nif rank == 0:\n    run.call("after_epoch")',
    "run.register(Hook())",
    'if flags["writes"]:\n    torch.save(net.state_dict(), "last.pt")',
    'if rank == 0:\n    save_file(net.state_dict(), "last.safetensors")',
    'rank == 0 and torch.save(net.state_dict(), "last.pt")',
    'net.save_pretrained("last", is_main_process=rank == 0)',
]


def _script(body: str, decorator: str = "", check: str = "pass", writes: str = "True") -> str:
    text = SCRIPT.replace("BODY", body.replace("\n", "\n    ")).replace("DECORATOR\n", decorator)
    return BEFORE + text.replace("CHECK", check).replace("WRITES", writes)


@pytest.mark.parametrize("body", ALL)
def test_every_rank_writes(body: str, tmp_path: Path) -> None:
    assert codes_in(_script(body), tmp_path) == ["LS401"]


@pytest.mark.parametrize("body", ONE)
def test_one_rank_writes(body: str, tmp_path: Path) -> None:
    assert codes_in(_script(body), tmp_path) == []


def test_one_rank_by_decorators_flags_and_frameworks(tmp_path: Path) -> None:
    body = 'keep(net.state_dict(), "last.pt")'
    assert codes_in(_script(body), tmp_path) == ["LS401"]
    assert codes_in(_script(body, "@on_rank(0)\n"), tmp_path) == []
    assert codes_in(_script(body, "@Alone\n"), tmp_path) == []
    assert codes_in(_script(ALL[0], check="if dist.get_rank() != 0:\n            return"), tmp_path) == []
    assert codes_in(_script(ALL[2], writes="self.writes"), tmp_path) == []
    save = "torch.save(self.net.state_dict(), 'last.pt')"
    assert codes_in(BEFORE + LIGHTNING.replace("SAVE", save), tmp_path) == ["LS401"]
    save = f"if self.trainer.is_global_zero:\n            {save}"
    assert codes_in(BEFORE + LIGHTNING.replace("SAVE", save), tmp_path) == []
