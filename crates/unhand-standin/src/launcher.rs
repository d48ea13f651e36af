//! Sets a program up to run on the stand-in: writes the libraries it needs, and says which environment loads them.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Cursor;
use std::path::{Path, PathBuf};

use crate::config;
use crate::elf::{self, Library};
use crate::error::Error;
use crate::stub::stub;
use crate::table::{Entry, Table, table};
use crate::torch::Torch;

/// The half of this crate that programs load, as `build.rs` built it. Empty where the stand-in does not run.
const LOADED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libunhand_standin.so"));
/// The driver's name, which the core library has.
const CORE: &str = "libcuda.so.1";
/// The management library. It has no functions of its own: who looks in it finds those of the core, which it needs.
const NVML: &str = "libnvidia-ml.so.1";
/// What a stub calls to say that it stood for work.
const IMPORT: &str = "unhand_standin_library_call";
/// What functions return that return a text.
const ANSWER: &[u8] = b"unhand stand-in\0";

/// What to load for one PyTorch installation.
#[derive(Clone, Debug)]
pub struct Plan {
    libraries: Vec<Library>,
    /// Functions that PyTorch needs and nobody provides.
    pub missing: Vec<String>,
    cuda_version: i32,
    cudnn_version: Option<i32>,
    nccl_version: Option<i32>,
}

/// The libraries of a plan, written out.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// Where they are.
    pub folder: PathBuf,
    /// Variables to set for the program, in addition to what it has.
    pub environment: Vec<(String, String)>,
}

/// Compares what PyTorch needs with what there is.
///
/// # Errors
/// If the machine is not one the stand-in runs on.
pub fn plan(torch: &Torch) -> Result<Plan, Error> {
    if LOADED.is_empty() {
        return Err(Error::Platform);
    }
    let exports = elf::read_from(&mut Cursor::new(LOADED))
        .map_err(|error| Error::File { path: CORE.into(), error })?
        .defined;
    Ok(plan_with(torch, &exports.into_iter().collect()))
}

fn plan_with(torch: &Torch, exports: &BTreeSet<String>) -> Plan {
    let table = table();
    let mut missing = Vec::new();
    let mut functions: BTreeMap<&str, Vec<(&Entry, Option<String>)>> = BTreeMap::new();
    for (name, origin) in &torch.functions {
        if exports.contains(name) {
            continue;
        }
        let Some((group, entry)) = find(&table, name) else {
            missing.push(name.clone());
            continue;
        };
        let library = match origin {
            Some((library, _)) => Some(library.as_str()),
            None => torch.libraries.keys().map(String::as_str).find(|library| group_of(library) == group),
        };
        // A function of a library that nobody names: any library will do, and the management library is always there.
        let version = origin.as_ref().map(|(_, version)| version.clone());
        functions.entry(library.unwrap_or(NVML)).or_default().push((entry, version));
    }
    let mut names: BTreeSet<&str> = torch.libraries.keys().map(String::as_str).collect();
    names.insert(NVML);
    names.remove(CORE);
    let libraries = names
        .into_iter()
        .map(|name| {
            let versions = torch.libraries.get(name).map(|versions| versions.iter().cloned().collect());
            library(name, versions.unwrap_or_default(), functions.remove(name).unwrap_or_default())
        })
        .collect();
    Plan {
        libraries,
        missing,
        cuda_version: torch.cuda_version,
        cudnn_version: torch.cudnn_version,
        nccl_version: torch.nccl_version,
    }
}

/// Writes a plan's libraries into a folder of their own below `cache`, or finds them there.
///
/// # Errors
/// If PyTorch needs what is not there, if files cannot be written, or if the loader could not take their paths.
pub fn prepare(plan: &Plan, cache: &Path) -> Result<Prepared, Error> {
    if !plan.missing.is_empty() {
        return Err(Error::Missing(plan.missing.clone()));
    }
    let fail = |path: &Path| {
        let path = path.to_owned();
        move |error| Error::File { path, error }
    };
    std::fs::create_dir_all(cache).map_err(fail(cache))?;
    let cache = cache.canonicalize().map_err(fail(cache))?;
    if cache.to_string_lossy().contains([':', ' ']) {
        return Err(Error::Path(cache));
    }
    let files: Vec<(&str, Vec<u8>)> =
        plan.libraries.iter().map(|library| (library.name.as_str(), library.to_bytes())).collect();
    let mut hasher = DefaultHasher::new();
    (LOADED, &files).hash(&mut hasher);
    let folder = cache.join(format!("{:016x}", hasher.finish()));
    if !folder.is_dir() {
        // Complete or not there: written beside the place, then renamed to it.
        let draft = cache.join(format!(".{:016x}.{}", hasher.finish(), std::process::id()));
        std::fs::create_dir_all(&draft).map_err(fail(&draft))?;
        for (name, bytes) in
            files.iter().map(|(name, bytes)| (*name, bytes.as_slice())).chain([(CORE, LOADED)])
        {
            let path = draft.join(name);
            std::fs::write(&path, bytes).map_err(fail(&path))?;
        }
        if let Err(error) = std::fs::rename(&draft, &folder) {
            let _ = std::fs::remove_dir_all(&draft);
            // Somebody else was faster, with the same bytes.
            if !folder.is_dir() {
                return Err(Error::File { path: folder, error });
            }
        }
    }
    Ok(Prepared { environment: environment(plan, &folder), folder })
}

