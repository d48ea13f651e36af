//! The oracle's side: a process that runs scripts on PyTorch's own allocator. See `tests/oracle/README.md`.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::outcome::{Outcome, Step, stat_names};
use crate::script::Script;

/// Where the oracle lives in the repository.
pub(crate) fn home() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/oracle")
}

/// Releases that have been built, the oldest first; `UNHAND_ORACLE_VERSIONS=2.11.0,2.15.0` names others.
pub(crate) fn versions() -> Vec<String> {
    if let Ok(list) = std::env::var("UNHAND_ORACLE_VERSIONS") {
        return list.split(',').map(|version| version.trim().to_owned()).collect();
    }
    let Ok(entries) = std::fs::read_dir(home().join("build")) else { return Vec::new() };
    let built = entries.filter_map(Result::ok).filter(|entry| entry.path().join("driver").is_file());
    let mut versions: Vec<String> =
        built.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    versions.sort_by_key(|version| {
        version.split('.').map(|number| number.parse().unwrap_or(0)).collect::<Vec<u32>>()
    });
    versions
}

/// The driver program of one release.
pub(crate) struct Oracle {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Oracle {
    pub(crate) fn start(version: &str) -> std::io::Result<Oracle> {
        let program = home().join("build").join(version).join("driver");
        let mut child = Command::new(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null()) // the library's warnings
            .spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(std::io::Error::other("no pipes"));
        };
        Ok(Oracle { child, input, output: BufReader::new(output) })
    }

    fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(0) => Err("the driver program ended".to_owned()),
            Ok(_) => Ok(line.trim_end().to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Runs a script in a fresh process image.
    pub(crate) fn run(&mut self, script: &Script) -> Result<Outcome, String> {
        let mut text = format!("init total={} conf={}\nevery 3\n", script.total, script.conf);
        for line in &script.lines {
            text.push_str(line);
            text.push('\n');
        }
        text.push_str("every 0\nsnapshot\npool_stats\nend\n");
        self.input.write_all(text.as_bytes()).map_err(|error| error.to_string())?;
        self.input.flush().map_err(|error| error.to_string())?;
        let mut answers = Vec::with_capacity(script.lines.len() + 6);
        while answers.last().is_none_or(|last: &String| last != "bye") {
            let line = self.line()?;
            if let Some(signal) = line.strip_prefix("died ") {
                let at = answers.len().saturating_sub(2);
                return Err(format!("PyTorch died of signal {signal} after line {at} or later"));
            }
            answers.push(line);
        }
        let [init, _every, steps @ .., _off, snapshot, pools, _bye] = answers.as_slice() else {
            return Err(format!("too few answers: {answers:?}"));
        };
        let unknown = |line: &String| line.starts_with("error protocol") && line.contains("this release");
        if init != "ok" || steps.iter().any(unknown) {
            return Ok(Outcome { refused: true, ..Outcome::default() });
        }
        let mut outcome =
            Outcome { snapshot: segments(snapshot), pools: sorted(pools), ..Outcome::default() };
        let mut stats = vec![0; stat_names().len()];
        for line in steps {
            outcome.steps.push(step(line, &mut stats)?);
        }
        Ok(outcome)
    }
}

impl Drop for Oracle {
    fn drop(&mut self) {
        // A driver program ends when its input does; it must not be left behind if a test panics.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads `answer|changed statistics|trace`.
fn step(line: &str, stats: &mut [i64]) -> Result<Step, String> {
    if line.starts_with("error protocol") && !line.starts_with("error protocol: no such block") {
        return Err(line.to_owned());
    }
    let mut parts = line.rsplitn(3, '|');
    let (Some(trace), Some(changed), Some(answer)) = (parts.next(), parts.next(), parts.next()) else {
        return Err(format!("unexpected answer `{line}`"));
    };
    for pair in changed.split(',').filter(|pair| !pair.is_empty()) {
        let (index, value) = pair.split_once('=').ok_or(pair)?;
        let index: usize = index.parse().map_err(|_| pair)?;
        *stats.get_mut(index).ok_or(pair)? = value.parse().map_err(|_| pair)?;
    }
    let snapshot = if answer.starts_with("cfg ") { segments(answer) } else { Vec::new() };
    Ok(Step {
        answer: answer.to_owned(),
        snapshot,
        stats: stats.to_vec(),
        trace: trace.split_whitespace().map(str::to_owned).collect(),
    })
}

/// The settings and the segments of a snapshot, without the ages, which are PyTorch's own business.
fn segments(text: &str) -> Vec<String> {
    let segment = |record: &str| {
        let mut words = Vec::new();
        for (at, word) in record.split(' ').enumerate() {
            match word.split(',').collect::<Vec<_>>().as_slice() {
                [state, size, requested, _age] => words.push(format!("{state},{size},{requested}")),
                _ if at == 10 => {}
                _ => words.push(word.to_owned()),
            }
        }
        words.join(" ")
    };
    // Rust writes floating-point numbers shorter than C.
    let number = |word: &str| word.parse::<f64>().map_or_else(|_| word.to_owned(), |value| value.to_string());
    let settings = |record: &str| record.split(' ').map(number).collect::<Vec<_>>().join(" ");
    let record = |record: &str| if record.starts_with("seg") { segment(record) } else { settings(record) };
    text.split(';').map(record).collect()
}

fn sorted(text: &str) -> Vec<String> {
    let mut pools: Vec<String> =
        if text == "none" { Vec::new() } else { text.split(' ').map(str::to_owned).collect() };
    pools.sort();
    pools
}
