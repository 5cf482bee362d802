# expect: none
"""Training with a small runner and hooks:  torchrun --nproc-per-node=8 train.py config.json

lr in the configuration is for 1024 images in a step, images_per_gpu and workers_per_gpu are for one process.
"""
import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchvision import models

from mini.data import training_loader, validation_loader
from mini.hooks import CheckpointHook, EvalHook, LogHook, ScheduleHook
from mini.runner import Runner


def main(config):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(config["seed"] + dist.get_rank())
    train_loader = training_loader(config["data"], config["seed"])
    val_loader = validation_loader(config["data"])

    net = models.swin_t(num_classes=config["classes"], dropout=0.1).cuda()
    model = DistributedDataParallel(net, device_ids=[local_rank])
    lr = config["lr"] * config["data"]["images_per_gpu"] * dist.get_world_size() / 1024
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=config["weight_decay"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config["epochs"])

    runner = Runner(model, optimizer, config["epochs"])
    runner.register(ScheduleHook(schedule))
    runner.register(EvalHook(val_loader))
    runner.register(LogHook(every=100))
    runner.register(CheckpointHook(config["work_dir"], schedule))
    if config.get("resume"):
        runner.resume(os.path.join(config["work_dir"], "last.pth"), schedule)
    runner.run(train_loader)
    dist.destroy_process_group()


if __name__ == "__main__":
    with open(sys.argv[1]) as handle:
        main(json.load(handle))
