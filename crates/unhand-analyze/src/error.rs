//! The one error type of this crate.

use std::io;

/// Why a question to a snapshot could not be answered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The snapshot says nothing at all about the device that was asked for.
    #[error("the snapshot has no device: `{device}` (it has {present})")]
    NoSuchDevice {
        /// The device index asked for.
        device: usize,
        /// The devices that are there, as text (`0, 1` or `none`).
        present: String,
    },
    /// A question needs the recorded history, and the snapshot has none.
    #[error("the snapshot has no history of device: `{device}`")]
    NoHistory {
        /// The device index asked for.
        device: usize,
    },
    /// Settings to replay under were refused.
    #[error(transparent)]
    Settings(#[from] unhand_alloc::SettingsError),
    /// The allocator could not follow the recording.
    #[error("cannot replay the history")]
    Replay(#[source] unhand_alloc::AllocError),
    /// The sizes of a device add up to more than any device has.
    #[error("the snapshot is damaged: the sizes of device `{device}` add up to 2^63 bytes or more")]
    Damaged {
        /// The device.
        device: usize,
    },
    /// The flame graph could not be drawn.
    #[error("cannot draw the flame graph: `{0}`")]
    Flame(String),
    /// The answer could not be written.
    #[error("cannot write the answer")]
    Io(#[from] io::Error),
    /// The answer could not be written as JSON.
    #[error("cannot write the answer as JSON")]
    Json(#[from] serde_json::Error),
}

/// The result of a question to a snapshot.
pub type Result<T, E = Error> = std::result::Result<T, E>;
