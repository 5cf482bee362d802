"""When ranks agree: soon after a request, whatever the steps before took."""

import signal
import time

import torch

from lockstep.config import Interval
from lockstep.distributed.world import World
from lockstep.training.control import Control, StopRequest


class _Alike(World):
    """A world of two whose other rank has what this one has."""

    def largest(self, values: list[int]) -> list[int]:
        return values


def test_a_request_after_an_epoch_without_evaluation_is_heard_at_the_next_step() -> None:
    """The two decisions at an epoch's end lie microseconds apart, as a thousand steps of a fifth of a second would."""
    request = StopRequest()
    control = Control(_Alike(0, 2, 0, 2, torch.device("cpu"), "gloo"), request, Interval.parse("0"), 16)
    for step in range(1, 17):
        control.agree(step)
        time.sleep(0.02)
    control.agree(16)
    control.agree(16, now=True)
    request(signal.SIGUSR1)
    assert control.agree(17).stop == signal.SIGUSR1
