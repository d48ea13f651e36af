#!/usr/bin/env bash
# What scopes, the leak watch, batches that adapt, the flight recorder and the pytest plugin do and cost on a GPU:
#
#     benches/gpu/habits.sh FOLDER
#
# Runs the tests and the benchmarks of these from a checkout with its module, and writes one log for each into the folder.
# The other tools of the comparison are those of benches/python/requirements-batches.txt.
set -u
cd "$(dirname "$0")/../.."
out=${1:?usage: habits.sh FOLDER}
mkdir -p "$out"
export PYTHONPATH="$PWD/python:$PWD/tests/standin${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1

one() {
    local name=$1
    shift
    local begin=$SECONDS
    timeout 300 "$@" >"$out/$name.log" 2>&1
    echo "$name: exit code $?, $((SECONDS - begin)) s: $(tail -n 1 "$out/$name.log" | cut -c1-200)"
}

# Tests that run out of memory are written for the device that their header names, `# stand-in: UNHAND_STANDIN_MEMORY=4GiB`.
total_mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1)
for test in births scope watch batches on_oom; do
    gib=$(sed -n 's/^# stand-in: UNHAND_STANDIN_MEMORY=\([0-9]*\)GiB$/\1/p' "tests/python/torch/$test.py")
    limit=
    [ -z "$gib" ] || limit=per_process_memory_fraction:$(awk "BEGIN { print $gib * 1024 / $total_mib }")
    PYTORCH_CUDA_ALLOC_CONF=$limit one "test-$test" python3 "tests/python/torch/$test.py"
done
one scope python3 benches/python/scope.py
one on_oom python3 benches/python/on_oom.py
one pytest_plugin python3 benches/python/pytest_plugin.py
one batches python3 benches/python/batches.py
one watch python3 benches/python/watch.py cost
