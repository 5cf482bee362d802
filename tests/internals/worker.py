"""One rank, for programs of examples/internals one after another: `python -m tests.internals.worker OUT PROGRAM...`.

What a program prints is a string of the list that OUT gets as JSON; a traceback is printed too. Where the environment
has a WORLD_SIZE it is torchrun's, with a store that the parent holds: each program's group is an attempt of its own.
"""

import contextlib
import io
import json
import os
import runpy
import sys
import traceback
import warnings
from pathlib import Path

import torch.distributed as dist


def printed(program: str) -> str:
    """What a program prints, run in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        try:
            runpy.run_path(program, run_name="__main__")
        except Exception:
            traceback.print_exc(file=out)
    if dist.is_initialized():
        dist.destroy_process_group()
    return out.getvalue()


def main() -> None:
    """Run all programs, in the order of the command line."""
    out, *programs = sys.argv[1:]
    sys.path.insert(0, str(Path(programs[0]).parent))
    texts = []
    for number, program in enumerate(programs):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # what the store's keys of this group begin with
        texts.append(printed(program))
    Path(out).write_text(json.dumps(texts))


if __name__ == "__main__":
    main()
