# The day's commands. Each is one line that can also be typed without `just`.

# List the recipes
default:
    @just --list

# Build everything once; `import unhand` works with PYTHONPATH=python
setup:
    cargo build --workspace --all-targets && cargo xtask module

# Format, lints and house rules
lint:
    cargo xtask lint

# Run the tests, or those whose name contains a word
test *words:
    cargo test --workspace {{words}}

# Run the Python tests that need no PyTorch, or those whose script's name contains a word
python *words:
    cargo xtask module && python3 tests/python/run.py {{words}}

# Everything CI runs
ci:
    .ci/run

# House rules alone
check:
    cargo xtask check

# Write code in the house format
format:
    cargo fmt --all

# Accept changed inline snapshots after reading the difference
accept:
    cargo insta test --accept --workspace

# Compare the allocator with PyTorch's own, built from its wheel
oracle:
    python3 tests/oracle/fetch.py && python3 tests/oracle/build.py && UNHAND_REQUIRE_ORACLE=1 cargo test --release -p unhand-alloc --test differential

# Count the instructions of the allocator's hot loops
instructions:
    cargo xtask instructions

# Time the allocator beside PyTorch's own, in one run
bench:
    cargo run --release --manifest-path benches/alloc/Cargo.toml

# Long runs: the allocator beside PyTorch's own, then both fuzz targets for SECONDS each
fuzz seconds="600":
    UNHAND_REQUIRE_ORACLE=1 UNHAND_ORACLE_SEED=random UNHAND_ORACLE_CASES=20000 cargo test --release -p unhand-alloc --test differential && cargo +nightly fuzz run --sanitizer none allocator -- -max_len=4096 -max_total_time={{seconds}} && cargo +nightly fuzz run pickle -- -dict=fuzz/pickle.dict -max_total_time={{seconds}}

# The reference of the crates
docs:
    cargo doc --workspace --no-deps --open

# The unhand command, built for speed
run *arguments:
    cargo run --release --quiet -p unhand-cli -- {{arguments}}
