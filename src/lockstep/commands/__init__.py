"""The commands of `lockstep`, by what they are for. A command's module is imported when it runs."""

import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command as the help has it, and the function that runs it."""

    group: str
    arguments: str
    summary: str
    function: str  # below lockstep.commands
    examples: tuple[str, ...] = ()  # behind `lockstep`

    def run(self, args: list[str]) -> int:
        """Run it; returns the exit code."""
        module, _, name = self.function.rpartition(".")
        code: int = getattr(importlib.import_module(f"lockstep.commands.{module}"), name)(args)
        return code


_START, _LOOK, _USE, _MEASURE = "start", "look", "use the weights", "measure"
_SCRIPTS, _CLUSTER = "other people's scripts", "cluster"
_RECIPE, _EITHER, _SCRIPT = "[RECIPE] [FLAGS]", "[RECIPE|RUN] [FLAGS]", "[FLAGS] SCRIPT [ARGUMENTS]"

COMMANDS: dict[str, Command] = {
    "train": Command(_START, _RECIPE, "train; the recipe is digits where none is named", "train.main",
        ("train mnist --nproc 2 --epochs 3", "train photos --data-dir ~/flowers --val-fraction 0.1",
         "train cifar10 --gpus 0,1 --precision bf16 --out runs/mine")),
    "resize": Command(_START, "RUN --nproc M", "give a run under way another number of processes", "resize.main",
        ("resize runs/one --nproc 3",)),
    "recipes": Command(_START, "", "list the recipes", "recipes.main"),
    "show": Command(_START, _EITHER, "print a recipe or a run as a command, or as a file for --config", "recipes.show",
        ("show cifar10", "show digits --toml > mine.toml", "show runs/one")),
    "preview": Command(_START, _EITHER, "draw pictures before and after augmentation, as a PNG", "preview.main",
        ("preview folder --data-dir ~/flowers --augment randaugment:2,9",)),
    "index": Command(_START, "URL [FLAGS]", "index a data set in webdataset's tar files", "index.main",
        ("index photos", "index 'https://data.example/photos/train-{000..099}.tar'")),
    "doctor": Command(_START, "[FLAGS]", "check this machine and the network", "doctor.command.main",
        ("doctor", "doctor --nnodes 2 --master-addr 10.0.0.1 --master-port 29500")),
    "runs": Command(_LOOK, "[FOLDER] [FLAGS]", "list the runs below a folder, and how they go", "runs.main",
        ("runs --state running", "runs experiments --sort best --limit 10")),
    "watch": Command(_LOOK, "[RUN] [FLAGS]", "follow a run from another terminal", "watch.main", ("watch runs/one",)),
    "diff": Command(_LOOK, "RUN RUN [FLAGS]", "say what differs between two runs", "diff.main",
        ("diff runs/one runs/two",)),
    "report": Command(_LOOK, "RUN [RUN ...] [FLAGS]", "write one HTML page of one run or several",
        "report.command.main", ("report runs/one", "report runs/one runs/two --out both.html")),
    "eval": Command(_USE, "RUN [FLAGS]", "evaluate a run's weights again", "evaluate.main",
        ("eval runs/one --nproc 1", "eval runs/one --data ~/more-flowers --report scores.csv")),
    "predict": Command(_USE, "RUN PICTURE|FOLDER... [FLAGS]", "name what is on new pictures", "predict.main",
        ("predict runs/one photo.jpg more-photos/", "predict runs/one photos/ --format csv --file answers.csv")),
    "export": Command(_USE, "RUN [FLAGS]", "write a run's network for other programs", "export.main",
        ("export runs/one --to onnx", "export runs/one --to torch --weights final")),
    "lr-find": Command(_MEASURE, _RECIPE, "suggest a learning rate", "lr_find.main", ("lr-find cifar10",)),
    "sweep": Command(_MEASURE, _RECIPE, "train with several values of some flags, and compare", "sweep.main",
        ("sweep digits --vary lr=1e-3,3e-3 --vary seed=0,1,2",)),
    "compare": Command(_MEASURE, _RECIPE, "measure strategies and numbers of processes", "compare.main",
        ("compare mnist --strategies ddp,ddp+bf16 --nproc 1,2",)),
    "tune": Command(_MEASURE, _RECIPE, "find the quickest settings for this machine", "tune.main",
        ("tune cifar10", "tune mnist --axes split,precision --rounds 5")),
    "forecast": Command(_MEASURE, _RECIPE, "forecast the speed of more processes", "forecast.main",
        ("forecast cifar10 --nproc 1,2,4,8 --interconnect 10gbit",)),
    "verify": Command(_MEASURE, _RECIPE, "compare the first steps on several numbers of processes",
        "verify.command.main", ("verify digits --nproc 1,2,4 --exact 8",)),
    "chaos": Command(_MEASURE, _RECIPE, "kill a training at random, and see whether it recovers", "chaos.main",
        ("chaos digits --exact 4 --kills 10",)),
    "lint": Command(_SCRIPTS, "[ARGUMENTS]", "find faults in training scripts without running them", "lint.main"),
    "audit": Command(_SCRIPTS, _SCRIPT, "run a script on several numbers of processes, and say what that changes",
        "audit.command.main", ("audit --nproc 1,2,4 train.py --epochs 1",)),
    "reproduce": Command(_SCRIPTS, _SCRIPT, "write what a script trains as a recipe, with proof",
        "reproduce.command.main", ("reproduce train.py --epochs 3",)),
    "launch-script": Command(_CLUSTER, "slurm|kubernetes|torchrun [RECIPE] [FLAGS]",
        "write a job file, or torchrun's command lines", "launch_script.main",
        ("launch-script slurm cifar10 --nnodes 2 --gpus-per-node 4 --time 8:00:00 --file job.sh",)),
}  # fmt: skip
