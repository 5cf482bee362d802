"""The command `lockstep`: its commands, its help, and how it ends."""

import os
import sys
from collections.abc import Callable, Sequence

import lockstep
from lockstep.commands import chaos, completion, diff, evaluate, export, predict, recipes, runs, train, watch
from lockstep.commands.audit import command as audit
from lockstep.commands.compare import command as compare
from lockstep.commands.doctor import command as doctor
from lockstep.commands.forecast import command as forecast
from lockstep.commands.launch_script import command as launch_script
from lockstep.commands.lint import command as lint
from lockstep.commands.lr_find import command as lr_find
from lockstep.commands.preview import command as preview
from lockstep.commands.report import command as report
from lockstep.commands.reproduce import command as reproduce
from lockstep.commands.shared.arguments import print_error, print_failure
from lockstep.commands.shared.helping import joined
from lockstep.commands.sweep import command as sweep
from lockstep.commands.tune import command as tune
from lockstep.commands.verify import command as verify
from lockstep.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USER_ERROR, PeerError, UserError, unknown
from lockstep.processes.failures import WorkerFailed
from lockstep.processes.output import unbreakable_output
from lockstep.processes.signals import exit_now

# command -> (its arguments, what it is for, what runs it: arguments to an exit code)
COMMANDS: dict[str, tuple[str, str, Callable[[list[str]], int]]] = {
    "train": ("[RECIPE] [FLAGS]", "train; the recipe is digits where none is named", train.main),
    "eval": ("RUN [FLAGS]", "evaluate the weights of a run folder again, on any number of processes", evaluate.main),
    "runs": (
        "[FOLDER] [FLAGS]",
        "table the runs below a folder: epoch, top-1, running or ended, since when",
        runs.main,
    ),
    "watch": (
        "[RUN] [FLAGS]",
        "follow a run from another terminal, or another machine that sees its folder",
        watch.main,
    ),
    "diff": ("RUN RUN [FLAGS]", "say what differs between two runs: config, environment, order, result", diff.main),
    "preview": (
        "[RECIPE|RUN] [FLAGS]",
        "draw what the network sees: some pictures before and after augmentation, as a PNG",
        preview.main,
    ),
    "report": (
        "RUN [RUN ...] [FLAGS]",
        "write one HTML page of one run or several: curves, faults, classes, environment",
        report.main,
    ),
    "predict": ("RUN PICTURE|FOLDER... [FLAGS]", "name what is on new pictures, by a run's weights", predict.main),
    "verify": (
        "[RECIPE] [FLAGS]",
        "run the first steps on several numbers of processes, compare, and say why they differ",
        verify.main,
    ),
    "chaos": (
        "[RECIPE] [FLAGS]",
        "kill a training at random moments, let it recover, compare it with an undisturbed one",
        chaos.main,
    ),
    "compare": (
        "[RECIPE] [FLAGS]",
        "measure strategies and numbers of processes under equal conditions",
        compare.main,
    ),
    "tune": ("[RECIPE] [FLAGS]", "measure the quickest way to train here, and print its command", tune.main),
    "sweep": (
        "[RECIPE] [FLAGS]",
        "train once for each value of what --vary names, and table the runs with intervals over seeds",
        sweep.main,
    ),
    "lr-find": (
        "[RECIPE] [FLAGS]",
        "raise the learning rate step by step, draw the loss over it, and suggest one",
        lr_find.main,
    ),
    "forecast": (
        "[RECIPE] [FLAGS]",
        "measure briefly, and forecast the speed of N processes over an interconnect",
        forecast.main,
    ),
    "launch-script": (
        "slurm|kubernetes|torchrun [RECIPE] [FLAGS]",
        "write the job file, or torchrun's line for each machine",
        launch_script.main,
    ),
    "lint": (
        "FILE|FOLDER... [FLAGS]",
        "find in training scripts of anybody's what changes their result on several processes, without running them",
        lint.main,
    ),
    "audit": (
        "[FLAGS] SCRIPT [ARGUMENTS]",
        "run a training script of anybody's on several numbers of processes, recorded, and say what that changes",
        audit.main,
    ),
    "reproduce": (
        "[FLAGS] SCRIPT [ARGUMENTS]",
        "write what a training script of anybody's trains as a recipe, and prove it step by step",
        reproduce.main,
    ),
    "doctor": (
        "[FLAGS]",
        "try what a run needs from this machine and the network, and say what to do about the rest",
        doctor.main,
    ),
    "export": (
        "RUN [FLAGS]",
        "write a run's network for other programs: safetensors, torch.save, ONNX or pt2",
        export.main,
    ),
    "recipes": ("", "list the recipes", recipes.main),
    "completion": (
        "bash|zsh",
        "print what completes commands, recipes, flags and values in a shell",
        lambda args: completion.main(args, {name: usage for name, (usage, _, _) in COMMANDS.items()}),
    ),
    "show": ("RECIPE|RUN", "print a recipe or a run's config as a command, or as --toml, to copy", recipes.show),
}

