//! Runs the real PyTorch on the stand-in: the scripts of `tests/standin`, and the workloads of recorded runs.
//!
//! Needs what `tests/standin/fetch.py` installs. Without it the tests pass without having looked, unless
//! `UNHAND_REQUIRE_STANDIN` is set, as it is in CI.

mod bench;
mod recordings;
mod scripts;
