"""What an audit can find: a finding of one script, and the faults by their codes, which `lockstep lint` has as well."""

# ruff: noqa: E501

from dataclasses import dataclass

APART = "LS501"  # no rule of lint's: the weights on N processes are others than on one, and nothing above says why


@dataclass(frozen=True, order=True)
class Finding:
    """`says` has the numbers; `at` is the user's line, as "train.py:41"; `nproc` the number of processes it is of.

    A note is nothing to mend: it says what differs by choice.
    """

    code: str
    at: str
    says: str
    nproc: int
    note: bool = False


def times(count: int, thing: str, more: str = "") -> str:
    """A number with its thing: "1 sample", "2,500 samples"."""
    return f"{count:,} {thing if count == 1 else more or thing + 's'}"


@dataclass(frozen=True)
class Fault:
    """`title` names the fault, `result` what becomes of the training by it, `mend` what to write instead."""

    title: str
    result: str = ""
    mend: str = ""


FAULTS = {
    "LS101": Fault("set_epoch is never called",
        "every epoch has the order of the first one, on 2 processes and more; each rank sees the same part in all of them",
        "for epoch in range(epochs):\n    sampler.set_epoch(epoch)"),
    "LS102": Fault("the sampler is over another data set than the loader's",
        "the loader reads the samples that another set's numbers name: a part of the data is never read, or read by chance",
        "sampler = DistributedSampler(dataset)\nloader = DataLoader(dataset, sampler=sampler)"),
    "LS104": Fault("a rank's part of the test set is taken for the whole",
        "the printed accuracy is of 1/N of the set: on 4 processes of 2,500 of 10,000 images",
        "sums = torch.tensor([correct, total], device=device)\ndist.all_reduce(sums)\naccuracy = (sums[0] / sums[1]).item()"),
    "LS105": Fault("samples that pad the parts are counted twice",
        "the accuracy depends on N: 10,000 images on 3 processes count as 10,002, the first two of them twice",
        "DataLoader(Subset(test_set, range(rank, len(test_set), world_size)))  # or accelerator.gather_for_metrics"),
    "LS106": Fault("the test loader reads the training set",
        "the printed accuracy is that on samples that were trained on: it says nothing about new ones",
        "test_loader = DataLoader(test_set, batch_size=256)"),
    "LS108": Fault("every rank downloads the data",
        "N processes fetch and write the same files at once: N times the traffic, and of a data set broken archives, or one that is read while it is unpacked",
        "if rank == 0:\n    MNIST(root, download=True)\ndist.barrier()\ndataset = MNIST(root, download=False)"),
    "LS201": Fault("the loss is not divided by the number of accumulated passes",
        "gradients are k times as large: with 4 passes an update of SGD goes 4 times as far",
        "loss = loss / accumulate\nloss.backward()"),
    "LS202": Fault("the last, shorter group of accumulated passes makes no update",
        "with 782 batches and k = 4 the last 2 batches' gradients are dropped, or enter the next epoch's first update",
        "if (i + 1) % accumulate == 0 or i + 1 == len(loader):\n    optimizer.step()"),
    "LS203": Fault("means over unequal batches are averaged",
        "samples of the short last batch count more than the others: with 10,000 images in batches of 256, 16 images 16 times",
        "total += loss.detach() * len(labels)\ncount += len(labels)\n...\ndist.all_reduce(total)\ndist.all_reduce(count)\nmean = total / count"),
    "LS204": Fault("one rank's own number is printed as the training's",
        "the epoch's loss is of 1/N of the samples, and jumps when N changes",
        "sums = torch.tensor([total, count], device=device)\ndist.all_reduce(sums)\nmean = (sums[0] / sums[1]).item()"),
    "LS205": Fault("the best model is chosen by one rank's number",
        "the kept weights are the best on 1/N of the test set; with N, another epoch's are kept",
        "dist.all_reduce(sums)  # before the number is compared"),
    "LS206": Fault("the reduced value is computed and dropped",
        "what is printed, logged or compared is this rank's own number, as if nothing had been reduced",
        "loss = reduce_mean(loss)"),
    "LS207": Fault("gradients are clipped before they are unscaled",
        "gradients that are 65,536 times too large are cut to the limit: nearly each update has the same, tiny length",
        "scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), limit)\nscaler.step(optimizer)"),
    "LS208": Fault("neither batch size nor learning rate knows the number of processes",
        "N processes train another experiment: on 4 processes 4 times the batch, a quarter of the steps, at the same rate",
        "DataLoader(dataset, batch_size=batch_size // world_size, sampler=sampler)  # the same experiment\nSGD(model.parameters(), lr=lr * world_size)  # or another one, on purpose"),
    "LS209": Fault("batch size and learning rate are both adjusted to N",
        "the global batch stays as it was, and the rate is N times too high: on 8 processes 8 times, which diverges or trains badly",
        "SGD(model.parameters(), lr=lr)  # with batch_size // world_size"),
    "LS210": Fault("the scheduler is stepped a wrong number of times",
        "the rate ends before the training does, or long after it: stepped N times as often, it is over after 1/N of the epochs",
        "scheduler = CosineAnnealingLR(optimizer, T_max=epochs * len(loader))  # and one step() a batch"),
    "LS211": Fault("all ranks draw the same dropout masks",
        "the k-th samples of all ranks lose the same units: a step sees N times fewer different masks",
        "torch.manual_seed(seed)         # the same initial weights\nmodel = Net()\ntorch.manual_seed(seed + rank)  # other masks"),
    "LS212": Fault("ranks draw different splits or weights",
        "each rank cuts the set elsewhere: samples of one rank's test part are trained on by another; weights differ without DDP",
        "random_split(dataset, sizes, generator=torch.Generator().manual_seed(0))"),
    "LS214": Fault("the model is evaluated in training mode",
        "dropout is active and batch norm takes the test batch's own statistics: the accuracy is too low, and depends on the batch size",
        "model.eval()\nwith torch.no_grad():\n    ...\nmodel.train()"),
    "LS215": Fault("after the first evaluation the model stays in evaluation mode",
        "from epoch 2 on there is no dropout, and batch norm's running statistics stand still at those of epoch 1",
        "for epoch in range(epochs):\n    model.train()"),
    "LS302": Fault("the training step calls the model without its wrapper",
        "gradients are never averaged: each rank trains a model of its own on 1/N of the data, and one of them is saved",
        "outputs = ddp_model(images)"),
    "LS303": Fault("the rank over all machines is taken for a device's number",
        "on the second machine rank 8 asks for GPU 8 of 8: CUDA raises invalid device ordinal; on one machine nothing shows",
        'local_rank = int(os.environ["LOCAL_RANK"])\ntorch.cuda.set_device(local_rank)'),
    "LS304": Fault("the local rank is taken from the command line",
        "under torchrun each process has the default: all ranks use GPU 0 (or fail on an unknown argument)",
        'local_rank = int(os.environ["LOCAL_RANK"])'),
    "LS308": Fault("a collective that only some ranks reach",
        "the ranks that are there wait for the others until the timeout (10 or 30 minutes), and fail; or a later call is answered wrongly",
        "dist.all_reduce(x)  # on all ranks\nif rank == 0:\n    print(x)"),
    "LS401": Fault("every rank writes the same file",
        "N processes write into one file at once: now and then a checkpoint that can't be read",
        "if rank == 0:\n    torch.save(state, path)"),
    "LS402": Fault("a checkpoint is loaded without map_location",
        "each rank loads rank 0's tensors onto GPU 0: N times the memory there, and out of memory on large models",
        'torch.load(path, map_location="cpu", weights_only=True)'),
    "LS404": Fault("what a resumed run needs is not in the checkpoint",
        "a resumed run is another one: momentum starts from 0, the schedule or the epochs from the beginning",
        'torch.save({"model": ..., "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),\n            "scaler": scaler.state_dict(), "epoch": epoch}, path)'),
    "LS406": Fault("nothing lets the ranks wait between saving and loading",
        "ranks read a file that rank 0 has not finished, or not begun: an error, or the weights of an earlier run",
        "if rank == 0:\n    torch.save(state, path)\ndist.barrier()\nstate = torch.load(path)"),
    "LS407": Fault("a resumed run begins at epoch 0 again",
        "the data's order and the schedule start from the beginning: with 90 epochs and a stop after 60, 150 are trained",
        'start = checkpoint["epoch"] + 1\nfor epoch in range(start, epochs):'),
    APART: Fault("the weights are not those of one process"),
}  # fmt: skip
