//! Files we write: complete or not there at all, and never over somebody's file unasked.

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once};

use fs_err as fs;

use crate::failure::Failure;

/// What to remove if somebody interrupts us: the temporary name of the file in work. One command writes at
/// most one file.
static IN_WORK: Mutex<Option<PathBuf>> = Mutex::new(None);

/// The exit code of a command that was interrupted, as shells have it: 128 and the number of SIGINT.
const INTERRUPTED: i32 = 130;

fn in_work() -> MutexGuard<'static, Option<PathBuf>> {
    IN_WORK.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Makes Ctrl-C remove the file in work before it ends the command. Only a command that writes a file needs
/// that; for the others the system's own way is right.
fn watch_for_interrupts() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // Refused when a handler is there already: then we are part of a larger program that has its own way.
        let _ = ctrlc::set_handler(|| {
            if let Some(temporary) = in_work().take() {
                let _ = fs::remove_file(temporary);
            }
            std::process::exit(INTERRUPTED);
        });
    });
}

/// A file under a temporary name beside its own; [`OutputFile::commit`] gives it its name, and dropping
/// it before that leaves nothing behind.
pub(crate) struct OutputFile {
    target: PathBuf,
    temporary: PathBuf,
    out: Option<BufWriter<fs::File>>,
}

impl OutputFile {
    /// Begins a file that will be `target`. An existing one is kept unless `force` is set.
    pub(crate) fn create(target: &Path, force: bool) -> Result<OutputFile, Failure> {
        if !force && target.exists() {
            let message = format!("the file is already there: `{}`", target.display());
            return Err(
                Failure::bad_use(message).hint("choose another name, or pass `--force` to replace it")
            );
        }
        let Some(name) = target.file_name() else {
            return Err(Failure::bad_use(format!("not a file name: `{}`", target.display())));
        };
        // Beside the target and not in a temporary folder: a rename works only within one file system.
        let mut temporary_name = std::ffi::OsString::from(".");
        temporary_name.push(name);
        temporary_name.push(format!(".{}.part", std::process::id()));
        let temporary = target.with_file_name(temporary_name);
        watch_for_interrupts();
        *in_work() = Some(temporary.clone());
        let file = fs::File::create(&temporary).map_err(|error| cannot_write(target, &error))?;
        Ok(OutputFile { target: target.to_owned(), temporary, out: Some(BufWriter::new(file)) })
    }

    /// Puts the finished file in its place.
    pub(crate) fn commit(mut self) -> Result<(), Failure> {
        if let Some(out) = self.out.take() {
            out.into_inner().map_err(|error| cannot_write(&self.target, error.error()))?;
            fs::rename(&self.temporary, &self.target).map_err(|error| cannot_write(&self.target, &error))?;
        }
        Ok(())
    }
}

/// Lets `write` fill the file `target`. If it fails, there is no file.
///
/// The outer error is the file's, the inner one the writer's own.
pub(crate) fn write_file<E>(
    target: &Path,
    force: bool,
    write: impl FnOnce(&mut dyn Write) -> Result<(), E>,
) -> Result<Result<(), E>, Failure> {
    let mut file = OutputFile::create(target, force)?;
    let result = write(&mut file);
    if result.is_ok() {
        file.commit()?;
    }
    Ok(result)
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.as_mut().map_or(Ok(bytes.len()), |out| out.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.as_mut().map_or(Ok(()), Write::flush)
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        // After a commit the temporary name is gone already, and removing it fails, as it should.
        drop(self.out.take());
        let _ = fs::remove_file(&self.temporary);
        in_work().take();
    }
}

fn cannot_write(target: &Path, error: &io::Error) -> Failure {
    Failure::bad_input(format!("cannot write: `{}`", target.display())).because_io(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("the folder is there");
        entries.map(|entry| entry.expect("readable").file_name().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn a_file_appears_when_it_is_complete() {
        let folder = tempfile::tempdir().expect("a folder");
        let target = folder.path().join("a.csv");
        let mut file = OutputFile::create(&target, false).expect("created");
        file.write_all(b"a,b\n").expect("written");
        assert!(!target.exists());
        file.commit().expect("renamed");
        assert_eq!(names(folder.path()), ["a.csv"]);
        assert_eq!(fs::read_to_string(&target).expect("there"), "a,b\n");
    }

    #[test]
    fn a_file_given_up_leaves_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut file = OutputFile::create(&folder.path().join("a.csv"), false).expect("created");
        file.write_all(b"a,").expect("written");
        drop(file);
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    fn an_existing_file_is_replaced_only_when_asked() {
        let folder = tempfile::tempdir().expect("a folder");
        let target = folder.path().join("a.csv");
        fs::write(&target, "mine").expect("written");
        let failure = OutputFile::create(&target, false).err().expect("refused");
        assert_eq!(failure.exit_code(), 2);
        OutputFile::create(&target, true).expect("created").commit().expect("renamed");
        assert_eq!(fs::read_to_string(&target).expect("there"), "");
    }
}
