//! The files of the project as git sees them, so that build outputs are never looked at.

use std::path::PathBuf;
use std::process::Command;

use crate::Failure;

/// One text file: its path from the repository root, with `/`, and its contents.
pub(crate) struct File {
    pub(crate) path: String,
    pub(crate) text: String,
}

impl File {
    /// What follows the last dot of the path; empty if nothing does.
    pub(crate) fn extension(&self) -> &str {
        self.path.rsplit_once('.').map_or("", |(_, extension)| extension)
    }
}

/// Every text file that is committed or about to be.
pub(crate) struct Tree {
    pub(crate) files: Vec<File>,
}

impl Tree {
    /// Reads the tree that holds this crate. Files that are not UTF-8 (recorded snapshots) are left out.
    pub(crate) fn read() -> Result<Tree, Failure> {
        let root = root();
        let output = Command::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(&root)
            .output()
            .map_err(|error| format!("cannot run `git ls-files`: {error}"))?;
        if !output.status.success() {
            return Err("`git ls-files` failed: the house rules look at a git checkout".into());
        }
        let mut files = Vec::new();
        for path in output.stdout.split(|&byte| byte == 0).filter(|path| !path.is_empty()) {
            let path = String::from_utf8(path.to_vec())?;
            // A file that was deleted but not yet committed is listed and gone.
            let Ok(bytes) = fs_err::read(root.join(&path)) else { continue };
            if let Ok(text) = String::from_utf8(bytes) {
                files.push(File { path, text });
            }
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        files.dedup_by(|a, b| a.path == b.path);
        Ok(Tree { files })
    }

    /// The text of one file, if it is there.
    pub(crate) fn text(&self, path: &str) -> Option<&str> {
        self.files.iter().find(|file| file.path == path).map(|file| file.text.as_str())
    }
}

/// The repository root: the parent of this crate's folder.
pub(crate) fn root() -> PathBuf {
    let mut root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.pop();
    root
}

#[cfg(test)]
pub(crate) fn tree_of(files: &[(&str, &str)]) -> Tree {
    let files =
        files.iter().map(|&(path, text)| File { path: path.to_owned(), text: text.to_owned() }).collect();
    Tree { files }
}
