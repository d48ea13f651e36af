//! Answers `export`: events, segments and blocks as CSV or JSON lines, written as they are read.

use std::io::Write;

use serde::Serialize;
use unhand_snapshot::{Action, BlockState, SegmentKind, Snapshot};

use crate::error::Result;
use crate::explain::{devices, no_such_device};
use crate::site::Sites;

/// What to write out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Table {
    /// One row for each event of the history.
    #[default]
    Events,
    /// One row for each segment at the end.
    Segments,
    /// One row for each block at the end.
    Blocks,
}

/// In which form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Comma-separated values with a header, quoted as RFC 4180 says; lines end with CR LF.
    #[default]
    Csv,
    /// One JSON object on each line.
    JsonLines,
}

/// One event. Field names are the column names.
#[derive(Debug, Serialize)]
struct EventRow<'a> {
    device: usize,
    index: usize,
    action: &'a str,
    /// `None` where the event has no address.
    address: Option<u64>,
    size_bytes: u64,
    /// Only of an out-of-memory error.
    device_free_bytes: Option<u64>,
    stream: u64,
    time_us: Option<i64>,
    pool_a: Option<u64>,
    pool_b: Option<u64>,
    site: Option<&'a str>,
    category: Option<&'static str>,
    /// Frames innermost first, `file:line (function)`, separated by ` < `.
    stack: Option<String>,
    compile_context: &'a str,
    user_metadata: &'a str,
}

/// One segment.
#[derive(Debug, Serialize)]
struct SegmentRow {
    device: usize,
    address: u64,
    total_bytes: u64,
    allocated_bytes: u64,
    active_bytes: u64,
    requested_bytes: u64,
    stream: u64,
    kind: &'static str,
    pool_a: u64,
    pool_b: u64,
    is_expandable: bool,
    blocks: usize,
}

/// One block.
#[derive(Debug, Serialize)]
struct BlockRow<'a> {
    device: usize,
    segment_address: u64,
    address: u64,
    size_bytes: u64,
    /// `None` of a free block, whose number in the file is left over from its last tenant.
    requested_bytes: Option<u64>,
    state: &'static str,
    site: Option<&'a str>,
    category: Option<&'static str>,
    stack: Option<String>,
}

const EVENT_COLUMNS: &[&str] = &[
    "device",
    "index",
    "action",
    "address",
    "size_bytes",
    "device_free_bytes",
    "stream",
    "time_us",
    "pool_a",
    "pool_b",
    "site",
    "category",
    "stack",
    "compile_context",
    "user_metadata",
];
const SEGMENT_COLUMNS: &[&str] = &[
    "device",
    "address",
    "total_bytes",
    "allocated_bytes",
    "active_bytes",
    "requested_bytes",
    "stream",
    "kind",
    "pool_a",
    "pool_b",
    "is_expandable",
    "blocks",
];
const BLOCK_COLUMNS: &[&str] = &[
    "device",
    "segment_address",
    "address",
    "size_bytes",
    "requested_bytes",
    "state",
    "site",
    "category",
    "stack",
];

impl Table {
    /// The column names, in order. They do not change between versions; new ones are added at the end.
    pub fn columns(self) -> &'static [&'static str] {
        match self {
            Table::Events => EVENT_COLUMNS,
            Table::Segments => SEGMENT_COLUMNS,
            Table::Blocks => BLOCK_COLUMNS,
        }
    }
}

/// Writes a table of one device, or of all devices one after the other. `stacks` adds the whole stacks to the
/// rows that have one; they make a file many times larger.
///
/// # Errors
/// [`crate::Error::NoSuchDevice`], or `out` fails.
pub fn export(
    snapshot: &Snapshot,
    device: Option<usize>,
    table: Table,
    format: Format,
    stacks: bool,
    out: &mut impl Write,
) -> Result<()> {
    let present = devices(snapshot);
    let wanted = match device {
        Some(device) if !present.contains(&device) => return Err(no_such_device(device, &present)),
        Some(device) => vec![device],
        None => present,
    };
    let mut sites = Sites::new(snapshot);
    let mut sink = Sink::new(out, format, table.columns())?;
    for device in wanted {
        match table {
            Table::Events => events(snapshot, device, &mut sites, stacks, &mut sink)?,
            Table::Segments => segments(snapshot, device, &mut sink)?,
            Table::Blocks => blocks(snapshot, device, &mut sites, stacks, &mut sink)?,
        }
    }
    sink.finish()
}

/// The word PyTorch uses for an action.
pub fn action_word(action: Action) -> &'static str {
    match action {
        Action::Alloc => "alloc",
        Action::FreeRequested => "free_requested",
        Action::FreeCompleted => "free_completed",
        Action::Free => "free",
        Action::SegmentAlloc => "segment_alloc",
        Action::SegmentFree => "segment_free",
        Action::SegmentMap => "segment_map",
        Action::SegmentUnmap => "segment_unmap",
        Action::Snapshot => "snapshot",
        Action::Oom => "oom",
        Action::Annotate => "annotate",
        Action::Other => "other",
    }
}

