# expect: none
import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

log = logging.getLogger("defects")


class Trainer:
    def __init__(self, model, opt, train_loader, val_loader, epochs, out):
        self.model, self.opt = model, opt
        self.train_loader, self.val_loader = train_loader, val_loader
        self.epochs, self.start = epochs, 0
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs)
        self.file = Path(out) / "ckpt.pt"
        self.device = torch.device("cuda", torch.cuda.current_device())

    def resume_if_possible(self):
        if not self.file.is_file():
            return
        ckpt = torch.load(self.file, map_location=self.device, weights_only=True)
        self.model.module.load_state_dict(ckpt["model"])
        self.opt.load_state_dict(ckpt["opt"])
        self.sched.load_state_dict(ckpt["sched"])
        self.start = ckpt["next_epoch"]
        log.info("continuing at epoch %d", self.start)

    def train(self):
        for epoch in range(self.start, self.epochs):
            self.train_loader.sampler.set_epoch(epoch)
            self._one_epoch()
            self.sched.step()
            log.info("epoch %d: %.2f%% right", epoch, 100 * self._accuracy())
            if dist.get_rank() == 0:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                torch.save({"model": self.model.module.state_dict(), "opt": self.opt.state_dict(),
                            "sched": self.sched.state_dict(), "next_epoch": epoch + 1}, self.file)

    def _one_epoch(self):
        self.model.train()
        for img, label in self.train_loader:
            img, label = img.to(self.device, non_blocking=True), label.to(self.device, non_blocking=True)
            loss = cross_entropy(self.model(img), label)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    @torch.no_grad()
    def _accuracy(self):
        core = self.model.module
        core.eval()
        good = torch.zeros(1, device=self.device)
        seen = torch.zeros(1, device=self.device)
        for img, label in self.val_loader:
            label = label.to(self.device, non_blocking=True)
            out = core(img.to(self.device, non_blocking=True))
            good += (out.argmax(1) == label).sum()
            seen += label.size(0)
        dist.all_reduce(good)
        dist.all_reduce(seen)
        return (good / seen).item()
