//! Makes a failing script small: lines are taken out in ever smaller groups, then numbers are made simpler.

use crate::script::Script;

const MIB: u64 = 1 << 20;
/// A run takes some milliseconds.
const MOST_RUNS: u32 = 3000;

/// The smallest script found for which `fails` still gives a message, and that message. `message` is what the
/// script gives as it is.
pub(crate) fn minimize(
    script: Script,
    message: String,
    mut fails: impl FnMut(&Script) -> Option<String>,
) -> (Script, String) {
    let proper = script.is_proper();
    let mut best = (script, message);
    let mut left = MOST_RUNS;
    let mut attempt = |best: &mut (Script, String), candidate: Script| {
        // A misuse would be another story than the one to be told.
        if left == 0 || (proper && !candidate.is_proper()) {
            return false;
        }
        left -= 1;
        fails(&candidate).is_some_and(|message| {
            *best = (candidate, message);
            true
        })
    };
    loop {
        let before = best.0.clone();
        let mut group = best.0.lines.len();
        while group > 0 {
            let mut at = 0;
            while at < best.0.lines.len() {
                let mut candidate = best.0.clone();
                let stop = (at + group).min(candidate.lines.len());
                candidate.lines.drain(at..stop);
                if !attempt(&mut best, candidate) {
                    at += group;
                }
            }
            group /= 2;
        }
        for at in 0..best.0.lines.len() {
            for simpler in simpler_lines(&best.0.lines[at]) {
                let mut candidate = best.0.clone();
                candidate.lines[at] = simpler;
                if attempt(&mut best, candidate) {
                    break;
                }
            }
        }
        for total in [1024 * MIB, 128 * MIB, best.0.total / (2 * MIB) * 2 * MIB] {
            let candidate = Script { total, ..best.0.clone() };
            if total == best.0.total || attempt(&mut best, candidate) {
                break;
            }
        }
        for part in best.0.conf.clone().split(',') {
            let mut parts: Vec<&str> = best.0.conf.split(',').collect();
            parts.retain(|other| *other != part);
            let candidate = Script { conf: parts.join(","), ..best.0.clone() };
            if candidate.conf != best.0.conf {
                attempt(&mut best, candidate);
            }
        }
        if best.0 == before {
            return best;
        }
    }
}

/// Lines that do about the same with rounder numbers, the simplest first.
fn simpler_lines(line: &str) -> Vec<String> {
    let words: Vec<&str> = line.split(' ').collect();
    if let ["malloc", id, bytes, stream] = words.as_slice() {
        let bytes: u64 = bytes.parse().unwrap_or(0);
        let sizes = [
            512,
            MIB,
            2 * MIB,
            10 * MIB,
            20 * MIB,
            bytes / (2 * MIB) * 2 * MIB,
            bytes / MIB * MIB,
            bytes / 512 * 512,
        ];
        let mut lines: Vec<String> = sizes
            .iter()
            .take_while(|size| **size != bytes)
            .filter(|size| **size > 0)
            .map(|size| format!("malloc {id} {size} {stream}"))
            .collect();
        if *stream != "0" {
            lines.insert(0, format!("malloc {id} {bytes} 0"));
        }
        return lines;
    }
    if let Some(conf) = line.strip_prefix("settings ") {
        let parts: Vec<&str> = conf.split(',').collect();
        if parts.len() > 1 {
            return (0..parts.len())
                .map(|without| {
                    let mut kept = parts.clone();
                    kept.remove(without);
                    format!("settings {}", kept.join(","))
                })
                .collect();
        }
    }
    Vec::new()
}
