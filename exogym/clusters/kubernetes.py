"""Make Kubernetes manifests for a run, and a Dockerfile for the run's image.

The manifests describe an indexed Job with one pod per machine. Its pods find each other by the names of a headless
service. Each pod's launcher needs the run's secret from a Kubernetes Secret, which you must create.

If a pod is preempted, all pods end, and Kubernetes starts the script anew in each. A preempted pod does not count as a
failure, but the others do. The run resumes if the script calls `fit(save_dir=..., resume=True)` with a folder on the
volume.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from exogym.clusters.words import IMAGE, LABEL, QUANTITY, check_arguments, check_word
from exogym.errors import ArgumentError, check_count

PORT = 29500
USER = 10001
GRACE_S = 120  # from SIGTERM, at which the run saves itself, to the end of a pod
RESTARTS = 10  # failures that are allowed, for each pod
WORK = "/work"  # the project's folder in the image, and the working directory
MOUNT = "/checkpoints"  # the folder of the claim in the pods
LABEL_WORDS = "at most 52 lowercase letters, digits and '-', as in a DNS label"


@dataclass(frozen=True)
class Pods:
    """A script and the resources that it needs on a Kubernetes cluster. Raises ArgumentError for invalid values.

    Args:
        script: path of a Python file in the image.
        arguments: the script's arguments.
        image: name of the image that the cluster pulls.
        nodes: number of pods.
        processes_per_node: processes in each pod. By default, one per GPU, or one without GPUs.
        name: name of the Kubernetes objects.
        cpus, memory, gpus: each pod's resources, as Kubernetes quantities.
        claim: name of a PersistentVolumeClaim for checkpoints, writable by all pods.
    """

    script: str
    arguments: tuple[str, ...] = ()
    image: str = "exogym:latest"
    nodes: int = 1
    processes_per_node: int | None = None
    name: str = "exogym"
    cpus: str = "2"
    memory: str = "4Gi"
    gpus: int = 0
    claim: str = "exogym-checkpoints"

    def __post_init__(self) -> None:
        check_count("nodes", self.nodes)
        check_count("gpus", self.gpus, least=0)
        if self.processes_per_node is not None:
            check_count("processes_per_node", self.processes_per_node)
        for name in ("name", "claim"):
            check_word(name, getattr(self, name), LABEL, LABEL_WORDS)
        for name in ("cpus", "memory"):
            check_word(name, getattr(self, name), QUANTITY, "a quantity, such as 500m, 2 or 4Gi")
        check_word("image", self.image, IMAGE, "an image, such as registry.example/team/exogym:1")
        check_arguments((self.script, *self.arguments))
        if not self.script:
            raise ArgumentError("no script: pass the path of a Python file in the image")

    @property
    def processes(self) -> int:
        return self.processes_per_node or self.gpus or 1


def manifests(pods: Pods) -> list[dict[str, Any]]:
    """Return the Kubernetes objects for a run, in the order in which to apply them: a service, a policy and a job."""
    labels = {"app.kubernetes.io/name": "exogym", "app.kubernetes.io/instance": pods.name}
    about = {"name": pods.name, "labels": labels}
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": about,
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels,
                 "ports": [{"name": "meeting", "port": PORT}]},
    }  # fmt: skip
    only_ours = {  # only the run's pods may connect to the run's pods
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": about,
        "spec": {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"],
                 "ingress": [{"from": [{"podSelector": {"matchLabels": labels}}]}]},
    }  # fmt: skip
    job = {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": about,
        "spec": {
            "completionMode": "Indexed", "completions": pods.nodes, "parallelism": pods.nodes,
            "backoffLimit": RESTARTS * pods.nodes,  # if one pod is lost, all fail
            "podFailurePolicy": {
                "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
            },
            "template": {"metadata": {"labels": labels}, "spec": _pod(pods)},
        },
    }  # fmt: skip
    return [service, only_ours, job]


def document(objects: Sequence[dict[str, Any]]) -> str:
    """Return the text of a file for `kubectl apply` with these objects. The objects are written as JSON, which is YAML.

    >>> print(document([{"kind": "Job"}, {"kind": "Service"}]), end="")
    # Written by exogym cluster kubernetes: read it, change it, and apply it with kubectl.
    ---
    {
      "kind": "Job"
    }
    ---
    {
      "kind": "Service"
    }
    """
    head = "# Written by exogym cluster kubernetes: read it, change it, and apply it with kubectl.\n"
    return head + "".join(f"---\n{json.dumps(one, indent=2)}\n" for one in objects)


def _pod(pods: Pods) -> dict[str, Any]:
    master = f"{pods.name}-0.{pods.name}"  # the cluster's DNS completes it with the pods' own namespace
    words = [pods.script if not pods.script.startswith("-") else f"./{pods.script}", *pods.arguments]
    command = [
        "python", "-m", "exogym.launch", "--nnodes", str(pods.nodes), "--nproc_per_node", str(pods.processes),
        "--node_rank", "$(JOB_COMPLETION_INDEX)", "--master_addr", master, "--master_port", str(PORT), "--",
        *(word.replace("$", "$$") for word in words),  # Kubernetes would replace $(names)
    ]  # fmt: skip
    needs = {"cpu": pods.cpus, "memory": pods.memory} | ({"nvidia.com/gpu": str(pods.gpus)} if pods.gpus else {})
    secret = {"name": f"{pods.name}-secret", "key": "secret"}
    container = {
        "name": "exogym", "image": pods.image, "command": command, "workingDir": WORK,
        "env": [{"name": "EXOGYM_SECRET", "valueFrom": {"secretKeyRef": secret}}],
        "ports": [{"name": "meeting", "containerPort": PORT}], "resources": {"requests": needs, "limits": needs},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "checkpoints", "mountPath": MOUNT}, {"name": "memory", "mountPath": "/dev/shm"}],
    }  # fmt: skip
    return {
        "subdomain": pods.name, "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S, "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "fsGroup": USER,
                            "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": pods.claim}},
                    {"name": "memory", "emptyDir": {"medium": "Memory"}}],
    }  # fmt: skip


def dockerfile() -> str:
    """Return a Dockerfile for an image with the wheel in dist/, the current folder and this machine's torch version."""
    own, python = version("exogym"), ".".join(platform.python_version_tuple()[:2])
    torch = version("torch").partition("+")[0]
    return f"""\
# Written by exogym cluster kubernetes. First: pip wheel --no-deps -w dist exogym (or its source folder).
FROM python:{python}-slim
COPY dist/exogym-{own}-py3-none-any.whl /tmp/
RUN pip install --no-cache-dir torch=={torch} /tmp/exogym-{own}-py3-none-any.whl && rm /tmp/*.whl
RUN useradd --uid {USER} --create-home exogym
WORKDIR {WORK}
COPY --chown={USER} . {WORK}
USER {USER}
"""
