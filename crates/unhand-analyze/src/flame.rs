//! Answers `flame`: bytes by call stack, as folded lines, speedscope JSON or SVG.

use std::io::Write;

use rustc_hash::FxHashMap;
use serde::Serialize;
use unhand_snapshot::{Action, BlockState, FrameId, Snapshot, StackId};

use crate::bounds;
use crate::error::{Error, Result};
use crate::explain::{devices, no_such_device};
use crate::holding::BEFORE_HISTORY;
use crate::rounding::Rounding;
use crate::site::{NO_PYTHON_FRAMES, NO_STACK_RECORDED};
use crate::timeline::{Life, Timeline};

/// Which bytes a flame graph shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FlameOf {
    /// Requested bytes at the peak of requested bytes.
    #[default]
    RequestedPeak,
    /// Block bytes at the peak of allocated bytes.
    AllocatedPeak,
    /// Requested bytes at the peak of reserved bytes: what was live when PyTorch last had to ask for more.
    ReservedPeak,
    /// Requested bytes at the end.
    End,
    /// All bytes ever requested in the history.
    Total,
}

/// Bytes by stack.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Flame {
    /// Which bytes.
    pub of: FlameOf,
    /// The device.
    pub device: usize,
    /// Bytes of all stacks.
    pub total_bytes: u64,
    /// The frames that occur, sorted: `leak (record.py:40)`.
    pub frames: Vec<String>,
    /// The stacks, in the order of their frames.
    pub stacks: Vec<FlameStack>,
}

/// The bytes of one stack.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct FlameStack {
    /// Indices into [`Flame::frames`], outermost first.
    pub frames: Vec<u32>,
    /// The bytes.
    pub bytes: u64,
}

impl Flame {
    /// Gathers the bytes of one device.
    ///
    /// # Errors
    /// [`Error::NoSuchDevice`]; [`Error::NoHistory`] when a peak or the total is asked for without a history.
    pub fn of(snapshot: &Snapshot, device: usize, of: FlameOf) -> Result<Flame> {
        Flame::at(snapshot, device, of, None)
    }

    /// As [`Flame::of`], with the event of the allocated peak known from a replay.
    ///
    /// # Errors
    /// As [`Flame::of`].
    pub fn at(
        snapshot: &Snapshot,
        device: usize,
        of: FlameOf,
        allocated_event: Option<usize>,
    ) -> Result<Flame> {
        let present = devices(snapshot);
        if !present.contains(&device) {
            return Err(no_such_device(device, &present));
        }
        bounds::check(snapshot, device)?;
        let rounding = Rounding::of(&snapshot.settings);
        let mut sums: FxHashMap<Bottom, u64> = FxHashMap::default();
        let mut add = |stack: StackId, is_older: bool, bytes: u64| {
            let bottom = if is_older && stack.is_none() { Bottom::Older } else { Bottom::Stack(stack) };
            *sums.entry(bottom).or_default() += bytes;
        };
        match of {
            FlameOf::End => {
                for segment in snapshot.segments.iter().filter(|s| usize::try_from(s.device) == Ok(device)) {
                    for block in segment.blocks.iter().filter(|b| b.state != BlockState::Inactive) {
                        add(block.stack, false, block.requested_size);
                    }
                }
            }
            FlameOf::Total => {
                let trace = snapshot
                    .traces
                    .get(device)
                    .filter(|t| !t.is_empty())
                    .ok_or(Error::NoHistory { device })?;
                for event in trace.iter().filter(|e| e.action == Action::Alloc) {
                    add(event.stack, false, event.size);
                }
            }
            FlameOf::RequestedPeak | FlameOf::AllocatedPeak | FlameOf::ReservedPeak => {
                let timeline = Timeline::of(snapshot, device)?;
                let moment = match of {
                    FlameOf::AllocatedPeak => allocated_event.or(timeline.allocated.peak_event),
                    FlameOf::ReservedPeak => timeline.reserved.peak_event,
                    _ => timeline.requested.peak_event,
                };
                let is_live = |life: &Life| match moment {
                    Some(event) if of == FlameOf::AllocatedPeak => life.is_allocated_after(event),
                    Some(event) => life.is_active_after(event),
                    None => life.born().is_none(),
                };
                for life in timeline.lives.iter().filter(|life| is_live(life)) {
                    let bytes = match of {
                        FlameOf::AllocatedPeak => rounding.block_bytes(life.requested_bytes),
                        _ => life.requested_bytes,
                    };
                    add(life.stack, life.born().is_none(), bytes);
                }
            }
        }
        Ok(Flame::gather(snapshot, device, of, sums))
    }

