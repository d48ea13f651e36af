//! Findings about the variables that change what PyTorch does with memory.

use unhand_alloc::{Profile, Release, Settings, SettingsError};
use unhand_analyze::Bytes;

use super::environment::Environment;
use super::finding::{Finding, Level, Topic};
use crate::settings::nearest_key;

/// The older name and the newer. Where both are set, PyTorch's allocator for CUDA reads the older one and nothing else
/// (tried with 2.11 and 2.15).
const CONF: [&str; 2] = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];

pub(super) fn findings(environment: &Environment) -> Vec<Finding> {
    let mut findings = allocator(environment);
    findings.extend(caching(environment));
    findings.extend(blocking(environment));
    findings.extend(workspace(environment));
    findings.extend(loading(environment));
    findings
}

fn finding(level: Level, sentence: impl Into<String>) -> Finding {
    Finding::new(Topic::Settings, level, sentence)
}

fn allocator(environment: &Environment) -> Vec<Finding> {
    let set: Vec<(&str, &str)> =
        CONF.iter().filter_map(|name| Some((*name, environment.variable(name)?))).collect();
    let Some((name, conf)) = set.first() else {
        return vec![finding(Level::Ok, "The allocator has its default settings.")];
    };
    let torch = environment.python.as_ref().ok().and_then(|python| python.torch.as_ref());
    let release = torch.and_then(|torch| torch.version.as_ref()?.parse().ok());
    let mut findings = vec![of_conf(name, conf, release.unwrap_or_default())];
    if let Some((ignored, other)) = set.get(1)
        && conf.trim() != other.trim()
    {
        let sentence = format!(
            "{ignored}={other} has no effect: where both are set, PyTorch's allocator for CUDA reads {name} alone, \
             although PyTorch documents the other as the primary one."
        );
        let hint = "unset one of them; what was in effect is in a snapshot, and `unhand explain --json` shows it as \
                    `settings`";
        findings.push(finding(Level::Warning, sentence).hint(hint));
    }
    findings
}

fn of_conf(name: &str, conf: &str, release: Release) -> Finding {
    let error = match Settings::parse(conf, &Profile::of(release)) {
        Ok(_) if conf.trim().is_empty() => {
            return finding(Level::Ok, format!("{name} is empty: default settings."));
        }
        Ok(_) => return finding(Level::Ok, format!("{name}={conf} is understood.")),
        Err(error) => error,
    };
    let refused =
        || finding(Level::Problem, format!("{name}={conf} is refused by PyTorch {release}: {error}."));
    match &error {
        SettingsError::BadValue { key, value, .. } if key == "backend" && value == "cudaMallocAsync" => {
            let sentence = format!(
                "{name}={conf}: CUDA's own allocator instead of PyTorch's; it keeps no segments, and unhand can \
                 neither explain nor replay what it caches."
            );
            finding(Level::Warning, sentence)
        }
        SettingsError::UnknownKey { key } => match nearest_key(key) {
            Some(near) => refused().hint(format!("did you mean `{near}`?")),
            None => refused(),
        },
        _ => refused(),
    }
}

fn caching(environment: &Environment) -> Option<Finding> {
    let value =
        environment.variable("PYTORCH_NO_CUDA_MEMORY_CACHING").filter(|value| !matches!(*value, "" | "0"))?;
    let sentence = format!(
        "PYTORCH_NO_CUDA_MEMORY_CACHING={value}: PyTorch asks the driver for every tensor, which is slow, counts nothing \
         as allocated or reserved, and leaves snapshots empty."
    );
    Some(finding(Level::Warning, sentence).hint("unset it, unless you look for an access out of bounds"))
}

fn blocking(environment: &Environment) -> Option<Finding> {
    let value = environment.variable("CUDA_LAUNCH_BLOCKING").filter(|value| !matches!(*value, "" | "0"))?;
    let sentence =
        format!("CUDA_LAUNCH_BLOCKING={value}: the program waits for every kernel, which is slow.");
    Some(finding(Level::Note, sentence).hint("unset it when you have found the error you are looking for"))
}

fn workspace(environment: &Environment) -> Option<Finding> {
    let value = environment.variable("CUBLAS_WORKSPACE_CONFIG")?;
    Some(match workspace_bytes(value) {
        Some(bytes) => {
            let sentence = format!(
                "CUBLAS_WORKSPACE_CONFIG={value}: each pair of a cuBLAS handle and a stream keeps {} as workspace.",
                Bytes(bytes)
            );
            finding(Level::Note, sentence)
        }
        None => finding(
            Level::Warning,
            format!("CUBLAS_WORKSPACE_CONFIG={value} is not of the form `:SIZE:COUNT`."),
        )
        .hint("for example `:4096:8`, eight buffers of 4096 KiB"),
    })
}

/// `:4096:2:16:8` is two buffers of 4096 KiB and eight of 16 KiB.
fn workspace_bytes(value: &str) -> Option<u64> {
    let numbers: Option<Vec<u64>> =
        value.strip_prefix(':')?.split(':').map(|number| number.parse().ok()).collect();
    let numbers = numbers.filter(|numbers| numbers.len() % 2 == 0)?;
    numbers
        .chunks_exact(2)
        .try_fold(0_u64, |sum, pair| sum.checked_add(pair[0].checked_mul(pair[1])?.checked_mul(1024)?))
}

fn loading(environment: &Environment) -> Option<Finding> {
    let value = environment.variable("CUDA_MODULE_LOADING")?;
    Some(match value {
        "EAGER" => {
            let sentence = "CUDA_MODULE_LOADING=EAGER: every kernel of every library is loaded at the start, into memory \
                            outside PyTorch's allocator.";
            finding(Level::Warning, sentence)
                .hint("unset it, or set it to LAZY: kernels are loaded when they are first used")
        }
        "LAZY" | "DEFAULT" | "" => return None,
        _ => finding(Level::Warning, format!("CUDA_MODULE_LOADING={value} is neither LAZY nor EAGER.")),
    })
}
