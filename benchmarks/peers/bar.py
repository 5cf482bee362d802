"""As fit, on a terminal: the live progress bar is drawn."""

import os
import pty
import subprocess

from peers import fit
from peers.task import Side, Task


def build(task: Task) -> Side:
    if not os.isatty(1):
        reading, terminal = pty.openpty()
        subprocess.Popen(["cat"], stdin=reading, stdout=subprocess.DEVNULL)  # ends with the terminal's last user
        os.dup2(terminal, 1)
        os.close(reading)
        os.close(terminal)
    return fit.build(task)
