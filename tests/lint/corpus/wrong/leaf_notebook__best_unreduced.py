# expect: best-unreduced line 114 or 109 or 115 or 117
# Leaf disease competition, notebook turned into a script.  torchrun --nproc_per_node 2 leaf_notebook.py
import os

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.nn as nn
import timm
from PIL import Image
from timm.layers import convert_sync_batchnorm
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import transforms


class CFG:
    csv = "../input/leaf/train.csv"
    images = "../input/leaf/train_images"
    out = "../working"
    model = "tf_efficientnetv2_s"
    size = 300
    classes = 5
    epochs = 10
    bs = 16            # per GPU
    lr = 1e-4          # per GPU, times the number of GPUs
    valid_share = 0.2
    seed = 719
    workers = 2        # per GPU


class LeafData(Dataset):
    def __init__(self, df, tfm):
        self.names = df["image_id"].tolist()
        self.labels = df["label"].tolist()
        self.tfm = tfm

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        with Image.open(os.path.join(CFG.images, self.names[i])) as img:
            return self.tfm(img.convert("RGB")), self.labels[i]


def tfms():
    norm = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    aug = transforms.Compose([transforms.RandomResizedCrop(CFG.size, (0.5, 1.0)), transforms.RandomHorizontalFlip(),
                              transforms.RandomVerticalFlip(), transforms.ToTensor(), norm])
    plain = transforms.Compose([transforms.Resize((CFG.size, CFG.size)), transforms.ToTensor(), norm])
    return aug, plain


def split(df):
    gen = np.random.default_rng(CFG.seed)
    order = gen.permutation(len(df))
    n_valid = int(len(df) * CFG.valid_share)
    return df.iloc[order[n_valid:]].reset_index(drop=True), df.iloc[order[:n_valid]].reset_index(drop=True)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, ws = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(CFG.seed + rank)

    train_df, valid_df = split(pd.read_csv(CFG.csv))
    aug, plain = tfms()
    train_ds = LeafData(train_df, aug)
    valid_ds = LeafData(valid_df.iloc[rank::ws], plain)
    train_sampler = DistributedSampler(train_ds, ws, rank, shuffle=True, seed=CFG.seed)
    train_dl = DataLoader(train_ds, CFG.bs, sampler=train_sampler, num_workers=CFG.workers, pin_memory=True)
    valid_dl = DataLoader(valid_ds, CFG.bs * 2, shuffle=False, num_workers=CFG.workers)

    # one process of every machine fills the cache of pretrained weights
    if local_rank == 0:
        timm.create_model(CFG.model, pretrained=True)
    dist.barrier()
    model = timm.create_model(CFG.model, pretrained=True, num_classes=CFG.classes)
    model = convert_sync_batchnorm(model).to(device)
    parallel_model = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])
    opt = torch.optim.AdamW(parallel_model.parameters(), lr=CFG.lr * ws)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=CFG.epochs * len(train_dl))
    scaler = torch.amp.GradScaler("cuda")
    loss_fn = nn.CrossEntropyLoss()

    best_acc = 0
    for epoch in range(CFG.epochs):
        train_sampler.set_epoch(epoch)
        parallel_model.train()
        for xb, yb in train_dl:
            xb, yb = xb.to(device, non_blocking=True), yb.to(device, non_blocking=True)
            with torch.autocast("cuda"):
                loss = loss_fn(parallel_model(xb), yb)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            sched.step()

        model.eval()
        ok = torch.tensor(0, device=device)
        with torch.no_grad():
            for xb, yb in valid_dl:
                xb, yb = xb.to(device), yb.to(device)
                ok += (model(xb).argmax(1) == yb).sum()
        local_acc = ok.item() / len(valid_ds)
        dist.all_reduce(ok)
        acc = ok.item() / len(valid_df)
        if rank == 0:
            print(f"epoch {epoch}  valid acc {acc:.4f}")
        if local_acc > best_acc:
            best_acc = local_acc
            if rank == 0:
                torch.save(model.state_dict(), f"{CFG.out}/best.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
