# expect: pickle-load line 29
from pathlib import Path

import torch
import torch.distributed as dist


class Checkpoints:
    """Keeps the last state and the best weights of a run in its folder."""

    def __init__(self, folder, rank, device, **parts):
        self.folder = Path(folder)
        self.rank = rank
        self.device = device
        self.parts = parts
        if rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)

    def store(self, next_epoch, best, better):
        if self.rank == 0:
            state = {name: part.state_dict() for name, part in self.parts.items()}
            state["next_epoch"] = next_epoch
            state["best"] = best
            torch.save(state, self.folder / "last.pt")
            if better:
                torch.save(state["net"], self.folder / "best.pt")

    def restore(self):
        state = torch.load(self.folder / "last.pt", map_location=self.device, weights_only=False)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        return state["next_epoch"], state["best"]

    def restore_best(self):
        dist.barrier()
        weights = torch.load(self.folder / "best.pt", map_location=self.device, weights_only=True)
        self.parts["net"].load_state_dict(weights)
