//! Whole runs of the command: arguments in; stdout, stderr and the exit code out.

mod answers;
mod broken_input;
mod figures;
mod recordings;
mod run;
mod stand_in;
mod usage;
