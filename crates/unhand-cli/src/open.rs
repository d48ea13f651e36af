//! Paths on the command line become bytes: files, stdin, folders, compressed or not. Parses nothing.

use std::borrow::Cow;
use std::io::Read;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use fs_err as fs;
use memmap2::Mmap;
use unhand_snapshot::Error;

use crate::failure::Failure;

/// What stands for stdin on the command line.
const STDIN: &str = "-";

/// Files up to this size are read rather than mapped: it costs a few milliseconds, and whoever rewrites
/// the file meanwhile cannot disturb us.
const MAP_FROM_BYTES: u64 = 32 << 20;

/// Endings that make a file in a folder a snapshot, before an ending of a compression.
const SNAPSHOT_ENDINGS: &[&str] = &[".pickle", ".pkl"];
const COMPRESSION_ENDINGS: &[&str] = &[".gz", ".xz", ".zst"];

/// The bytes of one file, and the name to call it by.
pub(crate) struct Input {
    /// As given on the command line; `stdin` for `-`.
    pub(crate) name: String,
    bytes: Bytes,
}

enum Bytes {
    Owned(Vec<u8>),
    Mapped(Mmap),
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Owned(bytes) => bytes,
            Bytes::Mapped(map) => map,
        }
    }
}

impl Input {
    /// Opens one file, or stdin for `-`.
    pub(crate) fn open(path: &Path) -> Result<Input, Failure> {
        if is_stdin(path) {
            let mut bytes = Vec::new();
            std::io::stdin()
                .lock()
                .read_to_end(&mut bytes)
                .map_err(|error| Failure::bad_input("cannot read stdin").because(&error))?;
            return Ok(Input { name: "stdin".to_owned(), bytes: Bytes::Owned(bytes) });
        }
        let name = path.display().to_string();
        let bytes = read(path).map_err(|error| cannot_open(path, &error))?;
        Ok(Input { name, bytes })
    }

    /// The contents, decompressed if they are compressed. The contents decide, not the name. With `partial`,
    /// what could be decompressed of a file that was cut short.
    pub(crate) fn contents(&self, partial: bool) -> Result<Cow<'_, [u8]>, Failure> {
        let limit = unpacked_limit(self.bytes.len());
        let (contents, error) = unhand_snapshot::decompress_partial(&self.bytes, limit);
        match error {
            Some(error) if !(partial && matches!(error, Error::Decompress { .. })) => {
                Err(self.cannot_decompress(&error))
            }
            _ if contents.is_empty() => {
                Err(Failure::bad_input(format!("the file is empty: `{}`", self.name))
                    .hint("the program may have ended before it had written the snapshot"))
            }
            _ => Ok(contents),
        }
    }

    fn cannot_decompress(&self, error: &Error) -> Failure {
        let failure = Failure::bad_input(format!("cannot decompress: `{}`", self.name)).because(error);
        match error {
            Error::Decompress { .. } => failure.hint(
                "the file may have been cut short while it was copied; copy it again, or pass `--partial` to use \
                 what there is",
            ),
            _ => failure,
        }
    }
}

/// What a file may unpack to: enough for any real snapshot, too little for a bomb to hurt.
fn unpacked_limit(n_packed: usize) -> u64 {
    (4 << 30).max((n_packed as u64).saturating_mul(256))
}

fn read(path: &Path) -> std::io::Result<Bytes> {
    let file = fs::File::open(path)?;
    let metadata = file.metadata()?;
    // A pipe or a device has no length to map; `read` serves those, too.
    if metadata.is_file() && metadata.len() >= MAP_FROM_BYTES {
        return map(&file).map(Bytes::Mapped);
    }
    drop(file);
    fs::read(path).map(Bytes::Owned)
}

/// Maps a large file, so that only the pages in use take memory.
///
/// Rust asks that the bytes behind a slice do not change, and no operating system promises that for a
/// file that somebody else may write. What it means in practice: when another process *changes* the file,
/// the reader sees other bytes, which it checks like any others, since every length and index that comes
/// from a file is checked where it is used. When another process *truncates* the file, the next access to
/// a page that is gone ends this process with SIGBUS; nothing has been written by then that a crash could
/// spoil. PyTorch writes a snapshot once and closes it, so neither happens in ordinary use.
#[allow(unsafe_code, reason = "the one place that maps a file")]
fn map(file: &fs::File) -> std::io::Result<Mmap> {
    // SAFETY: the map is private and read-only, lives as long as the `Input` that owns it, and is read by
    // code that takes no byte for granted; see above for a file that changes underneath.
    unsafe { Mmap::map(file.file()) }
}

/// The files that the paths on the command line stand for: a folder is all snapshots right in it, in the
/// order in which a person would count them (`rank2` before `rank10`). A folder without any is a folder of
/// recordings, which have one folder each: all of them, or those of the newest run where ranks made them.
pub(crate) fn expand(paths: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    if paths.iter().filter(|path| is_stdin(path)).count() > 1 {
        return Err(stdin_twice());
    }
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            files.extend(snapshots_in(path)?);
        } else {
            files.push(path.clone());
        }
    }
    Ok(files)
}

/// Whether a path stands for stdin.
pub(crate) fn is_stdin(path: &Path) -> bool {
    path == Path::new(STDIN)
}