    fn gather(snapshot: &Snapshot, device: usize, of: FlameOf, sums: FxHashMap<Bottom, u64>) -> Flame {
        let has_stacks = crate::site::has_stacks(snapshot);
        let reason = if has_stacks { NO_PYTHON_FRAMES } else { NO_STACK_RECORDED };
        // Frames are numbered as they come, and renumbered once their labels are sorted.
        let mut labels: Vec<String> = Vec::new();
        let mut by_label: FxHashMap<String, u32> = FxHashMap::default();
        let mut number = |label: String| -> u32 {
            *by_label.entry(label).or_insert_with_key(|label| {
                labels.push(label.clone());
                u32::try_from(labels.len() - 1).unwrap_or(u32::MAX)
            })
        };
        let mut by_frame: FxHashMap<FrameId, u32> = FxHashMap::default();
        let mut stacks: Vec<FlameStack> = Vec::with_capacity(sums.len());
        for (bottom, bytes) in sums.into_iter().filter(|&(_, bytes)| bytes > 0) {
            let mut frames: Vec<u32> = match bottom {
                Bottom::Older => vec![number(BEFORE_HISTORY.to_owned())],
                Bottom::Stack(stack) if stack.is_none() => vec![number(reason.to_owned())],
                Bottom::Stack(stack) => snapshot
                    .stacks
                    .frames(stack)
                    .map(|frame| *by_frame.entry(frame).or_insert_with(|| number(label(snapshot, frame))))
                    .collect(),
            };
            frames.reverse();
            stacks.push(FlameStack { frames, bytes });
        }
        let mut order: Vec<usize> = (0..labels.len()).collect();
        order.sort_unstable_by(|&a, &b| labels[a].cmp(&labels[b]));
        let mut new_number = vec![0_u32; labels.len()];
        for (new, &old) in order.iter().enumerate() {
            new_number[old] = u32::try_from(new).unwrap_or(u32::MAX);
        }
        for frame in stacks.iter_mut().flat_map(|stack| &mut stack.frames) {
            *frame = new_number[*frame as usize];
        }
        stacks.sort_unstable();
        stacks.dedup_by(|later, first| {
            let same = later.frames == first.frames;
            if same {
                first.bytes += later.bytes;
            }
            same
        });
        let frames = order.into_iter().map(|old| std::mem::take(&mut labels[old])).collect();
        let total_bytes = stacks.iter().map(|s| s.bytes).sum();
        Flame { of, device, total_bytes, frames, stacks }
    }

    /// The frames of a stack as text, outermost first.
    pub fn frames_of<'f>(&'f self, stack: &'f FlameStack) -> impl Iterator<Item = &'f str> {
        stack.frames.iter().map(|&frame| self.frames[frame as usize].as_str())
    }

    /// Writes folded lines: `outermost;…;innermost bytes`. A semicolon or a line break inside a frame becomes a
    /// comma or a space, since the format has no escape for them.
    ///
    /// # Errors
    /// When `out` fails.
    pub fn write_folded(&self, out: &mut impl Write) -> Result<()> {
        for line in self.folded_lines() {
            writeln!(out, "{line}")?;
        }
        Ok(())
    }

    /// The folded lines, one for each stack.
    pub fn folded_lines(&self) -> impl Iterator<Item = String> + '_ {
        let clean = |frame: &str| -> String {
            frame
                .chars()
                .map(|c| {
                    if c == ';' {
                        ','
                    } else if c.is_control() {
                        ' '
                    } else {
                        c
                    }
                })
                .collect()
        };
        let frames: Vec<String> = self.frames.iter().map(|frame| clean(frame)).collect();
        self.stacks.iter().map(move |stack| {
            let mut line = String::new();
            for &frame in &stack.frames {
                if !line.is_empty() {
                    line.push(';');
                }
                line.push_str(&frames[frame as usize]);
            }
            line.push(' ');
            line.push_str(&stack.bytes.to_string());
            line
        })
    }

    /// Writes a file for <https://www.speedscope.app>, unit bytes.
    ///
    /// # Errors
    /// When `out` fails.
    pub fn write_speedscope(&self, name: &str, out: &mut impl Write) -> Result<()> {
        let file = SpeedscopeFile {
            schema: "https://www.speedscope.app/file-format-schema.json",
            exporter: concat!("unhand ", env!("CARGO_PKG_VERSION")),
            name,
            shared: SpeedscopeShared {
                frames: self.frames.iter().map(|name| SpeedscopeFrame { name }).collect(),
            },
            profiles: [SpeedscopeProfile {
                kind: "sampled",
                name,
                unit: "bytes",
                start_value: 0,
                end_value: self.total_bytes,
                samples: self.stacks.iter().map(|s| s.frames.as_slice()).collect(),
                weights: self.stacks.iter().map(|s| s.bytes).collect(),
            }],
        };
        serde_json::to_writer(out, &file)?;
        Ok(())
    }

    /// Draws an SVG, the same bytes for the same stacks every time.
    ///
    /// # Errors
    /// [`Error::Flame`] when there is nothing to draw, or `out` fails.
    #[cfg(feature = "flame-svg")]
    pub fn write_svg(&self, title: &str, out: &mut impl Write) -> Result<()> {
        let mut options = inferno::flamegraph::Options::default();
        title.clone_into(&mut options.title);
        "bytes".clone_into(&mut options.count_name);
        options.deterministic = true;
        let lines: Vec<String> = self.folded_lines().collect();
        inferno::flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), out)
            .map_err(|error| Error::Flame(error.to_string()))
    }
}

/// What a sum stands under.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Bottom {
    Stack(StackId),
    Older,
}

fn label(snapshot: &Snapshot, frame: FrameId) -> String {
    let frame = snapshot.stacks.frame(frame);
    let file = snapshot.strings.get(frame.filename);
    let file =
        crate::site::inside_packages(file).unwrap_or_else(|| file.rsplit(['/', '\\']).next().unwrap_or(file));
    format!("{} ({file}:{})", snapshot.strings.get(frame.name), frame.line)
}

#[derive(Serialize)]
struct SpeedscopeFile<'a> {
    #[serde(rename = "$schema")]
    schema: &'static str,
    exporter: &'static str,
    name: &'a str,
    shared: SpeedscopeShared<'a>,
    profiles: [SpeedscopeProfile<'a>; 1],
}

#[derive(Serialize)]
struct SpeedscopeShared<'a> {
    frames: Vec<SpeedscopeFrame<'a>>,
}

#[derive(Serialize)]
struct SpeedscopeFrame<'a> {
    name: &'a str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SpeedscopeProfile<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    name: &'a str,
    unit: &'static str,
    start_value: u64,
    end_value: u64,
    samples: Vec<&'a [u32]>,
    weights: Vec<u64>,
}
