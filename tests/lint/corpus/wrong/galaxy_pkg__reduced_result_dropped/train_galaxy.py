# expect: none
"""Galaxy morphology with an averaged model.

    srun python train_galaxy.py --images /scratch/galaxies
    (MASTER_ADDR and MASTER_PORT are exported by the batch script)
"""
import argparse

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision.models import efficientnet_v2_s

from comm import Comm
from galaxy_data import galaxy_loaders


class Experiment:
    def __init__(self, hp, comm):
        self.hp, self.comm = hp, comm
        torch.manual_seed(hp.seed + comm.rank)
        self.train_dl, self.dev_dl, self.sampler, classes = galaxy_loaders(hp, comm)
        self.net = efficientnet_v2_s(num_classes=classes)
        self.net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(self.net).to(comm.device)
        self.ddp = DistributedDataParallel(self.net, device_ids=[comm.device.index])
        # after the wrapper has made the weights equal
        self.ema = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
        self.opt = torch.optim.RMSprop(self.ddp.parameters(), lr=hp.lr * comm.size, momentum=0.9, eps=1e-3)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, step_size=3, gamma=0.9)
        self.epoch = 0
        if hp.resume:
            self.restore(hp.resume)

    def parts(self):
        return {"net": self.net, "ema": self.ema, "opt": self.opt, "sched": self.sched}

    def restore(self, path):
        saved = torch.load(path, map_location=self.comm.device, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(saved[name])
        self.epoch = saved["epoch"]

    def checkpoint(self):
        if not self.comm.chief:
            return
        saved = {name: part.state_dict() for name, part in self.parts().items()}
        torch.save(saved | {"epoch": self.epoch}, self.hp.out)

    def one_epoch(self):
        self.ddp.train()
        loss_sum = torch.zeros((), device=self.comm.device)
        for stamp, kind in self.train_dl:
            stamp = stamp.to(self.comm.device, non_blocking=True)
            kind = kind.to(self.comm.device, non_blocking=True)
            loss = cross_entropy(self.ddp(stamp), kind)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.ema.update_parameters(self.net)
            loss_sum += loss.detach()
        # drop_last: as many batches on each process
        return self.comm.sum(loss_sum / len(self.train_dl)) / self.comm.size

    @torch.no_grad()
    def dev_accuracy(self):
        self.ema.eval()
        right, seen = (torch.zeros((), device=self.comm.device) for _ in range(2))
        for stamp, kind in self.dev_dl:
            stamp, kind = stamp.to(self.comm.device), kind.to(self.comm.device)
            right += (self.ema(stamp).argmax(1) == kind).sum()
            seen += kind.numel()
        return self.comm.sum(right) / self.comm.sum(seen)

    def run(self):
        while self.epoch < self.hp.epochs:
            self.sampler.set_epoch(self.epoch)
            loss = self.one_epoch()
            accuracy = self.dev_accuracy()
            self.sched.step()
            self.epoch += 1
            self.comm.say(f"{self.epoch:3d}: loss {loss:.4f} dev {accuracy:.4f}")
            self.checkpoint()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--images", required=True)
    ap.add_argument("--out", default="galaxy.pt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--epochs", type=int, default=90)
    ap.add_argument("--batch", type=int, default=32, help="of a process")
    ap.add_argument("--lr", type=float, default=0.002, help="of a process; multiplied by their number")
    ap.add_argument("--workers", type=int, default=4, help="of a process")
    ap.add_argument("--seed", type=int, default=21)
    with Comm() as comm:
        Experiment(ap.parse_args(), comm).run()
