"""A Trainer class as tutorials have it: attributes of self, methods, snapshots."""

import os

import torch
import torch.nn.functional as F
import torchvision
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def ddp_setup():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="nccl")


class Trainer:
    def __init__(self, model, train_data, test_data, optimizer, scheduler, save_every, snapshot_path):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.model = model.to(self.local_rank)
        self.train_data = train_data
        self.test_data = test_data
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.save_every = save_every
        self.epochs_run = 0
        self.best = 0.0
        self.snapshot_path = snapshot_path
        if os.path.exists(snapshot_path):
            self._load_snapshot(snapshot_path)
        self.model = DDP(self.model, device_ids=[self.local_rank])

    def _load_snapshot(self, path):
        snapshot = torch.load(path, map_location=f"cuda:{self.local_rank}", weights_only=True)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.scheduler.load_state_dict(snapshot["SCHEDULER_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"] + 1

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.cross_entropy(output, targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        self.model.train()
        for source, targets in self.train_data:
            source = source.to(self.local_rank)
            targets = targets.to(self.local_rank)
            self._run_batch(source, targets)

    def _save_snapshot(self, epoch):
        snapshot = {
            "MODEL_STATE": self.model.module.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "SCHEDULER_STATE": self.scheduler.state_dict(),
            "EPOCHS_RUN": epoch,
        }
        torch.save(snapshot, self.snapshot_path)

    def test(self):
        self.model.eval()
        correct = torch.zeros((), device=self.local_rank)
        total = torch.zeros((), device=self.local_rank)
        with torch.no_grad():
            for source, targets in self.test_data:
                source = source.to(self.local_rank)
                targets = targets.to(self.local_rank)
                correct += (self.model.module(source).argmax(1) == targets).sum()
                total += len(targets)
        return (correct / total).item()

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            self.scheduler.step()
            if self.global_rank == 0:
                accuracy = self.test()
                print(f"epoch {epoch}: {accuracy:.4f}")
                if epoch % self.save_every == 0:
                    self._save_snapshot(epoch)


def load_train_objs(total_batch_size):
    train_set = torchvision.datasets.CIFAR10("data", train=True, transform=torchvision.transforms.ToTensor())
    test_set = torchvision.datasets.CIFAR10("data", train=False, transform=torchvision.transforms.ToTensor())
    model = torchvision.models.resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    return train_set, test_set, model, optimizer, scheduler


def prepare_dataloader(dataset: Dataset, batch_size: int):
    return DataLoader(
        dataset, batch_size=batch_size, pin_memory=True, shuffle=False, sampler=DistributedSampler(dataset)
    )


def main(save_every, total_epochs, total_batch_size, snapshot_path="snapshot.pt"):
    ddp_setup()
    train_set, test_set, model, optimizer, scheduler = load_train_objs(total_batch_size)
    train_data = prepare_dataloader(train_set, total_batch_size // dist.get_world_size())
    test_data = DataLoader(test_set, batch_size=500)
    trainer = Trainer(model, train_data, test_data, optimizer, scheduler, save_every, snapshot_path)
    trainer.train(total_epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(10, 100, 256)
