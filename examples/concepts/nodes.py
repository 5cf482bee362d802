"""Two nodes on one machine: what torchrun tells the processes of each, and how rank follows from it.

python examples/concepts/nodes.py
"""

import os
import socket
import subprocess
import sys

VARIABLES = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")


def agent(node: int, port: int) -> subprocess.Popen[str]:
    """What one types on a node; there `localhost` is the address of node 0."""
    flags = f"--nnodes 2 --node-rank {node} --nproc-per-node 2 --master-addr localhost --master-port {port}"
    command = [sys.executable, "-m", "torch.distributed.run", *flags.split(), __file__]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def main() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    agents = [agent(node, port) for node in (0, 1)]
    said = [started.communicate()[0] for started in agents]
    assert not any(started.returncode for started in agents)
    print("node rank  local rank  local world size  rank  world size  formula")
    for line in sorted("".join(said).splitlines()):
        node, local, local_size, rank, size = line.split()
        formula = int(node) * int(local_size) + int(local)
        print(f"{node:>9}{local:>12}{local_size:>18}{rank:>6}{size:>12}{formula:>9}")


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:  # started by an agent; one line at once, so that two don't mix
        sys.stdout.write(" ".join(os.environ[name] for name in VARIABLES) + "\n")
    else:
        main()
