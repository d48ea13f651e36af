//! `--set KEY=VALUE` on the command line becomes the text that PyTorch's allocator would read.

use std::fmt;
use std::str::FromStr;

use unhand_alloc::{Profile, Settings, SettingsError};

use crate::failure::Failure;

/// One `--set`: a key of `PYTORCH_CUDA_ALLOC_CONF` and its value, both as written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Setting {
    key: String,
    value: String,
}

impl FromStr for Setting {
    type Err = &'static str;

    /// Reads `KEY=VALUE`, and `KEY:VALUE` as PyTorch writes it. The value may hold either sign.
    fn from_str(text: &str) -> Result<Setting, Self::Err> {
        let (key, value) = text.split_once(['=', ':']).ok_or("expected KEY=VALUE")?;
        let (key, value) = (key.trim(), value.trim());
        if key.is_empty() || value.is_empty() {
            return Err("expected KEY=VALUE");
        }
        Ok(Setting { key: key.to_owned(), value: value.to_owned() })
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.key, self.value)
    }
}

/// All `--set` options as one configuration text, checked by the allocator's own parser.
pub(crate) fn conf(settings: &[Setting], profile: &Profile) -> Result<String, Failure> {
    let conf = settings.iter().map(Setting::to_string).collect::<Vec<_>>().join(",");
    match Settings::parse(&conf, profile) {
        Ok(_) => Ok(conf),
        Err(error) => Err(refused(&error)),
    }
}

fn refused(error: &SettingsError) -> Failure {
    let failure = Failure::bad_use("cannot use `--set`").because(error);
    match error {
        SettingsError::UnknownKey { key } => failure.hint(match nearest_key(key) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("the keys are {}", Settings::keys().collect::<Vec<_>>().join(", ")),
        }),
        SettingsError::NotInRelease { .. } => failure.hint("name a newer release with `--torch`"),
        _ => failure,
    }
}

/// The known key that takes the fewest changes to reach, if a typing error can explain the difference.
pub(crate) fn nearest_key(key: &str) -> Option<&'static str> {
    let key = key.to_ascii_lowercase().replace('-', "_");
    // `max_split_size` for `max_split_size_mb` is the commonest slip, and longer than any typing error.
    if let Some(full) = Settings::keys().find(|known| known.strip_suffix("_mb") == Some(&key)) {
        return Some(full);
    }
    let (distance, near) = Settings::keys().map(|known| (edit_distance(&key, known), known)).min()?;
    (distance <= 1 + near.len() / 5).then_some(near)
}

/// How many letters must be put in, taken out or replaced (Levenshtein).
fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<String, &'static str> {
        text.parse::<Setting>().map(|setting| setting.to_string())
    }

    #[test]
    fn reads_both_spellings() {
        assert_eq!(parse("max_split_size_mb=64"), Ok("max_split_size_mb:64".to_owned()));
        assert_eq!(parse("max_split_size_mb: 64"), Ok("max_split_size_mb:64".to_owned()));
        let nested = "roundup_power2_divisions=[256:1,>:8]";
        assert_eq!(parse(nested), Ok("roundup_power2_divisions:[256:1,>:8]".to_owned()));
        for bad in ["", "max_split_size_mb", "=64", "max_split_size_mb="] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_allocator_judges_the_values() {
        let conf = |text: &str| conf(&[text.parse().expect("KEY=VALUE")], &Profile::default());
        assert_eq!(conf("expandable_segments=True").expect("accepted"), "expandable_segments:True");
        assert_eq!(conf("max_split_size_mb=1").expect_err("too small").exit_code(), 2);
    }

    #[test]
    fn knows_what_was_meant() {
        assert_eq!(nearest_key("max_split_size"), Some("max_split_size_mb"));
        assert_eq!(nearest_key("expandable-segments"), Some("expandable_segments"));
        assert_eq!(nearest_key("expandible_segment"), Some("expandable_segments"));
        assert_eq!(nearest_key("shoe_size"), None);
        assert_eq!(edit_distance("kitten", "sitting"), 3);
    }
}
