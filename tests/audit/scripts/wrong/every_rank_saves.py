"""Every rank writes the same checkpoint at the same time."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, loader, optimizer):
        self.model = DDP(model)
        self.loader = loader
        self.optimizer = optimizer

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def _save_checkpoint(self, epoch):
        state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": epoch}
        torch.save(state, "checkpoint.pt")
        print(f"Epoch {epoch} | Training checkpoint saved at checkpoint.pt")

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self.loader.sampler.set_epoch(epoch)
            for source, targets in self.loader:
                self._run_batch(source, targets)
            self._save_checkpoint(epoch)


def main():
    dist.init_process_group("gloo")
    inputs = torch.randn(256, 20, generator=torch.Generator().manual_seed(4))
    dataset = TensorDataset(inputs, inputs[:, :5].argmax(1))
    loader = DataLoader(dataset, batch_size=32 // dist.get_world_size(), sampler=DistributedSampler(dataset))
    torch.manual_seed(0)
    model = nn.Linear(20, 5)
    Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.05)).train(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
