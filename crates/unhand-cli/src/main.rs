//! The `unhand` command: reads files, asks `unhand-analyze`, prints the answer.
fn main() {}
