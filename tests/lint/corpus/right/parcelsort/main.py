# expect: none
"""Parcel damage classifier. srun python -m main --config conf/damage.json"""
import argparse
import json

from damage import DamageTrainer
from runtime import Runtime


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--restore", default=None, help="snapshot to go on from")
    args = parser.parse_args()
    with open(args.config) as f:
        config = json.load(f)

    with Runtime(seed=config["seed"]) as rt:
        trainer = DamageTrainer(config, rt)
        if args.restore:
            trainer.restore(args.restore)
        trainer.run()


if __name__ == "__main__":
    main()
