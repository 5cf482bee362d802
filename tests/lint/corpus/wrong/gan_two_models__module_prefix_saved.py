# expect: module-prefix-saved line 77
import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms
from torchvision.utils import save_image

LATENT = 100


def generator_net():
    return nn.Sequential(
        nn.ConvTranspose2d(LATENT, 256, 4), nn.GroupNorm(8, 256), nn.ReLU(),
        nn.ConvTranspose2d(256, 128, 4, 2, 1), nn.GroupNorm(8, 128), nn.ReLU(),
        nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.GroupNorm(8, 64), nn.ReLU(),
        nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def discriminator_net():
    return nn.Sequential(
        nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(128, 256, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(256, 1, 4), nn.Flatten(),
    )  # fmt: skip


def main(epochs=50, global_batch=256, lr=2e-4):
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(9 + rank)  # every rank has noise of its own

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)])
    images = datasets.CIFAR10(os.environ["DATA"], transform=transform)
    sampler = DistributedSampler(images, drop_last=True)
    loader = DataLoader(images, global_batch // world_size, sampler=sampler, num_workers=4, drop_last=True)

    generator = DDP(generator_net().to(device), device_ids=[device.index])
    discriminator = DDP(discriminator_net().to(device), device_ids=[device.index], broadcast_buffers=False)
    opt_g = optim.Adam(generator.parameters(), lr=lr, betas=(0.5, 0.999))
    opt_d = optim.Adam(discriminator.parameters(), lr=lr, betas=(0.5, 0.999))
    loss_fn = nn.BCEWithLogitsLoss()
    preview = torch.randn(64, LATENT, 1, 1, device=device)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        generator.train()
        for real, _ in loader:
            real = real.to(device, non_blocking=True)
            fake = generator(torch.randn(len(real), LATENT, 1, 1, device=device))

            opt_d.zero_grad()
            both = discriminator(torch.cat([real, fake.detach()]))
            target = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).to(device)
            loss_fn(both, target).backward()
            opt_d.step()

            opt_g.zero_grad()
            for parameter in discriminator.parameters():
                parameter.requires_grad_(False)
            # the bare network: its weights get no gradients here, so there is nothing for DDP to do
            judged = discriminator.module(fake)
            loss_fn(judged, torch.ones_like(judged)).backward()
            opt_g.step()
            for parameter in discriminator.parameters():
                parameter.requires_grad_(True)
        if rank == 0:
            generator.eval()
            with torch.no_grad():
                save_image(generator.module(preview), f"epoch-{epoch}.png", nrow=8, normalize=True)
            torch.save(generator.state_dict(), "generator.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
