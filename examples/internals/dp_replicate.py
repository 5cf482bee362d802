"""A replica has no parameters for an optimizer, lives for one forward, and hands its gradient to the module.

Reads:
torch/nn/parallel/replicate.py: replicate
torch/nn/modules/module.py: Module._replicate_for_data_parallel
torch/nn/parallel/_functions.py: Broadcast.backward, ReduceAddCoalesced.forward
"""

import torch
from torch import nn
from torch.nn.parallel import replicate
from two_cpus import two_cpus

net = nn.BatchNorm1d(1, momentum=1.0)
with two_cpus():
    replicas = replicate(net, [0, 1])
print("parameters of net:", len(list(net.parameters())), "- of a replica:", len(list(replicas[1].parameters())))
for replica, value in zip(replicas, (1.0, 5.0), strict=True):
    replica.seen = value
    (replica(torch.full((4, 1), value)) + replica.weight).sum().backward()
print("running mean of net:", net.running_mean.item(), "- of the replicas:", [m.running_mean.item() for m in replicas])
print("net.seen:", getattr(net, "seen", None), "- replicas:", [replica.seen for replica in replicas])
print("gradient of net.weight, 4 from each replica:", net.weight.grad.item())
