//! Kernel launches: checked, put into a graph when captured, and computed only where `kernels` knows how.

use std::cell::RefCell;

use super::copy::submit;
use super::graph::Work;
use super::{emulate, gpu, log};
use crate::code::{Code, Outcome};

/// Threads or blocks in three directions, as C passes them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Dim3 {
    pub(crate) x: u32,
    pub(crate) y: u32,
    pub(crate) z: u32,
}

/// What stands between `<<<` and `>>>`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Configuration {
    pub(crate) grid: Dim3,
    pub(crate) block: Dim3,
    pub(crate) shared_bytes: usize,
    pub(crate) stream: u64,
}

thread_local! {
    static PENDING: RefCell<Vec<Configuration>> = const { RefCell::new(Vec::new()) };
}

/// The compiler's code pushes a configuration before it calls the launch stub…
pub(crate) fn push(configuration: Configuration) {
    PENDING.with_borrow_mut(|pending| pending.push(configuration));
}

/// …which pops it.
pub(crate) fn pop() -> Option<Configuration> {
    PENDING.with_borrow_mut(Vec::pop)
}

/// Launches a kernel. `arguments` is the address of the array of its arguments' addresses, or 0.
pub(crate) fn launch(kernel: u64, configuration: &Configuration, arguments: u64) -> Outcome {
    if !is_possible(configuration) {
        return Err(Code::INVALID_CONFIGURATION);
    }
    let name = gpu().kernels.name(kernel);
    let effect = name.and_then(|name| emulate::effect(name, arguments, u64::from(configuration.grid.x)));
    if effect.is_none() {
        log::kernel(name);
    }
    submit(configuration.stream, Work::Kernel(effect))
}

/// The limits that all GPUs since compute capability 3.0 share.
fn is_possible(configuration: &Configuration) -> bool {
    let Configuration { grid, block, .. } = configuration;
    let n_threads = u64::from(block.x) * u64::from(block.y) * u64::from(block.z);
    (1..=0x7fff_ffff).contains(&grid.x)
        && (1..=65_535).contains(&grid.y)
        && (1..=65_535).contains(&grid.z)
        && (1..=1024).contains(&n_threads)
        && block.z <= 64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_possible_with(grid: (u32, u32, u32), block: (u32, u32, u32)) -> bool {
        let dim = |(x, y, z)| Dim3 { x, y, z };
        is_possible(&Configuration { grid: dim(grid), block: dim(block), shared_bytes: 0, stream: 0 })
    }

    #[test]
    fn refuses_what_no_gpu_runs() {
        assert!(is_possible_with((1, 1, 1), (1024, 1, 1)));
        assert!(!is_possible_with((0, 1, 1), (32, 1, 1)));
        assert!(!is_possible_with((1, 65_536, 1), (32, 1, 1)));
        assert!(!is_possible_with((1, 1, 1), (512, 4, 1)));
    }
}
