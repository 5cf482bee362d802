# expect: subset-first-part line 55 or 31 or 54
# Cassava leaf disease, from my Kaggle notebook (2 x T4). Exported with nbconvert and tidied.
import os
import socket
import time

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.models import vit_b_16, ViT_B_16_Weights


class CFG:
    base = "/kaggle/input/cassava-leaf-disease-classification"
    seed = 2021
    size = 224
    n_classes = 5
    epochs = 6
    bs = 24            # per GPU
    lr = 1e-5          # for one GPU with bs images, times the number of GPUs
    workers = 2        # per GPU
    holdout = 0.15
    fraction = 0.25    # a random part of the training images, for quick tries


class LeafDataset(Dataset):
    def __init__(self, df, tf):
        self.names = df["image_id"].values
        self.labels = df["label"].values
        self.tf = tf

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        path = os.path.join(CFG.base, "train_images", self.names[i])
        return self.tf(Image.open(path).convert("RGB")), int(self.labels[i])


def split_frames():
    df = pd.read_csv(os.path.join(CFG.base, "train.csv"))
    order = np.random.default_rng(CFG.seed).permutation(len(df))
    n_val = int(len(df) * CFG.holdout)
    val_df = df.iloc[order[:n_val]].reset_index(drop=True)
    trn_df = df.drop(index=order[:n_val]).reset_index(drop=True)
    if CFG.fraction < 1.0:
        trn_df = trn_df[: int(len(trn_df) * CFG.fraction)]
    return trn_df, val_df


mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
train_tf = transforms.Compose([
    transforms.RandomResizedCrop(CFG.size, scale=(0.5, 1.0)),
    transforms.RandomHorizontalFlip(),
    transforms.RandomVerticalFlip(),
    transforms.ToTensor(),
    transforms.Normalize(mean, std),
])
valid_tf = transforms.Compose([
    transforms.Resize((CFG.size, CFG.size)),
    transforms.ToTensor(),
    transforms.Normalize(mean, std),
])


def make_loaders(rank, world):
    trn_df, val_df = split_frames()
    trn_ds = LeafDataset(trn_df, train_tf)
    sampler = DistributedSampler(trn_ds, num_replicas=world, rank=rank, shuffle=True, seed=CFG.seed)
    trn_dl = DataLoader(trn_ds, batch_size=CFG.bs, sampler=sampler, num_workers=CFG.workers, drop_last=True)
    val_ds = LeafDataset(val_df.iloc[rank::world], valid_tf)
    val_dl = DataLoader(val_ds, batch_size=CFG.bs * 2, num_workers=CFG.workers)
    return trn_dl, sampler, val_dl


def validate(net, val_dl, dev):
    net.eval()
    ok = torch.zeros(1, device=dev)
    n = torch.zeros(1, device=dev)
    with torch.inference_mode():
        for x, y in val_dl:
            x, y = x.to(dev), y.to(dev)
            ok += net(x).argmax(1).eq(y).sum()
            n += len(y)
    dist.all_reduce(ok)
    dist.all_reduce(n)
    return float(ok / n)


def worker(rank, world, port):
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    torch.cuda.set_device(rank)      # one machine: the rank is the GPU
    dev = torch.device(f"cuda:{rank}")
    torch.manual_seed(CFG.seed + rank)
    trn_dl, sampler, val_dl = make_loaders(rank, world)

    if rank == 0:
        vit_b_16(weights=ViT_B_16_Weights.DEFAULT)
    dist.barrier()
    net = vit_b_16(weights=ViT_B_16_Weights.DEFAULT)
    net.heads.head = nn.Linear(net.heads.head.in_features, CFG.n_classes)
    net = net.to(dev)
    ddp = DistributedDataParallel(net, device_ids=[rank])
    opt = torch.optim.AdamW(ddp.parameters(), lr=CFG.lr * world, weight_decay=1e-2)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=CFG.lr * world, epochs=CFG.epochs,
                                                steps_per_epoch=len(trn_dl))
    crit = nn.CrossEntropyLoss(label_smoothing=0.05)

    best = 0.0
    for ep in range(CFG.epochs):
        t0 = time.time()
        sampler.set_epoch(ep)
        ddp.train()
        for x, y in trn_dl:
            x, y = x.to(dev, non_blocking=True), y.to(dev, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = crit(ddp(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
        score = validate(net, val_dl, dev)
        if rank == 0:
            print(f"epoch {ep} valid acc {score:.4f} ({time.time() - t0:.0f}s)")
            if score > best:
                best = score
                torch.save(net.state_dict(), "/kaggle/working/vit_best.pth")
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    n_gpu = torch.cuda.device_count()
    mp.spawn(worker, args=(n_gpu, free_port()), nprocs=n_gpu)
