//! An [`Explanation`] as a page to read: the story first, lists below it.

use std::fmt::{self, Write};

use crate::explain::{Explanation, Peak};
use crate::holding::{Holder, Holding, SizeShare};
use crate::leaks::Confidence;
use crate::oom::Verdict;
use crate::pins::Cache;
use crate::places::PoolOwner;
use crate::prose::{Count, Share, Span, keep_end, plural, wrap};
use crate::style::Style;
use unhand_alloc::Bytes;

/// How to write an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextOptions {
    /// Columns of a line; 60 at least.
    pub width: usize,
    /// Rows of a list before the rest is summed up.
    pub limit: usize,
    /// Whether the stacks of the holders are listed, if the answer has them.
    pub stacks: bool,
    /// The decoration.
    pub style: Style,
}

impl Default for TextOptions {
    fn default() -> Self {
        TextOptions { width: 100, limit: 8, stacks: false, style: Style::PLAIN }
    }
}

/// Writes an explanation as text.
pub fn render(explanation: &Explanation, options: &TextOptions) -> String {
    let mut page = Page { out: String::new(), width: options.width.max(60), options: *options };
    // Writing to a String cannot fail.
    let _ = page.write(explanation);
    page.out
}

/// Writes the holders of one moment as text, a line each: bytes, share, blocks, what they are for, and the line.
pub fn render_holding(holding: &Holding, options: &TextOptions) -> String {
    let mut page = Page { out: String::new(), width: options.width.max(60), options: *options };
    let _ = page.holders(holding, false);
    page.out
}

struct Page {
    out: String,
    width: usize,
    options: TextOptions,
}

impl Page {
    fn write(&mut self, e: &Explanation) -> fmt::Result {
        self.heading(e)?;
        self.peaks(e)?;
        self.leaks(e)?;
        self.ooms(e)?;
        self.at_peak(e)?;
        self.at_end(e)?;
        self.cache(&e.end.cache, e)?;
        self.places(e)?;
        if !e.advice.is_empty() {
            self.section("What to do")?;
            for advice in &e.advice {
                self.item(&advice.sentence)?;
            }
        }
        if !e.notes.is_empty() {
            self.section("Notes")?;
            for note in &e.notes {
                self.item(note)?;
            }
        }
        Ok(())
    }

    fn heading(&mut self, e: &Explanation) -> fmt::Result {
        let file = e.file.as_deref().map(|f| format!("{f}, ")).unwrap_or_default();
        let style = self.options.style;
        writeln!(self.out, "{}", style.strong(format!("{file}device {}", e.device)))?;
        let r = &e.recording;
        let mut parts = Vec::new();
        if r.events == 0 {
            parts.push("no history".to_owned());
        } else {
            let over = r.duration_us.map(|us| format!(" over {}", Span(us))).unwrap_or_default();
            parts.push(format!("{} events{over}", Count(r.events as u64)));
        }
        if let Some(steps) = r.steps {
            parts.push(plural(steps as u64, "step"));
        }
        parts.push(if r.has_stacks { "with stacks" } else { "without stacks" }.to_owned());
        if let Some(settings) = r.settings.as_ref().filter(|s| !s.is_empty()) {
            parts.push(settings.clone());
        }
        let line = wrap(&parts.join(", "), self.width, 0);
        writeln!(self.out, "{}", style.faint(line))
    }

