//! Everything that can go wrong, each with the place in the file.

/// Why a snapshot could not be read or written. Offsets are bytes of (decompressed) pickle data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The data does not begin as a pickle of protocol 2 or later does.
    #[error("not a pickle of protocol 2 to 5, it looks like {looks_like}")]
    NotAPickle {
        /// What it may be instead.
        looks_like: &'static str,
    },
    /// A protocol later than 5.
    #[error("pickle protocol {protocol} is newer than this reader")]
    Protocol {
        /// The protocol the file declares.
        protocol: u8,
    },
    /// An opcode that only protocols 0 and 1 use.
    #[error("opcode `{name}` of pickle protocol 0 or 1 at byte {offset}")]
    OldOpcode {
        /// The opcode's name in Python's `pickletools`.
        name: &'static str,
        /// Where.
        offset: u64,
    },
    /// An opcode that would import or call something. Nothing of the kind happens here.
    #[error("opcode `{name}` at byte {offset} asks for code to be run: `{class}`")]
    Refused {
        /// The opcode's name in Python's `pickletools`.
        name: &'static str,
        /// What the file names, such as `os.system`.
        class: String,
        /// Where.
        offset: u64,
    },
    /// An opcode that no snapshot has.
    #[error("opcode `{name}` at byte {offset} is not supported")]
    Unsupported {
        /// The opcode's name in Python's `pickletools`.
        name: &'static str,
        /// Where.
        offset: u64,
    },
    /// A byte that is no opcode.
    #[error("unknown opcode {byte:#04x} at byte {offset}")]
    UnknownOpcode {
        /// The byte.
        byte: u8,
        /// Where.
        offset: u64,
    },
    /// The data ends before the pickle does.
    #[error("the data ends at byte {offset}, inside the pickle")]
    Truncated {
        /// How many bytes there are.
        offset: u64,
    },
    /// An opcode does not fit what came before it.
    #[error("malformed pickle at byte {offset}: {what}")]
    Malformed {
        /// What is wrong.
        what: &'static str,
        /// Where.
        offset: u64,
    },
    /// A list or dict is changed after it was put into another one, as in a list that contains itself.
    #[error("a list or dict is changed at byte {offset} after another one has taken it up")]
    ChangedAfterUse {
        /// Where.
        offset: u64,
    },
    /// The file would need far more memory than its length justifies, or values nest too deep.
    #[error("{what} at byte {offset}: more than a file of this length can honestly need")]
    TooLarge {
        /// What grows.
        what: &'static str,
        /// Where; the length of the data when it shows only after the last byte.
        offset: u64,
    },
    /// A good pickle, but not of a memory snapshot.
    #[error("not a memory snapshot, but {found}")]
    NotASnapshot {
        /// What it holds.
        found: String,
    },
    /// A part of the snapshot has not the form PyTorch gives it.
    #[error("`{path}` should be {expected}")]
    Form {
        /// Which part, such as `segments[3].blocks`.
        path: String,
        /// What PyTorch writes there.
        expected: &'static str,
    },
    /// Compressed data that cannot be unpacked.
    #[error("bad {format} data: {reason}")]
    Decompress {
        /// `gzip`, `xz` or `zstd`.
        format: &'static str,
        /// What the unpacker says.
        reason: String,
    },
    /// Compressed data that unpacks to more than was allowed.
    #[error("{format} data unpacks to more than {limit} bytes")]
    DecompressedTooLarge {
        /// `gzip`, `xz` or `zstd`.
        format: &'static str,
        /// The limit, in bytes.
        limit: u64,
    },
    /// A model that cannot be written, such as a [`Value`](crate::Value) nested too deep.
    #[error("cannot be written: {what}")]
    Unwritable {
        /// Why.
        what: &'static str,
    },
    /// The writer's own failure.
    #[error("cannot write the snapshot")]
    Write(#[from] std::io::Error),
}
