# expect: scheduler-not-saved line 101 or 83 or 102 or 116 or 117
"""FGVC Aircraft with PyTorch-Ignite.

One machine:      python ignite_aircraft.py --data DIR --out DIR --nproc 4
Several machines: torchrun --nnodes 2 --nproc_per_node 4 ... ignite_aircraft.py --data DIR --out DIR
"""
import argparse
import socket
from pathlib import Path

import ignite.distributed as idist
import torch
import torch.nn as nn
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import Checkpoint, DiskSaver, PiecewiseLinear, global_step_from_engine
from ignite.metrics import Accuracy, Loss
from ignite.utils import manual_seed, setup_logger
from torch.utils.data import DataLoader, Subset
from torchvision import transforms as T
from torchvision.datasets import FGVCAircraft
from torchvision.models import resnet34


def get_datasets(root):
    normalize = T.Normalize((0.48, 0.51, 0.53), (0.22, 0.21, 0.25))
    train_tf = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(), normalize])
    eval_tf = T.Compose([T.Resize((256, 256)), T.CenterCrop(224), T.ToTensor(), normalize])
    with idist.one_rank_first(local=True):
        train = FGVCAircraft(root, split="train", transform=train_tf, download=True)
    return train, FGVCAircraft(root, split="val", transform=eval_tf)


def get_dataflow(config):
    train, val = get_datasets(config["data"])
    # auto_dataloader divides batch size and workers by the processes and adds the distributed sampler
    train_loader = idist.auto_dataloader(
        train, batch_size=config["batch_size"], num_workers=config["num_workers"], shuffle=True, drop_last=True
    )
    share = Subset(val, range(idist.get_rank(), len(val), idist.get_world_size()))
    val_loader = DataLoader(
        share,
        batch_size=max(1, config["batch_size"] // idist.get_world_size()),
        num_workers=max(1, config["num_workers"] // idist.get_nproc_per_node()),
    )
    return train_loader, val_loader


def create_trainer(model, optimizer, criterion, scheduler, config):
    device = idist.device()

    def step(engine, batch):
        x, y = batch
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        model.train()
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    trainer = Engine(step)
    trainer.add_event_handler(Events.ITERATION_STARTED, scheduler)
    return trainer


def training(local_rank, config):
    rank = idist.get_rank()
    manual_seed(config["seed"] + rank)
    device = idist.device()
    logger = setup_logger("aircraft", distributed_rank=rank)

    train_loader, val_loader = get_dataflow(config)
    net = resnet34(num_classes=100)
    net.fc = nn.Sequential(nn.Dropout(0.4), net.fc)
    model = idist.auto_model(net, sync_bn=True)
    core = model.module if idist.get_world_size() > 1 else model
    # the rate belongs to the total batch, which stays the same with more processes
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, weight_decay=5e-4))
    criterion = nn.CrossEntropyLoss().to(device)

    per_epoch = len(train_loader)
    points = [(0, 0.0), (config["warmup"] * per_epoch, config["lr"]), (config["epochs"] * per_epoch, 0.0)]
    scheduler = PiecewiseLinear(optimizer, "lr", milestones_values=points)
    trainer = create_trainer(model, optimizer, criterion, scheduler, config)

    @trainer.on(Events.EPOCH_STARTED)
    def new_order(engine):
        if idist.get_world_size() > 1:
            train_loader.sampler.set_epoch(engine.state.epoch - 1)

    # ignite's metrics add up the processes' counts
    metrics = {"accuracy": Accuracy(device=device), "loss": Loss(criterion, device=device)}
    evaluator = create_supervised_evaluator(core, metrics=metrics, device=device)

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine):
        result = evaluator.run(val_loader).metrics
        logger.info("epoch %d: accuracy %.4f, loss %.4f", engine.state.epoch, result["accuracy"], result["loss"])

    out = Path(config["out"])
    to_save = dict(trainer=trainer, model=core, optimizer=optimizer)
    last = Checkpoint(to_save, DiskSaver(out / "resume", require_empty=False), n_saved=1)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, last)
    best = Checkpoint(
        {"model": core},
        DiskSaver(out / "best", require_empty=False),
        n_saved=1,
        filename_prefix="best",
        score_name="accuracy",
        score_function=Checkpoint.get_default_score_fn("accuracy"),
        global_step_transform=global_step_from_engine(trainer),
    )
    evaluator.add_event_handler(Events.COMPLETED, best)

    if config["resume"]:
        state = torch.load(config["resume"], map_location="cpu", weights_only=True)
        Checkpoint.load_objects(to_load=to_save, checkpoint=state)

    trainer.run(train_loader, max_epochs=config["epochs"])
    logger.info("done")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--resume")
    parser.add_argument("--batch-size", type=int, default=128, help="over all processes")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--num-workers", type=int, default=16, help="of a machine")
    parser.add_argument("--seed", type=int, default=333)
    parser.add_argument("--nproc", type=int, default=None, help="processes to spawn; not with torchrun")
    config = vars(parser.parse_args())
    spawn = {}
    if config["nproc"]:
        with socket.socket() as s:
            s.bind(("", 0))
            spawn = {"nproc_per_node": config["nproc"], "master_addr": "127.0.0.1", "master_port": s.getsockname()[1]}
    with idist.Parallel(backend="nccl", **spawn) as parallel:
        parallel.run(training, config)


if __name__ == "__main__":
    main()