    fn peaks(&mut self, e: &Explanation) -> fmt::Result {
        writeln!(self.out)?;
        let Some(peaks) = &e.peak else {
            let end = &e.end;
            return self.prose(&format!(
                "When the snapshot was taken, {} were allocated in {} and {} reserved in {}.",
                Bytes(end.allocated_bytes),
                plural(end.holding.blocks, "block"),
                Bytes(end.reserved_bytes),
                plural(end.segments, "segment")
            ));
        };
        let style = self.options.style;
        writeln!(self.out, "{}", style.strong("Peaks"))?;
        let rows =
            [("requested", &peaks.requested), ("allocated", &peaks.allocated), ("reserved", &peaks.reserved)];
        let bytes = rows.map(|(_, peak)| {
            let bound = if peak.is_exact { "" } else { "at least " };
            format!("{bound}{}", Bytes(peak.peak_bytes))
        });
        let width = bytes.iter().map(String::len).max().unwrap_or_default();
        for ((name, peak), bytes) in rows.into_iter().zip(bytes) {
            writeln!(self.out, "  {name:<9}  {:>width$}  {}", style.strong(bytes), when(peak))?;
        }
        let (need, held) = (peaks.allocated.peak_bytes, peaks.reserved.peak_bytes);
        if held > need && (held - need).saturating_mul(20) > held {
            let bound = if peaks.allocated.is_exact { "" } else { "up to " };
            self.prose(&format!(
                "PyTorch held {bound}{} more from the driver than its blocks ever needed at once ({} of the reserved \
                 peak).",
                Bytes(held - need),
                Share(held - need, held)
            ))?;
        }
        Ok(())
    }

    fn leaks(&mut self, e: &Explanation) -> fmt::Result {
        let Some(leaks) = &e.leaks else { return Ok(()) };
        if leaks.suspects.is_empty() {
            return Ok(());
        }
        self.section("Leak suspects")?;
        for suspect in leaks.suspects.iter().take(self.options.limit) {
            let sure = match suspect.confidence {
                Confidence::High => "",
                Confidence::Medium => "likely: ",
                Confidence::Low => "perhaps: ",
            };
            let kind = suspect.category.map(|c| format!(" They are {}.", c.words())).unwrap_or_default();
            let sentence = capital(&format!("{sure}{}.{kind}", suspect.sentence));
            let text = wrap(&sentence, self.width - 2, 2);
            writeln!(self.out, "  {}", self.options.style.warning(text))?;
            for frame in suspect.frames.iter().take(if self.options.stacks { usize::MAX } else { 0 }) {
                writeln!(self.out, "      {frame}")?;
            }
        }
        self.rest(leaks.suspects.len(), "suspect")
    }

    fn ooms(&mut self, e: &Explanation) -> fmt::Result {
        if e.ooms.is_empty() {
            return Ok(());
        }
        self.section("Out of memory")?;
        for oom in e.ooms.iter().take(self.options.limit) {
            let at = oom.since_start_us.map(|us| format!("After {}", Span(us))).unwrap_or_default();
            let during = oom.during.as_ref().map(|d| format!(" (during {d})")).unwrap_or_default();
            let fitted = format!(
                " Live then: {}, reserved {}; the largest block that would have fitted: {}{}.",
                Bytes(oom.requested_bytes),
                Bytes(oom.reserved_bytes),
                if oom.verdict == Verdict::Limit { "at least " } else { "" },
                Bytes(oom.would_have_fitted_bytes)
            );
            let lead = if at.is_empty() { String::new() } else { format!("{at}{during}: ") };
            let largest: Vec<String> = oom
                .holders
                .iter()
                .filter(|h| h.category.is_some())
                .take(3)
                .map(|h| format!("{} at {}", Bytes(h.requested_bytes), h.site.place()))
                .collect();
            let owners =
                if largest.is_empty() { String::new() } else { format!(" Largest: {}.", largest.join(", ")) };
            self.item(&format!("{lead}{}{fitted}{owners}", oom.sentence))?;
        }
        self.rest(e.ooms.len(), "error")
    }

    fn at_peak(&mut self, e: &Explanation) -> fmt::Result {
        let (Some(holding), Some(peaks)) = (&e.at_peak, &e.peak) else { return Ok(()) };
        if holding.blocks == 0 {
            return Ok(());
        }
        self.section("At the peak")?;
        let when = when(&peaks.requested);
        let lead = if when.is_empty() { String::new() } else { format!("{}, ", capital(&when)) };
        let bytes = Bytes(holding.requested_bytes);
        self.prose(&format!(
            "{lead}{bytes} were held by {}{}",
            plural(holding.blocks, "block"),
            categories(holding)
        ))?;
        self.holders(holding, false)?;
        if holding.categories.is_none() {
            self.prose(
                "No stacks were recorded, so the lines that allocated these blocks are not known. To have them next \
                 time: torch.cuda.memory._record_memory_history().",
            )?;
        }
        Ok(())
    }