# Turns for which an idle OpenMP thread stays awake. With libgomp's own, 300,000, two threads beside any other work take
# twice as long, since the one that waits holds the core that the other needs; on a quiet machine this costs 1 to 6 %.
_SPIN = "10000"

_HELP = """usage: lockstep COMMAND [ARGUMENTS]

Train PyTorch image classifiers on one process or many; the number of processes changes the speed and nothing else.

commands:
{commands}

examples:
  lockstep train                                        the bundled digits, on all cores
  lockstep train mnist --nproc 2 --epochs 3             two processes on this machine
  lockstep train cifar10 --gpus 0,2 --precision bf16    two GPUs of it
  lockstep train folder --data-dir ~/flowers            your own class folders; without val/: --val-fraction 0.1
  torchrun --nproc-per-node 4 -m lockstep train mnist   started by another launcher
  lockstep preview folder --data-dir ~/flowers --augment randaugment:2,9
  lockstep eval runs/digits-20260101-120000 --nproc 1
  lockstep runs --state running
  lockstep diff runs/digits-20260101-120000 runs/digits-20260102-090000
  lockstep predict runs/folder-20260101-120000 photo.jpg more-photos/
  lockstep verify digits --nproc 1,2,4 --exact 8       the same bits on 1, 2 and 4 processes?
  lockstep chaos digits --exact 4 --kills 10           does it come back, and as the same run?
  lockstep compare mnist --strategies single,ddp,ddp+bf16 --nproc 1,2
  lockstep tune cifar10                                 processes x threads, layout, precision: what is quickest here?
  lockstep sweep digits --vary lr=1e-3,3e-3 --vary seed=0,1,2
  lockstep lr-find cifar10                              the loss over the learning rate: picture and suggestion
  lockstep forecast cifar10 --nproc 1,2,4,8 --interconnect 10gbit
  lockstep launch-script slurm cifar10 --nnodes 2 --gpus-per-node 4 --time 8:00:00 --file job.sh
  lockstep lint train.py --fix                          your own PyTorch script: what goes wrong on several GPUs?
  lockstep doctor --nnodes 2 --master-addr 10.0.0.1 --master-port 29500

`lockstep COMMAND --help` explains a command, with `all` after it every flag.
Data sets are looked for in --data-dir, $LOCKSTEP_DATA or ./data.
Exit codes: 0 done, 1 a process failed, 2 something that you can put right, 124 no progress for --hang-timeout;
stopped by a signal, after a checkpoint: 130 (Ctrl-C), 143 (SIGTERM), 138 (SIGUSR1), 129 (the terminal closed).
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    args = list(sys.argv[1:] if argv is None else argv)
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:  # OpenMP reads it as torch loads it
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN)
    with unbreakable_output():
        code = _exit_code(args)
    if os.environ.get("RANK") and "torch.distributed" in sys.modules:
        exit_now(code)  # an ordinary end may abort: gloo's threads outlive the group, and want the interpreter's lock
    sys.exit(code)


def _exit_code(args: list[str]) -> int:
    try:
        return _dispatch(args)
    except UserError as error:
        print_error(str(error), once_a_host=True)
        return EXIT_USER_ERROR
    except WorkerFailed as failed:
        return print_failure(failed)
    except PeerError as error:
        print_error(str(error))
        return EXIT_FAILURE
    except KeyboardInterrupt:
        print_error("interrupted", once_a_host=True)
        return EXIT_INTERRUPTED


def _help() -> str:
    lines = []
    for name, (arguments, about, _) in COMMANDS.items():
        usage = f"  {name} {arguments}".rstrip()
        lines.append(f"{usage:<27}{about}" if len(usage) < 27 else f"{usage}\n{'':<27}{about}")
    return _HELP.format(commands="\n".join(lines))


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0
    if args[0] == "--version":
        from importlib.metadata import version

        print(f"lockstep {lockstep.__version__} (torch {version('torch')}, torchvision {version('torchvision')})")
        return 0
    if args[0] not in COMMANDS:
        raise unknown("command", args[0], COMMANDS, "See `lockstep --help`.")
    return COMMANDS[args[0]][2](joined(args[1:]))
