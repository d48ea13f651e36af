//! NCCL for one process alone: collectives of one rank are copies. More ranks are refused.

use std::ffi::{c_char, c_int};

use crate::code::{Code, Outcome};
use crate::entry::entries;
use crate::entry::runtime_memory::{free, malloc};
use crate::gpu::copy::submit;
use crate::gpu::graph::Work;
use crate::gpu::{config, current_device, gpu};
use crate::pointers::Out;

/// `ncclInvalidUsage`
const INVALID_USAGE: Code = Code(5);

/// 128 bytes by which ranks find each other; C passes them by value.
#[repr(C)]
struct UniqueId {
    bytes: [c_char; 128],
}

entries! { plain:
    fn ncclGetVersion(version: Out<c_int>) {
        version.set(config().nccl_version)
    }
    fn ncclGetUniqueId(id: Out<UniqueId>) {
        id.set(UniqueId { bytes: [1; 128] })
    }
    fn ncclCommInitRank(communicator: Out<u64>, n_ranks: c_int, _id: UniqueId, _rank: c_int) {
        create(communicator, n_ranks)
    }
    fn ncclCommInitRankConfig(communicator: Out<u64>, n_ranks: c_int, _id: UniqueId, _rank: c_int, _config: u64) {
        create(communicator, n_ranks)
    }
    fn ncclCommInitRankScalable(
        communicator: Out<u64>,
        n_ranks: c_int,
        _rank: c_int,
        _n_ids: c_int,
        _ids: u64,
        _config: u64,
    ) {
        create(communicator, n_ranks)
    }
    fn ncclCommInitAll(communicators: Out<u64>, n_devices: c_int, _devices: u64) {
        create(communicators, n_devices)
    }
    fn ncclCommSplit(_communicator: u64, _color: c_int, _key: c_int, new: Out<u64>, _config: u64) {
        create(new, 1)
    }
    fn ncclCommCount(_communicator: u64, count: Out<c_int>) {
        count.set(1)
    }
    fn ncclCommUserRank(_communicator: u64, rank: Out<c_int>) {
        rank.set(0)
    }
    fn ncclCommCuDevice(_communicator: u64, device: Out<c_int>) {
        device.set(current_device())
    }
    fn ncclCommGetAsyncError(_communicator: u64, error: Out<c_int>) {
        error.set(0)
    }
    fn ncclMemAlloc(address: Out<u64>, bytes: usize) {
        malloc(address, bytes)
    }
    fn ncclMemFree(address: u64) {
        free(address)
    }
    fn ncclAllReduce(source: u64, target: u64, count: usize, kind: c_int, _op: c_int, _comm: u64, stream: u64) {
        copy(source, target, count, kind, stream)
    }
    fn ncclReduce(
        source: u64,
        target: u64,
        count: usize,
        kind: c_int,
        _op: c_int,
        _root: c_int,
        _comm: u64,
        stream: u64,
    ) {
        copy(source, target, count, kind, stream)
    }
    fn ncclReduceScatter(source: u64, target: u64, count: usize, kind: c_int, _op: c_int, _comm: u64, stream: u64) {
        copy(source, target, count, kind, stream)
    }
    fn ncclAllGather(source: u64, target: u64, count: usize, kind: c_int, _comm: u64, stream: u64) {
        copy(source, target, count, kind, stream)
    }
    fn ncclBroadcast(source: u64, target: u64, count: usize, kind: c_int, _root: c_int, _comm: u64, stream: u64) {
        copy(source, target, count, kind, stream)
    }
}

fn create(communicator: Out<u64>, n_ranks: c_int) -> Outcome {
    if n_ranks != 1 {
        communicator.set_if_asked(0);
        return Err(INVALID_USAGE);
    }
    communicator.set(gpu().kernels.handle())
}

fn copy(source: u64, target: u64, count: usize, kind: c_int, stream: u64) -> Outcome {
    // int8, uint8, int32, uint32, int64, uint64, half, float, double, bfloat16, and two of 8 bits.
    let width = match kind {
        0 | 1 | 10 | 11 => 1,
        6 | 9 => 2,
        4 | 5 | 8 => 8,
        _ => 4,
    };
    if source == target {
        return submit(stream, Work::Library);
    }
    submit(stream, Work::Copy { target, source, bytes: count as u64 * width })
}
