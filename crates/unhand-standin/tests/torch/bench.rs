//! Where the installations are, and how a script is run on one.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};

use unhand_standin::{Plan, inspect, plan, prepare};

/// An installation of PyTorch beside the light packages.
pub(crate) struct Bench {
    torch: PathBuf,
    packages: PathBuf,
}

/// The release that the recordings were made with.
pub(crate) const RECORDED: &str = "2.11.0";
/// All releases that are tried, as far as they are installed. The last is built for CUDA 12.
pub(crate) const RELEASES: &[&str] = &[RECORDED, "2.15.0", "2.9.1"];

/// The repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// One program at a time: each takes a processor and a gigabyte.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The installation of a release. Nothing if it is not there; an error if it has to be.
pub(crate) fn bench(release: &str) -> Option<Bench> {
    let cache = std::env::var_os("UNHAND_STANDIN_CACHE")
        .map_or_else(|| root().join("tests/standin/cache"), PathBuf::from);
    let bench = Bench { torch: cache.join(format!("torch-{release}")), packages: cache.join("packages") };
    if bench.torch.join("torch").is_dir() && bench.packages.is_dir() {
        return Some(bench);
    }
    let is_required = std::env::var("UNHAND_REQUIRE_STANDIN").is_ok_and(|releases| {
        // `1` stands for the releases that `fetch.py` installs by default.
        releases.split(',').any(|name| name == release || name == "1" && release != "2.9.1")
    });
    assert!(!is_required, "torch {release} is not in {}: run tests/standin/fetch.py", cache.display());
    None
}

impl Bench {
    /// A command that runs on the stand-in.
    pub(crate) fn command(&self, words: &[&str], environment: &[(&str, &str)]) -> Command {
        let prepared =
            prepare(&self.plan(), &std::env::temp_dir().join("unhand-standin-tests")).expect("written");
        let mut command = Command::new("python3");
        let path = std::env::join_paths([&self.torch, &self.packages]).expect("paths without a colon");
        command
            .args(words)
            .env("PYTHONPATH", path)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env_remove("PYTORCH_CUDA_ALLOC_CONF")
            .env_remove("FRACTION_GB")
            .envs(prepared.environment)
            .envs(environment.iter().copied());
        command
    }

    /// Runs a command to its end.
    pub(crate) fn run(&self, words: &[&str], environment: &[(&str, &str)]) -> Output {
        let _turn = turn();
        self.command(words, environment).output().expect("python3 runs")
    }

    /// What this release needs, compared with what there is.
    pub(crate) fn plan(&self) -> Plan {
        plan(&inspect(&self.torch.join("torch")).expect("a CUDA build")).expect("Linux on x86-64")
    }
}

/// Both outputs of a command, for a message.
pub(crate) fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}
