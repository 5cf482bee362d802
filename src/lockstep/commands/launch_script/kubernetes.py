"""A manifest for Kubeflow's operators: PyTorchJob of the Training Operator, TrainJob of its successor, Trainer."""

from dataclasses import dataclass
from typing import Any, Literal

from lockstep.commands.launch_script import yaml
from lockstep.commands.launch_script.plan import Allotted
from lockstep.commands.launch_script.torchrun import train_words
from lockstep.config.fields import require

_STORE, _SHM = "lockstep", "shm"  # volumes
_MOUNT = "/lockstep"


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
        require(self.grace_period >= 0, f"--grace-period {self.grace_period} is negative", "Use 0 or more.")


def script(plan: KubernetesPlan) -> str:
    """The manifest, as YAML."""
    require(bool(plan.image), "a job on Kubernetes needs an image", "Name one with torch and Lockstep: --image.")
    body = _train_job(plan) if plan.kind == "trainjob" else _pytorch_job(plan)
    note = (
        f"# The claim {plan.claim} has to be there. The run folder is on it, and so a pod that starts again goes on.\n"
    )
    return note + yaml.dump(body)


def _metadata(plan: KubernetesPlan) -> dict[str, Any]:
    return {"name": plan.job} | ({"namespace": plan.namespace} if plan.namespace else {})


def _pytorch_job(plan: KubernetesPlan) -> dict[str, Any]:
    """A PyTorchJob: the operator sets torchrun's arguments as PET_ variables."""
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": plan.image,
        "command": _command(plan),
        "resources": _resources(plan),
        "volumeMounts": _mounts(),
    }
    pod = {"terminationGracePeriodSeconds": plan.grace_period, "containers": [container], "volumes": _volumes(plan)}
    # OnFailure, not ExitCode: where one pod dies the others end with code 1, which ExitCode holds for final
    one = {"replicas": 1, "restartPolicy": "OnFailure", "template": {"spec": pod}}
    replicas = {"Master": one} | ({"Worker": one | {"replicas": plan.nnodes - 1}} if plan.nnodes > 1 else {})
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(plan),
        "spec": {
            "nprocPerNode": str(plan.per_node),
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": plan.config.recovery.max_restarts * plan.nnodes},
            "pytorchReplicaSpecs": replicas,
        },
    }


def _train_job(plan: KubernetesPlan) -> dict[str, Any]:
    """A TrainJob: the runtime has the pod's template, and the job adds to it."""
    pod = {
        "terminationGracePeriodSeconds": plan.grace_period,
        "containers": [{"name": "node", "volumeMounts": _mounts()}],
        "volumes": _volumes(plan),
    }
    patch = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(plan),
        "spec": {
            "runtimeRef": {"name": plan.runtime},
            "trainer": {
                "image": plan.image,
                "command": _command(plan),
                "numNodes": plan.nnodes,
                "numProcPerNode": plan.per_node,
                "resourcesPerNode": _resources(plan),
            },
            "runtimePatches": [{"manager": "lockstep", "trainingRuntimeSpec": {"template": {"spec": patch}}}],
        },
    }


def _command(plan: KubernetesPlan) -> list[str]:
    """torchrun, which takes the rest from PET_ variables. RANK and WORLD_SIZE of the operator count pods."""
    data = {} if plan.config.execution.data_dir else {"data_dir": f"{_MOUNT}/data"}
    words = ["torchrun", *train_words(plan, f"{_MOUNT}/runs/{plan.job}", **data)]
    return [word.replace("$", "$$") for word in words]  # Kubernetes expands $(NAME) and reads $$ as $


def _resources(plan: KubernetesPlan) -> dict[str, Any]:
    asked: dict[str, Any] = {"cpu": str(plan.cores * plan.per_node)}
    if plan.memory:
        asked["memory"] = plan.memory
    if plan.gpus_per_node:
        asked["nvidia.com/gpu"] = str(plan.gpus_per_node)
    firm = {name: value for name, value in asked.items() if name != "cpu"}  # a limit on cores would throttle
    return {"requests": asked} | ({"limits": firm} if firm else {})


def _mounts() -> list[dict[str, Any]]:
    return [{"name": _STORE, "mountPath": _MOUNT}, {"name": _SHM, "mountPath": "/dev/shm"}]


def _volumes(plan: KubernetesPlan) -> list[dict[str, Any]]:
    return [
        {"name": _STORE, "persistentVolumeClaim": {"claimName": plan.claim}},
        {"name": _SHM, "emptyDir": {"medium": "Memory"}},  # a container's own has 64 MiB, too little for loader workers
    ]
