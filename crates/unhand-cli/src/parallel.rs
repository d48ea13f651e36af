//! Does the same work on several files at once and gives the results in the order of the files.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::failure::Failure;

/// Each file in work takes memory; more at once than this is not worth it.
const MAX_THREADS: usize = 8;

/// Applies `work` to every item. Of several failures, the one of the earliest item is reported; once there is
/// one, no further item is begun.
pub(crate) fn map_in_order<T: Sync, R: Send>(
    items: &[T],
    work: impl Fn(&T) -> Result<R, Failure> + Sync,
) -> Result<Vec<R>, Failure> {
    let n_cores = thread::available_parallelism().map_or(1, NonZero::get);
    let n_threads = items.len().min(n_cores).min(MAX_THREADS);
    if n_threads < 2 {
        return items.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::with_capacity(items.len()));
    thread::scope(|scope| {
        for _ in 0..n_threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(index) else { return };
                    let result = work(item);
                    if result.is_err() {
                        // Items are begun in order, so every item before this one is done or in work.
                        next.store(items.len(), Ordering::Relaxed);
                    }
                    // A panic elsewhere is passed on by the scope; until then the results are whole.
                    results.lock().unwrap_or_else(PoisonError::into_inner).push((index, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|&(index, _)| index);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_the_order_of_the_items() {
        let items: Vec<u64> = (0..100).collect();
        let doubled = map_in_order(&items, |item| {
            thread::sleep(std::time::Duration::from_micros((100 - item) * 10));
            Ok(item * 2)
        });
        assert_eq!(doubled.expect("no failure"), (0..100).map(|item| item * 2).collect::<Vec<_>>());
    }

    #[test]
    fn the_failure_of_the_earliest_item_is_reported() {
        let items: Vec<u64> = (0..20).collect();
        let result = map_in_order(&items, |&item| match item {
            3 => {
                thread::sleep(std::time::Duration::from_millis(20));
                Err(Failure::bad_use("three"))
            }
            4 => Err(Failure::bad_input("four")),
            item => Ok(item),
        });
        assert_eq!(result.expect_err("two fail").exit_code(), 2);
    }
}
