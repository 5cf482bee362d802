"""Errors that a user can act on: what happened, where, and what to do."""

import difflib
import re
from collections.abc import Iterable

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_HANG = 124  # no progress for --hang-timeout, as timeout(1) has it
EXIT_INTERRUPTED = 130  # 128 + SIGINT, what a shell reports for Ctrl-C

NOT_ON_WINDOWS = "this runs on Linux; on Windows install and start it inside WSL2 (`wsl --install` sets that up)"


# what a command or a flag was called, or is called elsewhere -> its name here
RENAMED = {"--shards": "--exact", "--timeout": "--collective-timeout"}
# what is typed from habit -> how it is said here
SAID = {
    "--amp": "mixed precision is --precision bf16 here (or fp16, with a gradient scaler)",
    "--bf16": "that is --precision bf16 here",
    "--fp16": "that is --precision fp16 here",
    "--half": "that is --precision fp16 here",
    "--pretrained": "that is --init pretrained here (or --init FILE)",
    "--data": "--data-dir DIR says where data lies; your own class folders: `lockstep train photos --data-dir DIR`",
    "--evaluate": "a run's weights are evaluated by `lockstep eval RUN`",
    "--test-only": "a run's weights are evaluated by `lockstep eval RUN`",
    "--distributed": "there is nothing to switch on: --nproc says how many processes (default: auto)",
    "--local-rank": "a launcher says that by LOCAL_RANK, and Lockstep reads it; start processes by --nproc",
    "--world-size": "that is --nproc here, processes on each machine, and --nnodes, machines",
    "--rank": "that is --node-rank here, the machine's number, with --nnodes",
    "--dist-url": "that is --master-addr and --master-port here",
    "--multiprocessing-distributed": "there is nothing to switch on: --nproc says how many processes (default: auto)",
    "--model-ema": "that is --ema 0.9999 here",
    "--early-stopping": "that is --patience 5 here",
    "--deterministic": "the same command gives the same run; --exact 8 does so on any number of processes up to 8",
    "--sync-batchnorm": "batch norm over all processes is the default here; --batch-norm says it",
    "--tensorboard": "that is --log tensorboard here",
    "--wandb": "that is --log wandb here",
    "--verbose": "`lockstep watch RUN` and the run's journal.jsonl tell more",
}


class UserError(Exception):
    """Something that the user can put right.

    The command line prints it without a traceback and exits with code 2. `remedy` says what to do.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  {self.remedy}" if self.remedy else self.message


def unknown(kind: str, name: str, known: Iterable[str], remedy: str = "") -> UserError:
    """The error for a name that nothing answers to; it offers its other name, or the nearest known ones."""
    names = sorted(known)
    if (new := RENAMED.get(name)) in names:
        return UserError(f"{name} is called {new} here")
    if kind == "flag" and name in SAID:
        return UserError(f"{name}: {SAID[name]}")
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else (f"Known: {', '.join(names)}." if len(names) <= 20 else "")
    return UserError(f"unknown {kind} {name!r}", " ".join(part for part in (hint, remedy) if part))


def reason(error: BaseException) -> str:
    """What somebody's error says, in one line: without colours and addresses, with its type where it says little.

    What would move a terminal's cursor, as an error that quotes a damaged file may, is written as Python writes it.
    """
    line = re.sub(r"\x1b\[[0-9;]*m| ?<_io\.[^>]*>", "", str(error)).strip().partition("\n")[0]
    line = line if line.isprintable() else repr(line)[1:-1]
    says = re.search("[A-Za-z]{3}", line) and not isinstance(error, KeyError)
    return line if says else f"{type(error).__name__} {line}".strip()


def refusal(error: BaseException) -> str:
    """What the system says, without number and path, for a message that names the path; of other errors `reason`."""
    return getattr(error, "strerror", None) or reason(error)


class PeerError(Exception):
    """This rank stops because another one failed; the other one's message is the one to read."""