    fn at_end(&mut self, e: &Explanation) -> fmt::Result {
        let end = &e.end;
        if end.segments == 0 {
            return Ok(());
        }
        self.section("At the end")?;
        let pending = if end.pending_blocks > 0 {
            format!(
                "; {} more ({}) are freed and wait for another stream",
                plural(end.pending_blocks, "block"),
                Bytes(end.pending_bytes)
            )
        } else {
            String::new()
        };
        self.prose(&format!(
            "Of {} reserved, {} are still allocated in {}{pending}{}",
            Bytes(end.reserved_bytes),
            Bytes(end.allocated_bytes),
            plural(end.holding.blocks - end.pending_blocks, "block"),
            categories(&end.holding)
        ))?;
        self.holders(&end.holding, e.recording.events > 0)?;
        if let Some(leaks) = e.leaks.as_ref().filter(|l| l.suspects.is_empty()) {
            match leaks.repetitions {
                Some(n) => self.prose(&format!(
                    "No leak suspected: nothing that the {} steps allocated grew with them.",
                    Count(n)
                ))?,
                None if leaks.basis.is_none() => {
                    self.prose(&format!("Leaks were not looked for: {}.", leaks.limits))?;
                }
                None => self.prose("No leak suspected: no line leaves blocks behind regularly.")?,
            }
        }
        Ok(())
    }

    fn cache(&mut self, cache: &Cache, e: &Explanation) -> fmt::Result {
        if cache.cached_bytes == 0 {
            return Ok(());
        }
        self.section("Cached")?;
        let kept = if cache.kept_by_pools_bytes > 0 {
            format!("; {} stay until their private pool is gone", Bytes(cache.kept_by_pools_bytes))
        } else {
            String::new()
        };
        self.prose(&format!(
            "{} are reserved but hold no block: torch.cuda.empty_cache() would return {}, {} are stuck beside live \
             blocks{kept}.",
            Bytes(cache.cached_bytes),
            Bytes(cache.returnable_bytes),
            Bytes(cache.stuck_bytes)
        ))?;
        // A stuck share that nobody would miss is not worth a list.
        if cache.stuck_bytes.saturating_mul(50) < e.end.reserved_bytes && cache.stuck_bytes < 64 << 20 {
            return Ok(());
        }
        for group in cache.pinned_by.iter().take(3) {
            self.item(&group.sentence)?;
        }
        if cache.pinned_by.len() > 3 {
            let rest: u64 = cache.pinned_by[3..].iter().map(|g| g.would_return_bytes).sum();
            writeln!(self.out, "  {} are stuck beside other mixtures of lines.", Bytes(rest))?;
        }
        writeln!(self.out, "  The largest:")?;
        for segment in cache.stuck.iter().take(3) {
            writeln!(
                self.out,
                "    {} {:#x}: {} of {} stuck, beside {}",
                if segment.is_expandable { "pages of the segment at" } else { "segment" },
                segment.address,
                Bytes(segment.stuck_bytes),
                Bytes(segment.pinned_bytes),
                plural(segment.pins.len() as u64, "live block")
            )?;
            for pin in segment.pins.iter().take(3) {
                let site = pin.site.as_deref().unwrap_or("");
                let pending = if pin.is_pending { " (freed, waits for a stream)" } else { "" };
                let workspace = if pin.is_workspace_size { " (the size of a cuBLAS workspace)" } else { "" };
                let note = format!("{site}{pending}{workspace}");
                let row =
                    format!("      {:#x}  {:>9}  {}", pin.address, Bytes(pin.block_bytes), note.trim_start());
                writeln!(self.out, "{}", row.trim_end())?;
            }
            if segment.pins.len() > 3 {
                writeln!(self.out, "      and {} more", segment.pins.len() - 3)?;
            }
        }
        Ok(())
    }

