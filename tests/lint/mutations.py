"""Faults for the right scripts of right/: (script, code, what stands there, what takes its place).

A fault is found if the mutated script has this code and no other; RIGHT: other right ways to write it, in which these codes are not found.
"""

WRONG: list[tuple[str, str, str, str]] = [
    # Data
    ("torchrun", "LS101", "        sampler.set_epoch(epoch)\n", ""),
    ("spawn", "LS101", "        sampler.set_epoch(epoch)\n", ""),
    ("horovod", "LS101", "        sampler.set_epoch(epoch)\n", ""),
    ("spawn", "LS102", "DistributedSampler(train_set,", "DistributedSampler(test_set,"),
    ("spawn", "LS103", "world_size, sampler=sampler", "world_size, shuffle=True, sampler=sampler"),
    ("torchrun", "LS104 LS205", "    dist.all_reduce(sums)\n    return (sums[0] / sums[1]).item()\n\n\ndef main",
     "    return (sums[0] / sums[1]).item()\n\n\ndef main"),
    ("accelerate", "LS104", "            predictions, labels = accelerator.gather_for_metrics((predictions, labels))\n", ""),
    ("torchrun", "LS105", "DataLoader(own, batch_size=500)",
     "DataLoader(test_set, batch_size=500, sampler=DistributedSampler(test_set, shuffle=False))"),
    ("accelerate", "LS105", "gather_for_metrics", "gather"),
    ("spawn", "LS106", "DataLoader(test_set", "DataLoader(train_set"),
    ("spawn", "LS106", 'train=False, transform', 'train=True, transform'),
    ("spawn", "LS107", "    sampler = Dist", "    # a random quarter\n    train_set = torch.utils.data.Subset(train_set,"
     " range(len(train_set) // 4))\n    sampler = Dist"),
    ("torchrun", "LS108", '    if rank == 0:\n        datasets.MNIST("data", train=True, download=True)\n    dist.barrier()\n',
     '    datasets.MNIST("data", train=True, download=True)\n'),
    ("spawn", "LS108", 'train=True, transform', 'train=True, download=True, transform'),
    ("accelerate", "LS108", "    with accelerator.main_process_first():\n", "    if True:\n"),
    ("torchrun", "LS109", "batch_size=args.batch_size // world_size", "batch_size=args.batch_size"),
    ("torchrun", "LS109", "num_workers=4", "num_workers=os.cpu_count()"),
    ("torchrun", "LS110", "random.seed(torch.initial_seed() % 2**32)", "random.seed(0)"),
    ("torchrun", "LS110", "random.seed(torch.initial_seed() % 2**32)", "random.seed(1234 + worker_id)"),
    ("torchrun", "LS111", "transforms.Normalize((0.1307,), (0.3081,))]",
     "transforms.Normalize((0.1307,), (0.3081,)), transforms.Normalize((0.1307,), (0.3081,))]"),
    ("torchrun", "LS111", "        update = (i + 1)", "        images = (images - mean) / std\n        update = (i + 1)"),
    # Maths
    ("torchrun", "LS201", "scaler.scale(loss / accumulate)", "scaler.scale(loss)"),
    ("torchrun", "LS202", " or i + 1 == len(loader)\n", "\n"),
    ("torchrun", "LS203", "        sums += torch.stack([loss.detach() * len(labels), loss.new_tensor(len(labels))])\n        if update:",
     "        total += loss.detach()\n        mean = total / len(loader)\n        dist.all_reduce(mean, op=dist.ReduceOp.AVG)\n        if update:"),
    ("torchrun", "LS204", "    dist.all_reduce(sums)\n    return (sums[0] / sums[1]).item()\n\n\n@torch",
     "    return (sums[0] / sums[1]).item()\n\n\n@torch"),
    ("lightning", "LS204", ", sync_dist=True", ""),
    ("accelerate", "LS206", 'total = accelerator.reduce(total, "sum")', 'accelerator.reduce(total, "sum")\n        total /= 2'),
    ("torchrun", "LS207", "            scaler.unscale_(optimizer)\n", ""),
    ("spawn", "LS208", "BATCH // world_size", "BATCH"),
    ("spawn", "LS209", "lr=0.1", "lr=0.1 * world_size"),
    ("spawn", "LS210", "T_max=EPOCHS * len(loader)", "T_max=EPOCHS"),
    ("spawn", "LS210", "        if rank == 0:\n            model.eval()", "        scheduler.step()\n        if rank == 0:\n            model.eval()"),
    ("spawn", "LS210", "            scheduler.step()\n", "            for _ in range(world_size):\n                scheduler.step()\n"),
    ("torchrun", "LS211", "    torch.manual_seed(1 + rank)\n", ""),
    ("spawn", "LS212", "    test_loader = ", "    train_set, rest = torch.utils.data.random_split(train_set, [40000, 10000])\n    test_loader = "),
    ("torchrun", "LS213", "    model = DistributedDataParallel(model, device_ids=[local_rank])\n",
     "    model = DistributedDataParallel(model, device_ids=[local_rank])\n"
     "    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)\n"),
    ("torchrun", "LS214", "    model.eval()\n", ""),
    ("spawn", "LS215", "        model.train()\n", ""),
    ("torchrun", "LS215", "    model.train()\n", ""),
    # Process
    ("spawn", "LS301", "DDP(torchvision.models.resnet18(num_classes=10).cuda(rank), device_ids=[rank])",
     "DDP(torchvision.models.resnet18(num_classes=10))\n    model = model.cuda(rank)"),
    ("spawn", "LS302", "criterion(model(images), labels)", "criterion(model.module(images), labels)"),
    ("torchrun", "LS303", "    torch.cuda.set_device(local_rank)\n", '    torch.cuda.set_device(int(os.environ["RANK"]))\n'),
    ("torchrun", "LS304", '    local_rank = int(os.environ["LOCAL_RANK"])\n',
     '    parser.add_argument("--local_rank", type=int, default=0)\n    local_rank = parser.parse_args().local_rank\n'),
    ("spawn", "LS305", '    store = dist.TCPStore("localhost", port)\n    dist.init_process_group("nccl", store=store,',
     '    import os\n    os.environ["MASTER_ADDR"] = "localhost"\n    os.environ["MASTER_PORT"] = "12355"\n'
     '    dist.init_process_group("nccl",'),
    ("spawn", "LS305", '"nccl", store=store,', '"nccl", init_method="tcp://127.0.0.1:23456",'),
    ("torchrun", "LS306", "    dist.destroy_process_group()\n", ""),
    ("torchrun", "LS307", '    dist.init_process_group("nccl")\n    rank, world_size = dist.get_rank(), dist.get_world_size()\n',
     '    rank, world_size = dist.get_rank(), dist.get_world_size()\n    dist.init_process_group("nccl")\n'),
    ("torchrun", "LS308", "        if rank == 0:\n            print(", "        if rank == 0:\n            dist.barrier()\n            print("),
    ("torchrun", "LS308", "        accuracy = evaluate(model.module, test_loader, device)\n        scheduler.step()\n        if rank == 0:\n",
     "        scheduler.step()\n        if rank == 0:\n            accuracy = evaluate(model.module, test_loader, device)\n"),
    ("accelerate", "LS308", "        accelerator.print(", "        if accelerator.is_main_process:\n"
     "            accelerator.wait_for_everyone()\n        accelerator.print("),
    ("spawn", "LS309", "            optimizer.step()\n", "            optimizer.step()\n            dist.barrier()\n"),
    ("spawn", "LS310", "            optimizer.step()\n", "            optimizer.step()\n            last = loss.item()\n"),
    ("spawn", "LS310", "            optimizer.step()\n", "            optimizer.step()\n            print(loss)\n"),
    ("torchrun", "LS311", "        with nullcontext() if update else model.no_sync():\n", "        if True:\n"),
    ("torchrun", "LS312", "        with nullcontext() if update else model.no_sync():\n            with torch.autocast(device.type):\n"
     "                loss = F.cross_entropy(model(images), labels)\n",
     "        with torch.autocast(device.type):\n            loss = F.cross_entropy(model(images), labels)\n"
     "        with nullcontext() if update else model.no_sync():\n"),
    ("torchrun", "LS313", "device_ids=[local_rank])", "device_ids=[local_rank], find_unused_parameters=True)"),
    ("spawn", "LS314", 'if __name__ == "__main__":\n    main()\n', "main()\n"),
    ("spawn", "LS315", "    world_size = torch.cuda.device_count()\n    mp.spawn(run, args=(world_size, store.port), nprocs=world_size)\n",
     "    world_size = torch.cuda.device_count()\n    torch.cuda.set_device(0)\n    children = [mp.Process(target=run,"
     " args=(r, world_size, store.port)) for r in range(world_size)]\n    for child in children:\n        child.start()\n"),
    # Files
    ("torchrun", "LS401", '            torch.save(state, "last.pt")\n            if', '        torch.save(model.module.state_dict(), "last.pt")\n'
     '        if rank == 0:\n            torch.save(state, "all.pt")\n            if'),
    ("horovod", "LS401", "        if hvd.rank() == 0:\n            torch.save", "        if True:\n            torch.save"),
    ("torchrun", "LS402", "args.resume, map_location=device,", "args.resume,"),
    ("spawn", "LS403", "model.module.state_dict()", "model.state_dict()"),
    ("torchrun", "LS404", '                "optimizer": optimizer.state_dict(),\n', ""),
    ("torchrun", "LS404", '                "scaler": scaler.state_dict(),\n', ""),
    ("torchrun", "LS404", '                "scheduler": scheduler.state_dict(),\n', ""),
    ("torchrun", "LS405", "map_location=device, weights_only=True", "map_location=device, weights_only=False"),
    ("torchrun", "LS406", '    dist.barrier()\n    weights =', '    weights ='),
    ("torchrun", "LS407", "range(start, args.epochs)", "range(args.epochs)"),
]  # fmt: skip

