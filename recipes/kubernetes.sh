#!/bin/sh
# Kubernetes: IMAGE=registry/image:tag recipes/kubernetes.sh [arguments of the script] | kubectl apply -f -
# KIND is k8s-jobset (the JobSet controller alone), k8s-trainjob (Kubeflow Trainer) or k8s-mpijob (its MPI operator, with
# sshd and Open MPI in the image). The image has polyaccel and this repository as its working folder. RESOURCE is a
# device plugin's name, such as that of its GPUs, of which each node gets one a rank.
set -eu

exec polyaccel run --emit "${KIND:-k8s-jobset}" --image "${IMAGE:?the container image}" --name "${NAME:-gpt}" \
    --num-nodes "${NODES:-2}" --ranks "${RANKS_PER_NODE:-2}" ${RESOURCE:+--resource "$RESOURCE"} \
    examples/gpt/train.py "$@"
