//! The settings worth trying, and how a change is laid over recorded settings.

use unhand_alloc::Profile;

/// Settings that people try, each as a change over the recorded ones. Garbage collection only does something
/// under a memory limit, so it is tried only then.
pub fn sweep(profile: &Profile, has_limit: bool) -> Vec<String> {
    let mut all: Vec<String> = [
        "expandable_segments:True",
        "max_split_size_mb:32",
        "max_split_size_mb:64",
        "max_split_size_mb:128",
        "max_split_size_mb:256",
        "max_split_size_mb:512",
        "roundup_power2_divisions:4",
        "roundup_power2_divisions:8",
        "roundup_power2_divisions:16",
        "expandable_segments:True,roundup_power2_divisions:8",
        "expandable_segments:True,roundup_power2_divisions:16",
    ]
    .map(str::to_owned)
    .into();
    if profile.large_segment_key {
        all.push("large_segment_size_mb:64".into());
        all.push("expandable_segments:True,large_segment_size_mb:11".into());
    }
    if has_limit {
        all.push("garbage_collection_threshold:0.6".into());
        all.push("garbage_collection_threshold:0.8".into());
    }
    all
}

/// Lays the keys of `change` over those of `conf`; keys keep their place, new ones follow.
///
/// ```
/// use unhand_analyze::replay::merge_conf;
/// assert_eq!(merge_conf("a:1,b:[1:2,>:3]", "b:4,c:5"), "a:1,b:4,c:5");
/// ```
pub fn merge_conf(conf: &str, change: &str) -> String {
    let mut keys: Vec<(String, String)> = split(conf);
    for (key, value) in split(change) {
        match keys.iter_mut().find(|(known, _)| *known == key) {
            Some((_, old)) => *old = value,
            None => keys.push((key, value)),
        }
    }
    keys.into_iter().map(|(key, value)| format!("{key}:{value}")).collect::<Vec<_>>().join(",")
}

/// `key:value` pairs; commas inside brackets belong to the value.
fn split(conf: &str) -> Vec<(String, String)> {
    let mut pairs = Vec::new();
    let (mut depth, mut start) = (0i32, 0);
    let end = conf.len();
    let commas = conf.char_indices().filter_map(|(at, character)| {
        match character {
            '[' => depth += 1,
            ']' => depth -= 1,
            _ => {}
        }
        (character == ',' && depth == 0).then_some(at)
    });
    for at in commas.chain([end]) {
        let part = conf[start..at].trim();
        start = (at + 1).min(end);
        if !part.is_empty() {
            let (key, value) = part.split_once(':').unwrap_or((part, ""));
            pairs.push((key.trim().to_owned(), value.trim().to_owned()));
        }
    }
    pairs
}
