//! A dry run's answer as text.

use unhand_analyze::{Bytes, TextOptions, plural, render_holding, wrap};

use super::answer::{Answer, Confidence, Device, Fit, Sureness, Target};
use crate::failure::Failure;
use crate::printer::Printer;
use crate::table::Table;

pub(super) fn print(
    answer: &Answer,
    target: &Target,
    limit: usize,
    printer: &mut Printer,
) -> Result<(), Failure> {
    for device in &answer.devices {
        writeln!(printer)?;
        ladder(answer, device, target, printer)?;
        if let Some(holding) = &device.at_peak {
            section("Held at the peak", printer)?;
            let options =
                TextOptions { width: printer.width(), limit, stacks: false, style: printer.style() };
            write!(printer, "{}", render_holding(holding, &options))?;
        }
        section("Where it fits", printer)?;
        gpus(device, target, printer)?;
        if !device.advice.is_empty() {
            section("What to do", printer)?;
            for advice in &device.advice {
                paragraph(&advice.sentence, printer)?;
            }
        }
        writeln!(printer)?;
        paragraph(&sureness(&device.confidence), printer)?;
    }
    for note in &answer.notes {
        writeln!(printer)?;
        paragraph(note, printer)?;
    }
    Ok(())
}

fn ladder(answer: &Answer, device: &Device, target: &Target, printer: &mut Printer) -> Result<(), Failure> {
    let style = printer.style();
    let after = match answer.steps {
        Some(steps) if steps > 0 => format!(", in {}", plural(steps, "optimizer step")),
        _ => String::new(),
    };
    let heading = format!("cuda:{} at its peak{after}", device.device);
    writeln!(printer, "{}", style.strong(heading))?;
    let (peak, sure) = (device.peak, &device.confidence);
    let verdict = verdict(&device.fit, target);
    for (name, bytes, words) in [
        ("requested", peak.requested_bytes, word(sure.requested)),
        ("allocated", peak.allocated_bytes, word(sure.allocated)),
        ("reserved", peak.reserved_bytes, word(sure.reserved)),
        ("context", peak.context_bytes, word(sure.context)),
        ("used", peak.used_bytes, verdict.as_str()),
    ] {
        writeln!(printer, "  {name:<9}  {:>10}  {words}", Bytes(bytes).to_string())?;
    }
    Ok(())
}

fn word(sureness: Sureness) -> &'static str {
    match sureness {
        Sureness::Exact => "exact",
        Sureness::AtLeast => "at least",
        Sureness::Measured => "measured",
        Sureness::Guess => "a guess",
    }
}

fn verdict(fit: &Fit, target: &Target) -> String {
    let of = Bytes(target.memory_bytes);
    match (fit.left_bytes, &fit.fits_with, fit.lacking_bytes) {
        (Some(left), _, _) if fit.gives_back => {
            format!("fits {of} once cached blocks are given back, {} left", Bytes(left))
        }
        (Some(left), _, _) => format!("fits {of}, {} left", Bytes(left)),
        (None, Some(settings), _) => {
            format!("does not fit {of}, except with PYTORCH_CUDA_ALLOC_CONF={settings}")
        }
        (None, None, Some(lacking)) => {
            format!("does not fit {of}: {} too much is alive at once", Bytes(lacking))
        }
        (None, None, None) => format!("does not fit {of}: too much lies between the blocks"),
    }
}

fn gpus(device: &Device, target: &Target, printer: &mut Printer) -> Result<(), Failure> {
    let mut table = Table::new(&["gpu", "memory", "left", ""]);
    for fit in &device.gpus {
        let words = match (&fit.fits_with, fit.lacking_bytes) {
            _ if fit.gives_back => "fits, giving cached blocks back".to_owned(),
            _ if fit.fits => "fits".to_owned(),
            (Some(settings), _) => format!("fits with {settings}"),
            (None, Some(lacking)) => format!("does not fit, by {}", Bytes(lacking)),
            (None, None) => "does not fit".to_owned(),
        };
        let left = fit.left_bytes.map_or_else(|| "-".to_owned(), |bytes| Bytes(bytes).to_string());
        let is_asked = target.is_asked && target.profile.name == fit.gpu;
        table.row(vec![fit.gpu.to_owned(), Bytes(fit.memory_bytes).to_string(), left, words], is_asked);
    }
    table.print(printer)
}

/// How sure the figures are, in sentences.
fn sureness(confidence: &Confidence) -> String {
    let mut text = String::new();
    let libraries = confidence.without_workspaces_of.join(" and ");
    if libraries.is_empty() {
        text.push_str(
            "Requested, allocated and reserved are PyTorch's own allocator at work on the same requests. ",
        );
    } else {
        text.push_str(&format!(
            "Requested, allocated and reserved are PyTorch's own allocator at work, without the workspaces that {libraries} \
             would ask for on a device. "
        ));
    }
    text.push_str(match confidence.context {
        Sureness::Measured => "The context was measured on such a GPU with nothing loaded; kernels add to it as they are first used.",
        _ => "The context is a guess, scaled from the one GPU it was measured on; kernels add to it as they are first used.",
    });
    text
}

fn section(title: &str, printer: &mut Printer) -> Result<(), Failure> {
    let style = printer.style();
    writeln!(printer, "\n{}", style.strong(title))
}

fn paragraph(text: &str, printer: &mut Printer) -> Result<(), Failure> {
    let width = printer.width();
    writeln!(printer, "{}", wrap(text, width, 0))
}
