# expect: none
import torch
from torch.nn import functional as F


class Hook:
    def before_epoch(self, runner):
        pass

    def after_iter(self, runner):
        pass

    def after_epoch(self, runner):
        pass


class Runner:
    def __init__(self, model, optimizer, max_epochs):
        self.model = model
        self.optimizer = optimizer
        self.max_epochs = max_epochs
        self.epoch = 0
        self.iter = 0
        self.hooks = []
        self.metrics = {}

    def register(self, hook):
        self.hooks.append(hook)

    def call(self, point):
        for hook in self.hooks:
            getattr(hook, point)(self)

    def resume(self, path, schedule):
        device = torch.device("cuda", torch.cuda.current_device())
        state = torch.load(path, map_location=device, weights_only=True)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        self.epoch = state["epoch"]
        self.iter = state["iter"]

    def run(self, loader):
        self.loader = loader
        while self.epoch < self.max_epochs:
            self.call("before_epoch")
            self.model.train()
            for images, labels in loader:
                images = images.cuda(non_blocking=True)
                labels = labels.cuda(non_blocking=True)
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = F.cross_entropy(self.model(images), labels)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
                self.optimizer.step()
                self.loss = loss.detach()
                self.iter += 1
                self.call("after_iter")
            self.epoch += 1
            self.call("after_epoch")
