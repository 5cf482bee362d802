"""gather joins the outputs on one device. A loss from forward comes back once per device, whatever the shares' sizes.

It refuses CPU tensors: so shapes on the device "meta", the copy being torch.cat, and the numbers by hand. Reads:
torch/nn/parallel/scatter_gather.py: gather
torch/nn/parallel/_functions.py: Gather.forward
"""

import warnings
from unittest.mock import patch

import torch
from torch.nn.parallel import comm, gather

warnings.simplefilter("always")
warnings.showwarning = lambda message, *_: print("warning:", message)
losses = torch.tensor([1.0, 1.0, 1.0, 9.0, 9.0])
shares = losses.chunk(2)
with patch.object(comm, "gather", lambda tensors, dim, _: torch.cat(tensors, dim)):
    print("outputs:", list(gather([share.to("meta") for share in shares], 0).shape))
    print("losses:", list(gather([share.mean().to("meta") for share in shares], 0).shape))
print("mean of the shares' means:", sum(share.mean().item() for share in shares) / 2)
print("mean of the samples:", round(losses.mean().item(), 4))
