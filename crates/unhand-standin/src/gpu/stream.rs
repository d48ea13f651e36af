//! Streams and events. Everything is done at once, but may count as done only after a lag.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::code::{Code, Outcome};

/// A handle that is not a stream's: the device's default stream by its three names.
const LAST_DEFAULT: u64 = 2;
/// Handles of streams look like pointers: PyTorch orders blocks by them.
const FIRST_STREAM: u64 = 0x1000_0000;
const FIRST_EVENT: u64 = 0x4000_0000;

/// All streams and events of the process.
pub(crate) struct Streams {
    lag: Duration,
    by_handle: HashMap<u64, Stream>,
    events: HashMap<u64, Event>,
    next_stream: u64,
    next_event: u64,
}

/// One stream. Default streams come into being when they are first used.
#[derive(Clone, Debug)]
pub(crate) struct Stream {
    pub(crate) device: i32,
    pub(crate) priority: i32,
    /// Whether it orders itself with the legacy default stream.
    pub(crate) is_blocking: bool,
    /// The capture it is part of.
    pub(crate) capture: Option<u64>,
    n_submitted: u64,
    n_waited_for: u64,
    last_submitted: Option<Instant>,
}

/// One event.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    has_timing: bool,
    recorded: Option<Record>,
    /// The capture it was recorded in, and the nodes it stands for there.
    pub(crate) captured: Option<(u64, Vec<u64>)>,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    stream: u64,
    n_submitted: u64,
    at: Instant,
    was_waited_for: bool,
}

impl Streams {
    pub(crate) fn new(lag_us: u64) -> Streams {
        Streams {
            lag: Duration::from_micros(lag_us),
            by_handle: HashMap::new(),
            events: HashMap::new(),
            next_stream: FIRST_STREAM,
            next_event: FIRST_EVENT,
        }
    }

    /// Changes the lag from now on, for tests of deferred frees.
    pub(crate) fn set_lag(&mut self, lag_us: u64) {
        self.lag = Duration::from_micros(lag_us);
    }

    /// `cudaStreamCreateWithPriority`
    pub(crate) fn create(&mut self, device: i32, is_blocking: bool, priority: i32) -> u64 {
        let handle = self.next_stream;
        self.next_stream += 0x1000;
        self.by_handle.insert(handle, Stream::new(device, is_blocking, priority));
        handle
    }

    /// The key of a handle from a caller, whose current device tells what the default stream is.
    pub(crate) fn key(&mut self, handle: u64, device: i32) -> Result<u64, Code> {
        if handle > LAST_DEFAULT {
            return if self.by_handle.contains_key(&handle) { Ok(handle) } else { Err(Code::INVALID_HANDLE) };
        }
        let key = LAST_DEFAULT + 1 + u64::try_from(device).map_err(|_| Code::INVALID_DEVICE)?;
        self.by_handle.entry(key).or_insert_with(|| Stream::new(device, true, 0));
        Ok(key)
    }

    /// Whether a key is that of a default stream.
    pub(crate) fn is_default(key: u64) -> bool {
        key < FIRST_STREAM
    }

