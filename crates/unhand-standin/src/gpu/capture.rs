//! Stream capture, as strict as CUDA's: what is not allowed fails, and spoils the capture.

use std::cell::Cell;
use std::collections::HashMap;

use super::graph::Work;
use super::stream::Streams;
use super::{Gpu, current_device};
use crate::code::{Code, Outcome};
use crate::sys;

thread_local! {
    /// How this thread wants its unsafe calls treated (`cudaThreadExchangeStreamCaptureMode`).
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// How far the prohibition of unsafe calls reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Every thread.
    Global,
    /// The thread that captures.
    ThreadLocal,
    /// Nobody.
    Relaxed,
}

impl Mode {
    pub(crate) fn from_number(number: i32) -> Result<Mode, Code> {
        match number {
            0 => Ok(Mode::Global),
            1 => Ok(Mode::ThreadLocal),
            2 => Ok(Mode::Relaxed),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    pub(crate) fn number(self) -> i32 {
        match self {
            Mode::Global => 0,
            Mode::ThreadLocal => 1,
            Mode::Relaxed => 2,
        }
    }
}

/// Captures that are open.
#[derive(Default)]
pub(crate) struct Captures {
    open: HashMap<u64, Capture>,
    last_id: u64,
}

#[derive(Debug)]
struct Capture {
    mode: Mode,
    thread: u64,
    origin: u64,
    graph: u64,
    is_spoiled: bool,
    /// Stream → the nodes that what comes next on it has to wait for.
    last: HashMap<u64, Vec<u64>>,
}

/// What `cudaStreamGetCaptureInfo` tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// The stream is not being captured.
    None,
    /// It is, into a graph; these nodes come last.
    Active { id: u64, graph: u64, last: Vec<u64> },
    /// It is, but something forbidden was done.
    Spoiled { id: u64 },
}

/// Sets this thread's mode and returns what it was.
pub(crate) fn exchange_mode(mode: Mode) -> Mode {
    MODE.replace(mode)
}

impl Gpu {
    /// `cudaStreamBeginCapture`, into a new graph or, after given nodes, into one that exists.
    pub(crate) fn begin_capture(
        &mut self,
        handle: u64,
        mode: Mode,
        into: Option<(u64, Vec<u64>)>,
    ) -> Outcome {
        let key = self.streams.key(handle, current_device())?;
        if Streams::is_default(key) {
            return Err(Code::CAPTURE_UNSUPPORTED);
        }
        if self.streams.get(key)?.capture.is_some() {
            return Err(Code::ILLEGAL_STATE);
        }
        let (graph, last) = into.unwrap_or_else(|| (self.graphs.create(), Vec::new()));
        self.captures.last_id += 1;
        let id = self.captures.last_id;
        let capture = Capture {
            mode,
            thread: sys::thread(),
            origin: key,
            graph,
            is_spoiled: false,
            last: HashMap::from([(key, last)]),
        };
        self.captures.open.insert(id, capture);
        self.streams.get_mut(key)?.capture = Some(id);
        Ok(())
    }

    /// `cudaStreamEndCapture`. An error ends the capture, too, except on the wrong stream or thread.
    pub(crate) fn end_capture(&mut self, handle: u64) -> Result<u64, Code> {
        let key = self.streams.key(handle, current_device())?;
        let id = self.streams.get(key)?.capture.ok_or(Code::ILLEGAL_STATE)?;
        let capture = self.captures.open.get_mut(&id).ok_or(Code::ILLEGAL_STATE)?;
        if capture.origin != key {
            capture.is_spoiled = true;
            return Err(Code::CAPTURE_UNMATCHED);
        }
        if capture.mode != Mode::Relaxed && capture.thread != sys::thread() {
            capture.is_spoiled = true;
            return Err(Code::CAPTURE_WRONG_THREAD);
        }
        let Some(capture) = self.captures.open.remove(&id) else { return Err(Code::ILLEGAL_STATE) };
        self.streams.leave_capture(id);
        let last = capture.last.get(&key).map_or(&[][..], Vec::as_slice);
        let failure = if capture.is_spoiled {
            Some(Code::CAPTURE_INVALIDATED)
        } else if self.graphs.is_covered_by(capture.graph, last) {
            None
        } else {
            Some(Code::CAPTURE_UNJOINED)
        };
        match failure {
            None => Ok(capture.graph),
            Some(code) => {
                // Objects of a graph that never came to be are few; their destructors are not run.
                let _ = self.graphs.destroy(capture.graph);
                Err(code)
            }
        }
    }

