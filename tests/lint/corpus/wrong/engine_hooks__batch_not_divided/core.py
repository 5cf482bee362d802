# expect: none
import torch
import torch.distributed as dist
from torch import nn


class Hook:
    def before_run(self, loop): ...
    def before_epoch(self, loop): ...
    def after_epoch(self, loop): ...


class Loop:
    """Epoch loop that leaves everything but the arithmetic to hooks."""

    def __init__(self, model, opt, sched, train_dl, check_dl, epochs):
        self.model, self.opt, self.sched = model, opt, sched
        self.train_dl, self.check_dl, self.epochs = train_dl, check_dl, epochs
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
        self.hooks = []
        self.epoch = 0
        self.metrics = {}

    def register(self, hook):
        self.hooks.append(hook)

    def fire(self, name):
        for hook in self.hooks:
            getattr(hook, name)(self)

    def run(self):
        self.fire("before_run")
        while self.epoch < self.epochs:
            self.fire("before_epoch")
            self._fit()
            self._score()
            self.epoch += 1
            self.fire("after_epoch")

    def _fit(self):
        self.model.train()
        total = torch.zeros((), device="cuda")
        for x, y in self.train_dl:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            self.opt.zero_grad()
            loss = self.criterion(self.model(x), y)
            loss.backward()
            self.opt.step()
            self.sched.step()
            total += loss.detach()
        # equally many full batches on each rank
        total /= len(self.train_dl)
        dist.all_reduce(total)
        self.metrics["train_loss"] = total.item() / dist.get_world_size()

    @torch.no_grad()
    def _score(self):
        net = self.model.module.eval()
        hits = torch.zeros(2, device="cuda", dtype=torch.long)
        for x, y in self.check_dl:
            y = y.cuda(non_blocking=True)
            hits[0] += (net(x.cuda(non_blocking=True)).argmax(-1) == y).sum()
            hits[1] += y.numel()
        dist.all_reduce(hits)
        self.metrics["accuracy"] = hits[0].item() / hits[1].item()
