#!/bin/sh
# Everything that needs a GPU, in one run: the marked tests, then what capture costs on 8B shapes.
# usage: sh tools/gpu_checks.sh OUTPUT_DIR; vLLM must be importable and the project installed.
set -eu
out=$1
export VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=WARNING
python3 -m pytest -q -rA -p no:cacheprovider tests/gpu 2>&1 | tee "$out/gpu_tests.log"
python3 tools/benchmark.py --model tests/gpu/llama_8b --prefill 256x1024 --decode 256x128+256 --rounds 2 \
    --store /dev/shm --output "$out/benchmark_8b.json" \
    -- --load-format dummy --skip-tokenizer-init --max-model-len 4096 --gpu-memory-utilization 0.8
