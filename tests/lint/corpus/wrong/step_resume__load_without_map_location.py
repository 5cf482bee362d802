# expect: load-without-map-location line 50
"""Checkpoints in the middle of an epoch: the sampler leaves out what the epoch has already given."""

import os
import signal

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ResumableSampler(DistributedSampler):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.skip = 0

    def set_position(self, epoch, skip):
        self.set_epoch(epoch)
        self.skip = skip

    def __iter__(self):
        return iter(list(super().__iter__())[self.skip :])

    def __len__(self):
        return self.num_samples - self.skip


class State:
    def __init__(self, model, optimizer, path):
        self.model, self.optimizer, self.path = model, optimizer, path
        self.epoch, self.step = 0, 0

    def save(self):
        if dist.get_rank() == 0:
            state = {
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "epoch": self.epoch,
                "step": self.step,
            }
            torch.save(state, f"{self.path}.new")
            os.replace(f"{self.path}.new", self.path)
        dist.barrier()

    def load(self):
        if os.path.exists(self.path):
            state = torch.load(self.path, weights_only=True)
            self.model.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.epoch, self.step = state["epoch"], state["step"]
        dist.barrier()


def main():
    stop = []
    signal.signal(signal.SIGUSR1, lambda *_: stop.append(True))
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    arrays = torch.load("train.pt", map_location="cpu", weights_only=True, mmap=True)
    data = TensorDataset(arrays["x"], arrays["y"])
    sampler = ResumableSampler(data, drop_last=True)
    batch = 4096 // world_size
    loader = DataLoader(data, batch, sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Linear(512, 2048), nn.SiLU(), nn.Linear(2048, 100)).to(device)
    model = DistributedDataParallel(model, device_ids=[local_rank])
    state = State(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "state.pt")
    state.load()

    while state.epoch < 10:
        sampler.set_position(state.epoch, state.step * batch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            state.optimizer.zero_grad()
            loss.backward()
            state.optimizer.step()
            state.step += 1
            if state.step % 1000 == 0:
                flag = torch.tensor(len(stop), device=device)
                dist.all_reduce(flag)  # one rank's signal stops all of them at the same step
                state.save()
                if flag.item():
                    dist.destroy_process_group()
                    return
        state.epoch, state.step = state.epoch + 1, 0
        state.save()
        if rank == 0:
            print(f"{state.epoch} epochs")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
