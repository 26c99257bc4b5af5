#!/bin/sh
# What needs a GPU, in parts, for a machine that is lent for half an hour; each leaves its figures in OUTPUT_DIR.
# usage: sh tools/gpu_checks.sh OUTPUT_DIR PART...
#   tests      the marked tests of one GPU                                                           (5 minutes)
#   rehearsal  `check --rehearse` of the 8B shapes                                                   (1)
#   benchmark  what capture costs at 8B shapes, to /dev/shm and to the disk of $TMP; store_speed     (5)
#   training   tokens/s of ours, speculators and SpecForge at 8B shapes                              (10; 6 to compile)
#   answers    SmolLM2's own answers to many prompts, with their states, into /dev/shm                (5)
#   drafts     from those two drafts by ours and one by speculators                                   (20; two GPUs: 15)
#   parallel   two GPUs: capture and training                                                        (9)
# vLLM must be importable and the project installed; for `training` speculators and specforge, for `drafts` speculators.
# They take all GPUs of the machine. `answers` and `drafts` want SMOLLM2, the folder that tools/smollm2.py makes, `answers` also PROMPTS, the file
# that tools/many_prompts.py writes.
set -eu
[ $# -gt 1 ] || { echo "usage: sh tools/gpu_checks.sh OUTPUT_DIR PART..." >&2; exit 2; }
out=$1
shift
scratch=${TMP:-/tmp}
memory=/dev/shm
export VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=WARNING
# Sixteen threads that wait by spinning for a loop over small tensors took 12 cores from all else.
export OMP_WAIT_POLICY=PASSIVE

# Run a command with its words in a file, and end as it ends.
keep() {
    log=$1
    shift
    status=0
    "$@" > "$log" 2>&1 || status=$?
    tail -n 30 "$log"
    return $status
}

run_tests() { GPU_RESULTS=$out keep "$out/gpu_tests.log" python3 -m pytest -q -rA -s -p no:cacheprovider "$@"; }

# Told their memory, the engines start at the same time.
benchmark() {
    python3 tools/benchmark.py --model tests/gpu/llama_8b --prefill 256x1024 --decode 256x128+256 --rounds 5 \
        --store $memory --disk "$scratch" --output "$out/benchmark_8b.json" \
        -- --load-format dummy --skip-tokenizer-init --max-model-len 4096 --gpu-memory-utilization 0.3 \
        --kv-cache-memory-bytes 21474836480
    python3 tools/store_speed.py "$scratch/store_speed" --mib 2048 --json "$out/store_speed.json"
}

compare_training() {
    python3 -c "from pathlib import Path; from tests.gpu.conftest import write_model, write_states
folder = Path('$scratch/8b'); (folder / 'model').mkdir(parents=True)
write_states(folder / 'store', write_model(folder / 'model'))"
    python3 tools/compare_training.py --model "$scratch/8b/model" --store "$scratch/8b/store" --steps 24 \
        --sides ours-compiled,speculators,specforge --side-seconds 430 --output "$out/training_8b.json"
    rm -rf "$scratch/8b"
}

count_gpus() {
    gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
    [ "$gpus" -gt 0 ] || { echo "gpu_checks: torch sees no GPU" >&2; exit 1; }
}

# Three engines a GPU share the prompts, and write one store: the scheduler of one keeps one core busy and a GPU at 7%.
capture_answers() {
    count_gpus
    for made in $memory/smollm2 "$scratch/prompts"; do
        [ ! -e "$made" ] || { echo "gpu_checks: $made is there from another run: remove it" >&2; exit 1; }
    done
    mkdir "$scratch/prompts"
    split -n "l/$((3 * gpus))" -d --additional-suffix .jsonl "$PROMPTS" "$scratch/prompts/"
    engines=
    engine=0
    for prompts in "$scratch"/prompts/*.jsonl; do
        CUDA_VISIBLE_DEVICES=$((engine % gpus)) VLLM_CACHE_ROOT=$scratch/cache-$engine \
            VLLM_OVERLAY=1 VLLM_OVERLAY_CAPTURE=$memory/smollm2 \
            vllm-overlay prepare "$prompts" \
            --model "$SMOLLM2" -o "$scratch/dataset-$engine" --regenerate --max-tokens 128 \
            -- --dtype bfloat16 --max-model-len 1024 --gpu-memory-utilization 0.15 \
            --kv-cache-memory-bytes 8589934592 > "$out/prepare-$engine.log" 2>&1 &
        engines="$engines $!"
        engine=$((engine + 1))
    done
    failed=0
    for engine in $engines; do wait "$engine" || failed=1; done
    [ $failed = 0 ]
    vllm-overlay inspect $memory/smollm2 --json > "$out/smollm2_store.json"
}

# usage: train_draft NAME COMPARE_DRAFTS_OPTION...: the figures of a side that failed are its last words.
train_draft() {
    name=$1
    shift
    status=0
    keep "$out/drafts-$name.log" python3 tools/compare_drafts.py --model "$SMOLLM2" --store $memory/smollm2 \
        --seconds 600 --self-test warn --work "$scratch/work-$name" --output "$scratch/drafts-$name" "$@" || status=$?
    tar -C "$scratch" -czf - "drafts-$name" | split -b 15000000 -d - "$out/drafts-$name.tgz."
    return $status
}

# The two of ours share a GPU, speculators has one to itself. With one alone, speculators prepares and compiles (six
# minutes at 8B shapes) while ours train, and trains when they are done.
compare_drafts() {
    count_gpus
    (
        export CUDA_VISIBLE_DEVICES=0
        train_draft ours --sides ours-compiled
    ) &
    plain=$!
    (
        export CUDA_VISIBLE_DEVICES=0
        train_draft norms --sides ours-compiled --norms
    ) &
    normed=$!
    [ "$gpus" -gt 1 ] || sleep 440
    failed=0
    (
        export CUDA_VISIBLE_DEVICES=$((gpus - 1))
        train_draft speculators --sides speculators
    ) || failed=1
    wait $plain || failed=1
    wait $normed || failed=1
    [ $failed = 0 ]
    rm -rf $memory/smollm2
}

for part in "$@"; do
    case $part in
        tests) run_tests tests/gpu ;;
        rehearsal) keep "$out/rehearsal.log" vllm-overlay check tests/gpu/llama_8b --rehearse ;;
        benchmark) benchmark ;;
        training) compare_training ;;
        answers) capture_answers ;;
        drafts) compare_drafts ;;
        parallel) run_tests tests/gpu/test_fsdp_gpu.py tests/gpu/test_parallel_gpu.py ;;
        *) echo "gpu_checks: there is no part $part" >&2; exit 2 ;;
    esac
done
