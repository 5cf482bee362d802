# expect: wrapped-before-moved line 62
import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import SVHN
from torchvision.transforms import ToTensor


class ConvNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        layers, channels = [], 3
        for factor in (1, 2, 4):
            layers += [nn.Conv2d(channels, width * factor, 3, 2, 1), nn.GroupNorm(8, width * factor), nn.SiLU()]
            channels = width * factor
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(channels, 10)

    def forward(self, x):
        return self.head(self.body(x))


def save(path, epoch, model, ema, optimizer, scheduler):
    state = dict(
        epoch=epoch,
        model=model.module.state_dict(),
        ema=ema.state_dict(),
        optimizer=optimizer.state_dict(),
        scheduler=scheduler.state_dict(),
    )
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def restore(path, device, model, ema, optimizer, scheduler):
    if not os.path.isfile(path):
        return 0
    state = torch.load(path, map_location=device, weights_only=True)
    model.module.load_state_dict(state["model"])
    ema.load_state_dict(state["ema"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    return state["epoch"] + 1


def main(root="data", path="svhn.ckpt", epochs=40, batch=512):
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    torch.manual_seed(31 * rank)
    data = SVHN(root, "train", transform=ToTensor())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch // world, sampler=sampler, num_workers=2, pin_memory=True)
    model = DistributedDataParallel(ConvNet()).to(device)
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(restore(path, device, model, ema, optimizer, scheduler), epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update_parameters(model.module)
        scheduler.step()
        if rank == 0:
            save(path, epoch, model, ema, optimizer, scheduler)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