    /// What there is to say about a stream's capture.
    pub(crate) fn capture_status(&mut self, handle: u64) -> Result<Status, Code> {
        let key = self.streams.key(handle, current_device())?;
        let Some(id) = self.streams.get(key)?.capture else {
            if Streams::is_default(key) && self.is_blocking_captured() {
                return Err(Code::CAPTURE_IMPLICIT);
            }
            return Ok(Status::None);
        };
        let Some(capture) = self.captures.open.get(&id) else { return Ok(Status::None) };
        if capture.is_spoiled {
            return Ok(Status::Spoiled { id });
        }
        let last = capture.last.get(&key).cloned().unwrap_or_default();
        Ok(Status::Active { id, graph: capture.graph, last })
    }

    /// `cudaStreamUpdateCaptureDependencies`
    pub(crate) fn set_last(&mut self, handle: u64, nodes: Vec<u64>, is_replacement: bool) -> Outcome {
        let key = self.streams.key(handle, current_device())?;
        let id = self.streams.get(key)?.capture.ok_or(Code::ILLEGAL_STATE)?;
        let capture = self.captures.open.get_mut(&id).ok_or(Code::ILLEGAL_STATE)?;
        if nodes.iter().any(|node| self.graphs.graph_of(*node) != Some(capture.graph)) {
            return Err(Code::INVALID_VALUE);
        }
        let last = capture.last.entry(key).or_default();
        if is_replacement {
            *last = nodes;
        } else {
            add_new(last, &nodes);
        }
        Ok(())
    }

    /// Refuses a call that CUDA does not allow while a capture is open, and spoils the captures concerned.
    pub(crate) fn unsafe_call(&mut self) -> Outcome {
        let own_mode = MODE.get();
        if self.captures.open.is_empty() || own_mode == Mode::Relaxed {
            return Ok(());
        }
        let thread = sys::thread();
        let mut outcome = Ok(());
        for capture in self.captures.open.values_mut() {
            let concerns_own = capture.thread == thread && capture.mode != Mode::Relaxed;
            let concerns_all = own_mode == Mode::Global && capture.mode == Mode::Global;
            if concerns_own || concerns_all {
                capture.is_spoiled = true;
                outcome = Err(Code::CAPTURE_UNSUPPORTED);
            }
        }
        outcome
    }

    /// Refuses to wait for, or ask about, a stream that is being captured.
    pub(crate) fn not_captured(&mut self, key: u64) -> Outcome {
        let Some(id) = self.streams.get(key)?.capture else {
            if Streams::is_default(key) && self.is_blocking_captured() {
                self.spoil_blocking();
                return Err(Code::CAPTURE_IMPLICIT);
            }
            return Ok(());
        };
        if let Some(capture) = self.captures.open.get_mut(&id) {
            capture.is_spoiled = true;
        }
        Err(Code::CAPTURE_UNSUPPORTED)
    }

    /// Puts work on a stream. Gives it back to be done now, or keeps it for the graph.
    pub(crate) fn enqueue(&mut self, handle: u64, work: Work) -> Result<Option<Work>, Code> {
        self.current()?;
        let key = self.streams.key(handle, current_device())?;
        let Some(id) = self.streams.get(key)?.capture else {
            if Streams::is_default(key) && self.is_blocking_captured() {
                self.spoil_blocking();
                return Err(Code::CAPTURE_IMPLICIT);
            }
            self.streams.submit(key)?;
            return Ok(Some(work));
        };
        let capture = self.captures.open.get_mut(&id).ok_or(Code::ILLEGAL_STATE)?;
        if capture.is_spoiled {
            return Err(Code::CAPTURE_INVALIDATED);
        }
        let last = capture.last.entry(key).or_default();
        let node = self.graphs.add(capture.graph, work, last.clone())?;
        *last = vec![node];
        Ok(None)
    }

