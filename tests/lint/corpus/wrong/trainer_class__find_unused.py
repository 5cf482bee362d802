# expect: find-unused line 45
import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class TrainConfig:
    epochs: int = 10
    batch_size: int = 32  # per process
    lr: float = 1e-3  # of one process
    save_every: int = 1
    snapshot_path: str = "snapshot.pt"


class Points(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.rand(size, 20, generator=generator)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Trainer:
    def __init__(self, model, dataset, config):
        self.config = config
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        self.loader = DataLoader(dataset, config.batch_size, sampler=DistributedSampler(dataset), pin_memory=True)
        # without it: "Expected to have finished reduction in the prior iteration"
        self.model = DDP(model.to(self.device), device_ids=[self.device.index], find_unused_parameters=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr * self.world_size)
        self.epochs_run = 0
        if os.path.exists(config.snapshot_path):
            self._load_snapshot()

    def _load_snapshot(self):
        snapshot = torch.load(self.config.snapshot_path, map_location=self.device, weights_only=True)
        self.model.module.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.epochs_run = snapshot["epochs_run"]
        if self.rank == 0:
            print(f"goes on after epoch {self.epochs_run}")

    def _save_snapshot(self, epoch):
        snapshot = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epochs_run": epoch + 1,
        }
        torch.save(snapshot, self.config.snapshot_path)

    def _run_batch(self, source, target):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), target)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        sums = torch.zeros(2, device=self.device)
        for source, target in self.loader:
            source, target = source.to(self.device), target.to(self.device)
            sums[0] += self._run_batch(source, target) * len(source)
            sums[1] += len(source)
        dist.all_reduce(sums)
        return sums[0] / sums[1]

    def train(self):
        self.model.train()
        for epoch in range(self.epochs_run, self.config.epochs):
            loss = self._run_epoch(epoch)
            if self.rank == 0:
                print(f"epoch {epoch} | loss {loss.item():.5f}")
            if self.rank == 0 and epoch % self.config.save_every == 0:
                self._save_snapshot(epoch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group(backend="nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(17 + dist.get_rank())
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
    config = TrainConfig(epochs=args.epochs, save_every=args.save_every)
    Trainer(model, Points(2048), config).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
