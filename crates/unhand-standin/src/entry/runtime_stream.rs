//! The runtime about streams, events and stream capture.

use std::cell::RefCell;
use std::ffi::{c_int, c_uint};

use super::entries;
use crate::code::{Code, Outcome};
use crate::gpu::capture::{Mode, Status, exchange_mode};
use crate::gpu::copy::submit;
use crate::gpu::graph::Work;
use crate::gpu::{config, current_device, gpu};
use crate::pointers::{In, Out};

const NON_BLOCKING: c_uint = 1;
const NO_TIMING: c_uint = 2;

thread_local! {
    /// What the pointers that `cudaStreamGetCaptureInfo` hands out point to, until the thread asks again.
    static LAST_NODES: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

entries! { runtime:
    fn cudaStreamCreate(stream: Out<u64>) {
        create(stream, 0, 0)
    }
    fn cudaStreamCreateWithFlags(stream: Out<u64>, flags: c_uint) {
        create(stream, flags, 0)
    }
    fn cudaStreamCreateWithPriority(stream: Out<u64>, flags: c_uint, priority: c_int) {
        create(stream, flags, priority)
    }
    fn cudaStreamDestroy(stream: u64) {
        gpu().streams.destroy(stream)
    }
    fn cudaStreamGetPriority(stream: u64, priority: Out<c_int>) {
        let mut gpu = gpu();
        let key = gpu.streams.key(stream, current_device())?;
        priority.set(gpu.streams.get(key)?.priority)
    }
    fn cudaStreamGetFlags(stream: u64, flags: Out<c_uint>) {
        let mut gpu = gpu();
        let key = gpu.streams.key(stream, current_device())?;
        flags.set(if gpu.streams.get(key)?.is_blocking { 0 } else { NON_BLOCKING })
    }
    fn cudaStreamGetDevice(stream: u64, device: Out<c_int>) {
        let mut gpu = gpu();
        let key = gpu.streams.key(stream, current_device())?;
        device.set(gpu.streams.get(key)?.device)
    }
    fn cudaStreamGetId(stream: u64, id: Out<u64>) {
        id.set(stream)
    }
    fn cudaStreamQuery(stream: u64) {
        let mut gpu = gpu();
        let key = gpu.streams.key(stream, current_device())?;
        gpu.not_captured(key)?;
        gpu.unsafe_call()?;
        if gpu.streams.is_done(key)? { Ok(()) } else { Err(Code::NOT_READY) }
    }
    fn cudaStreamSynchronize(stream: u64) {
        let mut gpu = gpu();
        let key = gpu.streams.key(stream, current_device())?;
        gpu.not_captured(key)?;
        gpu.unsafe_call()?;
        gpu.streams.wait(key)
    }
    fn cudaStreamWaitEvent(stream: u64, event: u64, _flags: c_uint) {
        gpu().wait_event(stream, event)
    }
    fn cudaStreamAddCallback(stream: u64, function: u64, data: u64, _flags: c_uint) {
        submit(stream, Work::Callback { function, stream, data })
    }
    fn cudaLaunchHostFunc(stream: u64, function: u64, data: u64) {
        submit(stream, Work::Host { function, data })
    }

    fn cudaEventCreate(event: Out<u64>) {
        let mut gpu = gpu();
        gpu.current()?;
        event.set(gpu.streams.create_event(true))
    }
    fn cudaEventCreateWithFlags(event: Out<u64>, flags: c_uint) {
        let mut gpu = gpu();
        gpu.current()?;
        event.set(gpu.streams.create_event(flags & NO_TIMING == 0))
    }
    fn cudaEventDestroy(event: u64) {
        gpu().streams.destroy_event(event)
    }
    fn cudaEventRecord(event: u64, stream: u64) {
        gpu().record_event(event, stream)
    }
    fn cudaEventRecordWithFlags(event: u64, stream: u64, _flags: c_uint) {
        gpu().record_event(event, stream)
    }
    fn cudaEventQuery(event: u64) {
        let mut gpu = gpu();
        gpu.ask_event(event)?;
        gpu.unsafe_call()?;
        if gpu.streams.is_event_done(event)? { Ok(()) } else { Err(Code::NOT_READY) }
    }
    fn cudaEventSynchronize(event: u64) {
        let mut gpu = gpu();
        gpu.ask_event(event)?;
        gpu.unsafe_call()?;
        gpu.streams.wait_for_event(event)
    }
    fn cudaEventElapsedTime(milliseconds: Out<f32>, start: u64, end: u64) {
        milliseconds.set(gpu().streams.elapsed_ms(start, end)?)
    }
    fn cudaEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) {
        milliseconds.set(gpu().streams.elapsed_ms(start, end)?)
    }

    fn cudaStreamBeginCapture(stream: u64, mode: c_int) {
        gpu().begin_capture(stream, Mode::from_number(mode)?, None)
    }
    fn cudaStreamBeginCaptureToGraph(
        stream: u64,
        graph: u64,
        dependencies: In<u64>,
        _edges: u64,
        n_dependencies: usize,
        mode: c_int,
    ) {
        let dependencies = list(dependencies, n_dependencies)?;
        let mut gpu = gpu();
        gpu.graphs.nodes(graph)?;
        gpu.begin_capture(stream, Mode::from_number(mode)?, Some((graph, dependencies)))
    }
    fn cudaStreamEndCapture(stream: u64, graph: Out<u64>) {
        let ended = gpu().end_capture(stream);
        graph.set(*ended.as_ref().unwrap_or(&0))?;
        ended.map(drop)
    }
    fn cudaStreamIsCapturing(stream: u64, status: Out<c_int>) {
        status.set(match gpu().capture_status(stream)? {
            Status::None => 0,
            Status::Active { .. } => 1,
            Status::Spoiled { .. } => 2,
        })
    }
    fn cudaStreamGetCaptureInfo(
        stream: u64,
        status: Out<c_int>,
        id: Out<u64>,
        graph: Out<u64>,
        nodes: Out<u64>,
        edges: Out<u64>,
        n_nodes: Out<usize>,
    ) {
        edges.set_if_asked(0);
        capture_info(stream, status, id, graph, nodes, n_nodes)
    }
    fn cudaStreamGetCaptureInfo_v2(
        stream: u64,
        status: Out<c_int>,
        id: Out<u64>,
        graph: Out<u64>,
        nodes: Out<u64>,
        n_nodes: Out<usize>,
    ) {
        capture_info(stream, status, id, graph, nodes, n_nodes)
    }
    fn cudaStreamGetCaptureInfo_v3(
        stream: u64,
        status: Out<c_int>,
        id: Out<u64>,
        graph: Out<u64>,
        nodes: Out<u64>,
        edges: Out<u64>,
        n_nodes: Out<usize>,
    ) {
        edges.set_if_asked(0);
        capture_info(stream, status, id, graph, nodes, n_nodes)
    }
    fn cudaStreamUpdateCaptureDependencies(stream: u64, nodes: In<u64>, third: usize, fourth: usize, fifth: c_uint) {
        // CUDA 12: nodes, count, flags. CUDA 13: nodes, data of the edges, count, flags.
        let (count, flags) = if config().cuda_major() < 13 {
            (third, c_uint::try_from(fourth & 0xffff_ffff).unwrap_or(0))
        } else {
            (fourth, fifth)
        };
        gpu().set_last(stream, list(nodes, count)?, flags & 1 == 1)
    }
    fn cudaThreadExchangeStreamCaptureMode(mode: Out<c_int>) {
        let before = exchange_mode(Mode::from_number(mode.get()?)?);
        mode.set(before.number())
    }
}

