#!/usr/bin/env bash
# Half an hour on a machine with GPUs, from an installed checkout: what to run first, and send back.
#     bash results/reference/half_hour.sh                  all parts, in this order
#     bash results/reference/half_hour.sh kernels model    some of them
# host     what each engine's Python costs a layer, with a profile where py-spy is installed    9 min
# kernels  kernels against float64, their speed, each strategy's local work                     5 min
# model    a rank that hangs; Qwen3-4B on one GPU                                               8 min
# several  Ulysses and ring over all GPUs, where there are two or more                          6 min
# Every step has a time limit, and no step ends the others: the last lines name those that failed. All goes to
# $OUT and, packed again after every step, to $OUT.tgz: records, logs, profiles. Send that file back.
# NANO=1 takes a tiny model and short sequences: it shows on a CPU that every step runs, and measures nothing.
set -u
[ -z "${OUT:-}" ] || OUT=$(realpath -m "$OUT")
cd "$(dirname "$0")/../.."
export out=${OUT:-$PWD/results/sweeps/half_hour_$(date +%m%d_%H%M%S)}
here=results/reference/half_hour
gpus=$(nvidia-smi -L 2> /dev/null | wc -l)
small=model=qwen3_0_6b large=model=qwen3_4b deep=28 shallow=7 short=2k lengths=(8k 32k 64k 96k) kernels=torch_flash,cudnn
cells="measure.budget_s=6 measure.warmup_s=3 measure.min_timed_steps=4 measure.repeats=1 measure.reference_budget_s=0"
if [ -n "${NANO:-}" ]; then
    small="model=qwen3_nano cluster.threads_per_rank=1" large=model=qwen3_nano deep=3 shallow=2 short=64 lengths=(256 512 1k 2k)
    kernels=torch_flash
    cells="measure.steps=5 measure.warmup_s=0 measure.repeats=1 measure.reference_budget_s=0"
fi
failed=()
mkdir -p "$out" || exit 1
export PYTHONUNBUFFERED=1

step() { # name, seconds at most, command
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    timeout -k 20 "$limit" "$@" > "$out/$name.log" 2>&1
    code=$?
    [ $code = 0 ] || failed+=("$name (exit code $code, log: $out/$name.log)")
    echo "$name: exit code $code, $((SECONDS - start)) s" | tee -a "$out/steps.txt"
    tar czf "$out.tgz" --exclude=figures -C "$out" .
}

engine() { # engine, layers, length, checkpointing
    step "host_$1_$2_layers_$3_$4" 120 python $here/host_engines.py "$1" "$out/host_engines.jsonl" $small model.num_layers="$2" \
        seq_len="$3" checkpointing="$4"
}

host() {
    local case
    for case in zero3 zero3_leaf fsdp2 ddp plain; do
        engine $case $deep $short true
        engine $case $deep "${lengths[0]}" true
    done
    for case in zero3 zero3_leaf fsdp2; do
        engine $case $shallow $short true
        engine $case $deep $short false
    done
    for case in zero3 fsdp2; do
        command -v py-spy > /dev/null && step "profile_$case" 120 py-spy record --native --rate 200 --format raw \
            --output "$out/$case.folded" -- python $here/host_engines.py $case "$out/profiled.jsonl" $small \
            model.num_layers=$deep seq_len=$short checkpointing=true
    done
    step engines 180 python run_sweep.py -m strategy=local $small seq_len="${lengths[0]}" engine=zero3,fsdp2,ddp $cells \
        measure.keep_traces=true sweep_dir="$out/engines"
}

kernels() {
    step tests 90 python -m pytest -q -m gpu tests/bench/attention/test_kernels.py
    step attention 180 python run_sweep.py -m workload=attention strategy=local $large kernel=$kernels \
        seq_len="$(IFS=,; echo "${lengths[*]}")" $cells measure.budget_s=4 sweep_dir="$out/attention"
    step local_work 150 python $here/local_work.py "$out/local_work.jsonl" $kernels "${lengths[0]},${lengths[2]}" 4,8 $large
}

hang() { # a rank that stops in its timed steps has to be found and named
    local ranks=cluster.world_size=2 sweep process
    [ "$(nvidia-smi -L 2> /dev/null | wc -l)" = 1 ] && ranks="cluster=gpu cluster.world_size=2 cluster.ranks_per_gpu=2"
    python run_sweep.py model=qwen3_nano strategy=ring seq_len=4k engine=ddp $ranks measure.hang_timeout_s=10 \
        measure.budget_s=60 measure.steps=5000 measure.warmup_s=0 measure.repeats=1 measure.reference_budget_s=0 \
        sweep_dir="$out/hang" &
    sweep=$!
    while kill -0 $sweep 2> /dev/null; do
        for process in /proc/[0-9]*; do
            case $(readlink "$process/fd/1") in "$out"/hang/*/rank_1.log)
                if grep -qs timing "$(grep -o '/.*rank_1.place' "$process/maps" | head -1)"; then # the phase, as the rank notes it
                    sleep 5 && kill -STOP "${process#/proc/}"
                    break 2
                fi ;;
            esac
        done
        sleep 1
    done
    wait $sweep
    grep -q '"status": *"timed_out"' "$out/hang/records.jsonl"
}
export -f hang

model() {
    step hang 180 bash -c hang
    step memory 270 python run_sweep.py -m strategy=local $large seq_len="$(IFS=,; echo "${lengths[*]:0:2}")" loss=untiled engine=zero3 \
        $cells measure.budget_s=4 measure.min_timed_steps=2 sweep_dir="$out/memory"
    step speed 150 python run_sweep.py -m strategy=local $large seq_len="${lengths[0]}" engine=fsdp2 kernel=$kernels $cells \
        measure.budget_s=4 sweep_dir="$out/speed"
}

several() {
    [ "$gpus" -ge 2 ] || [ -n "${NANO:-}" ] || return 0
    step several 360 python run_sweep.py -m strategy=local,deepspeed_ulysses,ring_flash_attn $small seq_len="${lengths[0]},${lengths[1]}" \
        $cells sweep_dir="$out/several"
}

{ nvidia-smi -L; nvidia-smi topo -m; nvidia-smi -q -d CLOCK,POWER; lscpu; python -m pip list; } > "$out/machine.txt" 2>&1
for part in "${@:-host kernels model several}"; do
    for each in $part; do
        case $each in
        host | kernels | model | several) $each ;;
        *) failed+=("$each: no such part; take host, kernels, model or several") ;;
        esac
    done
done
echo "send back: $out.tgz"
[ ${#failed[@]} = 0 ] && exit 0
printf 'failed: %s\n' "${failed[@]}"
exit 1
