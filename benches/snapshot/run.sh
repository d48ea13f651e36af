#!/bin/sh
# Makes a synthetic snapshot and answers "who held the memory at the peak?" with unhand and with Python, in one run.
#     benches/snapshot/run.sh [EVENTS] [FOLDER]
set -eu
cd "$(dirname "$0")"
events=${1:-1000000}
file=${2:-${TMPDIR:-/tmp}}/unhand-bench-$events.pickle
[ -e "$file" ] || python3 make.py "$events" "$file"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}"
cargo build --release --quiet
for _ in 1 2 3; do "$CARGO_TARGET_DIR/release/snapshot-bench" "$file"; done
python3 compare.py "$file" pickle
python3 compare.py "$file" pickle-no-gc
if python3 -c 'import torch' 2>/dev/null; then
    python3 compare.py "$file" viewer
else
    echo "torch is not installed: its viewer was not measured"
fi
