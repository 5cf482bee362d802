# expect: none
"""Bird song recognition with PyTorch-Ignite. torchrun --nproc_per_node=4 birdsong.py --data ... --output ..."""
import argparse
from functools import partial

import ignite.distributed as idist
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import Checkpoint, DiskSaver, ProgressBar, global_step_from_engine
from ignite.metrics import Accuracy, Loss
from ignite.utils import manual_seed, setup_logger
from torch.utils.data import DataLoader, Dataset, Subset


class SongDataset(Dataset):
    def __init__(self, path, augment=False):
        with np.load(path) as archive:
            self.mels, self.species = archive["mels"], archive["species"].astype(np.int64)
        self.augment = augment

    def __len__(self):
        return len(self.species)

    def __getitem__(self, item):
        mel = torch.from_numpy(self.mels[item]).float().unsqueeze(0)
        if self.augment:
            start = int(torch.randint(mel.shape[-1] - 16, (1,)))
            mel[..., start : start + 16] = 0
        return mel, int(self.species[item])


def build_net(num_classes):
    chans = [1, 32, 64, 128, 256]
    blocks = []
    for c_in, c_out in zip(chans, chans[1:]):
        blocks += [nn.Conv2d(c_in, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(256, num_classes))


def get_dataflow(config):
    train_ds = SongDataset(config["data"] + "/train.npz", augment=True)
    valid_ds = SongDataset(config["data"] + "/valid.npz")
    # auto_dataloader divides batch size and workers among the processes, and makes the sampler
    train_loader = idist.auto_dataloader(
        train_ds, batch_size=config["batch_size"], num_workers=config["num_workers"], shuffle=True, drop_last=True
    )
    # each process its own part, none padded, hence a plain loader
    part = Subset(valid_ds, list(range(idist.get_rank(), len(valid_ds), idist.get_world_size())))
    workers = max(1, config["num_workers"] // idist.get_nproc_per_node())
    valid_loader = DataLoader(part, batch_size=64, num_workers=workers)
    return train_loader, valid_loader


def train_step(engine, batch, model, optimizer, scheduler, criterion):
    model.train()
    x, y = (t.to(idist.device(), non_blocking=True) for t in batch)
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss.detach()


def training(local_rank, config):
    manual_seed(config["seed"])
    logger = setup_logger("birdsong", distributed_rank=idist.get_rank())
    train_loader, valid_loader = get_dataflow(config)
    model = idist.auto_model(build_net(config["num_classes"]), sync_bn=True)
    # config["lr"] belongs to config["batch_size"], which is that of all processes
    optimizer = idist.auto_optim(optim.AdamW(model.parameters(), lr=config["lr"]))
    scheduler = optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=config["lr"], total_steps=config["epochs"] * len(train_loader)
    )
    criterion = nn.CrossEntropyLoss().to(idist.device())
    manual_seed(config["seed"] + 1 + idist.get_rank())

    step = partial(train_step, model=model, optimizer=optimizer, scheduler=scheduler, criterion=criterion)
    trainer = Engine(step)
    plain_model = getattr(model, "module", model)
    metrics = {"accuracy": Accuracy(device=idist.device()), "loss": Loss(criterion, device=idist.device())}
    evaluator = create_supervised_evaluator(plain_model, metrics=metrics, device=idist.device(), non_blocking=True)

    @trainer.on(Events.EPOCH_STARTED)
    def reshuffle():
        if idist.get_world_size() > 1:
            train_loader.sampler.set_epoch(trainer.state.epoch - 1)

    @trainer.on(Events.EPOCH_COMPLETED)
    def run_validation():
        state = evaluator.run(valid_loader)
        logger.info(
            "epoch %d: accuracy %.4f, loss %.4f", trainer.state.epoch, state.metrics["accuracy"], state.metrics["loss"]
        )

    saver = DiskSaver(config["output"], require_empty=False)
    best_handler = Checkpoint(
        {"model": model},
        saver,
        filename_prefix="best",
        n_saved=1,
        score_name="accuracy",
        score_function=Checkpoint.get_default_score_fn("accuracy"),
        global_step_transform=global_step_from_engine(trainer),
    )
    evaluator.add_event_handler(Events.COMPLETED, best_handler)
    to_save = {"trainer": trainer, "model": model, "optimizer": optimizer, "scheduler": scheduler, "best": best_handler}
    trainer.add_event_handler(
        Events.EPOCH_COMPLETED,
        Checkpoint(to_save, saver, n_saved=2, global_step_transform=lambda *_: trainer.state.epoch),
    )
    if config["resume"]:
        checkpoint = torch.load(config["resume"], map_location="cpu", weights_only=True)
        Checkpoint.load_objects(to_load=to_save, checkpoint=checkpoint)
    if idist.get_rank() == 0:
        ProgressBar().attach(trainer)

    trainer.run(train_loader, max_epochs=config["epochs"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--resume", default="")
    parser.add_argument("--batch_size", type=int, default=256, help="of all processes")
    parser.add_argument("--num_workers", type=int, default=16, help="of all processes of a machine")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--num_classes", type=int, default=264)
    parser.add_argument("--seed", type=int, default=12)
    cfg = vars(parser.parse_args())
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with idist.Parallel(backend=backend) as parallel:  # destroys the group when left
        parallel.run(training, cfg)
