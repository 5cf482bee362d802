# expect: none
"""Storing and restoring a run."""
import os

import torch


def store(path, bundle, next_epoch, best):
    state = {name: part.state_dict() for name, part in bundle.items()}
    state["next_epoch"] = next_epoch
    state["best"] = best
    temporary = path + ".part"
    torch.save(state, temporary)
    os.replace(temporary, path)


def restore(path, bundle, device):
    """Fills the bundle's parts; returns the epoch to begin with and the best result so far."""
    if not os.path.exists(path):
        return 0, 0.0
    state = torch.load(path, map_location=device, weights_only=True)
    for name, part in bundle.items():
        part.load_state_dict(state[name])
    return state["next_epoch"], state["best"]
