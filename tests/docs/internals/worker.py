"""One rank, for programs of examples/internals one after another: `python -m tests.docs.internals.worker OUT FILE...`.

What a program prints is a string of the list that OUT gets as JSON; a traceback is printed too. Where the environment
has a WORLD_SIZE it is torchrun's, and the parent holds the stores: one for each program, since keys stay.
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
from typing import Any

import torch.distributed as dist

# What programs leave is kept: a DDP that goes after its group joins the threads of gloo while it holds
# the lock of Python, for which they may be waiting.
_KEPT: list[dict[str, Any]] = []
PORTS = "LOCKSTEP_TEST_PORTS"  # of the stores, a program each


def printed(program: str) -> str:
    """What a program prints, run in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        try:
            _KEPT.append(runpy.run_path(program, run_name="__main__"))
        except Exception:
            traceback.print_exc(file=out)
    if dist.is_initialized():
        dist.destroy_process_group()
    return out.getvalue()


def main() -> None:
    out, *programs = sys.argv[1:]
    sys.path.insert(0, str(Path(programs[0]).parent))
    ports = os.environ.get(PORTS, "").split()
    texts = []
    for number, program in enumerate(programs):
        if ports:
            os.environ["MASTER_PORT"] = ports[number]
        texts.append(printed(program))
        Path(out).write_text(json.dumps(texts))  # each time, for who wants to know where it hangs


if __name__ == "__main__":
    main()
    os._exit(0)
