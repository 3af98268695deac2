#!/usr/bin/env bash
# usage: make_all.sh PYTHON: write every checkpoint of make_checkpoints.py here anew, by that interpreter's DeepSpeed
set -e
cd "$(dirname "$0")"
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
rm -rf steps.json zero1 zero2 zero3 universal bf16 bf16-zero3 fp16 fp16-zero3 offload offload-zero3
for run in zero1:2 zero2:2 zero3:2 bf16:3 bf16-zero3:2 fp16:2 fp16-zero3:2 offload:2 offload-zero3:3; do
    "$1" -m torch.distributed.run --nproc-per-node "${run#*:}" make_checkpoints.py "${run%:*}"
done
"$1" -m deepspeed.checkpoint.ds_to_universal --inject_missing_state \
    --input_folder zero1/global_step4 --output_folder universal/global_step4
rm -rf experts experts.json
PYTHONPATH=../../support "$1" -m torch.distributed.run --nproc-per-node 4 make_experts.py
rm -f */zero_to_fp32.py */zero_to_torch.py
