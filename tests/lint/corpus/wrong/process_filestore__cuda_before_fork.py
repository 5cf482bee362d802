# expect: cuda-before-fork line 44 or 43 or 50
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import multiprocessing
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms


def worker(rank, world_size, store_path, queue):
    store = dist.FileStore(store_path, world_size)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size)
    torch.manual_seed(rank)
    dataset = datasets.MNIST("data", train=True, transform=transforms.ToTensor())
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=128 // world_size, sampler=sampler)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    model = nn.parallel.DistributedDataParallel(model.cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, dtype=torch.float64, device="cuda")
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total[0] += loss.detach() * len(y)
            total[1] += len(y)
        dist.all_reduce(total)
        if rank == 0:
            queue.put((epoch, float(total[0] / total[1])))
    dist.destroy_process_group()


def main(world_size=2):
    datasets.MNIST("data", download=True)
    print(f"{torch.cuda.mem_get_info()[0] / 2**30:.1f} GiB are free")
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [context.Process(target=worker, args=(r, world_size, store, queue)) for r in range(world_size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    while not queue.empty():
        print("epoch %d: loss %.4f" % queue.get())


if __name__ == "__main__":
    main()
