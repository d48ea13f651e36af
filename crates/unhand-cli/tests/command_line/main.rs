//! Whole runs of the command: arguments in; stdout, stderr and the exit code out.

mod broken_input;
mod run;
mod usage;
