//! What the doctor says: findings, and the diagnosis that holds them; its field names are the JSON names.

use std::fmt;

use serde::Serialize;
use unhand_monitor::{Memory, Mig};

use super::interpreter::Interpreter;

/// Everything `unhand doctor` found out.
#[derive(Debug, Serialize)]
pub(crate) struct Diagnosis {
    pub(crate) schema_version: u32,
    pub(crate) findings: Vec<Finding>,
    pub(crate) driver_version: Option<String>,
    pub(crate) cuda_driver_version: Option<String>,
    pub(crate) devices: Vec<SeenDevice>,
    pub(crate) python: Option<Interpreter>,
}

/// A device, and how PyTorch calls it here.
#[derive(Debug, Serialize)]
pub(crate) struct SeenDevice {
    /// The driver's index.
    pub(crate) index: u32,
    pub(crate) uuid: String,
    pub(crate) name: Option<String>,
    /// `cuda:N` of this device, or of a part of it; `null` if this process does not see it.
    pub(crate) torch_index: Option<usize>,
    #[serde(flatten)]
    pub(crate) memory: Memory,
    pub(crate) mig: Option<Mig>,
}

/// One thing that is as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) topic: Topic,
    pub(crate) level: Level,
    pub(crate) sentence: String,
    /// What to do about it, if there is something to do.
    pub(crate) hint: Option<String>,
}

/// What a finding is about, in the order of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Topic {
    Driver,
    Devices,
    Machine,
    Python,
    Settings,
}

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Level {
    /// As it should be.
    Ok,
    /// Worth knowing.
    Note,
    /// Probably not what was meant.
    Warning,
    /// PyTorch cannot use the GPU like this.
    Problem,
}

impl Finding {
    pub(crate) fn new(topic: Topic, level: Level, sentence: impl Into<String>) -> Finding {
        Finding { topic, level, sentence: sentence.into(), hint: None }
    }

    /// Adds what to do about it.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Finding {
        self.hint = Some(hint.into());
        self
    }
}

impl Diagnosis {
    /// How many findings are of this level.
    pub(crate) fn count(&self, level: Level) -> usize {
        self.findings.iter().filter(|finding| finding.level == level).count()
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Topic::Driver => "Driver",
            Topic::Devices => "Devices",
            Topic::Machine => "Machine",
            Topic::Python => "Python",
            Topic::Settings => "Settings",
        })
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Level::Ok => "ok",
            Level::Note => "note",
            Level::Warning => "warning",
            Level::Problem => "problem",
        })
    }
}