fn events<W: Write>(
    snapshot: &Snapshot,
    device: usize,
    sites: &mut Sites<'_>,
    stacks: bool,
    sink: &mut Sink<'_, W>,
) -> Result<()> {
    let Some(trace) = snapshot.traces.get(device) else { return Ok(()) };
    for (index, event) in trace.iter().enumerate() {
        let told = (!event.stack.is_none()).then(|| sites.of(event.stack));
        let is_oom = event.action == Action::Oom;
        let action = match event.action {
            Action::Other => snapshot.strings.get(event.action_name),
            action => action_word(action),
        };
        sink.row(&EventRow {
            device,
            index,
            action,
            address: (!is_oom && event.action != Action::Snapshot).then_some(event.addr),
            size_bytes: event.size,
            device_free_bytes: is_oom.then_some(event.addr),
            stream: event.stream,
            time_us: event.time_us,
            pool_a: event.pool_id.map(|p| p.0),
            pool_b: event.pool_id.map(|p| p.1),
            site: told.map(|(site, _)| sites.get(site).name.as_str()),
            category: told.map(|(_, category)| category.label()),
            stack: (stacks && !event.stack.is_none()).then(|| stack_text(sites, event.stack)),
            compile_context: snapshot.strings.get(event.compile_context),
            user_metadata: snapshot.strings.get(event.user_metadata),
        })?;
    }
    Ok(())
}

fn segments<W: Write>(snapshot: &Snapshot, device: usize, sink: &mut Sink<'_, W>) -> Result<()> {
    for segment in snapshot.segments.iter().filter(|s| usize::try_from(s.device) == Ok(device)) {
        sink.row(&SegmentRow {
            device,
            address: segment.address,
            total_bytes: segment.total_size,
            allocated_bytes: segment.allocated_size,
            active_bytes: segment.active_size,
            requested_bytes: segment.requested_size,
            stream: segment.stream,
            kind: if segment.kind == SegmentKind::Small { "small" } else { "large" },
            pool_a: segment.pool_id.0,
            pool_b: segment.pool_id.1,
            is_expandable: segment.is_expandable,
            blocks: segment.blocks.len(),
        })?;
    }
    Ok(())
}

fn blocks<W: Write>(
    snapshot: &Snapshot,
    device: usize,
    sites: &mut Sites<'_>,
    stacks: bool,
    sink: &mut Sink<'_, W>,
) -> Result<()> {
    for segment in snapshot.segments.iter().filter(|s| usize::try_from(s.device) == Ok(device)) {
        for block in &segment.blocks {
            let told = (!block.stack.is_none()).then(|| sites.of(block.stack));
            sink.row(&BlockRow {
                device,
                segment_address: segment.address,
                address: block.address,
                size_bytes: block.size,
                requested_bytes: (block.state != BlockState::Inactive).then_some(block.requested_size),
                state: match block.state {
                    BlockState::ActiveAllocated => "active_allocated",
                    BlockState::ActivePendingFree => "active_pending_free",
                    BlockState::Inactive => "inactive",
                },
                site: told.map(|(site, _)| sites.get(site).name.as_str()),
                category: told.map(|(_, category)| category.label()),
                stack: (stacks && !block.stack.is_none()).then(|| stack_text(sites, block.stack)),
            })?;
        }
    }
    Ok(())
}

fn stack_text(sites: &Sites<'_>, stack: unhand_snapshot::StackId) -> String {
    let frames: Vec<String> = sites.frames(stack).iter().map(ToString::to_string).collect();
    frames.join(" < ")
}

/// Writes rows in one of the formats.
enum Sink<'w, W: Write> {
    Csv(Box<csv::Writer<&'w mut W>>),
    JsonLines(&'w mut W),
}

impl<'w, W: Write> Sink<'w, W> {
    fn new(out: &'w mut W, format: Format, columns: &[&str]) -> Result<Self> {
        match format {
            Format::JsonLines => Ok(Sink::JsonLines(out)),
            Format::Csv => {
                // The header is written here and not from the first row, so that an empty table has one too.
                let mut writer = csv::WriterBuilder::new()
                    .has_headers(false)
                    .terminator(csv::Terminator::CRLF)
                    .from_writer(out);
                writer.write_record(columns).map_err(std::io::Error::from)?;
                Ok(Sink::Csv(Box::new(writer)))
            }
        }
    }

    fn row(&mut self, row: &impl Serialize) -> Result<()> {
        match self {
            Sink::JsonLines(out) => {
                serde_json::to_writer(&mut **out, row)?;
                out.write_all(b"\n")?;
            }
            Sink::Csv(writer) => writer.serialize(row).map_err(std::io::Error::from)?,
        }
        Ok(())
    }

    fn finish(self) -> Result<()> {
        if let Sink::Csv(mut writer) = self {
            writer.flush()?;
        }
        Ok(())
    }
}
