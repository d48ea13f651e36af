//! What a house rule reports: where, what is wrong, and what to do about it.

use std::fmt;

/// One broken rule. Sorted by place, so that the output reads like a compiler's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    pub(crate) path: String,
    /// Counted from 1; 0 when the whole file is meant.
    pub(crate) line: usize,
    pub(crate) what: String,
    pub(crate) hint: &'static str,
}

impl Finding {
    pub(crate) fn new(path: &str, line: usize, what: impl Into<String>, hint: &'static str) -> Finding {
        Finding { path: path.to_owned(), line, what: what.into(), hint }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { path, line, what, hint } = self;
        match line {
            0 => write!(f, "{path}: {what}\n  hint: {hint}"),
            line => write!(f, "{path}:{line}: {what}\n  hint: {hint}"),
        }
    }
}
