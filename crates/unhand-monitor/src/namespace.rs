//! Whether process ids from the driver mean anything here: it knows the host's, a container has its own.

use std::path::Path;

/// The pid namespace that every process begins in has this number on every Linux (`PROC_PID_INIT_INO`).
const INITIAL: &str = "pid:[4026531836]";

/// What this process can tell about its pid namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PidNamespace {
    /// Whether it is the host's; `None` if that cannot be read.
    pub is_initial: Option<bool>,
    /// The numbers of this process, outermost first, as far as `/proc` shows them: one number inside a container, unless
    /// the host's `/proc` is mounted there.
    pub own_pids: Vec<u32>,
}

impl PidNamespace {
    /// Reads `/proc/self`.
    pub fn read() -> PidNamespace {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let link = std::fs::read_link(Path::new("/proc/self/ns/pid"));
        PidNamespace::of(&status, link.ok().and_then(|link| link.to_str().map(str::to_owned)).as_deref())
    }

    /// From the text of `status` and the target of the link `ns/pid`.
    pub fn of(status: &str, link: Option<&str>) -> PidNamespace {
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
        let own_pids: Vec<u32> =
            numbers.split_whitespace().filter_map(|number| number.parse().ok()).collect();
        let is_initial = match own_pids.len() {
            // More than one number: a namespace inside another.
            2.. => Some(false),
            _ => link.map(|link| link == INITIAL),
        };
        PidNamespace { is_initial, own_pids }
    }

    /// Whether the ids in `pids` belong to another namespace. A driver that names this very process speaks of ours.
    pub fn is_foreign(&self, mut pids: impl Iterator<Item = u32>) -> Option<bool> {
        let is_named = self.own_pids.last().is_some_and(|own| pids.any(|pid| pid == *own));
        if is_named { Some(false) } else { self.is_initial.map(|is_initial| !is_initial) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_the_initial_namespace() {
        let namespace = PidNamespace::of("Name:\tpython3\nNSpid:\t4711\n", Some(INITIAL));
        assert_eq!(namespace, PidNamespace { is_initial: Some(true), own_pids: vec![4711] });
        assert_eq!(namespace.is_foreign([1, 2].into_iter()), Some(false));
    }

    #[test]
    fn a_container_is_not() {
        let namespace = PidNamespace::of("NSpid:\t12\n", Some("pid:[4026532708]"));
        assert_eq!(namespace.is_initial, Some(false));
        assert_eq!(namespace.is_foreign([4711].into_iter()), Some(true));
        // Some drivers translate.
        assert_eq!(namespace.is_foreign([4711, 12].into_iter()), Some(false));
        let with_the_host_s_proc = PidNamespace::of("NSpid:\t4711\t12\n", None);
        assert_eq!(with_the_host_s_proc.is_initial, Some(false));
    }

    #[test]
    fn without_proc_nothing_is_known() {
        let namespace = PidNamespace::of("", None);
        assert_eq!(namespace, PidNamespace::default());
        assert_eq!(namespace.is_foreign([1].into_iter()), None);
    }
}
