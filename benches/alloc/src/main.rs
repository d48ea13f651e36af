//! Times the two hot loops of a caching allocator, beside the real `libc10_cuda` on the same fake runtime.
//!
//! `alloc-bench` prints a table of both, interleaved in one run. `alloc-bench pair BYTES TIMES` and
//! `alloc-bench replace LIVE TIMES [address]` run one loop silently: `cargo xtask instructions` counts them.

use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use unhand_alloc::{Allocation, CachingAllocator, NullDevice, Profile, Request, Settings};

/// Time this thread has spent on a processor: what else the machine does counts less than with a clock.
fn cpu_nanoseconds() -> Result<f64, Failure> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    Ok(text.split_whitespace().next().ok_or("no CPU time")?.parse()?)
}

type Front = CachingAllocator<NullDevice>;
type Failure = Box<dyn std::error::Error>;

/// The oracle's random sizes: xorshift64, log-uniform from 512 B to 4 MiB.
struct Sizes(u64);

impl Sizes {
    fn new() -> Sizes {
        Sizes(0x9E37_79B9_7F4A_7C15)
    }

    fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn size(&mut self) -> u64 {
        let draw = self.draw();
        let power = 1u64 << (9 + (draw >> 48) % 13);
        power + (draw & (power - 1))
    }
}

fn front(conf: &str) -> Result<Front, Failure> {
    let profile = Profile::default();
    Ok(CachingAllocator::with_settings(vec![NullDevice::new(1 << 40)], &Settings::parse(conf, &profile)?, profile))
}

/// Nanoseconds for one allocation and its free, both through the lock.
fn pair(allocator: &Front, bytes: u64, times: u64) -> Result<f64, Failure> {
    let start = cpu_nanoseconds()?;
    for _ in 0..times {
        let allocation = allocator.malloc(0, Request::new(black_box(bytes)))?;
        allocator.free(0, black_box(allocation))?;
    }
    Ok((cpu_nanoseconds()? - start) / times as f64)
}

/// The same, freeing by address as a C caller must.
fn pair_by_address(allocator: &Front, bytes: u64, times: u64) -> Result<f64, Failure> {
    let start = cpu_nanoseconds()?;
    for _ in 0..times {
        let address = allocator.malloc(0, Request::new(black_box(bytes)))?.address();
        allocator.free_address(0, black_box(address))?;
    }
    Ok((cpu_nanoseconds()? - start) / times as f64)
}

/// Nanoseconds to free one of `live` random blocks and allocate another.
fn replace(allocator: &Front, live: usize, times: u64, by_address: bool) -> Result<f64, Failure> {
    let mut sizes = Sizes::new();
    let mut blocks: Vec<Allocation> = Vec::with_capacity(live);
    for _ in 0..live {
        blocks.push(allocator.malloc(0, Request::new(sizes.size()))?);
    }
    let start = cpu_nanoseconds()?;
    for _ in 0..times {
        let slot = (sizes.draw() >> 32) as usize % live;
        if by_address {
            allocator.free_address(0, blocks[slot].address())?;
        } else {
            allocator.free(0, blocks[slot])?;
        }
        blocks[slot] = allocator.malloc(0, Request::new(sizes.size()))?;
    }
    let nanoseconds = (cpu_nanoseconds()? - start) / times as f64;
    for block in blocks {
        allocator.free(0, block)?;
    }
    Ok(nanoseconds)
}

/// The real allocator, in a process of its own.
struct Oracle {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Oracle {
    fn start(driver: &Path, conf: &str) -> Result<Oracle, Failure> {
        let mut child = Command::new(driver).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take().ok_or("no stdin")?;
        let output = BufReader::new(child.stdout.take().ok_or("no stdout")?);
        let mut oracle = Oracle { child, input, output };
        let conf = if conf.is_empty() { String::new() } else { format!(" conf={conf}") };
        oracle.ask(&format!("init total={}{conf} trace=0", 1u64 << 40))?;
        Ok(oracle)
    }

