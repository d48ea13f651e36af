//! Reads a `PYTORCH_CUDA_ALLOC_CONF` string into [`Settings`], as leniently as PyTorch does.

use super::{Reserve, Settings};
use crate::profile::{Parser, Profile};
use crate::size::{ROUNDUP_SLOTS, RoundupTable};

const MIB: u64 = 1 << 20;

/// Every key of the newest release.
pub(super) const KEYS: &[&str] = &[
    "backend",
    "expandable_segments",
    "expandable_segments_reserve",
    "expandable_segments_reserve_by_class",
    "garbage_collection_threshold",
    "graph_capture_record_stream_reuse",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "roundup_power2_divisions",
    "throw_on_cudamalloc_oom",
];

/// Has a pass of its own.
const LARGE_SEGMENT: &str = "large_segment_size_mb";

/// The keys of all accelerators, read before those of CUDA (2.10+).
const GENERIC: &[&str] = &[
    "expandable_segments",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_use_background_threads",
    "roundup_power2_divisions",
];

/// Why a configuration string was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// No release has this key.
    #[error("unrecognized key: `{key}`")]
    UnknownKey {
        /// The key as written.
        key: String,
    },
    /// The key is known, but not to this release.
    #[error("key `{key}` is not known to torch {release}")]
    NotInRelease {
        /// The key as written.
        key: String,
        /// The release asked for.
        release: String,
    },
    /// The string ends where a value should be.
    #[error("missing value for `{key}`")]
    MissingValue {
        /// The key without a value.
        key: String,
    },
    /// The value is out of range or not of the key's type.
    #[error("bad value for `{key}`: `{value}` ({expected})")]
    BadValue {
        /// The key.
        key: String,
        /// The value as written.
        value: String,
        /// What the key accepts.
        expected: &'static str,
    },
    /// Up to 2.9: a separator is missing.
    #[error("expected `{expected}` in the value of `{key}`, found `{found}`")]
    Separator {
        /// The key being read.
        key: String,
        /// The separator that should be here.
        expected: char,
        /// What is here instead.
        found: String,
    },
}

/// Splits at `, : [ ]`, each a token of its own; white space is dropped.
fn tokenize(conf: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut word = String::new();
    for character in conf.chars().filter(|character| !character.is_whitespace()) {
        if matches!(character, ',' | ':' | '[' | ']') {
            if !word.is_empty() {
                tokens.push(std::mem::take(&mut word));
            }
            tokens.push(character.to_string());
        } else {
            word.push(character);
        }
    }
    if !word.is_empty() {
        tokens.push(word);
    }
    tokens
}

struct Reader<'a> {
    tokens: &'a [String],
    at: usize,
    strict: bool,
}

impl Reader<'_> {
    fn separator(&mut self, key: &str, expected: char) -> Result<(), SettingsError> {
        let token = self.tokens.get(self.at);
        self.at += 1;
        match token {
            None => Err(SettingsError::MissingValue { key: key.to_owned() }),
            Some(found) if self.strict && !found.starts_with(expected) => {
                Err(SettingsError::Separator { key: key.to_owned(), expected, found: found.clone() })
            }
            Some(_) => Ok(()),
        }
    }

    fn value(&mut self, key: &str) -> Result<&str, SettingsError> {
        let token = self.tokens.get(self.at);
        self.at += 1;
        token.map(String::as_str).ok_or_else(|| SettingsError::MissingValue { key: key.to_owned() })
    }

    fn peek(&self) -> Option<&str> {
        self.tokens.get(self.at).map(String::as_str)
    }

    fn unsigned(&mut self, key: &str) -> Result<u64, SettingsError> {
        let value = self.value(key)?;
        leading_unsigned(value).ok_or_else(|| bad(key, value, "a whole number"))
    }

    fn float(&mut self, key: &str) -> Result<f64, SettingsError> {
        let value = self.value(key)?;
        leading_float(value).ok_or_else(|| bad(key, value, "a number"))
    }

    fn boolean(&mut self, key: &str) -> Result<bool, SettingsError> {
        match self.value(key)? {
            "True" => Ok(true),
            "False" => Ok(false),
            other => Err(bad(key, other, "`True` or `False`")),
        }
    }

    /// Everything up to the end of this key's value: one word, or a bracketed list.
    fn raw(&mut self, key: &str) -> Result<String, SettingsError> {
        let mut text = self.value(key)?.to_owned();
        if text == "[" {
            loop {
                let token = self.value(key)?;
                text.push_str(token);
                if token == "]" {
                    break;
                }
            }
        }
        Ok(text)
    }
}

