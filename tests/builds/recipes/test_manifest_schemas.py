"""Manifests against the published schemas: the models of Kubeflow's and Kubernetes' own packages, and, in a folder that
K8S_CRDS names, the definitions of the resources themselves. `make test-recipes` has the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

KINDS = ("k8s-jobset", "k8s-trainjob", "k8s-mpijob")
DEFINITIONS = os.environ.get("K8S_CRDS")
pytestmark = pytest.mark.skipif(
    find_spec("kubeflow_trainer_api") is None, reason="Kubeflow's models are not installed: make test-recipes"
)


@pytest.fixture(scope="module", params=KINDS)
def manifest(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A manifest with all that one can have."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "train.py").touch()
    how = "--num-nodes 2 --nproc 4 --image registry/image:1 --name gpt --restarts 2 --export A=b --resource memory=64Gi"
    own = [] if request.param == "k8s-trainjob" else ["--workdir", "/app"]
    command = [sys.executable, "-m", "polyaccel", "run", "--emit", request.param, *how.split(), *own, "train.py", "x"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=True)
    found: dict[str, Any] = import_module("yaml").safe_load(done.stdout)
    return found


def test_the_models_read_it_and_nothing_is_left_over(manifest: dict[str, Any]) -> None:
    models = import_module("kubeflow_trainer_api.models")
    if manifest["kind"] == "MPIJob":  # its operator has no package: the pods are Kubernetes' own
        for replica in manifest["spec"]["mpiReplicaSpecs"].values():
            template = replica["template"]
            assert models.IoK8sApiCoreV1PodTemplateSpec.from_dict(template).to_dict() == template
        return
    model = {"JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob}[manifest["kind"]]
    assert model.from_dict(manifest).to_dict() == manifest


@pytest.mark.skipif(DEFINITIONS is None, reason="K8S_CRDS names no folder with the definitions of the resources")
def test_the_definition_of_the_resource_allows_it(manifest: dict[str, Any]) -> None:
    yaml, jsonschema = import_module("yaml"), import_module("jsonschema")
    definitions = [yaml.safe_load(file.read_text()) for file in sorted(Path(str(DEFINITIONS)).glob("*.yaml"))]
    version = manifest["apiVersion"].partition("/")[2]
    (schema,) = (
        each["schema"]["openAPIV3Schema"]
        for definition in definitions
        if definition["spec"]["names"]["kind"] == manifest["kind"]
        for each in definition["spec"]["versions"]
        if each["name"] == version
    )
    _close(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    errors = jsonschema.Draft7Validator(schema).iter_errors(manifest)
    assert [(list(error.path), error.message) for error in errors] == []


def _close(schema: Any) -> None:
    """Refuse what a schema does not name, as the server's strict validation does."""
    if isinstance(schema, dict):
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        if schema.get("x-kubernetes-int-or-string"):
            schema.pop("anyOf", None)
            schema["type"] = ["integer", "string"]
    for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _close(each)