    /// `cudaEventRecord`
    pub(crate) fn record_event(&mut self, event: u64, handle: u64) -> Outcome {
        let key = self.streams.key(handle, current_device())?;
        match self.streams.get(key)?.capture {
            None => self.streams.record(event, key),
            Some(id) => {
                let capture = self.captures.open.get(&id).ok_or(Code::ILLEGAL_STATE)?;
                let last = capture.last.get(&key).cloned().unwrap_or_default();
                self.streams.record_captured(event, id, last)
            }
        }
    }

    /// `cudaStreamWaitEvent`: waiting for an event of a capture makes a stream part of it.
    pub(crate) fn wait_event(&mut self, handle: u64, event: u64) -> Outcome {
        let key = self.streams.key(handle, current_device())?;
        let own = self.streams.get(key)?.capture;
        let captured = self.streams.event(event)?.captured.clone();
        let captured = captured.filter(|(id, _)| self.captures.open.contains_key(id));
        match (own, captured) {
            (None, None) => Ok(()),
            (Some(id), None) => {
                // The graph would depend on something outside of it.
                if let Some(capture) = self.captures.open.get_mut(&id) {
                    capture.is_spoiled = true;
                }
                Err(Code::CAPTURE_ISOLATION)
            }
            (own, Some((id, nodes))) => {
                if own.is_some_and(|own| own != id) {
                    for id in own.into_iter().chain([id]) {
                        if let Some(capture) = self.captures.open.get_mut(&id) {
                            capture.is_spoiled = true;
                        }
                    }
                    return Err(Code::CAPTURE_MERGE);
                }
                if Streams::is_default(key) {
                    return Err(Code::CAPTURE_IMPLICIT);
                }
                self.streams.get_mut(key)?.capture = Some(id);
                if let Some(capture) = self.captures.open.get_mut(&id) {
                    add_new(capture.last.entry(key).or_default(), &nodes);
                }
                Ok(())
            }
        }
    }

    /// Refuses to ask about an event that stands for nodes, and calls that no capture allows.
    pub(crate) fn ask_event(&mut self, event: u64) -> Outcome {
        let captured = self.streams.event(event)?.captured.clone();
        if let Some((id, _)) = captured
            && let Some(capture) = self.captures.open.get_mut(&id)
        {
            capture.is_spoiled = true;
            return Err(Code::CAPTURED_EVENT);
        }
        Ok(())
    }

    /// A call into a library on behalf of this thread: part of the capture it has open, if any.
    pub(crate) fn library_call(&mut self) {
        if self.captures.open.is_empty() {
            return;
        }
        let thread = sys::thread();
        let newest = self.captures.open.iter_mut().filter(|(_, capture)| capture.thread == thread);
        let Some((_, capture)) = newest.max_by_key(|(id, _)| **id) else { return };
        if capture.is_spoiled {
            return;
        }
        let last = capture.last.entry(capture.origin).or_default();
        if let Ok(node) = self.graphs.add(capture.graph, Work::Library, last.clone()) {
            *last = vec![node];
        }
    }

    fn is_blocking_captured(&self) -> bool {
        self.captures.open.values().any(|capture| self.is_blocking(capture.origin))
    }

    fn is_blocking(&self, key: u64) -> bool {
        self.streams.get(key).is_ok_and(|stream| stream.is_blocking)
    }

