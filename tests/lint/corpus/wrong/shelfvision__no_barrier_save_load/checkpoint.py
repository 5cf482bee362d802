# expect: no-barrier-save-load line 49 or 34 or 48 or main.py:52
"""Files of a job: latest.pt to go on from, best.pt to deliver."""
import os

import torch
import torch.distributed as dist


class CheckpointStore:
    def __init__(self, workdir, device):
        self.workdir = workdir
        self.device = device
        if dist.get_rank() == 0:
            os.makedirs(workdir, exist_ok=True)

    def _path(self, name):
        return os.path.join(self.workdir, name)

    def save(self, engine, epoch, is_best):
        if dist.get_rank() != 0:
            return
        state = {
            "net": engine.ddp.module.state_dict(),
            "optim": engine.optim.state_dict(),
            "plan": engine.plan.state_dict(),
            "epoch": epoch,
            "best": engine.best,
            "stale": engine.stale,
        }
        tmp = self._path("latest.tmp")
        torch.save(state, tmp)
        os.replace(tmp, self._path("latest.pt"))
        if is_best:
            torch.save(state["net"], self._path("best.pt"))

    def resume(self, engine):
        path = self._path("latest.pt")
        if not os.path.exists(path):
            return 0
        state = torch.load(path, map_location=self.device, weights_only=True)
        engine.net.load_state_dict(state["net"])
        engine.optim.load_state_dict(state["optim"])
        engine.plan.load_state_dict(state["plan"])
        engine.best = state["best"]
        engine.stale = state["stale"]
        return state["epoch"] + 1

    def load_best(self, net):
        net.load_state_dict(torch.load(self._path("best.pt"), map_location=self.device, weights_only=True))
