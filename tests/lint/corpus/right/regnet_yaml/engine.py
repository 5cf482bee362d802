# expect: none
import torch
import torch.distributed as dist
import torch.nn.functional as F


class Engine:
    def __init__(self, net, optimizer, scheduler, loaders, device, out, epochs):
        self.net, self.optimizer, self.scheduler = net, optimizer, scheduler
        self.loaders, self.device, self.out, self.epochs = loaders, device, out, epochs
        self.first_epoch, self.best = 0, 0.0

    def fit(self):
        for epoch in range(self.first_epoch, self.epochs):
            self.loaders["fit"].sampler.set_epoch(epoch)
            loss = self.train_epoch()
            acc = self.validate()
            self.scheduler.step()
            if dist.get_rank() == 0:
                print(f"[{epoch:03d}] loss {loss:.4f}  top1 {acc:.2%}", flush=True)
                better = acc > self.best
                self.best = max(acc, self.best)
                self.dump(epoch, better)

    def train_epoch(self):
        self.net.train()
        tally = torch.zeros(2, device=self.device)
        for images, target in self.loaders["fit"]:
            images = images.to(self.device, non_blocking=True)
            target = target.to(self.device, non_blocking=True)
            loss = F.cross_entropy(self.net(images), target, label_smoothing=0.1)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            tally[0] += loss.detach() * len(target)
            tally[1] += len(target)
        dist.all_reduce(tally)
        return (tally[0] / tally[1]).item()

    @torch.inference_mode()
    def validate(self):
        plain = self.net.module
        plain.eval()
        tally = torch.zeros(2, device=self.device, dtype=torch.float64)
        for images, target in self.loaders["val"]:
            images, target = images.to(self.device), target.to(self.device)
            tally[0] += (plain(images).argmax(1) == target).sum()
            tally[1] += len(target)
        dist.all_reduce(tally)
        return (tally[0] / tally[1]).item()

    def dump(self, epoch, better):
        blob = {
            "weights": self.net.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "epoch": epoch,
            "best": self.best,
        }
        torch.save(blob, self.out / "last.pt")
        if better:
            torch.save(blob["weights"], self.out / "best.pt")

    def restore(self, path):
        blob = torch.load(path, map_location=self.device, weights_only=True)
        self.net.module.load_state_dict(blob["weights"])
        self.optimizer.load_state_dict(blob["optimizer"])
        self.scheduler.load_state_dict(blob["scheduler"])
        self.best = blob["best"]
        self.first_epoch = blob["epoch"] + 1