fn bad(key: &str, value: &str, expected: &'static str) -> SettingsError {
    SettingsError::BadValue { key: key.to_owned(), value: value.to_owned(), expected }
}

/// The number a text starts with; what follows it is ignored and a minus sign wraps, as `std::stoull` does.
fn leading_unsigned(text: &str) -> Option<u64> {
    let (unsigned, negative) = match text.strip_prefix('-') {
        Some(rest) => (rest, true),
        None => (text.strip_prefix('+').unwrap_or(text), false),
    };
    let digits = unsigned.find(|c: char| !c.is_ascii_digit()).unwrap_or(unsigned.len());
    let number: u64 = unsigned[..digits].parse().ok()?;
    Some(if negative { number.wrapping_neg() } else { number })
}

/// The number a text starts with; what follows it is ignored, as `std::stod` does.
fn leading_float(text: &str) -> Option<f64> {
    let end =
        text.find(|c: char| !matches!(c, '0'..='9' | '.' | '-' | '+' | 'e' | 'E')).unwrap_or(text.len());
    (1..=end).rev().find_map(|length| text.get(..length)?.parse().ok())
}

pub(super) fn apply(settings: &mut Settings, conf: &str, profile: &Profile) -> Result<(), SettingsError> {
    let tokens = tokenize(conf);
    let strict = profile.parser == Parser::Strict;
    reset(settings);
    if profile.large_segment_key {
        // Parsed before the others, because their lower bounds depend on it.
        for (at, _) in tokens.iter().enumerate().filter(|(_, token)| *token == LARGE_SEGMENT) {
            large_segment_size(settings, &mut Reader { tokens: &tokens, at: at + 1, strict })?;
        }
    }
    if profile.large_segment_key {
        settings.max_non_split_rounding = settings.large_segment_size; // up to 2.10 it keeps its value
    }
    if strict {
        return pass(settings, &tokens, profile, |_| true);
    }
    // Two parsers read the whole string one after the other, so a bad value of the second's keys leaves all of
    // the first's applied.
    pass(settings, &tokens, profile, |key| GENERIC.contains(&key))?;
    pass(settings, &tokens, profile, |key| !GENERIC.contains(&key))
}

/// Applies the keys that a parser is concerned with and skips the others.
fn pass(
    settings: &mut Settings,
    tokens: &[String],
    profile: &Profile,
    concerns: impl Fn(&str) -> bool,
) -> Result<(), SettingsError> {
    let mut reader = Reader { tokens, at: 0, strict: profile.parser == Parser::Strict };
    while let Some(key) = reader.peek().map(str::to_owned) {
        reader.at += 1;
        check_key(&key, profile)?;
        if concerns(&key) && key != LARGE_SEGMENT {
            one_key(settings, &mut reader, &key)?;
        } else {
            reader.separator(&key, ':')?;
            reader.raw(&key)?;
        }
        if reader.peek().is_some() {
            reader.separator(&key, ',')?;
        }
    }
    Ok(())
}

/// In bytes, the largest whole number of MiB if that is too much.
fn mib_to_bytes(mib: u64) -> u64 {
    mib.min(u64::MAX / MIB) * MIB
}

fn reset(settings: &mut Settings) {
    settings.max_split_size = None;
    settings.garbage_collection_threshold = 0.0;
    settings.roundup_power2_divisions = [0; ROUNDUP_SLOTS];
}

fn large_segment_size(settings: &mut Settings, reader: &mut Reader<'_>) -> Result<(), SettingsError> {
    let key = LARGE_SEGMENT;
    reader.separator(key, ':')?;
    let mib = reader.unsigned(key)?;
    if mib <= 10 {
        return Err(bad(key, &mib.to_string(), "more than 10"));
    }
    settings.large_segment_size = mib_to_bytes(mib);
    Ok(())
}

fn check_key(key: &str, profile: &Profile) -> Result<(), SettingsError> {
    if !KEYS.contains(&key) {
        return Err(SettingsError::UnknownKey { key: key.to_owned() });
    }
    if since(key) > profile.release.minor() {
        return Err(SettingsError::NotInRelease {
            key: key.to_owned(),
            release: profile.release.to_string(),
        });
    }
    Ok(())
}