    fn ask(&mut self, line: &str) -> Result<String, Failure> {
        writeln!(self.input, "{line}")?;
        self.input.flush()?;
        let mut answer = String::new();
        self.output.read_line(&mut answer)?;
        if answer.starts_with("error") || answer.is_empty() {
            return Err(format!("the oracle answers `{line}` with `{}`", answer.trim()).into());
        }
        Ok(answer.trim().to_owned())
    }

    fn nanoseconds(&mut self, line: &str) -> Result<f64, Failure> {
        let answer = self.ask(line)?;
        let number = answer.split_whitespace().find_map(|word| word.parse().ok());
        number.ok_or_else(|| format!("no number in `{answer}`").into())
    }
}

impl Drop for Oracle {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The newest driver that `tests/oracle/build.py` made.
fn driver() -> Option<PathBuf> {
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/oracle/build");
    let mut found: Vec<PathBuf> = std::fs::read_dir(build)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path().join("driver")))
        .filter(|path| path.is_file())
        .collect();
    // By number: 2.15 is newer than 2.9.
    let version = |path: &PathBuf| -> Vec<u32> {
        let folder = path.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy().into_owned();
        folder.split('.').map(|part| part.parse().unwrap_or(0)).collect()
    };
    found.sort_by_key(version);
    found.pop()
}

fn best(mut run: impl FnMut() -> Result<f64, Failure>) -> Result<f64, Failure> {
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        best = best.min(run()?);
    }
    Ok(best)
}

fn compare() -> Result<(), Failure> {
    let driver = driver();
    if driver.is_none() {
        eprintln!("the real allocator is not built: tests/oracle/fetch.py && tests/oracle/build.py");
    }
    println!("best of five, CPU nanoseconds; ratio = real / unhand");
    println!("{:<46} {:>8} {:>11} {:>8} {:>6}", "", "unhand", "by address", "real", "ratio");
    for conf in ["", "expandable_segments:True"] {
        let mut oracle = driver.as_deref().map(|driver| Oracle::start(driver, conf)).transpose()?;
        let label = if conf.is_empty() { "default" } else { "expandable" };
        for bytes in [512u64, 100 << 10, 1 << 20, 5 << 20, 64 << 20] {
            let allocator = front(conf)?;
            let ours = best(|| pair(&allocator, bytes, 1_000_000))?;
            let address = best(|| pair_by_address(&allocator, bytes, 1_000_000))?;
            let real = oracle.as_mut().map(|oracle| oracle.nanoseconds(&format!("bench pair {bytes} 200000")));
            line(&format!("{label}: alloc + free, {} KiB", bytes as f64 / 1024.0), ours, address, real.transpose()?);
        }
        for live in [1_000usize, 20_000] {
            let ours = best(|| replace(&front(conf)?, live, 1_000_000, false))?;
            let address = best(|| replace(&front(conf)?, live, 1_000_000, true))?;
            let real = oracle.as_mut().map(|oracle| oracle.nanoseconds(&format!("bench replace {live} 200000")));
            line(&format!("{label}: replace one of {live}, 512 B - 4 MiB"), ours, address, real.transpose()?);
        }
    }
    Ok(())
}

fn line(label: &str, ours: f64, address: f64, real: Option<f64>) {
    let real_text = real.map_or("n/a".to_owned(), |real| format!("{real:.0}"));
    let ratio = real.map_or("n/a".to_owned(), |real| format!("{:.1}", real / ours));
    println!("{label:<46} {ours:>8.1} {address:>11.1} {real_text:>8} {ratio:>6}");
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| -> Result<u64, Failure> { Ok(arguments.get(at).ok_or("a number is missing")?.parse()?) };
    match arguments.first().map(String::as_str) {
        None => compare(),
        Some("pair") => pair(&front("")?, number(1)?, number(2)?).map(|_| ()),
        Some("pair-by-address") => pair_by_address(&front("")?, number(1)?, number(2)?).map(|_| ()),
        Some("replace") => replace(&front("")?, usize::try_from(number(1)?)?, number(2)?, false).map(|_| ()),
        Some(other) => Err(format!("unknown loop: `{other}`").into()),
    }
}
