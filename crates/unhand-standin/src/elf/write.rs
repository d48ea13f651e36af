//! Writes a shared library of small functions, so that no compiler is needed where PyTorch runs.
//!
//! The layout is one page-aligned part each for what is read, what is run and what is written:
//!
//! ```text
//! header, segments, symbols, versions, hash table, names │ code │ dynamic table, imported addresses, counter
//! ```

use std::collections::BTreeMap;

/// A library to write.
#[derive(Clone, Debug, Default)]
pub(crate) struct Library {
    /// Its own name (`DT_SONAME`).
    pub(crate) name: String,
    /// Names of the libraries it needs.
    pub(crate) needs: Vec<String>,
    /// Versions it defines, also when no symbol has them: a library that asks for one looks for it at load.
    pub(crate) versions: Vec<String>,
    /// Its functions.
    pub(crate) functions: Vec<Function>,
    /// The one function of another library that the code calls, through [`Patch::Import`].
    pub(crate) import: String,
    /// Texts that the code refers to, each with its end.
    pub(crate) texts: Vec<u8>,
}

/// A function.
#[derive(Clone, Debug, Default)]
pub(crate) struct Function {
    /// Its name.
    pub(crate) name: String,
    /// Which of the library's versions it has; none for the base version.
    pub(crate) version: Option<String>,
    /// Its machine code.
    pub(crate) code: Vec<u8>,
    /// Where in the code 4 bytes stand for a distance, and to what.
    pub(crate) patches: Vec<(usize, Patch)>,
}

/// What a distance in code leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patch {
    /// An offset in the library's texts.
    Text(usize),
    /// The imported function's address.
    Import,
    /// A counter of 8 bytes.
    Counter,
}

const PAGE: usize = 4096;
const HEADER: usize = 64;
const SEGMENT: usize = 56;
const N_SEGMENTS: usize = 5;
const SYMBOL: usize = 24;
/// Handles count up from here: no address of anything.
const FIRST_HANDLE: u64 = 0x0000_0a00_0000_0000;
const READ: u32 = 4;
const RUN: u32 = 1;
const WRITE: u32 = 2;

impl Library {
    /// The file's bytes.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut names = Names::default();
        let symbols = self.symbols(&mut names);
        let (definitions, n_definitions) = self.version_definitions(&mut names);
        let version_index = self.version_index();
        let hash = hash_table(&self.symbol_names());
        let own_name = names.add(&self.name);
        let needs: Vec<usize> = self.needs.iter().map(|name| names.add(name)).collect();

        let mut parts = Parts { bytes: vec![0; HEADER + N_SEGMENTS * SEGMENT] };
        let symbols_at = parts.add(&symbols);
        let definitions_at = parts.add(&definitions);
        let index_at = parts.add(&version_index);
        let hash_at = parts.add(&hash);
        let names_at = parts.add(&names.bytes);
        let texts_at = parts.add(&self.texts);
        let relocation_at = parts.add(&[0; 24]);
        let read_end = parts.bytes.len();

        let code_at = parts.page();
        let mut starts = Vec::new();
        for function in &self.functions {
            starts.push(parts.add(&function.code));
        }
        let code_end = parts.bytes.len();

        let data_at = parts.page();
        let mut table: Vec<(u64, usize)> = needs.iter().map(|name| (1, *name)).collect();
        table.extend([(14, own_name), (4, hash_at), (5, names_at), (6, symbols_at)]);
        table.extend([(10, names.bytes.len()), (11, SYMBOL), (0x6fff_fff0, index_at)]);
        table.extend([(0x6fff_fffc, definitions_at), (0x6fff_fffd, n_definitions)]);
        table.extend([(7, relocation_at), (8, 24), (9, 24), (0, 0)]);
        let dynamic: Vec<u8> =
            table.iter().flat_map(|(tag, value)| [tag.to_le_bytes(), wide(*value)]).flatten().collect();
        let dynamic_at = parts.add(&dynamic);
        let import_at = parts.add(&[0; 8]);
        let counter_at = parts.add(&FIRST_HANDLE.to_le_bytes());
        let data_end = parts.bytes.len();

