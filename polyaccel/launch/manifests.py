"""Jobs as documents that a cluster's own scheduler reads.

Kubernetes has three kinds: a JobSet, Kubeflow's TrainJob, or an MPIJob of its MPI operator.

[Note: Pod addresses]
The pods of a JobSet `NAME` with one job called `node` have the host names NAME-node-0-0, NAME-node-0-1, ... in the
domain NAME, and each finds its number in JOB_COMPLETION_INDEX. A TrainJob is a JobSet too. So every pod gives the
command `polyaccel run` with all hosts and its own number, and the rendezvous is at the first pod: no pod needs ssh. In
an MPIJob the launcher's pod alone gives it, with the hostfile that the operator writes, and mpirun reaches the others.

[Note: Secrets of a manifest]
People keep manifests in repositories. A variable whose name is that of a secret is taken from a Secret of the cluster,
which has the manifest's name, and its value does not stand in the manifest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from polyaccel.errors import LaunchError
from polyaccel.launch.base import Job
from polyaccel.redaction import is_secret

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
"""What YAML takes for something else than a string."""


def as_yaml(value: Mapping[str, Any]) -> str:
    """A document of mappings with names as keys, sequences, strings, integers and booleans; nothing else."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, under in value.items():
            if _is_block(under):
                yield f"{_scalar(key)}:"
                yield from (f"  {line}" for line in _lines(under))
            else:
                yield f"{_scalar(key)}: {_scalar(under)}"
        return
    for item in value:
        first, *rest = _lines(item) if _is_block(item) else [_scalar(item)]
        yield f"- {first}"
        yield from (f"  {line}" for line in rest)


def _is_block(value: Any) -> bool:
    return isinstance(value, (Mapping, Sequence)) and not isinstance(value, str) and len(value) > 0


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in quoted)


HOSTFILE = "/etc/mpi/hostfile"
"""Where the MPI operator writes the hosts of an MPIJob, for its launcher."""
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_NUMBERED = 'first=$1 verb=$2; shift 2; exec "$first" "$verb" --node-rank "$JOB_COMPLETION_INDEX" "$@"'
"""A shell's program: the command of its arguments, `polyaccel run ...`, with the pod's number among the options."""
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True, slots=True)
class PodSettings:
    """What a job does not contain about its pods: the container `image`, `resources` by name (their limits), the
    `workdir` in the image (None: its own), and how often all of them are started again. `name` is the manifest's."""

    name: str
    image: str
    resources: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    restarts: int = 0

    def __post_init__(self) -> None:
        """Raise LaunchError for a name that no pod can have."""
        if _NAME.fullmatch(self.name) is None:
            hint = "give --name with at most 40 lower-case letters, digits and dashes, a letter first"
            raise LaunchError(f"{self.name!r} is not a name for a job of Kubernetes", hint=hint, value=self.name)


Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ManifestKind:
    """A kind of manifest: how its pods are called, by the job's name and their number; which options give `polyaccel
    run` its hosts there; and what the manifest of a job is, whose pods give the command of these words."""

    host: Callable[[str, int], str]
    hosts_option: Callable[[Job], Sequence[str]]
    make: Callable[[Job, Sequence[str], PodSettings], Manifest]


def _job_set(job: Job, words: Sequence[str], pods: PodSettings) -> Manifest:
    template = {"spec": {"restartPolicy": "Never", **_pod("node", _numbered(words), job, pods)}}
    count = len(job.hosts)
    indexed = {"completionMode": "Indexed", "completions": count, "parallelism": count, "backoffLimit": 0}
    nodes = {"name": "node", "replicas": 1, "template": {"spec": {**indexed, "template": template}}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": pods.name},
        "spec": {
            "failurePolicy": {"maxRestarts": pods.restarts},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [nodes],
        },
    }


def _train_job(job: Job, words: Sequence[str], pods: PodSettings) -> Manifest:
    if pods.workdir is not None:
        hint = "leave --workdir out and let the image have it, or emit k8s-jobset"
        raise LaunchError(
            "a TrainJob has no field for the folder in which its container works", hint=hint, value=pods.workdir
        )
    trainer: Manifest = {"image": pods.image, "command": _numbered(words), "numNodes": len(job.hosts)}
    if job.exports:
        trainer["env"] = _environment(job.exports, pods)
    if pods.resources:
        trainer["resourcesPerNode"] = {"limits": dict(pods.resources)}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": pods.name},
        "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer},
    }


def _mpi_job(job: Job, words: Sequence[str], pods: PodSettings) -> Manifest:
    started = _pod(
        "launcher", [word.replace("$", "$$") for word in words], job, pods, variables=_AS_ROOT, has_resources=False
    )
    waiting = _pod("worker", [], job, pods, variables=_AS_ROOT)
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": pods.name},
        "spec": {
            "slotsPerWorker": max(map(len, job.hosts.values())),
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": pods.restarts},
            "mpiImplementation": "OpenMPI",
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": {"spec": started}},
                "Worker": {"replicas": len(job.hosts), "restartPolicy": "Never", "template": {"spec": waiting}},
            },
        },
    }


def _numbered(words: Sequence[str]) -> list[str]:
    """The command of a pod that adds its number. Kubernetes itself replaces `$(NAME)` in commands."""
    return ["sh", "-c", _NUMBERED, "sh", *(word.replace("$", "$$") for word in words)]


def _pod(
    container: str,
    command: list[str],
    job: Job,
    pods: PodSettings,
    *,
    variables: Mapping[str, str] | None = None,
    has_resources: bool = True,
) -> Manifest:
    """The specification of a pod with one container, whose /dev/shm may grow: data loaders hand batches over there."""
    made: Manifest = {"name": container, "image": pods.image}
    if command:
        made["command"] = command
    if pods.workdir is not None:
        made["workingDir"] = pods.workdir
    if environment := {**(variables or {}), **job.exports}:
        made["env"] = _environment(environment, pods)
    if pods.resources and has_resources:
        made["resources"] = {"limits": dict(pods.resources)}
    made["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
    return {"containers": [made], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}


def _environment(variables: Mapping[str, str], pods: PodSettings) -> list[Manifest]:
    """`$(NAME)` in a value would be replaced; `$$` stands for a dollar sign. See [Note: Secrets of a manifest]."""
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": pods.name, "key": name}}}
        if is_secret(name)
        else {"name": name, "value": value.replace("$", "$$")}
        for name, value in variables.items()
    ]


def _listed(job: Job) -> Sequence[str]:
    hosts = ",".join(f"{host}:{len(slots)}" for host, slots in job.hosts.items())
    return ("--hosts", hosts, "--master-addr", str(job.master_addr), "--master-port", str(job.master_port))


def _by_mpi(job: Job) -> Sequence[str]:
    return ("--launcher", "openmpi", "--hostfile", HOSTFILE)


KINDS: Mapping[str, ManifestKind] = MappingProxyType(
    {
        "k8s-jobset": ManifestKind(lambda name, number: f"{name}-node-0-{number}.{name}", _listed, _job_set),
        "k8s-trainjob": ManifestKind(lambda name, number: f"{name}-node-0-{number}.{name}", _listed, _train_job),
        "k8s-mpijob": ManifestKind(lambda name, number: f"{name}-worker-{number}.{name}", _by_mpi, _mpi_job),
    }
)