fn environment(plan: &Plan, folder: &Path) -> Vec<(String, String)> {
    let names = [CORE].into_iter().chain(plan.libraries.iter().map(|library| library.name.as_str()));
    let mut preload: Vec<String> =
        names.map(|name| folder.join(name).to_string_lossy().into_owned()).collect();
    // Those of another plan stay out: a command may be started from one that runs on the stand-in.
    let is_ours = |path: &str| folder.parent().is_some_and(|cache| Path::new(path).starts_with(cache));
    let before = std::env::var("LD_PRELOAD").unwrap_or_default();
    preload.extend(
        before.split([':', ' ']).filter(|path| !path.is_empty() && !is_ours(path)).map(str::to_owned),
    );
    let mut environment = vec![
        ("LD_PRELOAD".to_owned(), preload.join(":")),
        (config::CUDA.to_owned(), plan.cuda_version.to_string()),
        // Triton looks for a file of that name.
        ("TRITON_LIBCUDA_PATH".to_owned(), folder.to_string_lossy().into_owned()),
    ];
    let versions = [(config::CUDNN, plan.cudnn_version), (config::NCCL, plan.nccl_version)];
    for (name, version) in versions {
        environment.extend(version.map(|version| (name.to_owned(), version.to_string())));
    }
    environment
}

fn library(name: &str, versions: Vec<String>, functions: Vec<(&Entry, Option<String>)>) -> Library {
    let mut texts = ANSWER.to_vec();
    let mut stubs = Vec::new();
    for (entry, version) in functions {
        let name_at = texts.len();
        texts.extend(entry.name.bytes().chain([0]));
        stubs.push(stub(entry, version, name_at, 0));
    }
    Library {
        name: name.to_owned(),
        needs: vec![CORE.to_owned()],
        versions,
        functions: stubs,
        import: IMPORT.to_owned(),
        texts,
    }
}

/// `libcublas.so.13` → `cublas`
fn group_of(library: &str) -> &str {
    let name = library.strip_prefix("lib").unwrap_or(library);
    name.split(".so").next().unwrap_or(name)
}

fn find<'a>(table: &'a Table, function: &str) -> Option<(&'a str, &'a Entry)> {
    table.iter().find_map(|(group, functions)| functions.get(function).map(|entry| (group.as_str(), entry)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn torch(functions: &[(&str, Option<(&str, &str)>)]) -> Torch {
        let own = |(library, version): (&str, &str)| (library.to_owned(), version.to_owned());
        let mut torch = Torch { cuda_version: 13_000, ..Torch::default() };
        for (name, origin) in functions {
            torch.functions.insert((*name).to_owned(), origin.map(own));
            if let Some((library, version)) = origin {
                torch.libraries.entry((*library).to_owned()).or_default().insert((*version).to_owned());
            }
        }
        torch.libraries.entry("libnccl.so.2".into()).or_default();
        torch
    }

    #[test]
    fn puts_each_function_into_the_library_it_is_expected_in() {
        let torch = torch(&[
            ("cublasSgemm_v2", Some(("libcublas.so.13", "libcublas.so.13"))),
            ("ncclGetVersion", None),
            ("cudaInventedYesterday", Some(("libcudart.so.13", "libcudart.so.13"))),
        ]);
        let plan = plan_with(&torch, &BTreeSet::new());
        assert_eq!(plan.missing, ["cudaInventedYesterday"]);
        let names: Vec<(&str, usize)> =
            plan.libraries.iter().map(|library| (library.name.as_str(), library.functions.len())).collect();
        assert_eq!(
            names,
            [("libcublas.so.13", 1), ("libcudart.so.13", 0), ("libnccl.so.2", 1), ("libnvidia-ml.so.1", 0)]
        );
        let folder = tempfile::tempdir().expect("a folder");
        let refused = prepare(&plan, folder.path());
        assert!(matches!(refused, Err(Error::Missing(missing)) if missing.len() == 1));
    }

    #[test]
    fn the_same_plan_is_written_once() {
        let plan = plan(&torch(&[])).expect("the machine is one that the stand-in runs on");
        let cache = tempfile::tempdir().expect("a folder");
        let first = prepare(&plan, cache.path()).expect("written");
        let second = prepare(&plan, cache.path()).expect("found");
        assert_eq!(first.folder, second.folder);
        assert_eq!(std::fs::read_dir(cache.path()).expect("a folder").count(), 1);
        assert!(first.folder.join(CORE).is_file());
        let spaced = cache.path().join("with space");
        assert!(matches!(prepare(&plan, &spaced), Err(Error::Path(_))));
    }
}