    pub(crate) fn get(&self, key: u64) -> Result<&Stream, Code> {
        self.by_handle.get(&key).ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn get_mut(&mut self, key: u64) -> Result<&mut Stream, Code> {
        self.by_handle.get_mut(&key).ok_or(Code::INVALID_HANDLE)
    }

    /// Takes all streams out of a capture.
    pub(crate) fn leave_capture(&mut self, capture: u64) {
        for stream in self.by_handle.values_mut().filter(|stream| stream.capture == Some(capture)) {
            stream.capture = None;
        }
    }

    /// `cudaStreamDestroy`: what was submitted is finished first.
    pub(crate) fn destroy(&mut self, handle: u64) -> Outcome {
        if handle <= LAST_DEFAULT {
            return Err(Code::INVALID_HANDLE);
        }
        self.by_handle.remove(&handle).map(drop).ok_or(Code::INVALID_HANDLE)
    }

    /// Something is put on a stream.
    pub(crate) fn submit(&mut self, key: u64) -> Outcome {
        let stream = self.get_mut(key)?;
        stream.n_submitted += 1;
        stream.last_submitted = Some(Instant::now());
        Ok(())
    }

    /// `cudaStreamQuery`
    pub(crate) fn is_done(&self, key: u64) -> Result<bool, Code> {
        let stream = self.get(key)?;
        Ok(stream.n_waited_for == stream.n_submitted
            || stream.last_submitted.is_none_or(|at| at.elapsed() >= self.lag))
    }

    /// `cudaStreamSynchronize`: time jumps to the end of what is on the stream.
    pub(crate) fn wait(&mut self, key: u64) -> Outcome {
        let stream = self.get_mut(key)?;
        stream.n_waited_for = stream.n_submitted;
        Ok(())
    }

    /// `cudaDeviceSynchronize`
    pub(crate) fn wait_for_device(&mut self, device: i32) {
        for stream in self.by_handle.values_mut().filter(|stream| stream.device == device) {
            stream.n_waited_for = stream.n_submitted;
        }
    }

    pub(crate) fn create_event(&mut self, has_timing: bool) -> u64 {
        let handle = self.next_event;
        self.next_event += 0x40;
        self.events.insert(handle, Event { has_timing, recorded: None, captured: None });
        handle
    }

    pub(crate) fn destroy_event(&mut self, event: u64) -> Outcome {
        self.events.remove(&event).map(drop).ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn event(&self, event: u64) -> Result<&Event, Code> {
        self.events.get(&event).ok_or(Code::INVALID_HANDLE)
    }

    /// `cudaEventRecord`
    pub(crate) fn record(&mut self, event: u64, key: u64) -> Outcome {
        self.submit(key)?;
        let n_submitted = self.get(key)?.n_submitted;
        let event = self.events.get_mut(&event).ok_or(Code::INVALID_HANDLE)?;
        event.recorded = Some(Record { stream: key, n_submitted, at: Instant::now(), was_waited_for: false });
        event.captured = None;
        Ok(())
    }

    /// The same inside a capture: the event stands for nodes, and no time passes.
    pub(crate) fn record_captured(&mut self, event: u64, capture: u64, nodes: Vec<u64>) -> Outcome {
        let event = self.events.get_mut(&event).ok_or(Code::INVALID_HANDLE)?;
        event.captured = Some((capture, nodes));
        Ok(())
    }

    /// `cudaEventQuery`
    pub(crate) fn is_event_done(&self, event: u64) -> Result<bool, Code> {
        let Some(record) = self.event(event)?.recorded else { return Ok(true) };
        let was_stream_waited_for =
            self.by_handle.get(&record.stream).is_none_or(|stream| stream.n_waited_for >= record.n_submitted);
        Ok(record.was_waited_for || was_stream_waited_for || record.at.elapsed() >= self.lag)
    }

    /// `cudaEventSynchronize`: everything up to the event is done, too.
    pub(crate) fn wait_for_event(&mut self, event: u64) -> Outcome {
        let event = self.events.get_mut(&event).ok_or(Code::INVALID_HANDLE)?;
        if let Some(record) = &mut event.recorded {
            record.was_waited_for = true;
            let (key, n_submitted) = (record.stream, record.n_submitted);
            if let Some(stream) = self.by_handle.get_mut(&key) {
                stream.n_waited_for = stream.n_waited_for.max(n_submitted);
            }
        }
        Ok(())
    }

    /// `cudaEventElapsedTime`, in milliseconds.
    pub(crate) fn elapsed_ms(&self, start: u64, end: u64) -> Result<f32, Code> {
        let (first, last) = (self.event(start)?, self.event(end)?);
        let (Some(from), Some(to)) = (first.recorded, last.recorded) else {
            return Err(Code::INVALID_HANDLE);
        };
        if !first.has_timing || !last.has_timing {
            return Err(Code::INVALID_HANDLE);
        }
        if !self.is_event_done(start)? || !self.is_event_done(end)? {
            return Err(Code::NOT_READY);
        }
        let forward = to.at.saturating_duration_since(from.at).as_secs_f32();
        let backward = from.at.saturating_duration_since(to.at).as_secs_f32();
        Ok((forward - backward) * 1e3)
    }
}

impl Stream {
    fn new(device: i32, is_blocking: bool, priority: i32) -> Stream {
        Stream {
            device,
            priority,
            is_blocking,
            capture: None,
            n_submitted: 0,
            n_waited_for: 0,
            last_submitted: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_lag_everything_is_done_at_once() {
        let mut streams = Streams::new(0);
        let (stream, event) = (streams.create(0, false, 0), streams.create_event(true));
        assert_eq!(streams.is_event_done(event), Ok(true));
        streams.record(event, stream).expect("both exist");
        assert_eq!((streams.is_event_done(event), streams.is_done(stream)), (Ok(true), Ok(true)));
        assert_eq!(streams.elapsed_ms(event, event), Ok(0.0));
    }

    #[test]
    fn with_lag_an_event_is_done_when_somebody_waited() {
        let mut streams = Streams::new(3_600_000_000);
        let stream = streams.create(0, false, 0);
        let (early, late) = (streams.create_event(true), streams.create_event(true));
        streams.record(early, stream).expect("both exist");
        streams.record(late, stream).expect("both exist");
        assert_eq!(streams.is_event_done(early), Ok(false));
        assert_eq!(streams.elapsed_ms(early, late), Err(Code::NOT_READY));
        streams.wait_for_event(early).expect("exists");
        assert_eq!((streams.is_event_done(early), streams.is_event_done(late)), (Ok(true), Ok(false)));
        streams.wait_for_device(0);
        assert_eq!((streams.is_event_done(late), streams.is_done(stream)), (Ok(true), Ok(true)));
    }

    #[test]
    fn each_device_has_a_default_stream() {
        let mut streams = Streams::new(0);
        let (first, second) = (streams.key(0, 0).expect("exists"), streams.key(0, 1).expect("exists"));
        assert!(first != second && Streams::is_default(second));
        assert_eq!(streams.key(77, 0), Err(Code::INVALID_HANDLE));
        let stream = streams.create(1, true, -3);
        assert_eq!(streams.key(stream, 0), Ok(stream));
        assert_eq!((streams.destroy(stream), streams.destroy(stream)), (Ok(()), Err(Code::INVALID_HANDLE)));
    }
}