fn one_key(settings: &mut Settings, reader: &mut Reader<'_>, key: &str) -> Result<(), SettingsError> {
    reader.separator(key, ':')?;
    match key {
        "max_split_size_mb" => {
            let mib = reader.unsigned(key)?;
            let least = settings.large_segment_size / MIB + u64::from(reader.strict);
            if mib < least {
                return Err(bad(key, &mib.to_string(), "at least large_segment_size_mb, 20 by default"));
            }
            settings.max_split_size = Some(mib_to_bytes(mib));
        }
        "max_non_split_rounding_mb" => {
            let mib = reader.unsigned(key)?;
            if mib < settings.large_segment_size / MIB + u64::from(reader.strict) {
                return Err(bad(key, &mib.to_string(), "at least large_segment_size_mb, 20 by default"));
            }
            settings.max_non_split_rounding = mib_to_bytes(mib);
        }
        "garbage_collection_threshold" => {
            let fraction = reader.float(key)?;
            if !(fraction > 0.0 && fraction < 1.0) {
                return Err(bad(key, &fraction.to_string(), "between 0 and 1, both excluded"));
            }
            settings.garbage_collection_threshold = fraction;
        }
        "roundup_power2_divisions" => roundup(&mut settings.roundup_power2_divisions, reader, key)?,
        "expandable_segments" => settings.expandable_segments = reader.boolean(key)?,
        "per_process_memory_fraction" => {
            let fraction = reader.float(key)?;
            if !(0.0..=1.0).contains(&fraction) {
                return Err(bad(key, &fraction.to_string(), "between 0 and 1"));
            }
            settings.per_process_memory_fraction = fraction;
        }
        "release_lock_on_cudamalloc" => settings.release_lock_on_cudamalloc = reader.boolean(key)?,
        "graph_capture_record_stream_reuse" => {
            settings.graph_capture_record_stream_reuse = reader.boolean(key)?;
        }
        "throw_on_cudamalloc_oom" => settings.throw_on_cudamalloc_oom = reader.boolean(key)?,
        "expandable_segments_reserve" => {
            // PyTorch only warns about a bad value here, so it must not fail.
            settings.expandable_segments_reserve = reserve(&reader.raw(key)?);
        }
        "backend" => match reader.value(key)? {
            "native" => {}
            other => return Err(bad(key, other, "`native`: no other backend is modelled")),
        },
        _ => {
            let value = carried(reader, key)?;
            settings.carried.retain(|(name, _)| name != key);
            settings.carried.push((key.to_owned(), value));
        }
    }
    Ok(())
}

/// The value of a key of the pinned host allocator, which is only carried; but a bad one is an error.
fn carried(reader: &mut Reader<'_>, key: &str) -> Result<String, SettingsError> {
    let at = reader.at;
    match key {
        "pinned_use_background_threads" | "pinned_use_cuda_host_register" | "pinned_free_catch_all" => {
            reader.boolean(key)?;
        }
        "expandable_segments_reserve_by_class" => return reader.raw(key),
        "pinned_num_register_threads" => {
            let threads = reader.unsigned(key)?;
            if !threads.is_power_of_two() || threads > 128 {
                return Err(bad(key, &threads.to_string(), "a power of two, at most 128"));
            }
        }
        "pinned_reserve_segment_size_mb" => {
            if reader.unsigned(key)? == 0 {
                return Err(bad(key, "0", "more than 0"));
            }
        }
        _ => {
            reader.unsigned(key)?;
        }
    }
    Ok(reader.tokens[at].clone())
}

/// The minor release that brought a key.
fn since(key: &str) -> u8 {
    match key {
        "expandable_segments_reserve" | "expandable_segments_reserve_by_class" => 15,
        "pinned_max_round_threshold_mb" | "pinned_max_cached_size_mb" => 13,
        "throw_on_cudamalloc_oom" | "pinned_free_catch_all" => 12,
        "large_segment_size_mb" => 11,
        "per_process_memory_fraction" | "pinned_reserve_segment_size_mb" => 10,
        "graph_capture_record_stream_reuse" => 9,
        _ => 0,
    }
}

