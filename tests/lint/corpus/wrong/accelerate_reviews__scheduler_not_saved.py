# expect: scheduler-not-saved line 152 or 116 or 122
"""Sentiment of product reviews with Accelerate: gradient accumulation, trackers, resumable.

accelerate launch train_reviews.py --data reviews.npz --output_dir runs/reviews
"""
import argparse
import math
import os

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ReviewClassifier(nn.Module):
    def __init__(self, vocab_size, max_len, num_labels, dim=256, depth=4, dropout=0.1):
        super().__init__()
        self.tok = nn.Embedding(vocab_size, dim, padding_idx=0)
        self.pos = nn.Parameter(torch.zeros(1, max_len, dim))
        layer = nn.TransformerEncoderLayer(dim, 8, 4 * dim, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, num_labels)

    def forward(self, input_ids):
        mask = input_ids.eq(0)
        x = self.encoder(self.tok(input_ids) + self.pos[:, : input_ids.size(1)], src_key_padding_mask=mask)
        weight = (~mask).unsqueeze(-1).to(x.dtype)
        return self.head((x * weight).sum(1) / weight.sum(1).clamp(min=1))


class Progress:
    """What save_state doesn't know by itself."""

    def __init__(self):
        self.next_epoch = 0
        self.best_accuracy = 0.0

    def state_dict(self):
        return {"next_epoch": self.next_epoch, "best_accuracy": self.best_accuracy}

    def load_state_dict(self, state):
        self.next_epoch = state["next_epoch"]
        self.best_accuracy = state["best_accuracy"]


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--resume_from", default="")
    parser.add_argument("--num_epochs", type=int, default=5)
    parser.add_argument("--total_batch_size", type=int, default=512, help="over processes and accumulation steps")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=3e-4, help="for the total batch size")
    parser.add_argument("--warmup_ratio", type=float, default=0.06)
    parser.add_argument("--mixed_precision", default="bf16", choices=["no", "fp16", "bf16"])
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def load_data(path):
    with np.load(path) as f:
        parts = [
            TensorDataset(torch.from_numpy(f[f"{part}_ids"]).long(), torch.from_numpy(f[f"{part}_labels"]).long())
            for part in ("train", "val")
        ]
        return parts[0], parts[1], int(f["vocab_size"])


def linear_schedule(optimizer, warmup_steps, total_steps):
    def factor(step):
        if step < warmup_steps:
            return step / max(1, warmup_steps)
        return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    correct, count = 0, 0
    for input_ids, labels in loader:
        predictions = model(input_ids).argmax(dim=-1)
        # gather_for_metrics leaves out what was repeated to fill up the last batch
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        correct = correct + (predictions == labels).sum()
        count += labels.numel()
    return correct.item() / count


def main():
    args = parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=args.output_dir),
    )
    accelerator.init_trackers("reviews", config=vars(args))
    set_seed(args.seed)

    train_set, val_set, vocab_size = load_data(args.data)
    batch_size = args.total_batch_size // (accelerator.num_processes * args.gradient_accumulation_steps)
    train_loader = DataLoader(train_set, batch_size=batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=2 * batch_size)

    model = ReviewClassifier(vocab_size, train_set.tensors[0].size(1), num_labels=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)

    updates = args.num_epochs * math.ceil(len(train_loader) / args.gradient_accumulation_steps)
    scheduler = linear_schedule(optimizer, int(args.warmup_ratio * updates), updates)

    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    set_seed(args.seed, device_specific=True)  # the weights are there: own dropout masks for each process
    if args.resume_from:
        accelerator.load_state(args.resume_from)

    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(progress.next_epoch, args.num_epochs):
        train_loader.set_epoch(epoch)
        model.train()
        totals = torch.zeros(2, device=accelerator.device)
        for input_ids, labels in train_loader:
            with accelerator.accumulate(model):
                loss = loss_fn(model(input_ids), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
            totals[0] += loss.detach() * labels.numel()
            totals[1] += labels.numel()
        totals = accelerator.reduce(totals, reduction="sum")
        accuracy = evaluate(accelerator, model, val_loader)
        accelerator.log(
            {"train_loss": (totals[0] / totals[1]).item(), "val_accuracy": accuracy, "lr": scheduler.get_last_lr()[0]},
            step=epoch,
        )
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.4f}")

        improved = accuracy > progress.best_accuracy
        progress.best_accuracy = max(accuracy, progress.best_accuracy)
        progress.next_epoch = epoch + 1
        accelerator.save_state(os.path.join(args.output_dir, "last"))
        if improved:
            accelerator.save(
                accelerator.unwrap_model(model).state_dict(), os.path.join(args.output_dir, "best_model.bin")
            )

    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