/// Two snapshots cannot come through one pipe.
pub(crate) fn stdin_twice() -> Failure {
    Failure::bad_use("stdin can be read once, and `-` is there twice")
}

fn snapshots_in(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let (mut files, folders) = listed(folder)?;
    if files.is_empty() {
        files = right_in(&folders)?;
    }
    if files.is_empty() {
        // Runs are named for the time at which they began.
        for run in folders.iter().rev() {
            files = right_in(&listed(run)?.1)?;
            if !files.is_empty() {
                break;
            }
        }
    }
    if files.is_empty() {
        let message = format!("no snapshot in the folder: `{}`", folder.display());
        return Err(Failure::bad_input(message)
            .hint("snapshots are called `*.pickle` or `*.pkl`, with `.gz`, `.xz` or `.zst` if compressed"));
    }
    Ok(files)
}

/// The snapshots right in each of some folders.
fn right_in(folders: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let mut files = Vec::new();
    for folder in folders {
        files.extend(listed(folder)?.0);
    }
    Ok(files)
}

/// The snapshots right in a folder, and the folders in it; not those whose name begins with a dot, as that of a
/// recording which was not finished.
fn listed(folder: &Path) -> Result<(Vec<PathBuf>, Vec<PathBuf>), Failure> {
    let cannot_read = |error| {
        Failure::bad_input(format!("cannot read the folder: `{}`", folder.display())).because_io(&error)
    };
    let (mut files, mut folders) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(folder).map_err(cannot_read)? {
        let path = entry.map_err(cannot_read)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() {
            if !name.starts_with('.') {
                folders.push(path);
            }
        } else if is_snapshot_name(&name) {
            files.push(path);
        }
    }
    for paths in [&mut files, &mut folders] {
        paths.sort_by_cached_key(|path| natural_key(&path.to_string_lossy()));
    }
    Ok((files, folders))
}

fn is_snapshot_name(name: &str) -> bool {
    let name = COMPRESSION_ENDINGS.iter().find_map(|ending| name.strip_suffix(ending)).unwrap_or(name);
    !name.starts_with('.') && SNAPSHOT_ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// A sort key that puts numbers in their order: text and numbers in turn, each number by its length
/// first.
fn natural_key(name: &str) -> Vec<(usize, String)> {
    let mut key: Vec<(usize, String)> = Vec::new();
    let mut was_digit = false;
    for c in name.chars() {
        let is_digit = c.is_ascii_digit();
        match key.last_mut() {
            Some((_, part)) if was_digit == is_digit => part.push(c),
            _ => key.push((0, c.to_string())),
        }
        was_digit = is_digit;
    }
    for (length, part) in &mut key {
        if part.starts_with(|c: char| c.is_ascii_digit()) {
            // Zeros in front do not make a number larger.
            let digits = part.trim_start_matches('0').to_owned();
            (*length, *part) = (digits.len() + 1, digits);
        }
    }
    key
}

fn cannot_open(path: &Path, error: &std::io::Error) -> Failure {
    let message = format!("cannot read: `{}`", path.display());
    let failure = Failure::bad_input(message).because_io(error);
    match error.kind() {
        std::io::ErrorKind::NotFound => failure.hint(
            "record one with `torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")`, or check the path",
        ),
        _ => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_files_as_a_person_would() {
        let mut names = ["rank10.pickle", "rank2.pickle", "rank02b.pickle", "a.pickle", "rank1.pickle"];
        names.sort_by_cached_key(|name| natural_key(name));
        assert_eq!(names, ["a.pickle", "rank1.pickle", "rank2.pickle", "rank02b.pickle", "rank10.pickle"]);
    }

    #[test]
    fn knows_a_snapshot_by_its_name() {
        for name in ["a.pickle", "a.pkl", "a.pickle.gz", "rank0.pickle.xz", "a.pkl.zst"] {
            assert!(is_snapshot_name(name), "{name}");
        }
        for name in ["a.json", "a.gz", ".a.pickle.17.part", ".a.pickle", "pickle"] {
            assert!(!is_snapshot_name(name), "{name}");
        }
    }

    #[test]
    fn a_folder_is_the_snapshots_in_it() {
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["rank10.pickle", "rank9.pickle.gz", "notes.txt"] {
            fs::write(folder.path().join(name), b"").expect("written");
        }
        let files = expand(&[folder.path().to_owned()]).expect("two snapshots");
        let names: Vec<_> = files.iter().map(|path| path.file_name().expect("a name").to_owned()).collect();
        assert_eq!(names, ["rank9.pickle.gz", "rank10.pickle"]);
        let failure = expand(&["-".into(), "-".into()]).expect_err("twice");
        assert_eq!(failure.exit_code(), 2);
    }

    #[test]
    fn large_files_are_mapped_and_read_the_same() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let length = usize::try_from(MAP_FROM_BYTES).expect("fits") + 1;
        fs::write(file.path(), vec![7; length]).expect("written");
        let bytes = read(file.path()).expect("read");
        assert!(matches!(bytes, Bytes::Mapped(_)));
        assert!(bytes.len() == length && bytes.iter().all(|&byte| byte == 7));
        fs::write(file.path(), b"small").expect("written");
        let bytes = read(file.path()).expect("read");
        assert!(matches!(bytes, Bytes::Owned(_)));
        assert_eq!(&*bytes, b"small");
    }
}
