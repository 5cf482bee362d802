# expect: none
# accelerate launch textures_accelerate_nb.py OUTPUT_FOLDER     (describable textures, 47 classes)
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import DTD
from torchvision.models import resnet34

ROOT = "textures"
BEST = Path(sys.argv[1]) / "best.pt"
EPOCHS = 40
TOTAL_BATCH = 128      # per step, split over the processes
RATE = 0.04            # for TOTAL_BATCH

# split_batches: every loader's batch is the whole step's, each process takes its part of it
accelerator = Accelerator(mixed_precision="bf16",
                          dataloader_config=DataLoaderConfiguration(split_batches=True))
set_seed(88, device_specific=True)

with accelerator.local_main_process_first():
    DTD(ROOT, split="train", download=accelerator.is_local_main_process)

normal = transforms.Normalize([0.531, 0.475, 0.427], [0.268, 0.258, 0.267])
learn = DTD(ROOT, split="train", transform=transforms.Compose([
    transforms.RandomResizedCrop(224, scale=(0.3, 1.0)), transforms.RandomHorizontalFlip(),
    transforms.ToTensor(), normal]))
still = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), normal])
tune = DTD(ROOT, split="val", transform=still)
exam = DTD(ROOT, split="test", transform=still)

learn_batches = DataLoader(learn, batch_size=TOTAL_BATCH, shuffle=True, num_workers=4, drop_last=True)
tune_batches = DataLoader(tune, batch_size=TOTAL_BATCH, num_workers=4)
exam_batches = DataLoader(exam, batch_size=TOTAL_BATCH, num_workers=4)

net = resnet34(num_classes=47)
optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-3)
plan = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
net, optimizer, learn_batches, tune_batches, exam_batches = accelerator.prepare(
    net, optimizer, learn_batches, tune_batches, exam_batches)


def measure(batches):
    net.eval()
    hits = torch.zeros((), device=accelerator.device)
    count = 0
    for image, kind in batches:
        with torch.no_grad():
            guess = net(image).argmax(dim=1)
        guess, kind = accelerator.gather_for_metrics((guess, kind))
        hits += (guess == kind).sum()
        count += len(kind)
    return hits.item() / count


best = 0.0
for epoch in range(EPOCHS):
    net.train()
    for image, kind in learn_batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(image), kind)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 2.0)
        optimizer.step()
    plan.step()
    tuned = measure(tune_batches)
    accelerator.print(f"epoch {epoch + 1}/{EPOCHS}: val {tuned:.4f}")
    if tuned > best:
        best = tuned
        if accelerator.is_main_process:
            BEST.parent.mkdir(parents=True, exist_ok=True)
            torch.save(accelerator.unwrap_model(net).state_dict(), BEST)

accelerator.wait_for_everyone()
weights = torch.load(BEST, map_location=accelerator.device, weights_only=True)
accelerator.unwrap_model(net).load_state_dict(weights)
accelerator.print(f"test {measure(exam_batches):.4f}")
accelerator.end_training()
