# expect: saved-every-rank line 124
# Blood cells, 8 classes. My Kaggle notebook as a script: accelerate launch --num_processes 2 blood_kaggle_accel.py
# %%
import math
from pathlib import Path

import pandas as pd
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from PIL import Image
from sklearn.model_selection import StratifiedKFold
from torch.utils.data import DataLoader, Dataset
from torchvision import models, transforms

# %% settings
INPUT = Path("/kaggle/input/blood-cells")
WORK = Path("/kaggle/working/blood")
FOLD, N_FOLDS = 0, 5
EPOCHS = 15
BS = 16               # of a process
ACCUM = 4             # batches to a step
LR = 3e-4             # for 128 images to a step: 16 x 4 x 2
SEED = 7
RESUME_FROM = None    # e.g. WORK / "checkpoints/checkpoint_3"


# %% data
class Cells(Dataset):
    def __init__(self, frame, tfm):
        self.frame = frame.reset_index(drop=True)
        self.tfm = tfm

    def __len__(self):
        return len(self.frame)

    def __getitem__(self, i):
        row = self.frame.loc[i]
        with Image.open(INPUT / "images" / row["file"]) as im:
            return self.tfm(im.convert("RGB")), int(row["label"])


def fold_frames():
    table = pd.read_csv(INPUT / "labels.csv")
    folds = StratifiedKFold(N_FOLDS, shuffle=True, random_state=SEED).split(table, table["label"])
    trn_idx, val_idx = list(folds)[FOLD]
    return table.iloc[trn_idx], table.iloc[val_idx]


norm = transforms.Normalize((0.87, 0.75, 0.72), (0.16, 0.19, 0.08))
tfm_train = transforms.Compose([transforms.RandomResizedCrop(256, (0.7, 1)), transforms.RandomHorizontalFlip(),
                                transforms.RandomVerticalFlip(), transforms.ToTensor(), norm])
tfm_valid = transforms.Compose([transforms.Resize((256, 256)), transforms.ToTensor(), norm])


# %% what a resumed run has to know besides
class Progress:
    def __init__(self):
        self.epoch = 0
        self.best = 0.0

    def state_dict(self):
        return {"epoch": self.epoch, "best": self.best}

    def load_state_dict(self, state):
        self.epoch, self.best = state["epoch"], state["best"]


# %% training
def validate(accelerator, model, valid_dl):
    model.eval()
    all_pred, all_true = [], []
    for x, y in valid_dl:
        with torch.no_grad():
            pred = model(x).argmax(1)
        pred, y = accelerator.gather_for_metrics((pred, y))
        all_pred.append(pred)
        all_true.append(y)
    pred, true = torch.cat(all_pred), torch.cat(all_true)
    return (pred == true).float().mean().item()


def main():
    conf = ProjectConfiguration(project_dir=str(WORK), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=ACCUM, project_config=conf)
    set_seed(SEED, device_specific=True)

    trn, val = fold_frames()
    train_dl = DataLoader(Cells(trn, tfm_train), batch_size=BS, shuffle=True, num_workers=2, drop_last=True)
    valid_dl = DataLoader(Cells(val, tfm_valid), batch_size=BS * 2, num_workers=2)
    net = models.convnext_tiny(num_classes=8)
    opt = torch.optim.AdamW(net.parameters(), lr=LR * BS * ACCUM * accelerator.num_processes / 128)
    net, opt, train_dl, valid_dl = accelerator.prepare(net, opt, train_dl, valid_dl)

    # per step of the optimizer a prepared scheduler moves as often as there are processes
    n_steps = EPOCHS * math.ceil(len(train_dl) / ACCUM)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=n_steps * accelerator.num_processes)
    sched = accelerator.prepare(sched)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if RESUME_FROM is not None:
        accelerator.load_state(str(RESUME_FROM))
        conf.iteration = progress.epoch

    criterion = nn.CrossEntropyLoss()
    while progress.epoch < EPOCHS:
        net.train()
        for x, y in train_dl:
            with accelerator.accumulate(net):
                loss = criterion(net(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
        acc = validate(accelerator, net, valid_dl)
        accelerator.print(f"epoch {progress.epoch}: {acc:.4f}")
        progress.epoch += 1
        if acc > progress.best:
            progress.best = acc
            WORK.mkdir(parents=True, exist_ok=True)
            torch.save(accelerator.unwrap_model(net).state_dict(), WORK / f"fold{FOLD}.pth")
        accelerator.save_state()
    accelerator.end_training()


# %%
if __name__ == "__main__":
    main()
