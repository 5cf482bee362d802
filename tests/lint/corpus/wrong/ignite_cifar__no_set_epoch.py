# expect: no-set-epoch line 66 or 29
import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy, Loss
from torch import nn, optim
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, models, transforms


def get_datasets(path):
    normalize = transforms.Normalize((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616))
    augment = transforms.Compose([transforms.RandomCrop(32, 4), transforms.ToTensor(), normalize])
    plain = transforms.Compose([transforms.ToTensor(), normalize])
    if idist.get_local_rank() > 0:
        idist.barrier()
    train = datasets.CIFAR10(path, train=True, download=idist.get_local_rank() == 0, transform=augment)
    if idist.get_local_rank() == 0:
        idist.barrier()
    return train, datasets.CIFAR10(path, train=False, transform=plain)


def training(local_rank, config):
    rank, world_size, device = idist.get_rank(), idist.get_world_size(), idist.device()
    torch.manual_seed(config["seed"] + rank)
    train_set, test_set = get_datasets(config["data"])
    # auto_dataloader divides batch and workers by the number of processes and adds a distributed sampler
    train_loader = idist.auto_dataloader(
        train_set, batch_size=config["batch_size"], num_workers=8, shuffle=True, drop_last=True
    )
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), batch_size=500, num_workers=2)

    model = idist.auto_model(models.resnet18(num_classes=10), sync_bn=True)
    optimizer = idist.auto_optim(optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9, weight_decay=5e-4))
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, config["epochs"])
    criterion = nn.CrossEntropyLoss()

    def train_step(engine, batch):
        model.train()
        x, y = batch[0].to(device, non_blocking=True), batch[1].to(device, non_blocking=True)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    trainer = Engine(train_step)
    evaluator = create_supervised_evaluator(
        model, metrics={"accuracy": Accuracy(), "loss": Loss(criterion)}, device=device
    )

    @trainer.on(Events.EPOCH_COMPLETED)
    def end_of_epoch(engine):
        scheduler.step()
        metrics = evaluator.run(test_loader).metrics  # summed over the processes by Ignite
        if rank == 0:
            print(f"epoch {engine.state.epoch}: {metrics['accuracy']:.4f} {metrics['loss']:.4f}")

    to_save = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "trainer": trainer}
    saver = Checkpoint(to_save, DiskSaver(config["output"], require_empty=False), n_saved=1)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
    if config["resume"]:
        state = torch.load(config["resume"], map_location="cpu", weights_only=True)
        Checkpoint.load_objects(to_load=to_save, checkpoint=state)
    trainer.run(train_loader, max_epochs=config["epochs"])


if __name__ == "__main__":
    config = dict(data="data", output="out", resume="", seed=543, batch_size=512, lr=0.4, epochs=24)
    with idist.Parallel(backend="nccl", nproc_per_node=torch.cuda.device_count()) as parallel:
        parallel.run(training, config)
