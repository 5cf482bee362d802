# expect: none
"""STL-10 with Ignite; torchrun --nproc_per_node=4 ignite_events.py config.yaml"""
import sys
from pathlib import Path

import ignite.distributed as idist
import torch
import torch.nn.functional as F
import torchvision
import yaml
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy, Loss
from ignite.utils import setup_logger
from torch.utils.data import DataLoader, Subset
from torchvision import transforms as T


def get_datasets(root):
    norm = T.Normalize((0.447, 0.440, 0.407), (0.260, 0.257, 0.271))
    augment = T.Compose([T.RandomCrop(96, padding=12), T.RandomHorizontalFlip(), T.ToTensor(), norm])
    plain = T.Compose([T.ToTensor(), norm])
    if idist.get_rank() == 0:
        torchvision.datasets.STL10(root, split="train", download=True)
    idist.barrier()
    train = torchvision.datasets.STL10(root, split="train", transform=augment)
    test = torchvision.datasets.STL10(root, split="test", transform=plain)
    return train, test


def make_trainer(model, optimizer, device):
    def step(engine, batch):
        model.train()
        x, y = (t.to(device, non_blocking=True) for t in batch)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Engine(step)


def make_evaluator(net, device):
    @torch.no_grad()
    def infer(engine, batch):
        net.eval()
        x, y = (t.to(device, non_blocking=True) for t in batch)
        return net(x), y

    evaluator = Engine(infer)
    Accuracy(device=device).attach(evaluator, "accuracy")
    Loss(F.cross_entropy, device=device).attach(evaluator, "nll")
    return evaluator


def run(local_rank, cfg):
    rank, world = idist.get_rank(), idist.get_world_size()
    device = idist.device()
    logger = setup_logger("stl10", distributed_rank=rank)
    torch.manual_seed(cfg["seed"] + rank)      # DDP copies the weights of rank 0

    train_set, test_set = get_datasets(cfg["root"])
    # auto_dataloader divides the batch by the processes and the workers by those of the machine
    train_loader = idist.auto_dataloader(train_set, batch_size=cfg["total_batch"], shuffle=True,
                                         drop_last=True, num_workers=cfg["workers_per_machine"])
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), batch_size=200,
                             num_workers=2, pin_memory=True)

    net = torchvision.models.resnet18(weights=None, num_classes=10)
    model = idist.auto_model(net, sync_bn=True)
    bare = model.module if world > 1 else model
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=cfg["lr"], momentum=0.9,
                                                 weight_decay=5e-4, nesterov=True))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=cfg["epochs"] // 3, gamma=0.1)

    trainer = make_trainer(model, optimizer, device)
    evaluator = make_evaluator(bare, device)

    @trainer.on(Events.EPOCH_STARTED)
    def reshuffle(engine):
        if world > 1:
            train_loader.sampler.set_epoch(engine.state.epoch)

    @trainer.on(Events.EPOCH_COMPLETED)
    def next_rate():
        scheduler.step()

    @trainer.on(Events.EPOCH_COMPLETED(every=cfg["eval_every"]) | Events.COMPLETED)
    def test(engine):
        metrics = evaluator.run(test_loader).metrics
        logger.info(f"epoch {engine.state.epoch}: accuracy {metrics['accuracy']:.4f} nll {metrics['nll']:.4f}")

    to_save = {"trainer": trainer, "model": model, "optimizer": optimizer, "scheduler": scheduler}
    keeper = Checkpoint(to_save, DiskSaver(cfg["out"], create_dir=True, require_empty=False), n_saved=2,
                        global_step_transform=lambda *_: trainer.state.epoch)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, keeper)

    if cfg.get("resume"):
        stored = torch.load(cfg["resume"], map_location=device, weights_only=True)
        Checkpoint.load_objects(to_load=to_save, checkpoint=stored)
        logger.info(f"resumed from {cfg['resume']}")

    trainer.run(train_loader, max_epochs=cfg["epochs"])


def main():
    cfg = {"total_batch": 256, "lr": 0.1, "epochs": 90, "eval_every": 5,
           "workers_per_machine": 16, "seed": 99}
    cfg.update(yaml.safe_load(Path(sys.argv[1]).read_text()))
    with idist.Parallel(backend="nccl") as parallel:
        parallel.run(run, cfg)


if __name__ == "__main__":
    main()
