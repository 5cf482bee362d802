# expect: none
"""Surface-defect classifier.  Start with torchrun; settings live in SETTINGS."""
import logging
import os

import torch
import torch.distributed as dist

import builders  # noqa: F401  (fills the registry)
from registry import make
from trainer import Trainer

SETTINGS = {
    "seed": 11,
    "epochs": 60,
    "data": {"name": "defect_folder", "root": os.environ.get("DEFECT_ROOT", "/data/defects"),
             "batch_per_process": 48, "workers_per_process": 5},
    "model": {"name": "resnet34_gray", "classes": 9},
    # lr for one process' batch; grows with the number of processes
    "optim": {"name": "adamw", "lr": 2.5e-4, "weight_decay": 0.02},
    "out": os.environ.get("DEFECT_OUT", "./defect_run"),
}


def main(settings):
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.ERROR)
    torch.manual_seed(settings["seed"] + dist.get_rank())

    train_loader, val_loader = make("data", **settings["data"])
    model = make("model", local=local, **settings["model"])
    opt = make("optim", params=model.parameters(), world=dist.get_world_size(), **settings["optim"])
    trainer = Trainer(model, opt, train_loader, val_loader, settings["epochs"], settings["out"])
    trainer.resume_if_possible()
    trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(SETTINGS)