fn roundup(table: &mut RoundupTable, reader: &mut Reader<'_>, key: &str) -> Result<(), SettingsError> {
    const EXPECTED: &str = "a power of two, or `[MIB:DIVISIONS,…,>:DIVISIONS]`";
    if reader.peek() != Some("[") {
        let divisions = reader.unsigned(key)?;
        if !divisions.is_power_of_two() {
            return Err(bad(key, &divisions.to_string(), EXPECTED));
        }
        table.fill(divisions);
        return Ok(());
    }
    reader.at += 1;
    let mut last = None;
    loop {
        if reader.strict && reader.peek().is_none() {
            return Ok(()); // the closing bracket may be missing
        }
        let interval = reader.value(key)?.to_owned();
        if interval == "]" {
            return Ok(());
        }
        reader.separator(key, ':')?;
        let divisions = reader.unsigned(key)?;
        if divisions != 0 && !divisions.is_power_of_two() {
            return Err(bad(key, &divisions.to_string(), EXPECTED));
        }
        if interval == ">" {
            let from = last.unwrap_or(0) + usize::from(!reader.strict);
            table[from.min(ROUNDUP_SLOTS)..].fill(divisions);
        } else {
            let mib = leading_unsigned(&interval).filter(|mib| mib.is_power_of_two());
            let mib = mib.ok_or_else(|| bad(key, &interval, EXPECTED))?;
            let slot = (mib.trailing_zeros() as usize).min(ROUNDUP_SLOTS - 1);
            if last.is_none() {
                table[..slot].fill(divisions);
            }
            table[slot] = divisions;
            last = Some(slot);
        }
        if reader.peek() != Some("]") && (reader.strict || reader.peek().is_some()) {
            reader.separator(key, ',')?;
        }
    }
}

fn reserve(text: &str) -> Option<Reserve> {
    if let Some(gib) = text.strip_suffix(['G', 'g']) {
        let bytes = gib.parse::<u64>().ok()?.checked_mul(1 << 30)?;
        return Some(Reserve::Bytes(bytes));
    }
    text.parse().ok().filter(|fraction| *fraction > 0.0).map(Reserve::Fraction)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Release;

    fn at(minor: u8) -> Profile {
        Profile::of(Release::new(minor).expect("known release"))
    }

    #[test]
    fn reads_every_documented_form_of_roundup() {
        let table = |conf: &str, minor| {
            Settings::parse(conf, &at(minor)).map(|settings| settings.roundup_power2_divisions)
        };
        assert_eq!(table("roundup_power2_divisions:4", 11), Ok([4; 16]));
        let listed = "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]";
        assert_eq!(table(listed, 11), Ok([1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8]));
        assert_eq!(table(listed, 9), Ok([1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 8, 8, 8, 8, 8, 8]));
        assert!(table("roundup_power2_divisions:0", 11).is_err());
        assert!(table("roundup_power2_divisions:3", 11).is_err());
    }

    #[test]
    fn every_parse_resets_some_keys_and_keeps_others() {
        let mut settings =
            Settings::parse("max_split_size_mb:64,expandable_segments:True", &at(15)).expect("valid");
        settings.apply("garbage_collection_threshold:0.5", &at(15)).expect("valid");
        assert_eq!(settings.max_split_size, None);
        assert!(settings.expandable_segments);
        assert!((settings.garbage_collection_threshold - 0.5).abs() < f64::EPSILON);
    }

    #[test]
    fn a_refused_string_has_applied_its_earlier_keys() {
        let mut settings = Settings::default();
        assert!(settings.apply("expandable_segments:True,max_split_size_mb:1", &at(15)).is_err());
        assert!(settings.expandable_segments);
        assert_eq!(settings.conf, "expandable_segments:True,max_split_size_mb:1");
    }

    #[test]
    fn lower_bounds_follow_the_release() {
        assert!(Settings::parse("max_split_size_mb:20", &at(10)).is_ok());
        assert!(Settings::parse("max_split_size_mb:20", &at(9)).is_err());
        assert!(Settings::parse("large_segment_size_mb:40,max_split_size_mb:30", &at(11)).is_err());
        assert!(Settings::parse("large_segment_size_mb:40", &at(10)).is_err());
    }

    #[test]
    fn numbers_are_read_by_prefix() {
        let settings = Settings::parse("max_split_size_mb:50;x", &at(15)).expect("prefix");
        assert_eq!(settings.max_split_size, Some(50 << 20));
    }

    #[test]
    fn names_the_unknown_key_and_the_missing_value() {
        assert_eq!(
            Settings::parse("max_splt:3", &at(15)),
            Err(SettingsError::UnknownKey { key: "max_splt".into() })
        );
        assert!(matches!(
            Settings::parse("max_split_size_mb:", &at(15)),
            Err(SettingsError::MissingValue { .. })
        ));
    }
}
