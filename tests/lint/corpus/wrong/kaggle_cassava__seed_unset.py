# expect: seed-unset line 83
# Notebook export: cassava leaf disease, 2 x T4.  torchrun --nproc_per_node=2 kaggle_cassava.py
import os
import random

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.nn as nn
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, random_split
from torchvision import models, transforms
from tqdm import tqdm


class CFG:
    folder = "/kaggle/input/cassava-leaf-disease-classification"
    size = 320
    epochs = 8
    batch = 24            # per GPU
    lr = 1e-4             # per GPU, scaled below
    workers = 2           # per GPU
    seed = 719
    valid_part = 0.2
    probe = 2000          # training images, drawn at random, for the overfitting check


# %%
class LeafDataset(Dataset):
    def __init__(self, table, transform):
        self.names = table.image_id.values
        self.labels = table.label.values
        self.transform = transform

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        image = Image.open(os.path.join(CFG.folder, "train_images", self.names[i])).convert("RGB")
        return self.transform(image), int(self.labels[i])


norm = transforms.Normalize([0.430, 0.497, 0.314], [0.222, 0.224, 0.211])
tf_train = transforms.Compose([transforms.RandomResizedCrop(CFG.size, (0.4, 1.0)), transforms.RandomHorizontalFlip(),
                               transforms.RandomVerticalFlip(), transforms.ToTensor(), norm])
tf_valid = transforms.Compose([transforms.Resize((CFG.size, CFG.size)), transforms.ToTensor(), norm])


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# %%
def count_right(net, loader, device):
    net.eval()
    right = torch.zeros(2, device=device)
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            right[0] += (net(images).argmax(1) == labels).sum()
            right[1] += len(labels)
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


# %%
def run():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    seed_all(CFG.seed + rank)

    table = pd.read_csv(os.path.join(CFG.folder, "train.csv"))
    augmented, plain = LeafDataset(table, tf_train), LeafDataset(table, tf_valid)
    n_valid = int(CFG.valid_part * len(table))
    common = torch.Generator().manual_seed(CFG.seed)
    train_part, valid_part = random_split(augmented, [len(table) - n_valid, n_valid])
    chosen = torch.randperm(len(train_part), generator=common)[:CFG.probe].tolist()
    probe_idx = [train_part.indices[i] for i in chosen]

    def own(indices):
        return DataLoader(Subset(plain, indices[rank::world]), CFG.batch * 2, num_workers=CFG.workers)

    sampler = DistributedSampler(train_part, shuffle=True)
    train_dl = DataLoader(train_part, CFG.batch, sampler=sampler, num_workers=CFG.workers, pin_memory=True,
                          drop_last=True)
    valid_dl, probe_dl = own(valid_part.indices), own(probe_idx)

    model = models.efficientnet_b0()
    model.classifier[1] = nn.Linear(model.classifier[1].in_features, 5)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device)
    model = DistributedDataParallel(model, device_ids=[local])
    optimizer = torch.optim.AdamW(model.parameters(), lr=CFG.lr * world)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=CFG.epochs * len(train_dl))
    criterion = nn.CrossEntropyLoss()

    best = 0.0
    for epoch in range(CFG.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in tqdm(train_dl, disable=rank != 0):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        seen_acc = count_right(model.module, probe_dl, device)
        acc = count_right(model.module, valid_dl, device)
        if rank == 0:
            print(f"epoch {epoch}: train probe {seen_acc:.4f}, valid {acc:.4f}")
            if acc > best:
                best = acc
                torch.save(model.module.state_dict(), "cassava_b0.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
