# expect: no-barrier-save-load line 55 or 54
"""Train a little, save on rank 0, load everywhere, go on."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(torch.relu(self.net1(x)))


def steps(model, optimizer, device, count, generator):
    for _ in range(count):
        optimizer.zero_grad()
        outputs = model(torch.randn(20, 10, generator=generator).to(device))
        labels = torch.randn(20, 5, generator=generator).to(device)
        nn.functional.mse_loss(outputs, labels).backward()
        optimizer.step()


def shared_folder():
    """A folder whose name rank 0 has made and told."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name, src=0)
    return name[0]


def demo():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    generator = torch.Generator().manual_seed(rank)
    model = DDP(ToyModel().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    steps(model, optimizer, device, 10, generator)

    path = os.path.join(shared_folder(), "toy.pt")
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, path)
    checkpoint = torch.load(path, map_location=device, weights_only=True)
    model.module.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])

    steps(model, optimizer, device, 10, generator)
    dist.barrier()  # nobody still reads when it is removed
    if rank == 0:
        os.remove(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    demo()