    fn spoil_blocking(&mut self) {
        let streams = &self.streams;
        for capture in self.captures.open.values_mut() {
            if streams.get(capture.origin).is_ok_and(|stream| stream.is_blocking) {
                capture.is_spoiled = true;
            }
        }
    }
}

fn add_new(last: &mut Vec<u64>, nodes: &[u64]) {
    for node in nodes {
        if !last.contains(node) {
            last.push(*node);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn captured() -> (Gpu, u64) {
        let mut gpu = Gpu::new(&Config::from(|_| None));
        let stream = gpu.streams.create(0, false, 0);
        gpu.begin_capture(stream, Mode::Global, None).expect("nothing is captured");
        (gpu, stream)
    }

    #[test]
    fn work_becomes_nodes_in_order() {
        let (mut gpu, stream) = captured();
        assert_eq!(gpu.enqueue(stream, Work::Library), Ok(None));
        assert_eq!(gpu.enqueue(stream, Work::Empty), Ok(None));
        let graph = gpu.end_capture(stream).expect("nothing forbidden was done");
        let nodes = gpu.graphs.nodes(graph).expect("exists").to_vec();
        assert_eq!(gpu.graphs.node(nodes[1]).expect("exists").dependencies, nodes[..1]);
        assert_eq!(gpu.enqueue(stream, Work::Empty), Ok(Some(Work::Empty)));
    }

    #[test]
    fn an_unsafe_call_spoils_the_capture_unless_the_thread_is_relaxed() {
        let (mut gpu, stream) = captured();
        let before = exchange_mode(Mode::Relaxed);
        assert_eq!(gpu.unsafe_call(), Ok(()));
        exchange_mode(before);
        assert_eq!(gpu.unsafe_call(), Err(Code::CAPTURE_UNSUPPORTED));
        assert_eq!(gpu.enqueue(stream, Work::Empty), Err(Code::CAPTURE_INVALIDATED));
        assert_eq!(gpu.end_capture(stream), Err(Code::CAPTURE_INVALIDATED));
        assert_eq!(gpu.capture_status(stream), Ok(Status::None));
    }

    #[test]
    fn forks_have_to_be_joined() {
        for is_joined in [true, false] {
            let (mut gpu, stream) = captured();
            let side = gpu.streams.create(0, false, 0);
            let (fork, join) = (gpu.streams.create_event(false), gpu.streams.create_event(false));
            gpu.record_event(fork, stream).expect("captured");
            gpu.wait_event(side, fork).expect("joins the capture");
            assert_eq!(gpu.enqueue(side, Work::Library), Ok(None));
            gpu.record_event(join, side).expect("captured");
            if is_joined {
                gpu.wait_event(stream, join).expect("same capture");
            }
            let ended = gpu.end_capture(stream).map(drop);
            assert_eq!(ended, if is_joined { Ok(()) } else { Err(Code::CAPTURE_UNJOINED) });
        }
    }

    #[test]
    fn asking_about_an_event_of_a_capture_spoils_it() {
        let (mut gpu, stream) = captured();
        let event = gpu.streams.create_event(false);
        gpu.record_event(event, stream).expect("captured");
        assert_eq!(gpu.ask_event(event), Err(Code::CAPTURED_EVENT));
        assert_eq!(gpu.end_capture(stream), Err(Code::CAPTURE_INVALIDATED));
    }

    #[test]
    fn the_default_stream_cannot_be_captured() {
        let mut gpu = Gpu::new(&Config::from(|_| None));
        assert_eq!(gpu.begin_capture(0, Mode::Global, None), Err(Code::CAPTURE_UNSUPPORTED));
        assert_eq!(gpu.end_capture(0), Err(Code::ILLEGAL_STATE));
    }

    #[test]
    fn waiting_for_something_outside_is_refused() {
        let (mut gpu, stream) = captured();
        let event = gpu.streams.create_event(false);
        assert_eq!(gpu.wait_event(stream, event), Err(Code::CAPTURE_ISOLATION));
        let key = gpu.streams.key(stream, 0).expect("exists");
        assert_eq!(gpu.not_captured(key), Err(Code::CAPTURE_UNSUPPORTED));
    }
}
