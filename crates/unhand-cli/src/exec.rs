//! Puts another command in the place of this process.

use std::io;
use std::process::Command;

/// This process becomes the command, so that signals and the exit code are the command's. Comes back only with an error.
#[cfg(unix)]
pub(crate) fn replace(command: &mut Command) -> io::Error {
    use std::os::unix::process::CommandExt;

    command.exec()
}

/// Runs the command and ends with its exit code: nearest to it where processes cannot be replaced.
#[cfg(not(unix))]
pub(crate) fn replace(command: &mut Command) -> io::Error {
    match command.status() {
        Ok(status) => std::process::exit(status.code().unwrap_or(1)),
        Err(error) => error,
    }
}
