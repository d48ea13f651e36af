//! The runtime about kernels: registration by the compiler's code, attributes, occupancy, launches.
#![allow(
    unsafe_code,
    reason = "keeps names that lie in the read-only data of the libraries that register them"
)]

use std::ffi::{c_int, c_uint};

use super::{answers, entries};
use crate::code::Code;
use crate::gpu::launch::{Configuration, Dim3, launch, pop, push};
use crate::gpu::{config, gpu};
use crate::pointers::{In, Out, Text, static_text};

/// `cudaFuncAttributes`, without the reserved words at its end.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct FunctionAttributes {
    shared_bytes: usize,
    constant_bytes: usize,
    local_bytes: usize,
    max_threads: c_int,
    n_registers: c_int,
    ptx_version: c_int,
    binary_version: c_int,
    cache_mode: c_int,
    max_dynamic_shared_bytes: c_int,
    preferred_carveout: c_int,
    cluster: [c_int; 6],
}

/// `cudaLaunchConfig_t`
#[repr(C)]
#[derive(Clone, Copy)]
struct LaunchConfig {
    grid: Dim3,
    block: Dim3,
    shared_bytes: usize,
    stream: u64,
    attributes: u64,
    n_attributes: c_uint,
}

answers! {
    fn __cudaRegisterFatBinary(_binary: u64) -> u64 {
        // The handle goes only to the functions below, which do not look at it; null would mean failure.
        0x7fff_0000
    }
    fn __cudaRegisterFatBinaryEnd(_handle: u64) -> () {}
    fn __cudaUnregisterFatBinary(_handle: u64) -> () {}
    fn __cudaInitModule(_handle: u64) -> u8 {
        0
    }
    fn __cudaRegisterFunction(
        _handle: u64,
        function: u64,
        _device_function: u64,
        name: Text,
        _thread_limit: c_int,
        _thread: u64,
        _block: u64,
        _block_dim: u64,
        _grid_dim: u64,
        _warp_size: u64,
    ) -> () {
        // SAFETY: the compiler puts the name into the read-only data of the library, which stays loaded.
        if let Some(name) = unsafe { static_text(name.address()) } {
            gpu().kernels.register(function, name);
        }
    }
    fn __cudaRegisterVar(
        _handle: u64,
        variable: u64,
        _device_variable: u64,
        _name: u64,
        _is_external: c_int,
        bytes: usize,
        _is_constant: c_int,
        _is_global: c_int,
    ) -> () {
        gpu().kernels.register_variable(variable, bytes as u64);
    }
    fn __cudaPushCallConfiguration(grid: Dim3, block: Dim3, shared_bytes: usize, stream: u64) -> c_uint {
        push(Configuration { grid, block, shared_bytes, stream });
        0
    }
}

entries! { runtime:
    fn __cudaPopCallConfiguration(grid: Out<Dim3>, block: Out<Dim3>, shared_bytes: Out<usize>, stream: Out<u64>) {
        let configuration = pop().ok_or(Code::INVALID_CONFIGURATION)?;
        grid.set(configuration.grid)?;
        block.set(configuration.block)?;
        shared_bytes.set(configuration.shared_bytes)?;
        stream.set(configuration.stream)
    }
    fn __cudaGetKernel(kernel: Out<u64>, function: u64) {
        kernel.set(function)
    }
    fn cudaGetFuncBySymbol(kernel: Out<u64>, function: u64) {
        kernel.set(function)
    }
    fn __cudaLaunchKernel(
        kernel: u64,
        grid: Dim3,
        block: Dim3,
        arguments: u64,
        shared_bytes: usize,
        stream: u64,
    ) {
        launch(kernel, &Configuration { grid, block, shared_bytes, stream }, arguments)
    }
    fn cudaLaunchKernel(kernel: u64, grid: Dim3, block: Dim3, arguments: u64, shared_bytes: usize, stream: u64) {
        launch(kernel, &Configuration { grid, block, shared_bytes, stream }, arguments)
    }
    fn cudaLaunchCooperativeKernel(
        kernel: u64,
        grid: Dim3,
        block: Dim3,
        arguments: u64,
        shared_bytes: usize,
        stream: u64,
    ) {
        launch(kernel, &Configuration { grid, block, shared_bytes, stream }, arguments)
    }
    fn cudaLaunchKernelExC(launch_config: In<LaunchConfig>, kernel: u64, arguments: u64) {
        let LaunchConfig { grid, block, shared_bytes, stream, .. } = launch_config.get()?;
        launch(kernel, &Configuration { grid, block, shared_bytes, stream }, arguments)
    }
    fn cudaFuncGetAttributes(attributes: Out<FunctionAttributes>, _function: u64) {
        // What the compiler made of a kernel is in its binary, which nobody reads here. Libraries size their
        // temporaries by the versions.
        let profile = config().profile;
        let version = profile.binary_version();
        attributes.set(FunctionAttributes {
            max_threads: 1024,
            n_registers: 32,
            ptx_version: version,
            binary_version: version,
            max_dynamic_shared_bytes: profile.shared_bytes_opt_in(),
            preferred_carveout: -1,
            ..FunctionAttributes::default()
        })
    }
    fn cudaFuncSetAttribute(_function: u64, _attribute: c_int, _value: c_int) {
        Ok(())
    }
    fn cudaFuncSetCacheConfig(_function: u64, _preference: c_int) {
        Ok(())
    }
    fn cudaKernelSetAttributeForDevice(_kernel: u64, _attribute: c_int, _value: c_int, _device: c_int) {
        Ok(())
    }
    fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        n_blocks: Out<c_int>,
        _function: u64,
        block_size: c_int,
        shared_bytes: usize,
    ) {
        n_blocks.set(occupancy(block_size, shared_bytes))
    }
    fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        n_blocks: Out<c_int>,
        _function: u64,
        block_size: c_int,
        shared_bytes: usize,
        _flags: c_uint,
    ) {
        n_blocks.set(occupancy(block_size, shared_bytes))
    }
    fn cudaOccupancyMaxActiveClusters(n_clusters: Out<c_int>, _function: u64, _config: u64) {
        n_clusters.set(config().profile.n_multiprocessors)
    }
}

/// Blocks of a kernel that fit on a multiprocessor: limited by threads, blocks and shared memory. Registers are
/// not known and left out. Never 0, which callers divide by.
pub(super) fn occupancy(block_size: c_int, shared_bytes: usize) -> c_int {
    let profile = config().profile;
    let by_threads = profile.threads_per_multiprocessor / block_size.max(1);
    let shared_bytes = c_int::try_from(shared_bytes).unwrap_or(c_int::MAX);
    let by_shared = profile.shared_bytes_per_multiprocessor / shared_bytes.max(1);
    profile.blocks_per_multiprocessor.min(by_threads).min(by_shared).max(1)
}
