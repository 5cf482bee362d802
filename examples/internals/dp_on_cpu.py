"""Without a GPU, DataParallel calls the module and does nothing else.

Reads:
torch/nn/parallel/data_parallel.py: DataParallel.__init__, DataParallel.forward
torch/_utils.py: _get_available_device_type
"""

import threading

import torch
from torch import nn


class Net(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(f"forward of {len(x)} samples in the main thread:", threading.current_thread() is threading.main_thread())
        return super().forward(x)


net = nn.DataParallel(Net(4, 2))
print("devices:", net.device_ids)
net(torch.ones(8, 4))