        for (function, start) in self.functions.iter().zip(&starts) {
            for (at, patch) in &function.patches {
                let target = match patch {
                    Patch::Text(offset) => texts_at + offset,
                    Patch::Import => import_at,
                    Patch::Counter => counter_at,
                };
                // Distances count from the end of the 4 bytes; the file is smaller than 2 GiB.
                let distance = target.wrapping_sub(start + at + 4);
                parts.put(start + at, &distance.to_le_bytes()[..4]);
            }
        }
        for (index, start) in starts.iter().enumerate() {
            parts.put(symbols_at + (index + 2) * SYMBOL + 8, &wide(*start));
        }
        // The loader writes the imported function's address, symbol 1, where the code reads it.
        parts.put(relocation_at, &wide(import_at));
        parts.put(relocation_at + 8, &(1_u64 << 32 | 6).to_le_bytes());

        parts.header();
        parts.segment(0, 1, READ, 0, read_end);
        parts.segment(1, 1, READ | RUN, code_at, code_end);
        parts.segment(2, 1, READ | WRITE, data_at, data_end);
        parts.segment(3, 2, READ | WRITE, dynamic_at, dynamic_at + dynamic.len());
        parts.segment(4, 0x6474_e551, READ | WRITE, 0, 0);
        parts.bytes
    }

    /// Names in the order of the symbol table, after the null symbol.
    fn symbol_names(&self) -> Vec<&str> {
        let functions = self.functions.iter().map(|function| function.name.as_str());
        [self.import.as_str()].into_iter().chain(functions).collect()
    }

    fn symbols(&self, names: &mut Names) -> Vec<u8> {
        let mut symbols = vec![0; SYMBOL];
        for (index, name) in self.symbol_names().into_iter().enumerate() {
            let offset = names.add(name);
            symbols.extend(&wide(offset)[..4]);
            // Global function; the import is undefined, all others are in some section.
            symbols.extend([0x12, 0]);
            symbols.extend(if index == 0 { [0, 0] } else { [1, 0] });
            symbols.extend([0; 16]);
        }
        symbols
    }

    fn version_number(&self, version: Option<&str>) -> u16 {
        let place = version.and_then(|version| self.versions.iter().position(|own| own == version));
        place.and_then(|place| u16::try_from(place + 2).ok()).unwrap_or(1)
    }

    fn version_index(&self) -> Vec<u8> {
        let functions =
            self.functions.iter().map(|function| self.version_number(function.version.as_deref()));
        // The null symbol is local, the import has no version of ours.
        [0, 1].into_iter().chain(functions).flat_map(u16::to_le_bytes).collect()
    }

    /// The base version, which is the library's name, and its own.
    fn version_definitions(&self, names: &mut Names) -> (Vec<u8>, usize) {
        let all: Vec<&str> =
            [self.name.as_str()].into_iter().chain(self.versions.iter().map(String::as_str)).collect();
        let mut definitions = Vec::new();
        for (index, version) in all.iter().enumerate() {
            let flags = u16::from(index == 0);
            let number = u16::try_from(index + 1).unwrap_or(u16::MAX);
            for field in [1, flags, number, 1] {
                definitions.extend(field.to_le_bytes());
            }
            definitions.extend(hash(version).to_le_bytes());
            definitions.extend(20_u32.to_le_bytes());
            let next: u32 = if index + 1 == all.len() { 0 } else { 28 };
            definitions.extend(next.to_le_bytes());
            definitions.extend(&wide(names.add(version))[..4]);
            definitions.extend(0_u32.to_le_bytes());
        }
        (definitions, all.len())
    }
}

/// Names, each once, with its end.
#[derive(Debug)]
struct Names {
    bytes: Vec<u8>,
    known: BTreeMap<String, usize>,
}

impl Default for Names {
    fn default() -> Self {
        Names { bytes: vec![0], known: BTreeMap::new() }
    }
}

