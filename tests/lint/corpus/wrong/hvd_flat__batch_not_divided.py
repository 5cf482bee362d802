# expect: batch-not-divided line 20
# horovodrun -np 8 -H a:4,b:4 python hvd_flat.py
import horovod.torch as hvd
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms

hvd.init()
torch.cuda.set_device(hvd.local_rank())
torch.manual_seed(5 + hvd.rank())

GLOBAL_BATCH, EPOCHS = 512, 60
normalize = transforms.Normalize((0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762))
augment = transforms.Compose([transforms.RandomCrop(32, 4), transforms.ToTensor(), normalize])
train_set = datasets.CIFAR100("data", True, augment)
test_set = datasets.CIFAR100("data", False, transforms.Compose([transforms.ToTensor(), normalize]))
sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), drop_last=True)
train_loader = DataLoader(train_set, GLOBAL_BATCH, sampler=sampler, num_workers=2, drop_last=True)
test_loader = DataLoader(Subset(test_set, range(hvd.rank(), len(test_set), hvd.size())), 500, num_workers=2)

model = models.resnet34(num_classes=100, norm_layer=hvd.SyncBatchNorm).cuda()
optimizer = optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=5e-4)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    model.train()
    running = torch.zeros((), device="cuda")
    for images, labels in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
        loss.backward()
        optimizer.step()
        running += loss.detach()
    scheduler.step()
    mean = hvd.allreduce(running / len(train_loader), name="loss")

    model.eval()
    hits = torch.zeros((), device="cuda")
    with torch.no_grad():
        for images, labels in test_loader:
            hits += (model(images.cuda()).argmax(1) == labels.cuda()).sum()
    hits = hvd.allreduce(hits, op=hvd.Sum, name="hits")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {mean.item():.4f}, accuracy {hits.item() / len(test_set):.4f}")

if hvd.rank() == 0:
    torch.save(model.state_dict(), "cifar100.pt")
hvd.shutdown()
