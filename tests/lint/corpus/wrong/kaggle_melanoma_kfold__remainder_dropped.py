# expect: remainder-dropped line 73 or 71 or 80 or 81
# ---
# Melanoma, one fold of five. Was a notebook, now:
#   torchrun --standalone --nproc_per_node=2 kaggle_melanoma_kfold.py --fold 0 --input ... --output ...
# ---
import argparse
import os

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.nn as nn
from contextlib import nullcontext
from PIL import Image
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T
from torchvision.models import efficientnet_v2_s


class CFG:
    n_folds = 5
    img_size = 384
    epochs = 10
    batch_size = 16       # per GPU
    accum = 4
    lr = 1e-4             # tuned on 2 GPUs (2 * 16 * 4 = 128 images per update), scaled below
    lr_images = 128
    weight_decay = 1e-2
    num_workers = 4       # per process
    seed = 2020


class MelanomaDataset(Dataset):
    def __init__(self, df, img_dir, tfm):
        self.ids = df.image_name.values
        self.targets = df.target.values.astype(np.float32)
        self.img_dir, self.tfm = img_dir, tfm

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        img = Image.open(os.path.join(self.img_dir, self.ids[i] + ".jpg")).convert("RGB")
        return self.tfm(img), self.targets[i]


def get_folds(csv, fold):
    df = pd.read_csv(csv)
    skf = StratifiedKFold(n_splits=CFG.n_folds, shuffle=True, random_state=CFG.seed)
    trn_idx, val_idx = list(skf.split(df, df.target))[fold]
    return df.iloc[trn_idx].reset_index(drop=True), df.iloc[val_idx].reset_index(drop=True)


def get_transforms():
    end = [T.ToTensor(), T.Normalize([0.80, 0.62, 0.59], [0.15, 0.18, 0.20])]
    trn = T.Compose([T.RandomResizedCrop(CFG.img_size, scale=(0.6, 1)), T.RandomHorizontalFlip(), T.RandomVerticalFlip(), *end])
    val = T.Compose([T.Resize((CFG.img_size, CFG.img_size)), *end])
    return trn, val


def train_fn(model, loader, criterion, optimizer, scaler, device):
    model.train()
    n = len(loader)
    running = torch.zeros(1, device=device)
    optimizer.zero_grad()
    for step, (x, y) in enumerate(loader):
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        last_of_window = step % CFG.accum == CFG.accum - 1
        # gradients travel only with the last batch of the window
        with nullcontext() if last_of_window else model.no_sync():
            with torch.autocast("cuda"):
                loss = criterion(model(x).squeeze(1), y)
            scaler.scale(loss / CFG.accum).backward()
        running += loss.detach()
        if last_of_window:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    dist.all_reduce(running)
    return running.item() / n / dist.get_world_size()


@torch.no_grad()
def valid_fn(model, loader, device):
    """AUC of the whole fold, the same number on all ranks."""
    model.eval()
    probs, targets = [], []
    for x, y in loader:
        with torch.autocast("cuda"):
            out = model.module(x.to(device, non_blocking=True)).squeeze(1)
        probs.append(out.float().sigmoid())
        targets.append(y)
    mine = (torch.cat(probs).cpu().numpy(), torch.cat(targets).numpy())
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    probs = np.concatenate([p for p, _ in everyone])
    targets = np.concatenate([t for _, t in everyone])
    return roc_auc_score(targets, probs)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--fold", type=int, default=0)
    ap.add_argument("--input", required=True)
    ap.add_argument("--output", required=True)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(CFG.seed + rank)
    np.random.seed(CFG.seed + rank)

    trn_df, val_df = get_folds(os.path.join(args.input, "train.csv"), args.fold)
    val_df = val_df.iloc[rank::world]  # no sampler: no image twice
    trn_tfm, val_tfm = get_transforms()
    img_dir = os.path.join(args.input, "jpeg", "train")
    trn_ds, val_ds = MelanomaDataset(trn_df, img_dir, trn_tfm), MelanomaDataset(val_df, img_dir, val_tfm)
    sampler = DistributedSampler(trn_ds, shuffle=True, seed=CFG.seed, drop_last=True)
    trn_dl = DataLoader(
        trn_ds, CFG.batch_size, sampler=sampler, num_workers=CFG.num_workers, pin_memory=True, drop_last=True
    )
    val_dl = DataLoader(val_ds, 2 * CFG.batch_size, shuffle=False, num_workers=CFG.num_workers, pin_memory=True)

    model = efficientnet_v2_s(num_classes=1, dropout=0.3)
    model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device), device_ids=[local_rank])
    lr = CFG.lr * (CFG.batch_size * CFG.accum * world) / CFG.lr_images
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=CFG.weight_decay)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=CFG.epochs)
    scaler = torch.amp.GradScaler("cuda")
    criterion = nn.BCEWithLogitsLoss()

    start, best_auc = 0, 0.0
    last_path = os.path.join(args.output, f"fold{args.fold}_last.pth")
    if os.path.exists(last_path):
        ck = torch.load(last_path, map_location=device, weights_only=True)
        model.module.load_state_dict(ck["model"])
        optimizer.load_state_dict(ck["optimizer"])
        scheduler.load_state_dict(ck["scheduler"])
        scaler.load_state_dict(ck["scaler"])
        start, best_auc = ck["epoch"] + 1, ck["best_auc"]

    for epoch in range(start, CFG.epochs):
        sampler.set_epoch(epoch)
        trn_loss = train_fn(model, trn_dl, criterion, optimizer, scaler, device)
        auc = float(valid_fn(model, val_dl, device))
        scheduler.step()
        is_best = auc > best_auc
        best_auc = max(best_auc, auc)
        if rank == 0:
            print(f"fold {args.fold} epoch {epoch}: loss {trn_loss:.5f} auc {auc:.5f}{' *' if is_best else ''}")
            os.makedirs(args.output, exist_ok=True)
            weights = model.module.state_dict()
            torch.save(
                {
                    "model": weights,
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "scaler": scaler.state_dict(),
                    "epoch": epoch,
                    "best_auc": best_auc,
                },
                last_path,
            )
            if is_best:
                torch.save(weights, os.path.join(args.output, f"fold{args.fold}_best.pth"))

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