    fn places(&mut self, e: &Explanation) -> fmt::Result {
        let end = &e.end;
        if end.streams.len() > 1 {
            self.section("By stream")?;
            for share in end.streams.iter().take(self.options.limit) {
                let name =
                    if share.stream == 0 { "default".to_owned() } else { format!("{:#x}", share.stream) };
                writeln!(
                    self.out,
                    "  {name:<14}  {:>9} reserved  {:>9} allocated  {:>9} cached",
                    Bytes(share.reserved_bytes),
                    Bytes(share.allocated_bytes),
                    Bytes(share.cached_bytes)
                )?;
            }
            self.rest(end.streams.len(), "stream")?;
            let side: u64 = end.streams.iter().filter(|s| s.stream != 0).map(|s| s.cached_bytes).sum();
            let said: Vec<&String> = end.streams.iter().filter_map(|s| s.sentence.as_ref()).collect();
            match said.as_slice() {
                [] => {}
                [one] => self.item(one)?,
                many => self.item(&format!(
                    "{} are cached for {} and cannot serve another stream.",
                    Bytes(side),
                    plural(many.len() as u64, "side stream")
                ))?,
            }
        }
        if end.pools.iter().any(|p| p.kind != PoolOwner::Default) {
            self.section("By memory pool")?;
            for share in end.pools.iter().take(self.options.limit) {
                let name = match share.kind {
                    PoolOwner::Default => "default".to_owned(),
                    kind => format!("{} ({}, {})", kind.words(), share.pool.0, share.pool.1),
                };
                writeln!(
                    self.out,
                    "  {name:<22}  {:>9} reserved  {:>9} allocated  {:>9} cached",
                    Bytes(share.reserved_bytes),
                    Bytes(share.allocated_bytes),
                    Bytes(share.cached_bytes)
                )?;
            }
            self.rest(end.pools.len(), "pool")?;
        }
        Ok(())
    }

    /// A list of holders: bytes, share or age, blocks, category, line.
    fn holders(&mut self, holding: &Holding, ages: bool) -> fmt::Result {
        let shown = &holding.holders[..holding.holders.len().min(self.options.limit)];
        let label = |h: &Holder| h.category.map_or("", |c| c.label());
        let labels = shown.iter().map(|h| label(h).len()).max().unwrap_or(0);
        let second_width = if ages { 11 } else { 4 };
        for holder in shown {
            let second = if ages {
                holder.oldest_age_us.map_or_else(|| "older".to_owned(), |us| Span(us).to_string())
            } else {
                Share(holder.requested_bytes, holding.requested_bytes).to_string()
            };
            let mut row = format!(
                "  {:>9}  {second:>second_width$}  {:>12}  ",
                Bytes(holder.requested_bytes),
                plural(holder.blocks, "block")
            );
            if labels > 0 {
                let _ = write!(row, "{:<labels$}  ", label(holder));
            }
            let room = self.width.saturating_sub(row.chars().count()).max(20);
            let line = line_of(holder, room);
            writeln!(self.out, "{row}{line}")?;
            for stack in holder.stacks.iter().take(if self.options.stacks { usize::MAX } else { 0 }) {
                writeln!(
                    self.out,
                    "      {} in {}:",
                    Bytes(stack.requested_bytes),
                    plural(stack.blocks, "block")
                )?;
                for frame in &stack.frames {
                    writeln!(self.out, "        {frame}")?;
                }
            }
        }
        let rest = &holding.holders[shown.len()..];
        if !rest.is_empty() {
            let bytes: u64 = rest.iter().map(|h| h.requested_bytes).sum();
            writeln!(self.out, "  {:>9}  in {}", Bytes(bytes), plural(rest.len() as u64, "more holder"))?;
        }
        if ages && !shown.is_empty() {
            let faint = "  (second column: the age of the oldest block)";
            writeln!(self.out, "{}", self.options.style.faint(faint))?;
        }
        Ok(())
    }

