//! Reads a shared library's dynamic symbols and what it needs, a few hundred KiB out of a file of any size.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

const DYNAMIC: u32 = 6;
const DYNAMIC_SYMBOLS: u32 = 11;
const VERSION_NEEDS: u32 = 0x6fff_fffe;
const VERSION_INDEX: u32 = 0x6fff_ffff;
const TAG_NEEDED: u64 = 1;
const TAG_NAME: u64 = 14;
const UNDEFINED: u16 = 0;
/// The upper bit of a version index hides a symbol from the linker; it is no part of the number.
const HIDDEN: u16 = 0x8000;
/// A section longer than this is not one of those read here.
const LONGEST: u64 = 64 << 20;

/// What one library needs and gives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Its own name (`DT_SONAME`).
    pub(crate) name: Option<String>,
    /// Names of the libraries it needs (`DT_NEEDED`).
    pub(crate) libraries: Vec<String>,
    /// Library → versions that it must define.
    pub(crate) versions: BTreeMap<String, Vec<String>>,
    /// Symbols that others must define.
    pub(crate) undefined: Vec<Symbol>,
    /// Symbols that it defines.
    pub(crate) defined: Vec<String>,
}

/// A symbol that somebody else must define.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Symbol {
    /// Its name.
    pub(crate) name: String,
    /// The library that is expected to define it, if the symbol has a version, and the version.
    pub(crate) version: Option<(String, String)>,
}

/// One line of the table of sections.
#[derive(Clone, Copy, Debug)]
struct Section {
    kind: u32,
    offset: u64,
    bytes: u64,
    link: u32,
}

/// Reads a file.
///
/// # Errors
/// The operating system's, and `InvalidData` for a file that is no 64-bit little-endian ELF file.
pub(crate) fn read(path: &Path) -> io::Result<Needs> {
    read_from(&mut File::open(path)?)
}

/// The same for a library that is not in a file.
pub(crate) fn read_from(file: &mut (impl Read + Seek)) -> io::Result<Needs> {
    let header = part(file, 0, 64)?;
    if header.get(..6) != Some(&[0x7f, b'E', b'L', b'F', 2, 1]) {
        return Err(damaged("no 64-bit ELF file"));
    }
    let table = number(&header, 40, 8)?;
    let count = number(&header, 60, 2)?;
    let lines = part(file, table, count * 64)?;
    let sections: Vec<Section> = lines
        .chunks_exact(64)
        .map(|line| {
            Ok(Section {
                kind: u32::try_from(number(line, 4, 4)?).map_err(|_| damaged("a section"))?,
                offset: number(line, 24, 8)?,
                bytes: number(line, 32, 8)?,
                link: u32::try_from(number(line, 40, 4)?).map_err(|_| damaged("a section"))?,
            })
        })
        .collect::<io::Result<_>>()?;
    let mut content = |kind: u32| -> io::Result<Option<(Vec<u8>, Vec<u8>)>> {
        let Some(section) = sections.iter().find(|section| section.kind == kind) else { return Ok(None) };
        let texts = sections.get(section.link as usize).ok_or_else(|| damaged("a section's texts"))?;
        Ok(Some((part(file, section.offset, section.bytes)?, part(file, texts.offset, texts.bytes)?)))
    };
    let mut needs = Needs::default();
    if let Some((entries, texts)) = content(DYNAMIC)? {
        for entry in entries.chunks_exact(16) {
            let (tag, value) = (number(entry, 0, 8)?, number(entry, 8, 8)?);
            match tag {
                TAG_NEEDED => needs.libraries.push(text(&texts, value)?),
                TAG_NAME => needs.name = Some(text(&texts, value)?),
                _ => {}
            }
        }
    }
    let versions = match content(VERSION_NEEDS)? {
        Some((entries, texts)) => version_needs(&entries, &texts, &mut needs)?,
        None => BTreeMap::new(),
    };
    let symbols = content(DYNAMIC_SYMBOLS)?;
    let indices = match sections.iter().find(|section| section.kind == VERSION_INDEX) {
        Some(section) => part(file, section.offset, section.bytes)?,
        None => Vec::new(),
    };
    if let Some((symbols, texts)) = symbols {
        for (index, symbol) in symbols.chunks_exact(24).enumerate().skip(1) {
            let name = text(&texts, number(symbol, 0, 4)?)?;
            if number(symbol, 6, 2)? != u64::from(UNDEFINED) {
                needs.defined.push(name);
                continue;
            }
            let version = number(&indices, index * 2, 2).ok().and_then(|number| u16::try_from(number).ok());
            let version = version.and_then(|number| versions.get(&(number & !HIDDEN)).cloned());
            needs.undefined.push(Symbol { name, version });
        }
    }
    Ok(needs)
}

