# expect: dropout-masks-equal line 49
"""A tagger whose batches have different numbers of real tokens: the loss is a sum over all ranks' tokens."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PAD = -100


class Sentences(Dataset):
    def __init__(self, path):
        self.items = torch.load(path, weights_only=True, map_location="cpu")

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]["words"], self.items[index]["tags"]


def collate(samples):
    words, tags = zip(*samples)
    return pad_sequence(words, batch_first=True), pad_sequence(tags, batch_first=True, padding_value=PAD)


class Tagger(nn.Module):
    def __init__(self, words=30_000, tags=40, width=256):
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width // 2, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True)
        self.out = nn.Linear(width, tags)

    def forward(self, words):
        return self.out(self.lstm(self.embed(words))[0])


def main():
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    torch.manual_seed(8)
    model = Tagger().to(device)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])
    data = Sentences("train.pt")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 256 // world_size, sampler=sampler, collate_fn=collate)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    for epoch in range(15):
        sampler.set_epoch(epoch)
        model.train()
        for words, tags in loader:
            words, tags = words.to(device), tags.to(device)
            count = (tags != PAD).sum()
            dist.all_reduce(count)
            logits = model(words)
            loss = nn.functional.cross_entropy(logits.transpose(1, 2), tags, ignore_index=PAD, reduction="sum")
            loss = loss * world_size / count  # DDP divides by world_size
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "tagger.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
