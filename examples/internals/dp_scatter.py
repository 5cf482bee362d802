"""scatter cuts every tensor by torch.chunk; all else goes to every device as it is.

To these functions the device -1 is the CPU. Reads:
torch/nn/parallel/scatter_gather.py: scatter, scatter_kwargs
torch/nn/parallel/_functions.py: Scatter.forward
"""

import torch
from torch.nn.parallel.scatter_gather import scatter_kwargs

for samples, devices in ((10, 4), (5, 4), (8, 3)):
    inputs, _ = scatter_kwargs((torch.arange(samples),), None, [-1] * devices)
    print(f"{samples} samples over {devices} devices:", [len(args[0]) for args in inputs])

batch = {"image": torch.zeros(6, 3, 8, 8), "names": list("abcdef"), "scale": torch.ones(2)}
for share in scatter_kwargs((batch,), None, [-1, -1])[0]:
    print({name: list(value.shape) if torch.is_tensor(value) else value for name, value in share[0].items()})
