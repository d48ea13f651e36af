//! The runs of a replay as a table, and in sentences what to make of it.

use unhand_analyze::replay::{RanOut, Run, SegmentEvent};
use unhand_analyze::{Bytes, BytesChange, Count, Share, wrap};

use super::{DeviceReplay, best_of};
use crate::failure::Failure;
use crate::printer::Printer;
use crate::table::Table;

/// Prints one device: the heading, the table, the sentences.
pub(super) fn print(replay: &DeviceReplay, is_sweep: bool, printer: &mut Printer) -> Result<(), Failure> {
    let DeviceReplay { name, device, release, runs, .. } = replay;
    let Some((recorded, others)) = runs.split_first() else { return Ok(()) };
    let style = printer.style();
    writeln!(printer, "{}", style.strong(format!("{name}, device {device}")))?;
    let n_events = Count(recorded.events as u64);
    writeln!(printer, "{}", style.faint(format!("{n_events} events, rules of torch {release}")))?;
    writeln!(printer, "\n{}", style.strong("Peaks"))?;
    table(replay, recorded, others).print(printer)?;
    writeln!(printer)?;
    let mut sentences = vec![exactness(recorded)];
    sentences.extend(others.iter().filter_map(|run| memory(replay, run)));
    if is_sweep {
        sentences.push(conclusion(recorded, others));
    }
    for sentence in sentences {
        writeln!(printer, "{}", wrap(&sentence, printer.width(), 0))?;
    }
    Ok(())
}

fn table(replay: &DeviceReplay, recorded: &Run, others: &[Run]) -> Table {
    let mut table = Table::new(&[
        "requested",
        "allocated",
        "reserved",
        "change",
        "segments",
        "driver calls",
        "ooms",
        "settings",
    ]);
    for (index, run) in [recorded].into_iter().chain(others).enumerate() {
        let change = if index == 0 {
            String::new()
        } else {
            BytesChange::between(recorded.peak.reserved_bytes, run.peak.reserved_bytes).to_string()
        };
        let cells = vec![
            Bytes(run.peak.requested_bytes).to_string(),
            Bytes(run.peak.allocated_bytes).to_string(),
            Bytes(run.peak.reserved_bytes).to_string(),
            change,
            Count(run.segments).to_string(),
            Count(run.driver_calls.total()).to_string(),
            Count(run.ooms).to_string(),
            label(replay, run),
        ];
        table.row(cells, index == 0);
    }
    if others.is_empty() {
        table.drop_column("change");
    }
    // A column of zeros takes the place that the settings need.
    if others.iter().chain([recorded]).all(|run| run.ooms == 0) {
        table.drop_column("ooms");
    }
    table
}

/// What a run is called: its settings, in PyTorch's own notation, and what else differs from the recording.
fn label(replay: &DeviceReplay, run: &Run) -> String {
    let mut parts = Vec::new();
    if run.recorded {
        parts.push("(recorded)".to_owned());
    }
    match run.settings.as_str() {
        "" if run.recorded => {}
        "" => parts.push("(defaults)".to_owned()),
        settings => parts.push(settings.to_owned()),
    }
    if !run.recorded {
        parts.extend(replay.torch.map(|release| format!("torch {release}")));
        parts.extend(replay.memory.map(|memory| format!("in {memory}")));
    }
    parts.join(" ")
}

/// Whether the replay of the recorded settings can be trusted, and so all others.
fn exactness(recorded: &Run) -> String {
    if let Some(why) = recorded.approximate {
        return format!("The figures are approximate: {why}.");
    }
    let Some(difference) = recorded.first_difference else {
        let n_calls = Count(recorded.driver_calls.total());
        return format!(
            "The recorded run is repeated exactly: all {n_calls} driver calls, in order and size."
        );
    };
    let words = |event: Option<SegmentEvent>| {
        event.map_or_else(
            || "nothing more".to_owned(),
            |event| format!("{} of {}", event.action, Bytes(event.size_bytes)),
        )
    };
    format!(
        "The recorded run is not repeated exactly, so all figures are estimates. The first difference is at event \
         {}: the recording has {}, the replay {}.",
        Count(difference.event as u64),
        words(difference.recorded),
        words(difference.replayed)
    )
}

/// How a run fared with the memory there was; nothing to say about one with memory without end.
fn memory(replay: &DeviceReplay, run: &Run) -> Option<String> {
    let name = label(replay, run);
    let Some(RanOut {
        event,
        requested_bytes,
        allocated_bytes,
        reserved_bytes,
        limit_bytes,
        as_recorded,
        ..
    }) = run.ran_out
    else {
        let reserved = Bytes(run.peak.reserved_bytes);
        return replay
            .memory
            .map(|memory| format!("{name}: fits, with {reserved} of {memory} reserved at most."));
    };
    let event = Count(event as u64);
    if as_recorded {
        return Some(format!("{name}: memory runs out at event {event}, as in the recorded run."));
    }
    Some(format!(
        "{name}: memory runs out at event {event}. {} are asked for; {} are allocated and {} reserved of {}. The \
         figures are those up to there.",
        Bytes(requested_bytes),
        Bytes(allocated_bytes),
        Bytes(reserved_bytes),
        Bytes(limit_bytes)
    ))
}

/// What a sweep comes to.
fn conclusion(recorded: &Run, others: &[Run]) -> String {
    let Some(best) = best_of(recorded, others) else {
        return "None of these settings reserves less than the recorded ones.".to_owned();
    };
    let saved = recorded.peak.reserved_bytes - best.peak.reserved_bytes;
    format!(
        "PYTORCH_CUDA_ALLOC_CONF={} would have reserved {} at its peak: {} ({} of the recorded peak) less.",
        best.settings,
        Bytes(best.peak.reserved_bytes),
        Bytes(saved),
        Share(saved, recorded.peak.reserved_bytes)
    )
}
