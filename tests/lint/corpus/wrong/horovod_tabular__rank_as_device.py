# expect: rank-as-device line 91
"""Credit default from tabular data, Horovod.   horovodrun -np 8 python tabular.py --data ... --model-dir ..."""
from __future__ import print_function

import argparse
import os

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.data as tud
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="Tabular example")
parser.add_argument("--data", required=True)
parser.add_argument("--model-dir", required=True)
parser.add_argument("--batch-size", type=int, default=1024, help="input batch size of each worker")
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--base-lr", type=float, default=5e-4, help="learning rate for a single GPU")
parser.add_argument("--warmup-epochs", type=int, default=3)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--resume", action="store_true")


class TabularNet(nn.Module):
    def __init__(self, cardinalities, nNumeric, width=512):
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(c, min(50, (c + 1) // 2)) for c in cardinalities])
        nIn = nNumeric + sum(e.embedding_dim for e in self.embeddings)
        self.mlp = nn.Sequential(
            nn.Linear(nIn, width), nn.LayerNorm(width), nn.ReLU(), nn.Dropout(0.3),
            nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(), nn.Dropout(0.3),
            nn.Linear(width, 1),
        )

    def forward(self, xCat, xNum):
        embedded = [e(xCat[:, i]) for i, e in enumerate(self.embeddings)]
        return self.mlp(torch.cat(embedded + [xNum], dim=1)).squeeze(1)


def loadSplit(path, name):
    with np.load(path) as f:
        tensors = [torch.from_numpy(f[name + suffix]) for suffix in ("_cat", "_num", "_y")]
        return tud.TensorDataset(tensors[0].long(), tensors[1].float(), tensors[2].float()), f["cardinalities"].tolist()


def sumOver(tensor, name):
    """Sum over all workers."""
    return hvd.allreduce(tensor, name=name, op=hvd.Sum)


def trainEpoch(epoch, model, optimizer, scheduler, loader, sampler, verbose):
    model.train()
    sampler.set_epoch(epoch)
    totals = torch.zeros(2).cuda()
    for xCat, xNum, y in loader:
        xCat, xNum, y = xCat.cuda(), xNum.cuda(), y.cuda()
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(xCat, xNum), y)
        loss.backward()
        optimizer.step()
        totals += torch.stack([loss.detach() * len(y), torch.ones_like(loss) * len(y)])
    scheduler.step()
    lossSum, count = sumOver(totals, "train_totals").tolist()
    if verbose:
        print("Epoch: {}\tloss: {:.5f}".format(epoch, lossSum / count))


def testEpoch(epoch, model, loader, verbose):
    model.eval()
    lossSum, hits, count = torch.zeros(1).cuda(), torch.zeros(1).cuda(), torch.zeros(1).cuda()
    with torch.no_grad():
        for xCat, xNum, y in loader:
            xCat, xNum, y = xCat.cuda(), xNum.cuda(), y.cuda()
            out = model(xCat, xNum)
            lossSum += F.binary_cross_entropy_with_logits(out, y, reduction="sum")
            hits += ((out > 0) == (y > 0.5)).sum()
            count += len(y)
    lossSum, hits, count = sumOver(lossSum, "loss"), sumOver(hits, "hits"), sumOver(count, "count")
    accuracy = (hits / count).item()
    if verbose:
        print("Test:  {}\tloss: {:.5f}\taccuracy: {:.4f}".format(epoch, (lossSum / count).item(), accuracy))
    return accuracy


def main():
    args = parser.parse_args()
    hvd.init()
    torch.cuda.set_device(hvd.rank())
    verbose = hvd.rank() == 0
    checkpointFile = os.path.join(args.model_dir, "checkpoint.pth.tar")

    trainSet, cardinalities = loadSplit(args.data, "train")
    testSet, _ = loadSplit(args.data, "test")
    trainSampler = DistributedSampler(trainSet, num_replicas=hvd.size(), rank=hvd.rank(), drop_last=True)
    trainLoader = tud.DataLoader(trainSet, batch_size=args.batch_size, sampler=trainSampler, drop_last=True)
    testPart = tud.Subset(testSet, range(hvd.rank(), len(testSet), hvd.size()))
    testLoader = tud.DataLoader(testPart, batch_size=4096)

    torch.manual_seed(args.seed)
    model = TabularNet(cardinalities, trainSet.tensors[1].shape[1]).cuda()
    torch.manual_seed(args.seed + 1 + hvd.rank())

    # Horovod: scale learning rate by the number of GPUs.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.base_lr * hvd.size(), weight_decay=1e-4)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0 / hvd.size(), total_iters=args.warmup_epochs)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs - args.warmup_epochs)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [args.warmup_epochs])

    # Horovod: restore on the first worker, which hands everything to the others.
    firstEpoch, bestAccuracy = 0, 0.0
    schedulerState = None
    if args.resume and hvd.rank() == 0:
        checkpoint = torch.load(checkpointFile, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        schedulerState = checkpoint["scheduler"]
        firstEpoch, bestAccuracy = checkpoint["epoch"] + 1, checkpoint["bestAccuracy"]
    firstEpoch = hvd.broadcast_object(firstEpoch, root_rank=0)
    bestAccuracy = hvd.broadcast_object(bestAccuracy, root_rank=0)
    schedulerState = hvd.broadcast_object(schedulerState, root_rank=0)
    if schedulerState is not None:
        scheduler.load_state_dict(schedulerState)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    for epoch in range(firstEpoch, args.epochs):
        trainEpoch(epoch, model, optimizer, scheduler, trainLoader, trainSampler, verbose)
        accuracy = testEpoch(epoch, model, testLoader, verbose)
        isBest = accuracy > bestAccuracy
        bestAccuracy = max(bestAccuracy, accuracy)
        if hvd.rank() == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "epoch": epoch,
                "bestAccuracy": bestAccuracy,
            }
            torch.save(state, checkpointFile)
            if isBest:
                torch.save(state["model"], os.path.join(args.model_dir, "best.pth.tar"))
    hvd.shutdown()


if __name__ == "__main__":
    main()