RIGHT: list[tuple[str, str, str, str]] = [
    ("spawn", "LS208", "batch_size=BATCH // world_size, sampler=sampler)", "batch_size=BATCH, sampler=sampler)  # per process"),
    ("torchrun", "LS105", "DataLoader(own, batch_size=500)",
     "DataLoader(test_set, batch_size=500, sampler=DistributedSampler(test_set, shuffle=False, drop_last=True))"),
    ("spawn", "LS107", "    sampler = Dist", "    # a random quarter\n    train_set = torch.utils.data.Subset(train_set,"
     " torch.randperm(len(train_set))[:100].tolist())\n    sampler = Dist"),
    ("torchrun", "LS108", 'train=True, download=True)', 'train=True, download=rank == 0)'),
    ("torchrun", "LS201", "scaler.scale(loss / accumulate)", "scaler.scale(loss * (1 / accumulate))"),
    ("torchrun", "LS202", "update = (i + 1) % accumulate == 0 or i + 1 == len(loader)",
     "last = i + 1 == len(loader)\n        update = (i + 1) % accumulate == 0 or last"),
    ("spawn", "LS210", "EPOCHS * len(loader)", "50_000 // BATCH * EPOCHS"),
    ("torchrun", "LS211", "torch.manual_seed(1 + rank)", "torch.cuda.manual_seed(1 + rank)"),
    ("spawn", "LS215", "        if rank == 0:\n            model.eval()", "        if rank == 0:\n            model.train(False)"),
    ("torchrun", "LS303", "    torch.cuda.set_device(local_rank)\n",
     '    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())\n'),
    ("spawn", "LS305", '    dist.init_process_group("nccl", store=store,',
     '    import os\n    os.environ.setdefault("MASTER_PORT", "12355")\n    dist.init_process_group("nccl",'),
    ("torchrun", "LS308", "        if rank == 0:\n            print(", "        dist.barrier()\n        if rank == 0:\n            print("),
    ("spawn", "LS310", "            optimizer.step()\n",
     "            optimizer.step()\n            if step % 50 == 0:\n                print(loss.item())\n"),
    ("torchrun", "LS401", 'torch.save(state, "last.pt")', 'torch.save(state, f"last-{rank}.pt")'),
    ("torchrun", "LS405", "torch.load(args.resume, ", "torch.load(args.resume, mmap=True, "),
]  # fmt: skip

_CPU = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("{backend}")
model = DistributedDataParallel(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(4, 2)).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""

OWN: list[tuple[str, str]] = [
    ("LS316", _CPU.format(backend="nccl")),
    ("", _CPU.format(backend="gloo")),
    ("", "print('no training at all')\n"),
    ("LS103", "from torch.utils.data import DataLoader, RandomSampler\nds = [1]\n"
     "DataLoader(ds, shuffle=True, sampler=RandomSampler(ds))  # noqa: LS101\n"),
    ("", "from torch.utils.data import DataLoader, RandomSampler\nds = [1]\n"
     "DataLoader(ds, shuffle=True, sampler=RandomSampler(ds))  # noqa: LS103\n"),
    ("", "from torch.utils.data import DataLoader, RandomSampler\nds = [1]\n"
     "DataLoader(ds, shuffle=True, sampler=RandomSampler(ds))  # noqa\n"),
]  # fmt: skip
