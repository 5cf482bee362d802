# expect: sync-each-step line 28
import argparse

import ignite.distributed as idist
import torch
from ignite.contrib.engines import common
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, models, transforms


class TrainStep:
    def __init__(self, model, optimizer, device):
        self.model, self.optimizer, self.device = model, optimizer, device
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.05)

    def __call__(self, engine, batch):
        self.model.train()
        images, labels = (part.to(self.device, non_blocking=True) for part in batch)
        loss = self.criterion(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
        self.optimizer.step()
        return {"loss": loss.item()}


def loaders(root, batch_size):
    transform = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()])
    train = datasets.ImageFolder(f"{root}/train", transform)
    val = datasets.ImageFolder(f"{root}/val", transform)
    mine = Subset(val, range(idist.get_rank(), len(val), idist.get_world_size()))
    train_loader = idist.auto_dataloader(train, batch_size=batch_size, shuffle=True, num_workers=16, drop_last=True)
    return train_loader, DataLoader(mine, batch_size=128, num_workers=4), len(train.classes)


def run(local_rank, args):
    device = idist.device()
    torch.manual_seed(50 + idist.get_rank())
    train_loader, val_loader, classes = loaders(args.root, args.batch_size)
    model = idist.auto_model(models.densenet121(num_classes=classes), sync_bn=True)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True))
    steps = args.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=steps)

    trainer = Engine(TrainStep(model, optimizer, device))
    sampler = train_loader.sampler if idist.get_world_size() > 1 else None
    # sets the sampler's epoch, steps the scheduler at each iteration, averages the loss over the processes
    common.setup_common_training_handlers(
        trainer,
        train_sampler=sampler,
        lr_scheduler=scheduler,
        output_names=["loss"],
        with_gpu_stats=False,
        clear_cuda_cache=False,
        stop_on_nan=False,  # it would look at every loss
    )
    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()}, device=device)
    keeper = Checkpoint(
        {"model": model}, DiskSaver(args.output, require_empty=False), score_name="accuracy", n_saved=1
    )
    evaluator.add_event_handler(Events.COMPLETED, keeper)

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine):
        evaluator.run(val_loader)
        if idist.get_rank() == 0:
            print(engine.state.epoch, f"{evaluator.state.metrics['accuracy']:.4f}")

    trainer.run(train_loader, max_epochs=args.epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--output", default="best")
    parser.add_argument("--batch-size", type=int, default=256, help="divided by the number of processes")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.1)
    arguments = parser.parse_args()
    with idist.Parallel(backend="nccl") as parallel:
        parallel.run(run, arguments)
