"""The loop that one writes by hand, in a process that keeps the memory that it frees, as Lockstep's does."""

from lockstep.distributed.devices import keep_freed
from peers import raw
from peers.task import Side, Task


def build(task: Task) -> Side:
    keep_freed()
    return raw.build(task)
