# expect: none
"""Settings of the weld seam inspection training."""

import argparse
from dataclasses import dataclass, field


@dataclass
class DataSettings:
    root: str = ""
    image_size: int = 224
    # Images behind one optimizer step: all processes and all micro-batches together.
    global_batch: int = 256
    # Loader workers a machine can bear, all of its processes together.
    workers_per_node: int = 16


@dataclass
class OptimSettings:
    epochs: int = 40
    # Belongs to global_batch, so it stays as it is when processes are added.
    lr: float = 3e-4
    weight_decay: float = 0.05
    accumulation: int = 4
    clip_norm: float = 1.0


@dataclass
class Settings:
    data: DataSettings = field(default_factory=DataSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    out_dir: str = ""
    resume: str = ""
    seed: int = 17


def parse_settings() -> Settings:
    parser = argparse.ArgumentParser(description="weld seam inspection")
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--out-dir", required=True)
    parser.add_argument("--resume", default="")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--global-batch", type=int, default=256)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--seed", type=int, default=17)
    args = parser.parse_args()
    return Settings(
        data=DataSettings(root=args.data_root, global_batch=args.global_batch),
        optim=OptimSettings(epochs=args.epochs, accumulation=args.accumulation),
        out_dir=args.out_dir,
        resume=args.resume,
        seed=args.seed,
    )
