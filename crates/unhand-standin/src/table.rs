//! The table of stubs: which functions there are, and what calling one has to set.

use std::collections::BTreeMap;

/// A function without a body of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: String,
    /// Which arguments point to results (1 is the first), and what to write there.
    pub(crate) outs: Vec<(u8, Kind)>,
    /// Stands for work on the device.
    pub(crate) is_work: bool,
    pub(crate) returns_text: bool,
    pub(crate) returns: i32,
}

/// What is written to a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Int,
    Size,
    Handle,
    Text,
}

/// Library (without `lib` and what follows the name) → function → what it does.
pub(crate) type Table = BTreeMap<String, BTreeMap<String, Entry>>;

const TEXT: &str = include_str!("../tables/libraries.txt");

/// The table that is part of the program.
pub(crate) fn table() -> Table {
    parse(TEXT).expect("a test reads the same table")
}

/// Reads a table, or says in which line it cannot be read.
fn parse(text: &str) -> Result<Table, String> {
    let mut table = Table::new();
    let mut library = None;
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            library = Some(name.to_owned());
            table.entry(name.to_owned()).or_default();
            continue;
        }
        let entry = parse_entry(line).ok_or_else(|| format!("line {}: `{line}`", index + 1))?;
        let library = library.as_ref().ok_or_else(|| format!("line {}: no library yet", index + 1))?;
        table.entry(library.clone()).or_default().insert(entry.name.clone(), entry);
    }
    Ok(table)
}

fn parse_entry(line: &str) -> Option<Entry> {
    let mut words = line.split_whitespace();
    let mut entry = Entry { name: words.next()?.to_owned(), ..Entry::default() };
    for word in words {
        match word.split_once(':') {
            None if word == "work" => entry.is_work = true,
            None if word == "text" => entry.returns_text = true,
            Some(("returns", number)) => entry.returns = number.parse().ok()?,
            Some((place, kind)) => {
                let place: u8 = place.parse().ok().filter(|place| (1..=32).contains(place))?;
                let kind = match kind {
                    "int" => Kind::Int,
                    "size" => Kind::Size,
                    "handle" => Kind::Handle,
                    "text" => Kind::Text,
                    _ => return None,
                };
                entry.outs.push((place, kind));
            }
            None => return None,
        }
    }
    Some(entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_table_of_the_repository() {
        let table = parse(TEXT).expect("every line is understood");
        let n_functions: usize = table.values().map(BTreeMap::len).sum();
        assert!(n_functions > 500, "{n_functions}");
        let entry = &table["cusolver"]["cusolverDnSpotrf_bufferSize"];
        assert_eq!(entry.outs, [(6, Kind::Int)]);
        assert!(table["cublas"]["cublasSgemm_v2"].is_work && !table["cublas"]["cublasSetStream_v2"].is_work);
    }

    #[test]
    fn says_which_line_it_does_not_understand() {
        assert_eq!(parse("[a]\nf 1:what\n"), Err("line 2: `f 1:what`".into()));
        assert_eq!(parse("f\n"), Err("line 1: no library yet".into()));
        for bad in ["f 0:int", "f 99:int", "f wrok", "f returns:x"] {
            assert!(parse(&format!("[a]\n{bad}\n")).is_err(), "{bad}");
        }
    }
}
