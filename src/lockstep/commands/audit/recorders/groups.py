"""Process groups: who joins as which rank, by which backend and address; all meet at the harness's own store."""

import os
import sys
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore, distributed_c10d

from lockstep.commands.audit.events import emit
from lockstep.commands.audit.plan import Plan
from lockstep.commands.audit.recorders.patching import around, given


def install(plan: Plan) -> None:
    """Record the making and the end of process groups, and lead every TCP rendezvous to the plan's port."""

    def store(_: Any, *args: Any, **kwargs: Any) -> TCPStore:
        timeout = given(args, kwargs, 4, "timeout", distributed_c10d.default_pg_timeout)
        return TCPStore("127.0.0.1", plan.port, None, False, timeout)

    def begin(original: Any, *args: Any, **kwargs: Any) -> Any:
        backend = given(args, kwargs, 0, "backend")
        method = given(args, kwargs, 1, "init_method")
        made = original(*args, **kwargs)
        port, said = os.environ.get("MASTER_PORT", ""), " ".join(plan.arguments)
        own = port != str(plan.port) and port not in said  # what the user typed can be typed otherwise for another run
        method = None if method and str(method) in said else method
        told = {"port": port, "own_port": own, "init_method": method, "backend": backend}
        emit("group", told, rank=dist.get_rank(), world=dist.get_world_size())
        return made

    def end(original: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if given(args, kwargs, 0, "group") is None:
            emit("group-end")
        return made

    rendezvous = sys.modules["torch.distributed.rendezvous"]  # the package has a function of that name
    around(rendezvous, "_create_c10d_store", store)
    for module in (distributed_c10d, dist):
        around(module, "destroy_process_group", end)
        around(module, "init_process_group", begin)
