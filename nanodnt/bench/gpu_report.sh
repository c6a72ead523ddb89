#!/usr/bin/env bash
# Checks and measures a GPU in 25 minutes: `make test-gpu`; the same run alone, under DDP and under FSDP over NCCL, each
# of one process, whose losses train.txt shows; then one command of bench.py after the other. All of them anyone can
# repeat. Its output goes to FOLDER/NAME.txt, its figures to FOLDER/NAME.json. What fails does not stop the
# others; the last line names it, and the exit code is 1. Nothing begins after 23 minutes.
#
# make gpu-report                      # into out/gpu
# nanodnt/bench/gpu_report.sh FOLDER

cd "$(dirname "$0")/../.." || exit 1
folder=${1:-out/gpu} python=${PYTHON:-.venv/bin/python}
failed=
"$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())" || {
    echo "error: this machine has no CUDA GPU" >&2
    exit 1
}
mkdir -p "$folder" || exit 1

run() {  # run NAME ARGUMENTS: bench.py with these arguments
    local name=$1
    shift
    if ((SECONDS > 23 * 60)); then
        failed+=" $name (no time)"
        return
    fi
    echo "$(date +%T) $name: python bench.py $*"
    echo "python bench.py $*" > "$folder/$name.txt"
    timeout 300 "$python" bench.py "$@" --data=random --json="$folder/$name.json" \
        >> "$folder/$name.txt" 2>&1 || failed+=" $name"
}

echo "$(date +%T) tests"
"$python" -m pytest -m gpu -n 8 > "$folder/tests.txt" 2>&1 || failed=" tests"

echo "$(date +%T) train"
"$python" data/pystdlib/prepare.py > "$folder/train.txt" 2>&1
for parallel in none ddp fsdp; do
    launch=(-m torch.distributed.run --standalone --nproc_per_node=1)
    [[ $parallel = none ]] && launch=()
    echo "$parallel" >> "$folder/train.txt"
    timeout 300 "$python" "${launch[@]}" train.py config/quickstart.py --parallel=$parallel --max_iters=400 --seed=1 \
        --out_dir="$folder/train_$parallel" --init_from=auto >> "$folder/train.txt" 2>&1 || failed+=" train_$parallel"
done

small=config/gpt2_small.py dnt=config/dnt_small.py one="--batch_size=32 --micro_batch_size=32 --steps=5"
experts="--n_expert=8 --n_ff=1536 --mlp=swiglu" # a token meets as many parameters as in gelu's n_ff = 4608
layouts=config/dnt/s1.py,config/dnt/s5.py,config/dyt/dyt.py,config/scale_vectors/unified.py

run nanogpt $small --against=nanogpt $one
run nanogpt_dnt $dnt --against=nanogpt $one
run nanogpt_dnt_stream $dnt --against=nanogpt --stream_dtype=bfloat16 $one
run 124m_gpt2 $small --vary=micro_batch_size=16,32,64,128 --batch_size=128 --repeats=3 --steps=5
run 124m_dnt $dnt --vary=micro_batch_size=32,64,128 --batch_size=128 --repeats=3 --steps=5
run 774m_dnt config/dnt_large.py --vary=micro_batch_size=16,32,64 --batch_size=64 --repeats=3 --steps=3
run 1436m_dnt config/dnt_xl.py --vary=micro_batch_size=8,16,32 --batch_size=32 --repeats=3 --steps=3
run layouts $small config/dnt/s1.py --vary=$layouts $one
run experts $dnt --vary=experts $experts $one
run norms config/dyt/7b.py --vary=norms --n_layer=2 --vocab_size=8192 --batch_size=1 --micro_batch_size=1 --repeats=3 --steps=5
run optimizers $dnt --vary=optimizers --batch_size=512 --micro_batch_size=32 --repeats=3 --steps=5
run plan $dnt --vary=micro_batch_size=4,8,16,32 --batch_size=32 --compile=False --repeats=1 --steps=2
TORCHINDUCTOR_CACHE_DIR=$(mktemp -d)
export TORCHINDUCTOR_CACHE_DIR
for cache in empty filled; do # "compile s" is what counts in these
    run "compile_cache_$cache" $dnt $one --repeats=1
done
rm -r "$TORCHINDUCTOR_CACHE_DIR"

echo "$(date +%T) in $folder${failed:+; failed:$failed}"
[[ -z $failed ]]