impl Names {
    fn add(&mut self, name: &str) -> usize {
        if let Some(offset) = self.known.get(name) {
            return *offset;
        }
        let offset = self.bytes.len();
        self.bytes.extend(name.as_bytes());
        self.bytes.push(0);
        self.known.insert(name.to_owned(), offset);
        offset
    }
}

/// The file while it grows. Addresses are offsets in the file.
struct Parts {
    bytes: Vec<u8>,
}

impl Parts {
    fn add(&mut self, part: &[u8]) -> usize {
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
        let at = self.bytes.len();
        self.bytes.extend(part);
        at
    }

    fn page(&mut self) -> usize {
        self.bytes.resize(self.bytes.len().next_multiple_of(PAGE), 0);
        self.bytes.len()
    }

    fn put(&mut self, at: usize, part: &[u8]) {
        self.bytes[at..at + part.len()].copy_from_slice(part);
    }

    fn header(&mut self) {
        // 64 bits, little endian, version 1, System V.
        self.put(0, &[0x7f, b'E', b'L', b'F', 2, 1, 1, 0]);
        // A shared library for x86-64.
        self.put(16, &[3, 0, 62, 0, 1, 0, 0, 0]);
        self.put(32, &wide(HEADER));
        self.put(52, &wide(HEADER)[..2]);
        self.put(54, &wide(SEGMENT)[..2]);
        self.put(56, &wide(N_SEGMENTS)[..2]);
        self.put(58, &[64, 0]);
    }

    fn segment(&mut self, index: usize, kind: u32, access: u32, start: usize, end: usize) {
        let at = HEADER + index * SEGMENT;
        self.put(at, &kind.to_le_bytes());
        self.put(at + 4, &access.to_le_bytes());
        for (field, value) in
            [start, start, start, end - start, end - start, if kind == 1 { PAGE } else { 8 }]
                .into_iter()
                .enumerate()
        {
            self.put(at + 8 + field * 8, &wide(value));
        }
    }
}

/// A table in which the loader finds symbols by name: one bucket for two symbols, and chains.
fn hash_table(names: &[&str]) -> Vec<u8> {
    let n_buckets = names.len().div_ceil(2).max(1);
    let mut buckets = vec![0_u32; n_buckets];
    let mut chains = vec![0_u32; names.len() + 1];
    for (index, name) in names.iter().enumerate() {
        let bucket = hash(name) as usize % n_buckets;
        let symbol = u32::try_from(index + 1).unwrap_or(0);
        chains[index + 1] = buckets[bucket];
        buckets[bucket] = symbol;
    }
    let counts = [buckets.len(), chains.len()].map(|count| u32::try_from(count).unwrap_or(0));
    counts.into_iter().chain(buckets).chain(chains).flat_map(u32::to_le_bytes).collect()
}

/// The hash of System V.
fn hash(name: &str) -> u32 {
    name.bytes().fold(0, |hash: u32, byte| {
        let hash = (hash << 4).wrapping_add(u32::from(byte));
        let high = hash & 0xf000_0000;
        (hash ^ (high >> 24)) & !high
    })
}

fn wide(number: usize) -> [u8; 8] {
    (number as u64).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_as_the_loader_does() {
        // Known values of the System V hash.
        assert_eq!((hash("printf"), hash("exit"), hash("")), (0x0779_05a6, 0x0006_cf04, 0));
    }

    #[test]
    fn writes_where_the_header_says() {
        let library = Library {
            name: "libx.so.1".into(),
            needs: vec!["liby.so".into()],
            versions: vec!["X_1".into()],
            functions: vec![Function {
                name: "f".into(),
                version: Some("X_1".into()),
                code: vec![0xc3],
                patches: vec![],
            }],
            import: "g".into(),
            texts: vec![0],
        };
        let bytes = library.to_bytes();
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        // The second segment is the code, a page that begins with the function.
        let code = usize::try_from(word(HEADER + SEGMENT + 8)).expect("fits");
        assert_eq!((code % PAGE, bytes[code]), (0, 0xc3));
        assert_eq!(library.version_index(), [0, 0, 1, 0, 2, 0]);
    }
}
