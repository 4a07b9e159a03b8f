"""Manifests for Kubernetes: a TrainJob of Kubeflow Trainer, which runs torchrun on each node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from fastsync._checks import check_at_least

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
RUNS = "/runs"
"""Where the claim is mounted."""


@dataclass(frozen=True)
class TrainJob:
    """The request to Kubeflow Trainer, version 2.2 or newer."""

    image: str | None = None
    """Container image that has fastsync-torch with the extra train. It must be said."""
    file: str = "trainjob.yaml"
    """File to write. It must not exist yet."""
    name: str = "fastsync"
    """Name of the job, and of the run's folder."""
    namespace: str | None = None
    """Namespace, where it is not the default."""
    runtime: str = "torch-distributed"
    """The cluster's training runtime."""
    nodes: int = 1
    """Pods."""
    nproc: int = 1
    """Ranks in each pod, as many as it has GPUs."""
    gpus_per_node: int | None = None
    """GPUs of NVIDIA for each pod."""
    cpus_per_node: int | None = None
    """Cores for each pod."""
    memory: str | None = None
    """Memory for each pod, such as 32Gi. What is in shared memory counts."""
    shared_memory: str = "2Gi"
    """Most that the ranks of a pod may share in memory: Kubernetes gives a pod 64 MiB otherwise."""
    claim: str | None = None
    """PersistentVolumeClaim for the run's folder, by which a job that is started again goes on."""

    def __post_init__(self) -> None:
        check_at_least(self, nodes=1, nproc=1, gpus_per_node=1, cpus_per_node=1)
        for name in ("name", "namespace", "claim"):
            value = getattr(self, name)
            if value is not None and not _NAME.fullmatch(value):
                raise ValueError(f"{name}={value!r} may hold small letters, digits and, within it, '-' only")


def manifest(job: TrainJob, command: Sequence[str]) -> str:
    """Makes the manifest.

    Args:
        job: what to ask for.
        command: what each pod runs: torchrun, which finds the other pods by what Kubeflow sets, and a script.

    Raises:
        ValueError: no image is said.
    """
    if job.image is None:
        raise ValueError("image is missing: say which container image has fastsync-torch with the extra train")
    resources = {"nvidia.com/gpu": job.gpus_per_node, "cpu": job.cpus_per_node, "memory": job.memory}
    asked = {name: value for name, value in resources.items() if value is not None}
    trainer: dict[str, Any] = {
        "image": job.image,
        "command": list(command),
        "numNodes": job.nodes,
        "numProcPerNode": job.nproc,
    }
    if asked:
        trainer["resourcesPerNode"] = {"requests": asked, "limits": dict(asked)}
    metadata = {"name": job.name, **({"namespace": job.namespace} if job.namespace else {})}
    spec = {"runtimeRef": {"name": job.runtime}, "trainer": trainer, "runtimePatches": [_volumes(job)]}
    content = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": spec}
    return yaml.safe_dump(content, sort_keys=False)


def _volumes(job: TrainJob) -> dict[str, Any]:
    """A memory volume on /dev/shm, and the claim on ``RUNS``, for the pods that train."""
    volumes: list[dict[str, Any]] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": job.shared_memory}}
    ]
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if job.claim is not None:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": job.claim}})
        mounts.append({"name": "runs", "mountPath": RUNS})
    pod = {"volumes": volumes, "containers": [{"name": "node", "volumeMounts": mounts}]}
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "manager": "fastsync.io/launch",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
    }
