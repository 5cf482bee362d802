# expect: none
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.metrics import roc_auc_score
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Table(Dataset):
    def __init__(self, path):
        with np.load(path) as arrays:
            self.x = torch.from_numpy(arrays["x"]).float()
            self.y = torch.from_numpy(arrays["y"]).float()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return index, self.x[index], self.y[index]


def predict_all(model, dataset, device):
    """Scores of every sample, in the data set's order, on each rank: what the sampler padded is written over."""
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=1024, sampler=sampler)
    model.eval()
    indices, scores = [], []
    with torch.no_grad():
        for index, x, _ in loader:
            indices.append(index.to(device))
            scores.append(model(x.to(device)).squeeze(1))
    indices, scores = torch.cat(indices), torch.cat(scores)
    all_indices = [torch.empty_like(indices) for _ in range(dist.get_world_size())]
    all_scores = [torch.empty_like(scores) for _ in range(dist.get_world_size())]
    dist.all_gather(all_indices, indices)
    dist.all_gather(all_scores, scores)
    out = torch.empty(len(dataset), device=device)
    out[torch.cat(all_indices)] = torch.cat(all_scores)
    return out.cpu()


def main():
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(123 + rank)

    train_set, val_set = Table("train.npz"), Table("val.npz")
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, batch_size=2048 // world_size, sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Linear(300, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 1)).to(device)
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.BCEWithLogitsLoss()
    best = 0.0
    for epoch in range(20):
        sampler.set_epoch(epoch)
        model.train()
        for _, x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x.to(device)).squeeze(1), y.to(device))
            loss.backward()
            optimizer.step()
        auc = roc_auc_score(val_set.y.numpy(), predict_all(model, val_set, device).numpy())
        if auc > best:
            best = auc
            if rank == 0:
                torch.save(model.module.state_dict(), "best.pt")
        if rank == 0:
            print(f"epoch {epoch}: AUC {auc:.4f} (best {best:.4f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
