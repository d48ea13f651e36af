//! Scripts: what both allocators are told to do, as lines of the oracle's protocol.

use std::collections::HashMap;
use std::fmt;

/// One script. Its text is the protocol of `tests/oracle/README.md`, so that a failing one can be replayed by
/// hand and kept in `tests/oracle/scripts`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Script {
    /// Bytes of device memory.
    pub(crate) total: u64,
    /// `PYTORCH_CUDA_ALLOC_CONF`.
    pub(crate) conf: String,
    /// The commands between `init` and `end`.
    pub(crate) lines: Vec<String>,
    /// Several streams' events, or several dying pools, may be met in one operation. The original visits them
    /// in the order of a hash table, so what depends on it is not compared; see `outcome.rs`.
    pub(crate) unordered: bool,
}

impl Script {
    /// Reads a script file: `#` starts a comment, `# unordered` alone on a line sets that flag.
    pub(crate) fn parse(text: &str) -> Result<Script, String> {
        let mut script = Script::default();
        let mut begun = false;
        for line in text.lines().map(str::trim) {
            if line == "# unordered" {
                script.unordered = true;
            }
            let line = line.split('#').next().unwrap_or_default().trim();
            match line.strip_prefix("init") {
                _ if line.is_empty() || line == "end" => {}
                Some(words) if !begun => {
                    begun = true;
                    for word in words.split_whitespace() {
                        match word.split_once('=') {
                            Some(("total", bytes)) => {
                                script.total = bytes.parse().map_err(|_| word.to_owned())?;
                            }
                            Some(("conf", conf)) => conf.clone_into(&mut script.conf),
                            _ => return Err(format!("unknown init word `{word}`")),
                        }
                    }
                }
                _ => script.lines.push(line.to_owned()),
            }
        }
        if begun { Ok(script) } else { Err("no `init` line".to_owned()) }
    }
}

/// What a script has done so far, as far as it decides whether the next line is proper.
#[derive(Debug, Default)]
struct Usage<'a> {
    max_split: u64,
    /// `expandable_segments` has been on.
    expandable: bool,
    /// Holds of each pool.
    holds: HashMap<&'a str, u32>,
    /// Pools diverted to.
    diverted: Vec<&'a str>,
    /// For each block the pools it may be in.
    blocks: HashMap<&'a str, Vec<&'a str>>,
    fallback: bool,
}

impl<'a> Usage<'a> {
    fn settings(&mut self, conf: &str) -> bool {
        let before = std::mem::replace(&mut self.max_split, max_split_mb(conf));
        self.expandable |= conf.contains("expandable_segments:True");
        self.max_split >= before
    }

    fn line(&mut self, line: &'a str, next: &str) -> bool {
        let mut words = line.split(' ');
        let (op, id) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let holds = self.holds.get(id).copied().unwrap_or(0);
        match op {
            "settings" => self.settings(id),
            "malloc" => {
                self.blocks.insert(id, self.diverted.clone());
                true
            }
            "free" => {
                self.blocks.remove(id);
                true
            }
            "pool_create" => {
                self.fallback |= line.contains("use_on_oom");
                self.holds.insert(id, 1).is_none()
            }
            "pool_begin" => {
                let proper = holds > 0 && !self.diverted.contains(&id);
                self.holds.insert(id, holds + 1);
                self.diverted.push(id);
                proper
            }
            "pool_end" => {
                let before = self.diverted.len();
                self.diverted.retain(|other| *other != id);
                self.diverted.len() < before
            }
            "pool_release" => {
                self.holds.insert(id, holds.saturating_sub(1));
                let alive = self.fallback || self.blocks.values().any(|pools| pools.contains(&id));
                holds > 1 || (holds == 1 && !self.diverted.contains(&id) && !(self.expandable && alive))
            }
            "pool_empty" => self.holds.contains_key(id) && self.diverted.is_empty(),
            "pool_use_on_oom" => self.holds.contains_key(id),
            "record_stream" => self.diverted.is_empty() || next.strip_prefix("free ") == Some(id),
            _ => true,
        }
    }
}

impl Script {
    /// Whether the script stays clear of what the original does not survive:
    /// pools used otherwise than its own callers use them; emptying a pool while requests are diverted (an
    /// internal error up to 2.12); a lower `max_split_size_mb` under way (parts of segments go to `cudaFree`);
    /// dropping a pool of expandable segments with live blocks (it may be erased under them); recording a stream
    /// on a block while requests are diverted and freeing it later (up to 2.12 the note outlives the block).
    pub(crate) fn is_proper(&self) -> bool {
        let mut usage = Usage::default();
        usage.settings(&self.conf);
        // A block that other streams may still use is alive after its free; not to track that is on the safe side.
        let pools = self.lines.iter().any(|line| line.starts_with("pool_"));
        let events = self.lines.iter().any(|line| line.starts_with("record_stream"));
        usage.fallback = pools && events;
        let following = self.lines.iter().skip(1).map(String::as_str).chain([""]);
        self.lines.iter().zip(following).all(|(line, next)| usage.line(line, next))
    }
}

/// The `max_split_size_mb` of a settings string.
fn max_split_mb(conf: &str) -> u64 {
    let value = conf.split(',').find_map(|pair| pair.strip_prefix("max_split_size_mb:"));
    value.and_then(|value| value.parse().ok()).unwrap_or(u64::MAX)
}

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.unordered {
            writeln!(f, "# unordered")?;
        }
        writeln!(f, "init total={} conf={}", self.total, self.conf)?;
        self.lines.iter().try_for_each(|line| writeln!(f, "{line}"))?;
        writeln!(f, "end")
    }
}
