"""A Trainer class with snapshots; dropout whose masks differ from rank to rank, and which is drawn for each sample."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Blobs(Dataset):
    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        centres = torch.randn(5, 20, generator=torch.Generator().manual_seed(99)) * 2
        self.targets = torch.randint(5, (size,), generator=generator)
        self.inputs = centres[self.targets] + torch.randn(size, 20, generator=generator)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class Trainer:
    def __init__(self, model, train_data, test_data, optimizer, snapshot_path):
        self.rank = int(os.environ["RANK"])
        self.model = model
        self.train_data = train_data
        self.test_data = test_data
        self.optimizer = optimizer
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        if os.path.exists(snapshot_path):
            self._load_snapshot()
        self.ddp = DDP(self.model)

    def _load_snapshot(self):
        snapshot = torch.load(self.snapshot_path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.epochs_run = snapshot["epochs_run"]

    def _save_snapshot(self, epoch):
        snapshot = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "epochs_run": epoch + 1}
        torch.save(snapshot, self.snapshot_path + ".part")
        os.replace(self.snapshot_path + ".part", self.snapshot_path)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.ddp(source), targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        self.ddp.train()
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    @torch.no_grad()
    def test(self):
        self.model.eval()
        right = torch.zeros(2)
        for source, targets in self.test_data:
            right += torch.tensor([(self.model(source).argmax(1) == targets).sum(), len(targets)])
        return (right[0] / right[1]).item()

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if self.rank == 0:
                self._save_snapshot(epoch)
                print(f"epoch {epoch}: accuracy {self.test():.2%}")


def main(total_epochs, total_batch, snapshot_path="snapshot.pt"):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = Blobs(240, 0), Blobs(160, 1)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 5))
    torch.manual_seed(1000 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train_data = DataLoader(train_set, batch_size=total_batch // world_size, sampler=DistributedSampler(train_set))
    test_data = DataLoader(test_set, batch_size=80)
    Trainer(model, train_data, test_data, optimizer, snapshot_path).train(total_epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(total_epochs=3, total_batch=32)