    fn section(&mut self, title: &str) -> fmt::Result {
        writeln!(self.out, "\n{}", self.options.style.strong(title))
    }

    fn prose(&mut self, text: &str) -> fmt::Result {
        writeln!(self.out, "  {}", wrap(text, self.width - 2, 2))
    }

    fn item(&mut self, text: &str) -> fmt::Result {
        writeln!(self.out, "  - {}", wrap(&capital(text), self.width - 4, 4))
    }

    fn rest(&mut self, all: usize, noun: &str) -> fmt::Result {
        match all.checked_sub(self.options.limit).filter(|&n| n > 0) {
            Some(n) => writeln!(self.out, "  and {} more", plural(n as u64, noun)),
            None => Ok(()),
        }
    }
}

/// `after 2.1 s, in step 7, during Optimizer.step#AdamW.step`.
fn when(peak: &Peak) -> String {
    let mut parts = Vec::new();
    match (peak.since_start_us, peak.event_index) {
        (Some(us), _) => parts.push(format!("after {}", Span(us))),
        (None, Some(index)) => parts.push(format!("after event {}", Count(index as u64))),
        (None, None) => parts.push("before the history began".to_owned()),
    }
    if let Some(step) = peak.step {
        parts.push(format!("in step {}", Count(step as u64)));
    }
    if let Some(during) = &peak.during {
        parts.push(format!("during {during}"));
    }
    parts.join(", ")
}

/// `: activations 84 %, parameters 10 %.`, or a full stop.
fn categories(holding: &Holding) -> String {
    let shares = holding.categories.as_deref().unwrap_or_default();
    let total = holding.requested_bytes;
    let told: Vec<String> = shares
        .iter()
        .filter(|share| share.requested_bytes.saturating_mul(200) >= total && share.requested_bytes > 0)
        .map(|share| format!("{} {}", share.category.words(), Share(share.requested_bytes, total)))
        .collect();
    if told.is_empty() { ".".to_owned() } else { format!(": {}.", told.join(", ")) }
}

fn line_of(holder: &Holder, room: usize) -> String {
    if let (Some(pool), Some(stream)) = (holder.pool, holder.stream) {
        let pool = match PoolOwner::of(pool) {
            PoolOwner::Default => "default pool".to_owned(),
            kind => format!("{} ({}, {})", kind.words(), pool.0, pool.1),
        };
        let stream = if stream == 0 { "default stream".to_owned() } else { format!("stream {stream:#x}") };
        let mut line = format!("{pool}, {stream}");
        // The sizes say something only where they recur.
        for (i, SizeShare { each_bytes, blocks }) in holder.sizes.iter().filter(|s| s.blocks > 1).enumerate()
        {
            let more = format!("{} {blocks} × {}", if i == 0 { ":" } else { "," }, Bytes(*each_bytes));
            if line.chars().count() + more.chars().count() > room {
                break;
            }
            line += &more;
        }
        return line;
    }
    let site = &holder.site;
    let own = site.called_from.as_ref().map(|own| format!(" from {own}")).unwrap_or_default();
    let note = if site.only_torch { " [only torch frames]" } else { "" };
    // What is dropped first when room is short: the folders, the function, and only then the person's own line.
    let file_only = |text: &str| -> String {
        let folders = text.split(':').next().and_then(|path| path.rfind('/')).map_or(0, |slash| slash + 1);
        text[folders..].to_owned()
    };
    let candidates = [
        format!("{}{note}{own}", site.name),
        format!("{}{note}{own}", file_only(&site.name)),
        format!("{}{note}{own}", file_only(site.place())),
        format!("{}{note}", file_only(&site.name)),
    ];
    let fitting = candidates.into_iter().find(|text| text.chars().count() <= room);
    fitting.unwrap_or_else(|| keep_end(&file_only(site.place()), room))
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
}
