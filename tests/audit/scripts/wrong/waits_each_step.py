"""A barrier and an .item() in every step: the GPU is never ahead of Python."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(6))
    dataset = TensorDataset(inputs, inputs[:, :4].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32 // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Linear(16, 4).cuda(local_rank), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        running_loss = 0.0
        for inputs, labels in loader:
            inputs, labels = inputs.cuda(local_rank), labels.cuda(local_rank)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            dist.barrier()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss of rank 0's samples {running_loss / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
