"""A manifest for Kubeflow's operators: PyTorchJob of the Training Operator, TrainJob of its successor, Trainer."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.commands.launch_script import yaml
from lockstep.commands.launch_script.plan import Allotted
from lockstep.commands.launch_script.torchrun import train_arguments
from lockstep.config.fields import require, require_at_least

_MOUNT = "/lockstep"
_NAME = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?"  # Kubernetes' own rule


@dataclass(frozen=True)
class KubernetesPlan(Allotted):
    """A run as a job of Kubeflow's, one pod on each machine; torchrun in it starts the processes."""

    kind: Literal["pytorchjob", "trainjob"] = "pytorchjob"
    """pytorchjob: kubeflow.org/v1, for the Training Operator; trainjob: trainer.kubeflow.org/v1alpha1, for Kubeflow
    Trainer 2.2 or later."""
    image: str = ""
    """Container image with torch and Lockstep."""
    claim: str = "lockstep"
    """Claim of a volume that all pods can mount: for runs/ and data/."""
    namespace: str = ""
    """Namespace of the job."""
    runtime: str = "torch-distributed"
    """The ClusterTrainingRuntime that a TrainJob refers to."""
    grace_period: int = 90
    """Seconds between SIGTERM and SIGKILL, for the last checkpoint."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(0, self, "grace_period")
        rule = "Use small letters, digits, hyphens and dots, a letter or digit first and last."
        for flag, name in (("claim", self.claim), ("namespace", self.namespace or "none"), ("runtime", self.runtime)):
            require(re.fullmatch(_NAME, name), f"--{flag} {name!r}: not a name that Kubernetes takes", rule)


def script(plan: KubernetesPlan) -> str:
    """The manifest, as YAML."""
    require(bool(plan.image), "a job on Kubernetes needs an image", "Name one with torch and Lockstep: --image.")
    kind, version, spec = ("PyTorchJob", "kubeflow.org/v1", _pytorch_job(plan))
    if plan.kind == "trainjob":
        kind, version, spec = ("TrainJob", "trainer.kubeflow.org/v1alpha1", _train_job(plan))
    metadata = {"name": plan.job} | ({"namespace": plan.namespace} if plan.namespace else {})
    note = f"# The claim {plan.claim} has to be there. The run folder is on it, and so a pod that starts again goes on."
    return f"{note}\n{yaml.dump({'apiVersion': version, 'kind': kind, 'metadata': metadata, 'spec': spec})}"


def _pytorch_job(plan: KubernetesPlan) -> dict[str, Any]:
    """The operator sets torchrun's arguments as PET_ variables."""
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": plan.image,
        "command": _command(plan),
        "resources": _resources(plan),
    }
    # OnFailure, not ExitCode: where one pod dies the others end with code 1, which ExitCode holds for final
    one = {"replicas": 1, "restartPolicy": "OnFailure", "template": {"spec": _pod(plan, container)}}
    return {
        "nprocPerNode": str(plan.per_node),
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": plan.config.recovery.max_restarts * plan.nnodes},
        "pytorchReplicaSpecs": {"Master": one}
        | ({"Worker": one | {"replicas": plan.nnodes - 1}} if plan.nnodes > 1 else {}),
    }


def _train_job(plan: KubernetesPlan) -> dict[str, Any]:
    """The runtime has the pod's template, and the job adds to it."""
    job = {"name": "node", "template": {"spec": {"template": {"spec": _pod(plan, {"name": "node"})}}}}
    return {
        "runtimeRef": {"name": plan.runtime},
        "trainer": {
            "image": plan.image,
            "command": _command(plan),
            "numNodes": plan.nnodes,
            "numProcPerNode": plan.per_node,
            "resourcesPerNode": _resources(plan),
        },
        "runtimePatches": [
            {"manager": "lockstep", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
        ],
    }


def _pod(plan: KubernetesPlan, container: dict[str, Any]) -> dict[str, Any]:
    """A pod with this container, run folders and data mounted, and memory for loader workers."""
    mounts = [{"name": "lockstep", "mountPath": _MOUNT}, {"name": "shm", "mountPath": "/dev/shm"}]
    return {
        "terminationGracePeriodSeconds": plan.grace_period,
        "containers": [container | {"volumeMounts": mounts}],
        "volumes": [
            {"name": "lockstep", "persistentVolumeClaim": {"claimName": plan.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # a container's own has 64 MiB, too little for workers
        ],
    }


def _command(plan: KubernetesPlan) -> list[str]:
    """torchrun, which takes the rest from PET_ variables. RANK and WORLD_SIZE of the operator count pods."""
    data = {} if plan.config.execution.data_dir else {"data_dir": f"{_MOUNT}/data"}
    arguments = ["torchrun", *train_arguments(plan, f"{_MOUNT}/runs/{plan.job}", **data)]
    return [argument.replace("$", "$$") for argument in arguments]  # Kubernetes expands $(NAME) and reads $$ as $


def _resources(plan: KubernetesPlan) -> dict[str, Any]:
    gpus = str(plan.gpus_per_node or "")
    firm = {name: value for name, value in (("memory", plan.memory), ("nvidia.com/gpu", gpus)) if value}
    requests = {"cpu": str(plan.cores * plan.per_node)} | firm  # a limit on cores would throttle
    return {"requests": requests} | ({"limits": firm} if firm else {})
