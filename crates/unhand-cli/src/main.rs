//! The program `unhand`; everything it does is in the library beside it.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(unhand_cli::run(std::env::args_os()))
}
