"""Each step of DataParallel moves all weights out of device 0 and all gradients into it; a ring spreads that evenly.

Reads:
torch/nn/parallel/replicate.py: _broadcast_coalesced_reshape
torch/nn/parallel/_functions.py: Broadcast.backward
"""

import torch
from torch import nn
from torch.nn.parallel import parallel_apply, replicate, scatter
from two_cpus import two_cpus

net = nn.Linear(1000, 1000, bias=False)
size = net.weight.nbytes / 1e6
for n in (2, 4, 8):
    moved: list[float] = []
    shares = scatter(torch.ones(16, 1000), [-1] * n)
    with two_cpus():
        replicas = replicate(net, range(n))
        out = sum(replica.weight.nbytes / 1e6 for replica in replicas[1:])
        for replica in replicas[1:]:
            replica.weight.register_hook(lambda grad, moved=moved: moved.append(grad.nbytes / 1e6))
        sum(output.sum() for output in parallel_apply(replicas, shares, None, range(n))).backward()
    ring = 2 * (n - 1) / n * size
    print(f"{n} devices: out of device 0 {out:.0f} MB, into it {sum(moved):.0f} MB; by a ring {ring:.0f} MB per device")