/// Version number → library and version.
type Versions = BTreeMap<u16, (String, String)>;

fn version_needs(entries: &[u8], texts: &[u8], needs: &mut Needs) -> io::Result<Versions> {
    let mut versions = BTreeMap::new();
    let mut at = 0;
    loop {
        let library = text(texts, number(entries, at + 4, 4)?)?;
        let mut inner = at + index(number(entries, at + 8, 4)?)?;
        for _ in 0..number(entries, at + 2, 2)? {
            let version = text(texts, number(entries, inner + 8, 4)?)?;
            let number_of =
                u16::try_from(number(entries, inner + 6, 2)?).map_err(|_| damaged("a version"))?;
            needs.versions.entry(library.clone()).or_default().push(version.clone());
            versions.insert(number_of & !HIDDEN, (library.clone(), version));
            inner += index(number(entries, inner + 12, 4)?)?;
        }
        match index(number(entries, at + 12, 4)?)? {
            0 => return Ok(versions),
            step => at += step,
        }
    }
}

fn part(file: &mut (impl Read + Seek), offset: u64, bytes: u64) -> io::Result<Vec<u8>> {
    if bytes > LONGEST {
        return Err(damaged("a section that is too long"));
    }
    let mut content = vec![0; index(bytes)?];
    file.seek(SeekFrom::Start(offset))?;
    file.read_exact(&mut content)?;
    Ok(content)
}

/// A little-endian number of up to 8 bytes.
fn number(bytes: &[u8], at: usize, width: usize) -> io::Result<u64> {
    let bytes =
        at.checked_add(width).and_then(|end| bytes.get(at..end)).ok_or_else(|| damaged("it is cut short"))?;
    Ok(bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

fn text(texts: &[u8], at: u64) -> io::Result<String> {
    let rest = texts.get(index(at)?..).ok_or_else(|| damaged("a name"))?;
    let end = rest.iter().position(|byte| *byte == 0).ok_or_else(|| damaged("a name"))?;
    Ok(String::from_utf8_lossy(&rest[..end]).into_owned())
}

fn index(number: u64) -> io::Result<usize> {
    usize::try_from(number).map_err(|_| damaged("a number"))
}

fn damaged(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("not a library that can be read: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_program_that_runs_this_test() {
        let needs = read(&std::env::current_exe().expect("a path")).expect("an ELF file");
        assert!(needs.libraries.iter().any(|name| name.starts_with("libc.so")), "{needs:?}");
        let versioned = |symbol: &Symbol| {
            symbol.version.as_ref().is_some_and(|(library, version)| {
                library.starts_with("libc.so") && version.starts_with("GLIBC_")
            })
        };
        assert!(needs.undefined.iter().any(versioned));
    }

    #[test]
    fn refuses_what_is_no_library() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        assert!(read(file.path()).is_err());
        std::fs::write(file.path(), [b'x'; 100]).expect("written");
        assert_eq!(read(file.path()).expect_err("no ELF").kind(), io::ErrorKind::InvalidData);
    }
}
