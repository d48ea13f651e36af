//! Questions to a PyTorch memory snapshot: pure functions that read no file and start no thread.
//!
//! Each answer is one struct; its JSON (`serde::Serialize`) and its text render that struct, and the field names
//! are the JSON names. Bytes are integers in fields that end in `_bytes`. What cannot be known is `None`.
//!
//! | question | call | answer | text |
//! |---|---|---|---|
//! | what held the memory, what pins it, what leaks | [`explain`]`(&snapshot, device, &ExplainOptions)` | [`Explanation`] | [`render`]`(&explanation, &TextOptions)` |
//! | which rank is different | [`Ranks::of`]`(&[Explanation])` | [`Ranks`] | [`Ranks::render`] |
//! | what changed between two | [`Diff::between`]`(&before, &after)` | [`Diff`] | [`Diff::render`] |
//! | bytes by stack | [`Flame::of`]`(&snapshot, device, FlameOf)` | [`Flame`] | [`Flame::write_folded`], [`Flame::write_speedscope`], `Flame::write_svg` |
//! | the raw tables | [`export`](export())`(&snapshot, device, Table, Format, stacks, &mut out)` | rows | CSV, JSON lines |
//! | what my own Rust program allocates | [`snapshot_of`]`(&allocator, stack_of)` | a snapshot | |
//! | the history itself | [`Timeline::of`]`(&snapshot, device)` | [`Timeline`] | |
//!
//! [`devices`] lists the devices a snapshot says something about. The exact peak of *allocated* bytes needs a
//! replay: the caller makes one, passes it as [`ExplainOptions::true_peaks`], and may push what replays under
//! other settings showed to [`Explanation::advice`]; without it that one figure is a lower bound and says so.
//!
//! ```no_run
//! use unhand_analyze::{ExplainOptions, TextOptions, devices, explain, render};
//! # fn read() -> unhand_snapshot::Snapshot { unhand_snapshot::Snapshot::default() }
//!
//! let snapshot = read();
//! for device in devices(&snapshot) {
//!     let options = ExplainOptions { file: Some("snapshot.pickle".into()), ..ExplainOptions::default() };
//!     let explanation = explain(&snapshot, device, &options)?;
//!     println!("{}", render(&explanation, &TextOptions::default()));
//!     println!("{}", serde_json::to_string(&explanation)?);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Feature `flame-svg` (default): flame graphs as SVG, through inferno (CDDL-1.0). Without it the folded and
//! speedscope forms remain.

#![forbid(unsafe_code)]

mod bounds;
mod category;
mod diff;
mod error;
mod explain;
mod export;
mod flame;
mod holding;
mod leaks;
mod oom;
mod pins;
mod places;
mod prose;
mod ranks;
mod record;
pub mod replay;
mod rounding;
mod site;
mod spans;
mod style;
mod timeline;

pub use category::{Category, LifeHints, is_cublas_workspace};
pub use diff::{
    ChangeKind, Diff, FigureChange, HolderChange, LeakChange, PinChange, SettingChange, StackChange,
};
pub use error::{Error, Result};
pub use explain::*;
pub use export::{Format, Table, action_word, export};
pub use flame::{Flame, FlameOf, FlameStack};
pub use holding::{BEFORE_HISTORY, CategoryShare, HeldStack, Holder, Holding, SizeShare};
pub use leaks::{Basis, Confidence, Leaks, Suspect};
pub use oom::{OutOfMemory, Verdict};
pub use pins::{Cache, Pin, PinGroup, StuckSegment};
pub use places::{PoolOwner, PoolShare, StreamShare};
pub use prose::{Count, Share, Span as TimeSpan, keep_end, plural, wrap};
pub use ranks::{
    Different, HolderDifference, InputDifference, InputShape, OddOne, RankFacts, RankRow, Ranks,
};
pub use record::snapshot_of;
pub use rounding::Rounding;
pub use site::{FrameText, NO_PYTHON_FRAMES, NO_STACK_RECORDED, Origin, Site, SiteId, Sites};
pub use spans::{Span, Spans};
pub use style::{Painted, Style};
pub use timeline::{Curve, Gaps, Life, Timeline};
pub use unhand_alloc::{Bytes, BytesChange, BytesError};
