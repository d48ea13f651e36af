//! Looks at a PyTorch installation: which libraries of NVIDIA's it needs, in which versions, and which functions.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::elf::{self, Needs};
use crate::error::Error;

/// What a PyTorch installation needs from NVIDIA.
#[derive(Clone, Debug, Default)]
pub struct Torch {
    /// The folder `torch`.
    pub folder: PathBuf,
    /// What `torch.__version__` says.
    pub version: String,
    /// 1000 × major + 10 × minor.
    pub cuda_version: i32,
    /// cuDNN, 10000 × major + 100 × minor + patch, if the metadata names one.
    pub cudnn_version: Option<i32>,
    /// NCCL, in the same way.
    pub nccl_version: Option<i32>,
    /// Library (`libcublas.so.13`) → versions it must define.
    pub libraries: BTreeMap<String, BTreeSet<String>>,
    /// Function → the library and version it is expected in, if any is named.
    pub functions: BTreeMap<String, Option<(String, String)>>,
}

/// How names of NVIDIA's libraries begin.
const LIBRARIES: &[&str] = &["libcu", "libnv", "libnccl"];
/// How names of functions begin that are asked for without saying in which library.
const FUNCTIONS: &[&str] = &[
    "cuda", "cublas", "cudnn", "cufft", "curand", "cusolver", "cusparse", "cupti", "nccl", "nvml", "nvrtc",
    "nvshmem", "nvtx",
];

