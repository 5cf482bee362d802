"""Waits that each step comes by: in loops, trainers, hooks and frameworks; and the same now and then, or after it."""

from pathlib import Path

import pytest

from tests.lint.shapes import BEFORE
from tests.lint.test_rules import codes_in

SCRIPT = """\
class Tally:
    def __init__(self):
        self.sum = 0.0
    def update(self, value):
        self.sum += value.item()
class Meter:
    def __init__(self):
        self.sum = 0.0
    def update(self, value):
        self.sum += value
class Hook:
    def after_step(self, run): pass
    def after_epoch(self, run): pass
class Wait(Hook):
    def WHEN(self, run):
        dist.barrier()
class Runner:
    def __init__(self):
        self.hooks, self.steps = [Wait()], 0
    def call(self, name):
        for hook in self.hooks:
            getattr(hook, name)(self)
    def count(self):
        self.steps += 1
        COUNT
def wait():
    if dist.is_initialized():
        dist.barrier()
def right(out, y):
    return (out.argmax(1) == y).float().mean()
def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = DDP(Net().cuda())
    opt = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
    train = make(64)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler, drop_last=True)
    run, tally, meter, seen, last = Runner(), Tally(), Meter(), [], 0.0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for i, (x, y) in enumerate(loader):
            opt.zero_grad()
            out = model(x.cuda())
            cost = F.cross_entropy(out, y.cuda())
            cost.backward()
            opt.step()
            EACH
        run.call("after_epoch")
    dist.destroy_process_group()
if __name__ == "__main__":
    main()
"""
ACCELERATE = """\
from accelerate import Accelerator
def main():
    runner = Accelerator(gradient_accumulation_steps=2)
    model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.1 * runner.num_processes)
    model, opt, loader = runner.prepare(model, opt, DataLoader(make(64), batch_size=8, shuffle=True, drop_last=True))
    for x, y in loader:
        with runner.accumulate(model):
            runner.backward(F.cross_entropy(model(x), y))
            opt.step(); opt.zero_grad()
        EACH
    runner.end_training()
main()
"""
LIGHTNING = """\
import lightning as L
class Mod(L.LightningModule):
    def __init__(self):
        super().__init__(); self.net = Net()
    def training_step(self, batch, idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])
    def HOOK(self, *args):
        self.trainer.strategy.barrier()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
def main():
    L.seed_everything(1)
    trainer = L.Trainer(devices=2, strategy="ddp", max_epochs=2)
    trainer.fit(Mod(), DataLoader(make(64), batch_size=8, shuffle=True))
if __name__ == "__main__":
    main()
"""
WAITS = [
    ("LS309", "wait()"),
    ("LS309", "if dist.get_world_size() > 1:\n    dist.barrier()"),
    ("LS309", 'run.call("after_step")'),
    ("LS309", "for hook in run.hooks:\n    hook.after_step(run)"),
    ("LS310", "tally.update(cost)"),
    ("LS310", "seen.append(float(right(out, y.cuda())))"),
    ("LS310", "if rank == 0:\n    print(cost.item())"),
    ("LS310", "if not torch.isfinite(cost):\n    raise ValueError(i)"),
    ("LS310", 'run.line = f"{i} {cost:.3f}"'),
    ("LS310", "value = cost.detach().clone()\ndist.all_reduce(value)\nseen.append(value.tolist())"),
    ("LS310", "torch.cuda.synchronize()"),
]
LATER = [
    "if i % 50 == 0:\n    wait()",
    "meter.update(cost.detach())",
    "seen.append(right(out, y.cuda()))",
    "if rank == 0 and i % 50 == 0:\n    print(cost.item())",
    "if i % 50:\n    continue\nprint(cost.item())",
    "if i % 50 == 0:\n    last = cost.item()\nrun.line = f'{last:.3f} {cost.shape}'",
    "value = cost.item() if i % 50 == 0 else None",
    "run.late = lambda: cost.item()",
    "if cost is not None:\n    seen.append(i)",
]


def _script(each: str = "pass", when: str = "after_step", count: str = "pass") -> str:
    text = SCRIPT.replace("EACH", each.replace("\n", "\n            "))
    return BEFORE + text.replace("WHEN", when).replace("COUNT", count)


@pytest.mark.parametrize(("code", "each"), WAITS)
def test_each_step_waits(code: str, each: str, tmp_path: Path) -> None:
    assert codes_in(_script(each), tmp_path) == [code]


@pytest.mark.parametrize("each", LATER)
def test_a_step_now_and_then_waits(each: str, tmp_path: Path) -> None:
    assert codes_in(_script(each), tmp_path) == []


def test_waits_of_hooks_and_frameworks(tmp_path: Path) -> None:
    assert codes_in(_script('run.call("after_step")', "after_epoch"), tmp_path) == []
    assert codes_in(_script("run.count()", count="dist.barrier()"), tmp_path) == ["LS309"]
    assert (
        codes_in(_script("run.count()", count="if self.steps % 50 == 0:\n            dist.barrier()"), tmp_path) == []
    )
    for each in ("runner.wait_for_everyone()", "if runner.sync_gradients:\n            runner.wait_for_everyone()"):
        assert codes_in(BEFORE + ACCELERATE.replace("EACH", each), tmp_path) == ["LS309"]
    assert codes_in(BEFORE + ACCELERATE.replace("EACH", "pass"), tmp_path) == []
    assert codes_in(BEFORE + LIGHTNING.replace("HOOK", "on_train_batch_end"), tmp_path) == ["LS309"]
    assert codes_in(BEFORE + LIGHTNING.replace("HOOK", "on_train_epoch_end"), tmp_path) == []
