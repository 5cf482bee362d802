"""The steps of DataParallel.forward by hand, and what one device computes.

Reads:
torch/nn/parallel/data_parallel.py: DataParallel.forward
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import parallel_apply, replicate, scatter
from two_cpus import two_cpus

torch.manual_seed(0)
net, x, y = nn.Linear(4, 3).double(), torch.randn(7, 4).double(), torch.randint(3, (7,))
F.cross_entropy(net(x), y).backward()
alone, net.weight.grad = net.weight.grad, None

shares = scatter(x, [-1, -1])
with two_cpus():
    outputs = parallel_apply(replicate(net, [0, 1]), shares, None, [0, 1])
F.cross_entropy(torch.cat(outputs), y).backward()
print("shares:", [len(output) for output in outputs])
print("gradient as on one device:", torch.allclose(net.weight.grad, alone, rtol=1e-12))