/// Asks an interpreter where its PyTorch is, without importing it.
///
/// # Errors
/// If the interpreter does not run or has no PyTorch.
pub fn find(python: &str) -> Result<PathBuf, Error> {
    const PROGRAM: &str = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')";
    let fail = |message: String| Error::Python { python: python.to_owned(), message };
    let output =
        Command::new(python).args(["-c", PROGRAM]).output().map_err(|error| fail(error.to_string()))?;
    let folder = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !output.status.success() {
        return Err(fail(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    if folder.is_empty() { Err(fail("it has no module `torch`".into())) } else { Ok(folder.into()) }
}

/// Reads the libraries of an installation.
///
/// # Errors
/// If there is none, if it is not built for CUDA, or if a library cannot be read.
pub fn inspect(folder: &Path) -> Result<Torch, Error> {
    let library_folder = folder.join("lib");
    let files = libraries_in(&library_folder)?;
    if files.is_empty() {
        return Err(Error::NoTorch(folder.to_owned()));
    }
    let mut torch = Torch { folder: folder.to_owned(), ..Torch::default() };
    read_version(folder, &mut torch)?;
    read_metadata(folder, &mut torch);
    let mut own = BTreeSet::new();
    let mut all = Vec::new();
    for path in files {
        let needs = elf::read(&path).map_err(|error| Error::File { path: path.clone(), error })?;
        own.extend(needs.name.clone());
        own.extend(needs.defined.iter().cloned());
        all.push(needs);
    }
    for needs in &all {
        collect(needs, &own, &mut torch);
    }
    Ok(torch)
}

fn collect(needs: &Needs, own: &BTreeSet<String>, torch: &mut Torch) {
    let is_wanted = |library: &str| LIBRARIES.iter().any(|start| library.starts_with(start));
    for library in needs.libraries.iter().filter(|library| is_wanted(library) && !own.contains(*library)) {
        torch.libraries.entry(library.clone()).or_default();
    }
    for (library, versions) in needs.versions.iter().filter(|(library, _)| is_wanted(library)) {
        torch.libraries.entry(library.clone()).or_default().extend(versions.iter().cloned());
    }
    for symbol in &needs.undefined {
        match &symbol.version {
            Some((library, _)) if is_wanted(library) => {
                torch.functions.insert(symbol.name.clone(), symbol.version.clone());
            }
            None if is_nvidia_function(&symbol.name) && !own.contains(&symbol.name) => {
                torch.functions.entry(symbol.name.clone()).or_insert(None);
            }
            _ => {}
        }
    }
}

/// `cuMemCreate`, `ncclAllReduce`, and not `customFunction`.
fn is_nvidia_function(name: &str) -> bool {
    let is_driver =
        name.strip_prefix("cu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()));
    is_driver || FUNCTIONS.iter().any(|start| name.starts_with(start))
}

fn libraries_in(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(Vec::new()) };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(|error| Error::File { path: folder.to_owned(), error })?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("lib")
            && (path.extension().is_some_and(|ending| ending == "so") || name.contains(".so."))
        {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// `torch/version.py` is written by the build: one assignment a line.
fn read_version(folder: &Path, torch: &mut Torch) -> Result<(), Error> {
    let path = folder.join("version.py");
    let text = std::fs::read_to_string(&path).map_err(|error| Error::File { path, error })?;
    let value = |name: &str| {
        let line = text.lines().find(|line| line.split([':', '=', ' ']).next() == Some(name))?;
        line.split_once('\'').and_then(|(_, rest)| rest.split_once('\'')).map(|(value, _)| value.to_owned())
    };
    torch.version = value("__version__").unwrap_or_default();
    let cuda = value("cuda").filter(|_| value("hip").is_none());
    let mut numbers = cuda.as_deref().unwrap_or_default().split('.').map(str::parse::<i32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major @ 12..=13)), Some(Ok(minor))) => {
            torch.cuda_version = major * 1000 + minor * 10;
            Ok(())
        }
        _ => Err(Error::NotCuda(torch.version.clone())),
    }
}

/// The wheel's metadata names the NVIDIA wheels it was built with. PyTorch compares cuDNN's version with the one it
/// was built with, so a stand-in has to tell the same.
fn read_metadata(folder: &Path, torch: &mut Torch) {
    let Some(parent) = folder.parent() else { return };
    let plain = torch.version.clone();
    let short = plain.split('+').next().unwrap_or_default().to_owned();
    let text = [plain, short].iter().find_map(|version| {
        std::fs::read_to_string(parent.join(format!("torch-{version}.dist-info/METADATA"))).ok()
    });
    let Some(text) = text else { return };
    for line in text.lines().filter_map(|line| line.strip_prefix("Requires-Dist: ")) {
        let Some((name, rest)) = line.split_once("==") else { continue };
        let version = rest.split([';', ' ', ',']).next().unwrap_or_default();
        if name.starts_with("nvidia-cudnn-cu") {
            torch.cudnn_version = number_of(version);
        } else if name.starts_with("nvidia-nccl-cu") {
            torch.nccl_version = number_of(version);
        }
    }
}

/// `9.19.0.56` → 91900
fn number_of(version: &str) -> Option<i32> {
    let mut numbers = version.split('.').map(|number| number.parse::<i32>().ok());
    let (major, minor, patch) = (numbers.next()??, numbers.next()??, numbers.next()??);
    Some(major * 10_000 + minor * 100 + patch)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder_with(version: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir_all(folder.path().join("torch/lib")).expect("made");
        std::fs::write(folder.path().join("torch/version.py"), version).expect("written");
        folder
    }

    #[test]
    fn reads_versions_from_what_the_build_left() {
        let folder = folder_with(
            "__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n",
        );
        let metadata = folder.path().join("torch-2.11.0.dist-info");
        std::fs::create_dir(&metadata).expect("made");
        let text = "Name: torch\nRequires-Dist: nvidia-cudnn-cu13==9.19.0.56; platform_system == \"Linux\"\n";
        std::fs::write(metadata.join("METADATA"), text).expect("written");
        let mut torch = Torch::default();
        let torch_folder = folder.path().join("torch");
        read_version(&torch_folder, &mut torch).expect("CUDA 13.0");
        read_metadata(&torch_folder, &mut torch);
        assert_eq!(
            (torch.cuda_version, torch.cudnn_version, torch.nccl_version),
            (13_000, Some(91_900), None)
        );
    }

    #[test]
    fn refuses_builds_for_the_cpu_and_for_rocm() {
        for version in [
            "__version__ = '2.11.0+cpu'\ncuda: Optional[str] = None\n",
            "__version__ = '2.11.0+rocm6'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n",
        ] {
            let folder = folder_with(version);
            let outcome = read_version(&folder.path().join("torch"), &mut Torch::default());
            assert!(matches!(outcome, Err(Error::NotCuda(_))), "{version}");
        }
        let empty = tempfile::tempdir().expect("a folder");
        assert!(matches!(inspect(empty.path()), Err(Error::NoTorch(_))));
    }

    #[test]
    fn knows_nvidias_functions_by_their_names() {
        for name in ["cuMemCreate", "ncclSend", "cuFileRead", "cusparseLtInit"] {
            assert!(is_nvidia_function(name), "{name}");
        }
        for name in ["current_device", "cursor", "malloc"] {
            assert!(!is_nvidia_function(name), "{name}");
        }
    }
}
