//! The driver about devices, contexts, modules, launches and streams.

use std::ffi::{c_char, c_int, c_uint};

use super::entries;
use super::runtime_launch::occupancy;
use crate::code::{self, Code};
use crate::gpu::copy::submit;
use crate::gpu::graph::Work;
use crate::gpu::launch::{Configuration, Dim3, launch};
use crate::gpu::properties::{attribute, uuid};
use crate::gpu::{config, current_device, gpu, set_current_device};
use crate::pointers::{In, Out, Text};

/// The one context of a device is this plus its number.
const CONTEXTS: u64 = 0x2000_0000;

/// The head of `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy)]
struct LaunchConfig {
    grid: Dim3,
    block: Dim3,
    shared_bytes: c_uint,
    stream: u64,
}

entries! { plain:
    fn cuInit(_flags: c_uint) {
        if gpu().devices.is_empty() { Err(Code(100)) } else { Ok(()) }
    }
    fn cuDriverGetVersion(version: Out<c_int>) {
        version.set(config().cuda_version.max(13_000))
    }
    fn cuDeviceGetCount(count: Out<c_int>) {
        count.set(c_int::try_from(gpu().devices.len()).unwrap_or(c_int::MAX))
    }
    fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) {
        gpu().device(ordinal)?;
        device.set(ordinal)
    }
    fn cuDeviceGetAttribute(value: Out<c_int>, number: c_int, device: c_int) {
        gpu().device(device)?;
        value.set(attribute(config().profile, number, index(device)?).ok_or(Code::INVALID_VALUE)?)
    }
    fn cuDeviceGetName(name: Out<c_char>, room: c_int, device: c_int) {
        gpu().device(device)?;
        name.set_text(config().profile.device_name, usize::try_from(room).map_err(|_| Code::INVALID_VALUE)?)
    }
    fn cuDeviceGetUuid(id: Out<[u8; 16]>, device: c_int) {
        gpu().device(device)?;
        id.set(uuid(index(device)?))
    }
    fn cuDeviceGetUuid_v2(id: Out<[u8; 16]>, device: c_int) {
        gpu().device(device)?;
        id.set(uuid(index(device)?))
    }
    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) {
        let total = gpu().device(device)?.memory_bytes;
        bytes.set(usize::try_from(total).unwrap_or(usize::MAX))
    }
    fn cuDevicePrimaryCtxGetState(device: c_int, flags: Out<c_uint>, is_active: Out<c_int>) {
        let is_there = gpu().device(device)?.has_context();
        flags.set_if_asked(0);
        is_active.set(c_int::from(is_there))
    }
    fn cuDevicePrimaryCtxRetain(context: Out<u64>, device: c_int) {
        gpu().device(device)?.enter();
        context.set(CONTEXTS + index(device)? as u64)
    }
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        gpu().device(device).map(drop)
    }
    fn cuCtxGetCurrent(context: Out<u64>) {
        context.set(CONTEXTS + index(current_device())? as u64)
    }
    fn cuCtxSetCurrent(context: u64) {
        enter(context)
    }
    fn cuCtxPushCurrent_v2(context: u64) {
        enter(context)
    }
    fn cuCtxPopCurrent_v2(context: Out<u64>) {
        context.set_if_asked(CONTEXTS + index(current_device())? as u64);
        Ok(())
    }
    fn cuCtxGetDevice(device: Out<c_int>) {
        device.set(current_device())
    }
    fn cuCtxSynchronize() {
        let mut gpu = gpu();
        gpu.unsafe_call()?;
        gpu.streams.wait_for_device(current_device());
        Ok(())
    }
    fn cuCtxGetLimit(value: Out<usize>, _limit: c_int) {
        value.set(1 << 20)
    }
    fn cuCtxSetLimit(_limit: c_int, _value: usize) {
        Ok(())
    }
    fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) {
        least.set_if_asked(0);
        greatest.set_if_asked(-5);
        Ok(())
    }
    fn cuGetErrorString(error: c_int, text: Out<*const c_char>) {
        text.set(code::meaning(error).as_ptr())
    }
    fn cuGetErrorName(error: c_int, text: Out<*const c_char>) {
        text.set(code::driver_name(error).as_ptr())
    }

    // Code that is loaded at run time is not read: it has a handle, and does nothing when launched.
    fn cuModuleLoad(module: Out<u64>, _path: Text) {
        module.set(gpu().kernels.handle())
    }
    fn cuModuleLoadData(module: Out<u64>, _image: u64) {
        module.set(gpu().kernels.handle())
    }
    fn cuModuleLoadDataEx(module: Out<u64>, _image: u64, _n_options: c_uint, _options: u64, _values: u64) {
        module.set(gpu().kernels.handle())
    }
    fn cuModuleUnload(_module: u64) {
        Ok(())
    }
    fn cuModuleGetFunction(function: Out<u64>, _module: u64, _name: Text) {
        function.set(gpu().kernels.handle())
    }
    fn cuModuleGetGlobal_v2(address: Out<u64>, bytes: Out<usize>, _module: u64, _name: Text) {
        address.set_if_asked(0);
        bytes.set_if_asked(0);
        Err(Code::NOT_FOUND)
    }
    fn cuLinkCreate_v2(_n_options: c_uint, _options: u64, _values: u64, state: Out<u64>) {
        state.set(gpu().kernels.handle())
    }
    fn cuLinkAddData_v2(
        _state: u64,
        _kind: c_int,
        _data: u64,
        _bytes: usize,
        _name: u64,
        _n_options: c_uint,
        _options: u64,
        _values: u64,
    ) {
        Ok(())
    }
    fn cuLinkComplete(_state: u64, image: Out<u64>, bytes: Out<usize>) {
        image.set_if_asked(LINKED.as_ptr() as u64);
        bytes.set_if_asked(LINKED.len());
        Ok(())
    }
    fn cuLinkDestroy(_state: u64) {
        Ok(())
    }
    fn cuFuncGetAttribute(value: Out<c_int>, number: c_int, _function: u64) {
        let (major, minor) = config().profile.capability;
        value.set(match number {
            0 => 1024,
            4 => 32,
            5 | 6 => major * 10 + minor,
            8 => config().profile.shared_bytes_opt_in(),
            _ => 0,
        })
    }
    fn cuFuncSetAttribute(_function: u64, _number: c_int, _value: c_int) {
        Ok(())
    }
    fn cuFuncSetCacheConfig(_function: u64, _preference: c_int) {
        Ok(())
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        n_blocks: Out<c_int>,
        _function: u64,
        block_size: c_int,
        shared_bytes: usize,
    ) {
        n_blocks.set(occupancy(block_size, shared_bytes))
    }
    fn cuOccupancyMaxActiveClusters(n_clusters: Out<c_int>, _function: u64, _config: u64) {
        n_clusters.set(config().profile.n_multiprocessors)
    }
    fn cuTensorMapEncodeTiled(map: Out<[u64; 16]>) {
        // The other arguments describe the map; nobody reads it.
        map.set([0; 16])
    }
    fn cuLaunchKernel(
        function: u64,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: u64,
        arguments: u64,
        _extra: u64,
    ) {
        let grid = Dim3 { x: grid_x, y: grid_y, z: grid_z };
        let block = Dim3 { x: block_x, y: block_y, z: block_z };
        launch(function, &Configuration { grid, block, shared_bytes: shared_bytes as usize, stream }, arguments)
    }
    fn cuLaunchCooperativeKernel(
        function: u64,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: u64,
        arguments: u64,
    ) {
        let grid = Dim3 { x: grid_x, y: grid_y, z: grid_z };
        let block = Dim3 { x: block_x, y: block_y, z: block_z };
        launch(function, &Configuration { grid, block, shared_bytes: shared_bytes as usize, stream }, arguments)
    }
    fn cuLaunchKernelEx(launch_config: In<LaunchConfig>, function: u64, arguments: u64, _extra: u64) {
        let LaunchConfig { grid, block, shared_bytes, stream } = launch_config.get()?;
        launch(function, &Configuration { grid, block, shared_bytes: shared_bytes as usize, stream }, arguments)
    }
    fn cuStreamWriteValue32_v2(stream: u64, target: u64, value: c_uint, _flags: c_uint) {
        submit(stream, Work::Fill { target, pattern: value, width: 4, count: 1 })
    }
    fn cuStreamSynchronize(stream: u64) {
        let mut gpu = gpu();
        let key = gpu.streams.key(stream, current_device())?;
        gpu.not_captured(key)?;
        gpu.unsafe_call()?;
        gpu.streams.wait(key)
    }
    fn cuStreamGetCtx(_stream: u64, context: Out<u64>) {
        context.set(CONTEXTS + index(current_device())? as u64)
    }
}

/// What linking yields; nobody reads it.
static LINKED: [u8; 4] = [0; 4];

fn index(device: c_int) -> Result<usize, Code> {
    usize::try_from(device).map_err(|_| Code::INVALID_DEVICE)
}

fn enter(context: u64) -> code::Outcome {
    if context == 0 {
        return Ok(());
    }
    let device = context.checked_sub(CONTEXTS).and_then(|device| c_int::try_from(device).ok());
    set_current_device(device.ok_or(Code(201))?)
}
