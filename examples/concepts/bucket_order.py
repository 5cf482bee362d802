"""Which gradients DDP sends together, in which order, in the first step and from the second on.

python examples/concepts/bucket_order.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
from lockstep.config import Execution


class Net(nn.Module):
    """Four layers of 1 MiB; `first` is used first and written down last."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.third, self.fourth = (nn.Linear(512, 512, bias=False) for _ in range(3))
        self.first = nn.Linear(512, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fourth(self.third(self.second(self.first(x))))


def main(world: ls.World) -> None:
    net = Net()
    names: dict[Tensor, str] = {parameter: name.partition(".")[0] for name, parameter in net.named_parameters()}
    model, seen = DistributedDataParallel(net, bucket_cap_mb=2), []

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append(" + ".join(names[parameter] for parameter in bucket.parameters()))
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    for step in range(3):
        model(torch.ones(1, 512)).sum().backward()
        world.print(f"step {step}: {', then '.join(seen)}")
        seen.clear()


if __name__ == "__main__":
    ls.launch(main, nproc=2, execution=Execution(device="cpu"))
