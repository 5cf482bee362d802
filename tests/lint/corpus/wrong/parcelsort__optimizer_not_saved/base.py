# expect: optimizer-not-saved line 62 or 61 or 64 or 65 or 67 or 69 or 70 or 72
"""The loop that all our trainers share; subclasses say what a model, a batch and a score are."""
import os
from abc import ABC, abstractmethod

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_


class BaseTrainer(ABC):
    def __init__(self, config, rt):
        self.config, self.rt = config, rt
        self.train_data, self.valid_data = self.make_data()
        self.net = self.make_net().to(rt.device)
        self.ddp = DistributedDataParallel(self.net, device_ids=[rt.local])
        # config["lr"] is for config["lr_images"] images to a step
        scale = config["batch_per_gpu"] * rt.world / config["lr_images"]
        self.opt = torch.optim.SGD(self.ddp.parameters(), lr=config["lr"] * scale, momentum=0.9, weight_decay=1e-4)
        self.sched = torch.optim.lr_scheduler.PolynomialLR(self.opt, total_iters=config["epochs"], power=2)
        self.scaler = torch.amp.GradScaler("cuda")
        self.epoch = 0
        if rt.is_chief:
            os.makedirs(config["run_dir"], exist_ok=True)

    @abstractmethod
    def make_data(self): ...

    @abstractmethod
    def make_net(self): ...

    @abstractmethod
    def loss(self, batch): ...

    @abstractmethod
    def score(self): ...

    def train_epoch(self):
        self.ddp.train()
        self.train_data.sampler.set_epoch(self.epoch)
        for batch in self.train_data:
            self.opt.zero_grad(set_to_none=True)
            with torch.autocast("cuda"):
                loss = self.loss(batch)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.opt)
            clip_grad_norm_(self.ddp.parameters(), self.config["clip"])
            self.scaler.step(self.opt)
            self.scaler.update()

    def run(self):
        while self.epoch < self.config["epochs"]:
            self.train_epoch()
            self.sched.step()
            result = self.score()
            self.rt.say(f"epoch {self.epoch}", result)
            self.epoch += 1
            if self.rt.is_chief:
                self.snapshot()

    def parts(self):
        return {"net": self.net, "sched": self.sched, "scaler": self.scaler}

    def snapshot(self):
        state = {name: part.state_dict() for name, part in self.parts().items()}
        state["epoch"] = self.epoch
        torch.save(state, os.path.join(self.config["run_dir"], f"snapshot_{self.epoch:04d}.pt"))

    def restore(self, path):
        state = torch.load(path, map_location=self.rt.device, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self.epoch = state["epoch"]
