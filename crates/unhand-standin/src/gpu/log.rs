//! What had no effect, for whoever wonders about a value: each kernel and library call once, in a file.

use std::collections::HashSet;
use std::ffi::CStr;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::{Mutex, OnceLock, PoisonError};

use super::config;

struct Log {
    file: Option<File>,
    seen: HashSet<String>,
}

/// Notes a kernel whose values are not computed.
pub(crate) fn kernel(name: Option<&'static CStr>) {
    if config().log.is_some() {
        note("kernel", &name.unwrap_or(c"?").to_string_lossy());
    }
}

/// Notes a library call that computes nothing.
pub(crate) fn call(name: &CStr) {
    if config().log.is_some() {
        note("call", &name.to_string_lossy());
    }
}

/// Notes that something was asked for that is not there.
pub(crate) fn missing(name: &str) {
    if config().log.is_some() {
        note("missing", name);
    }
}

fn note(kind: &str, what: &str) {
    static LOG: OnceLock<Mutex<Log>> = OnceLock::new();
    let open = || {
        let path = config().log.as_deref().unwrap_or_default();
        let file = OpenOptions::new().append(true).create(true).open(path).ok();
        Mutex::new(Log { file, seen: HashSet::new() })
    };
    let mut log = LOG.get_or_init(open).lock().unwrap_or_else(PoisonError::into_inner);
    let line = format!("{kind} {what}\n");
    if !log.seen.contains(&line) {
        if let Some(file) = &mut log.file {
            // A log that cannot be written is no reason to disturb the program.
            let _ = file.write_all(line.as_bytes());
        }
        log.seen.insert(line);
    }
}
