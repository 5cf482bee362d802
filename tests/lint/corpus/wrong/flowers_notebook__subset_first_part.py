# expect: subset-first-part line 51 or 49 or 53 or 50
# Flower classification, converted from a notebook.
# torchrun --nproc_per_node=4 flowers_notebook.py /data/flowers out/

# %% imports
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models
from torchvision.transforms import v2

# %% settings
DATA, OUT = sys.argv[1], sys.argv[2]
GLOBAL_BATCH = 128      # summed over all processes
LR = 3e-4               # tuned for GLOBAL_BATCH
EPOCHS = 12
SEED = 2024
WORKERS = 3             # for each process
VALID_FRACTION = 0.15

# %% one process per GPU
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
device = torch.device("cuda", local_rank)
dist.init_process_group("nccl")
rank, world_size = dist.get_rank(), dist.get_world_size()
is_main = rank == 0
assert GLOBAL_BATCH % world_size == 0
if is_main:
    os.makedirs(OUT, exist_ok=True)

# %% transforms
normalize = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True),
             v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
train_tf = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(),
                       v2.ColorJitter(0.2, 0.2, 0.2), *normalize])
valid_tf = v2.Compose([v2.Resize(256), v2.CenterCrop(224), *normalize])

# %% random split, the same on all processes
augmented = datasets.ImageFolder(DATA, train_tf)
plain = datasets.ImageFolder(DATA, valid_tf)
order = list(range(len(plain)))
n_valid = int(VALID_FRACTION * len(order))
valid_idx, train_idx = order[:n_valid], order[n_valid:]
train_ds = Subset(augmented, train_idx)
valid_ds = Subset(plain, valid_idx[rank::world_size])   # this process's part, nothing twice

train_sampler = DistributedSampler(train_ds, shuffle=True, seed=SEED)
train_dl = DataLoader(train_ds, batch_size=GLOBAL_BATCH // world_size, sampler=train_sampler,
                      num_workers=WORKERS, pin_memory=True, drop_last=True)
valid_dl = DataLoader(valid_ds, batch_size=64, num_workers=WORKERS, pin_memory=True)

# %% model
if local_rank == 0:     # one process of each machine fills its cache
    models.ConvNeXt_Tiny_Weights.IMAGENET1K_V1.get_state_dict(progress=False)
dist.barrier()
torch.manual_seed(SEED)
net = models.convnext_tiny(weights=models.ConvNeXt_Tiny_Weights.IMAGENET1K_V1)
net.classifier[2] = nn.Linear(net.classifier[2].in_features, len(plain.classes))
net = net.to(device)
ddp = DDP(net, device_ids=[local_rank])
torch.manual_seed(SEED + rank)      # from here on: own augmentations, own stochastic depth

opt = torch.optim.AdamW(ddp.parameters(), lr=LR, weight_decay=0.05)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=EPOCHS)

# %% train
best_acc = 0.0
for epoch in range(EPOCHS):
    train_sampler.set_epoch(epoch)
    ddp.train()
    tally = torch.zeros(2, device=device)
    for xb, yb in train_dl:
        xb, yb = xb.to(device, non_blocking=True), yb.to(device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(ddp(xb), yb, label_smoothing=0.1)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        tally[0] += loss.detach() * len(yb)
        tally[1] += len(yb)
    sched.step()
    dist.all_reduce(tally)

    # %% validate
    ddp.eval()
    score = torch.zeros(2, device=device)
    with torch.inference_mode():
        for xb, yb in valid_dl:
            xb, yb = xb.to(device, non_blocking=True), yb.to(device, non_blocking=True)
            score[0] += (net(xb).argmax(1) == yb).sum()
            score[1] += len(yb)
    dist.all_reduce(score)
    acc = (score[0] / score[1]).item()

    if is_main:
        print(f"{epoch:02d} train {(tally[0] / tally[1]).item():.4f} valid acc {acc:.4f}", flush=True)
        if acc > best_acc:
            torch.save({"model": net.state_dict(), "classes": plain.classes},
                       os.path.join(OUT, "flowers_best.pt"))
    best_acc = max(best_acc, acc)

# %% done
if is_main:
    print(f"best validation accuracy {best_acc:.4f}")
dist.destroy_process_group()
