"""An elastic run in small: members meet, one dies, the others meet again and go on from the checkpoint.

    python examples/concepts/membership.py

The agent below is what a launcher is: it starts processes, watches them, and begins another round without the dead.
"""

import multiprocessing
import os
import tempfile
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

STEPS, DIES_AT = 6, 3
DEADLINE = timedelta(seconds=60)


def worker(port: int, members: int, number: int, checkpoint: Path) -> None:
    """Take the next free rank of this round, and train from the newest checkpoint."""
    meeting = dist.PrefixStore(f"round {number}", dist.TCPStore("localhost", port, timeout=DEADLINE))
    rank = meeting.add("arrived", 1) - 1  # the rendezvous: ranks in order of arrival
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=members, timeout=DEADLINE)
    for step in range(int(checkpoint.read_text()), STEPS):
        if number == 0 and step == DIES_AT and rank == 1:
            os._exit(1)
        present = torch.ones(1)
        try:
            dist.all_reduce(present)  # a step: nobody gets on without the others
        except RuntimeError:
            os._exit(1)  # a peer is gone, and the agent knows
        if rank == 0:
            print(f"round {number}: step {step} by {int(present)} members", flush=True)
            if step % 2:
                checkpoint.write_text(str(step + 1))
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=DEADLINE)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])  # imported once for all
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "step"
        checkpoint.write_text("0")
        members, number = 3, 0
        while members:
            args = store.port, members, number, checkpoint
            running = [context.Process(target=worker, args=args) for _ in range(members)]
            for process in running:
                process.start()
            wait([process.sentinel for process in running])  # the first to end, well or badly
            failed = [process for process in running if process.exitcode]
            if not failed:
                break
            for process in running:
                process.kill()  # they wait for the dead one in a collective
            print(f"a member died; {members - 1} go on from step {checkpoint.read_text()}", flush=True)
            members, number = members - 1, number + 1
        for process in running:
            process.join()


if __name__ == "__main__":
    main()
