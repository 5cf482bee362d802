# expect: no-set-epoch line 81 or 79 or 82 or 84
"""
Fit an energy surface E(u) to displacements u of a supercell (npz with arrays displ and energy).

One machine, one process for each GPU. The arrays are read once by the parent and inherited through fork, so
that they lie in memory once.

  python phonon_regressor.py lattice.npz fit.pt --nproc 4
"""
import argparse
import os
import sys
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Enet(nn.Module):
    def __init__(self, nx, nh=256, pdrop=0.1):
        super().__init__()
        self.seq = nn.Sequential(
            nn.Linear(nx, nh), nn.SiLU(), nn.Dropout(pdrop),
            nn.Linear(nh, nh), nn.SiLU(), nn.Dropout(pdrop),
            nn.Linear(nh, 1),
        )

    def forward(self, u):
        return self.seq(u).squeeze(-1)


def read_data(fname, ntst, seed):
    with np.load(fname) as f:
        u, en = f["displ"].astype(np.float32), f["energy"].astype(np.float32)
    u = u.reshape(len(u), -1)
    ix = np.random.default_rng(seed).permutation(len(u))
    tst, trn = ix[:ntst], ix[ntst:]
    u0, du = u[trn].mean(0), u[trn].std(0) + 1e-6
    e0, de = en[trn].mean(), en[trn].std()
    u, en = (u - u0) / du, (en - e0) / de
    return dict(utrn=u[trn], etrn=en[trn], utst=u[tst], etst=en[tst], de=float(de))


@torch.no_grad()
def rmse(net, u, en, de):
    """RMSE on this share of the test set and all others together, in units of energy."""
    net.eval()
    s = torch.zeros(2, dtype=torch.float64, device=u.device)
    for ub, eb in zip(u.split(4096), en.split(4096)):
        s[0] += ((net(ub) - eb) ** 2).sum()
        s[1] += len(ub)
    dist.all_reduce(s)
    return de * float((s[0] / s[1]).sqrt())


def fit(k, a, dat, rdzv):
    np_ = a.nproc
    torch.cuda.set_device(k)  # all processes are on this machine, so k is the device as well
    dist.init_process_group("nccl", init_method=rdzv, rank=k, world_size=np_)
    dev = torch.device("cuda", k)

    torch.manual_seed(a.seed)
    net = DDP(Enet(dat["utrn"].shape[1]).to(dev), device_ids=[k])
    torch.manual_seed(a.seed + 1000 * (k + 1))  # own dropout masks for each process

    # a.batch and a.lr are meant for one process: np_ times the batch, np_ times the rate
    opt = torch.optim.Adam(net.parameters(), lr=a.lr * np_)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=a.epochs)

    utrn, etrn = torch.from_numpy(dat["utrn"]).to(dev), torch.from_numpy(dat["etrn"]).to(dev)
    utst, etst = torch.from_numpy(dat["utst"][k::np_]).to(dev), torch.from_numpy(dat["etst"][k::np_]).to(dev)
    ntrn = len(utrn) // np_ * np_  # same number for each process
    best = float("inf")

    for ep in range(a.epochs):
        net.train()
        g = torch.Generator().manual_seed(a.seed)
        mine = torch.randperm(len(utrn), generator=g)[:ntrn][k::np_].to(dev)
        s = torch.zeros(2, dtype=torch.float64, device=dev)
        for ib in mine.split(a.batch):
            loss = nn.functional.mse_loss(net(utrn[ib]), etrn[ib])
            opt.zero_grad()
            loss.backward()
            opt.step()
            s[0] += loss.detach() * len(ib)
            s[1] += len(ib)
        sched.step()
        dist.all_reduce(s)
        err = rmse(net.module, utst, etst, dat["de"])
        if k == 0:
            print(f"{ep:4d}  mse {float(s[0] / s[1]):.4e}  rmse(test) {err:.4e}", flush=True)
        if err < best:
            best = err
            if k == 0:
                torch.save({"net": net.module.state_dict(), "rmse": best, "epoch": ep}, a.out)

    dist.destroy_process_group()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("data")
    p.add_argument("out")
    p.add_argument("--nproc", type=int, default=4, help="number of GPUs of this machine to use")
    p.add_argument("--epochs", type=int, default=300)
    p.add_argument("--batch", type=int, default=512, help="for one process")
    p.add_argument("--lr", type=float, default=2e-4, help="for one process")
    p.add_argument("--ntst", type=int, default=5000)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()

    dat = read_data(a.data, a.ntst, a.seed)
    ctx = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as tmp:
        rdzv = "file://" + os.path.join(tmp, "rdzv")
        procs = [ctx.Process(target=fit, args=(k, a, dat, rdzv)) for k in range(a.nproc)]
        for q in procs:
            q.start()
        for q in procs:
            q.join()
    sys.exit(any(q.exitcode != 0 for q in procs))


if __name__ == "__main__":
    main()
