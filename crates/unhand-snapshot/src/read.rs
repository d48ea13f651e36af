//! Reading a snapshot: the order of steps, and what is worth a warning.

use crate::hash::{IdTable, Seed};
use crate::machine::Machine;
use crate::{Action, Error, Snapshot, Trace, Value, Warning};

/// How to read a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadOptions {
    /// Take what there is of a file that is cut off, with a [`Warning::Truncated`], instead of an error.
    pub tolerate_truncation: bool,
}

impl Snapshot {
    /// Reads a snapshot from the bytes of a pickle, as `torch.cuda.memory._dump_snapshot()` or
    /// `torch::cuda::_memory_snapshot_pickled()` make it. For compressed files see
    /// [`decompress`](crate::decompress).
    ///
    /// No code is run, whatever the file says. The bytes may be a mapped file: they are read once, front to back.
    ///
    /// # Errors
    ///
    /// [`Error`] says what is wrong and at which byte.
    ///
    /// ```
    /// use unhand_snapshot::{ReadOptions, Snapshot};
    /// let bytes = b"\x80\x04}(X\x08\x00\x00\x00segments]X\x0d\x00\x00\x00device_traces]u.";
    /// let snapshot = Snapshot::read(bytes, &ReadOptions::default())?;
    /// assert!(snapshot.segments.is_empty() && snapshot.traces.is_empty());
    ///
    /// let error = Snapshot::read(b"\x80\x04cos\nsystem\n.", &ReadOptions::default()).unwrap_err();
    /// assert_eq!(error.to_string(), "opcode `GLOBAL` at byte 2 asks for code to be run: `os.system`");
    /// # Ok::<(), unhand_snapshot::Error>(())
    /// ```
    pub fn read(bytes: &[u8], options: &ReadOptions) -> Result<Snapshot, Error> {
        let mut machine = Machine::new(bytes);
        let mut warnings = Vec::new();
        let root = match machine.run() {
            Err(Error::Truncated { offset }) if options.tolerate_truncation => {
                warnings.push(Warning::Truncated { offset });
                machine.finish_truncated()?
            }
            result => result?,
        };
        if machine.n_lossy > 0 {
            warnings.push(Warning::LossyText { n_texts: machine.n_lossy, offset: machine.first_lossy });
        }
        let mut snapshot = machine.into_snapshot(root)?;
        for (trace, device) in snapshot.traces.iter_mut().zip(0..) {
            inspect(trace, device, &mut warnings);
        }
        for trace in &mut snapshot.host_traces {
            inspect(trace, -1, &mut warnings);
        }
        let overflowed =
            |entry: &&(String, Value)| entry.0 == "trace_alloc_overflowed" && entry.1 == Value::Bool(true);
        let is_known = warnings.iter().any(|warning| matches!(warning, Warning::RingWrapped { .. }));
        if !is_known && snapshot.settings.entries.iter().find(overflowed).is_some() {
            warnings.push(Warning::RingWrapped { device: 0, first_index: 0 });
        }
        snapshot.warnings = warnings;
        Ok(snapshot)
    }
}

/// Puts a trace in order and says what is missing from it.
fn inspect(trace: &mut Trace, device: i32, warnings: &mut Vec<Warning>) {
    trace.shrink();
    let n_early = trace.repair_order();
    if n_early > 0 {
        warnings.push(Warning::OrderRepaired { device, n_early });
    }
    if let Some(first_index) = first_unmatched_free(trace) {
        warnings.push(Warning::RingWrapped { device, first_index });
    }
}

/// The first event that frees what no event before it allocated.
///
/// An address need not be forgotten when it is freed: a ring loses the oldest events, so the first free without an
/// allocation is one whose address did not occur before.
fn first_unmatched_free(trace: &Trace) -> Option<usize> {
    // With `skip_actions` there may be frees only, which says nothing about the ring.
    if !trace.actions().contains(&Action::Alloc) {
        return None;
    }
    let seed = Seed::default();
    let addrs = trace.addrs();
    let mut table = IdTable::default();
    for (index, (&action, &addr)) in trace.actions().iter().zip(addrs).enumerate() {
        let is_free = matches!(action, Action::FreeRequested | Action::Free);
        if action != Action::Alloc && !is_free {
            continue;
        }
        let hash = seed.pair(addr, 0);
        let is_known = table.find(hash, |id| addrs[id as usize] == addr).is_some();
        if is_free && !is_known {
            return Some(index);
        }
        if !is_known && let Some(id) = u32::try_from(index).ok().filter(|&id| id < u32::MAX) {
            table.insert(hash, id);
        }
    }
    None
}
