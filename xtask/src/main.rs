//! House rules and generated files, run as `cargo xtask`.
fn main() {}