fn create(stream: Out<u64>, flags: c_uint, priority: c_int) -> Outcome {
    let is_blocking = flags & NON_BLOCKING == 0;
    let mut gpu = gpu();
    gpu.current()?;
    stream.set(gpu.streams.create(current_device(), is_blocking, priority.clamp(-5, 0)))
}

fn list(nodes: In<u64>, count: usize) -> Result<Vec<u64>, Code> {
    (0..count).map(|index| nodes.at(index).get()).collect()
}

fn capture_info(
    stream: u64,
    status: Out<c_int>,
    id: Out<u64>,
    graph: Out<u64>,
    nodes: Out<u64>,
    n_nodes: Out<usize>,
) -> Outcome {
    let found = gpu().capture_status(stream)?;
    let (number, its_id, its_graph, last) = match found {
        Status::None => (0, 0, 0, Vec::new()),
        Status::Active { id, graph, last } => (1, id, graph, last),
        Status::Spoiled { id } => (2, id, 0, Vec::new()),
    };
    status.set(number)?;
    id.set_if_asked(its_id);
    graph.set_if_asked(its_graph);
    n_nodes.set_if_asked(last.len());
    LAST_NODES.with_borrow_mut(|kept| {
        *kept = last;
        nodes.set_if_asked(kept.as_ptr() as u64);
    });
    Ok(())
}
