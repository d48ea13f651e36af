//! Writing a snapshot as a pickle of protocol 4, with the keys in PyTorch's order and each frame and stack once.

use std::collections::HashMap;
use std::io::Write;

use crate::pickler::Pickler;
use crate::trace::keys as bits;
use crate::{
    AllocatorSettings, Annotation, Block, BlockState, Error, Extra, FrameId, PoolId, Segment, SegmentKind,
    Snapshot, StackId, Stage, StringId, Trace, Value, keys,
};

/// Picklers end a run of items here, so that a reader's stack stays small.
const BATCH: usize = 1000;

impl Snapshot {
    /// Writes the snapshot as `pickle.dump` of PyTorch's own would: protocol 4, which `pickle.load`,
    /// `torch.cuda._memory_viz` and PyTorch's web page all read.
    ///
    /// Keys the file had and this crate has no field for are written too, and keys it lacked are left out. Of the
    /// settings with a field, the field is what counts. Wrap a file in a `BufWriter` or not: it makes no difference.
    ///
    /// # Errors
    ///
    /// [`Error::Write`] if the writer fails, [`Error::Unwritable`] for values nested deeper than
    /// [`Value::MAX_DEPTH`] or ids of another snapshot.
    ///
    /// ```
    /// use unhand_snapshot::{Action, Event, PoolId, ReadOptions, Snapshot, StackId, StringId, Trace};
    /// let mut trace = Trace::default();
    /// trace.push(Event {
    ///     action: Action::Alloc,
    ///     addr: 0x7f00_0000_0000,
    ///     size: 512,
    ///     stream: 0,
    ///     time_us: Some(1),
    ///     stack: StackId::NONE,
    ///     compile_context: StringId::default(),
    ///     user_metadata: StringId::default(),
    ///     pool_id: Some(PoolId(0, 0)),
    ///     action_name: StringId::default(),
    /// });
    /// let snapshot = Snapshot { traces: vec![trace], ..Snapshot::default() };
    /// let mut bytes = Vec::new();
    /// snapshot.write(&mut bytes)?;
    /// let again = Snapshot::read(&bytes, &ReadOptions::default())?;
    /// assert_eq!(again.traces[0].event(0), snapshot.traces[0].event(0));
    /// # Ok::<(), unhand_snapshot::Error>(())
    /// ```
    pub fn write(&self, w: &mut impl Write) -> Result<(), Error> {
        let mut writer = Writer {
            snapshot: self,
            out: Pickler::new(w)?,
            texts: vec![None; self.strings.len()],
            frames: vec![None; self.stacks.n_frames()],
            stacks: HashMap::new(),
            pools: HashMap::new(),
            keys: vec![None; keys::LAST.0 as usize + 1],
        };
        writer.snapshot()?;
        writer.out.finish()
    }
}

/// A snapshot being written, and what the reader of the pickle will remember by then.
struct Writer<'s, W: Write> {
    snapshot: &'s Snapshot,
    out: Pickler<W>,
    /// Memo places by text, frame, stack, pool and fixed key.
    texts: Vec<Option<u32>>,
    frames: Vec<Option<u32>>,
    stacks: HashMap<StackId, u32>,
    pools: HashMap<PoolId, u32>,
    keys: Vec<Option<u32>>,
}

impl<W: Write> Writer<'_, W> {
    fn snapshot(&mut self) -> Result<(), Error> {
        let snapshot = self.snapshot;
        let layout = snapshot.layout;
        if layout.is_segment_list {
            return self.segments(&snapshot.segments);
        }
        self.out.begin_dict()?;
        if layout.has_segments || !snapshot.segments.is_empty() {
            self.key(keys::SEGMENTS)?;
            self.segments(&snapshot.segments)?;
        }
        if layout.has_traces || !snapshot.traces.is_empty() {
            self.key(keys::DEVICE_TRACES)?;
            self.traces(&snapshot.traces)?;
        }
        if layout.has_host_segments || !snapshot.host_segments.is_empty() {
            self.key(keys::HOST_SEGMENTS)?;
            self.segments(&snapshot.host_segments)?;
        }
        if layout.has_host_traces || !snapshot.host_traces.is_empty() {
            self.key(keys::HOST_TRACES)?;
            self.traces(&snapshot.host_traces)?;
        }
        if snapshot.settings.present {
            self.key(keys::ALLOCATOR_SETTINGS)?;
            self.settings(&snapshot.settings)?;
        }
        if layout.has_annotations || !snapshot.annotations.is_empty() {
            self.key(keys::EXTERNAL_ANNOTATIONS)?;
            self.list(&snapshot.annotations, Self::annotation)?;
        }
        self.entries(snapshot.extra.iter().map(|(key, value)| (key.as_str(), value)))?;
        self.out.end_dict()
    }

    fn list<T>(
        &mut self,
        items: &[T],
        mut write: impl FnMut(&mut Self, &T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.begin_list()?;
        for batch in items.chunks(BATCH) {
            self.out.mark()?;
            for item in batch {
                write(self, item)?;
            }
            self.out.appends()?;
        }
        Ok(())
    }

    fn segments(&mut self, segments: &[Segment]) -> Result<(), Error> {
        self.list(segments, Self::segment)
    }

    fn traces(&mut self, traces: &[Trace]) -> Result<(), Error> {
        self.list(traces, |writer, trace| {
            writer.out.begin_list()?;
            let mut index = 0;
            while index < trace.len() {
                writer.out.mark()?;
                let end = trace.len().min(index + BATCH);
                for at in index..end {
                    writer.event(trace, at)?;
                }
                writer.out.appends()?;
                index = end;
            }
            Ok(())
        })
    }

    fn segment(&mut self, segment: &Segment) -> Result<(), Error> {
        self.out.begin_dict()?;
        let numbers = [
            (keys::ADDRESS, segment.address),
            (keys::TOTAL_SIZE, segment.total_size),
            (keys::ALLOCATED_SIZE, segment.allocated_size),
            (keys::ACTIVE_SIZE, segment.active_size),
            (keys::REQUESTED_SIZE, segment.requested_size),
            (keys::STREAM, segment.stream),
        ];
        let has = |key: StringId| has(&keys::SEGMENT_KEYS, &segment.extra, key);
        if has(keys::DEVICE) {
            self.key(keys::DEVICE)?;
            self.out.int(segment.device.into())?;
        }
        for (key, number) in numbers.into_iter().filter(|(key, _)| has(*key)) {
            self.key(key)?;
            self.out.unsigned(number)?;
        }
        if has(keys::SEGMENT_TYPE) {
            self.key(keys::SEGMENT_TYPE)?;
            self.key(match segment.kind {
                SegmentKind::Small => keys::SMALL,
                SegmentKind::Large => keys::LARGE,
            })?;
        }
        if has(keys::SEGMENT_POOL_ID) {
            self.key(keys::SEGMENT_POOL_ID)?;
            self.pool(segment.pool_id)?;
        }
        if has(keys::IS_EXPANDABLE) {
            self.key(keys::IS_EXPANDABLE)?;
            self.out.bool(segment.is_expandable)?;
        }
        // PyTorch fills stacks in at the end, and puts an empty list where there is none.
        let has_frames = has(keys::FRAMES);
        if has_frames && segment.stack.is_none() {
            self.key(keys::FRAMES)?;
            self.stack(segment.stack)?;
        }
        if has(keys::BLOCKS) {
            self.key(keys::BLOCKS)?;
            self.list(&segment.blocks, Self::block)?;
        }
        if has_frames && !segment.stack.is_none() {
            self.key(keys::FRAMES)?;
            self.stack(segment.stack)?;
        }
        self.extra(&segment.extra)?;
        self.out.end_dict()
    }

    fn block(&mut self, block: &Block) -> Result<(), Error> {
        self.out.begin_dict()?;
        let numbers = [
            (keys::ADDRESS, block.address),
            (keys::SIZE, block.size),
            (keys::REQUESTED_SIZE, block.requested_size),
        ];
        let has = |key: StringId| has(&keys::BLOCK_KEYS, &block.extra, key);
        for (key, number) in numbers.into_iter().filter(|(key, _)| has(*key)) {
            self.key(key)?;
            self.out.unsigned(number)?;
        }
        if has(keys::STATE) {
            self.key(keys::STATE)?;
            self.key(match block.state {
                BlockState::ActiveAllocated => keys::ACTIVE_ALLOCATED,
                BlockState::ActivePendingFree => keys::ACTIVE_PENDING_FREE,
                BlockState::Inactive => keys::INACTIVE,
            })?;
        }
        if has(keys::FRAMES) {
            self.key(keys::FRAMES)?;
            self.stack(block.stack)?;
        }
        self.extra(&block.extra)?;
        self.out.end_dict()
    }

    fn annotation(&mut self, annotation: &Annotation) -> Result<(), Error> {
        self.out.begin_dict()?;
        let has = |key: StringId| has(&keys::ANNOTATION_KEYS, &annotation.extra, key);
        let stage = match annotation.stage {
            Stage::Start => Some(keys::START),
            Stage::End => Some(keys::END),
            Stage::Other => None,
        };
        if let Some(stage) = stage.filter(|_| has(keys::STAGE)) {
            self.key(keys::STAGE)?;
            self.key(stage)?;
        }
        if has(keys::NAME) {
            self.key(keys::NAME)?;
            self.text(annotation.name)?;
        }
        if has(keys::DEVICE) {
            self.key(keys::DEVICE)?;
            self.out.int(annotation.device.into())?;
        }
        if has(keys::TIME_US) {
            self.key(keys::TIME_US)?;
            self.out.int(annotation.time_us)?;
        }
        self.extra(&annotation.extra)?;
        self.out.end_dict()
    }

    fn event(&mut self, trace: &Trace, index: usize) -> Result<(), Error> {
        let event = trace.event(index);
        let has = |bit: u8| trace.shape(index).keys & bit != 0;
        self.out.begin_dict()?;
        self.key(keys::ACTION)?;
        match keys::action_key(event.action) {
            Some(key) => self.key(key)?,
            None => self.text(event.action_name)?,
        }
        let numbers = [
            (bits::ADDR, keys::ADDR, event.addr),
            (bits::DEVICE_FREE, keys::DEVICE_FREE, event.addr),
            (bits::SIZE, keys::SIZE, event.size),
            (bits::STREAM, keys::STREAM, event.stream),
        ];
        for (_, key, number) in numbers.into_iter().filter(|(bit, ..)| has(*bit)) {
            self.key(key)?;
            self.out.unsigned(number)?;
        }
        if let Some(time) = event.time_us {
            self.key(keys::TIME_US)?;
            self.out.int(time)?;
        }
        if has(bits::COMPILE_CONTEXT) {
            self.key(keys::COMPILE_CONTEXT)?;
            self.text(event.compile_context)?;
        }
        if has(bits::USER_METADATA) {
            self.key(keys::USER_METADATA)?;
            self.text(event.user_metadata)?;
        }
        if let Some(pool) = event.pool_id {
            self.key(keys::POOL_ID)?;
            self.pool(pool)?;
        }
        if has(bits::FRAMES) {
            self.key(keys::FRAMES)?;
            self.stack(event.stack)?;
        }
        if let Some(extra) = trace.extra(index) {
            self.extra(extra)?;
        }
        self.out.end_dict()
    }

    /// All settings in the file's order; those with a field as the field says.
    fn settings(&mut self, settings: &AllocatorSettings) -> Result<(), Error> {
        let of_file = AllocatorSettings::from_entries(settings.entries.clone());
        let divisions = settings.roundup_power2_divisions.iter();
        let divisions = divisions.map(|(size, n)| (Value::Str(size.to_string()), Value::from(*n))).collect();
        #[rustfmt::skip]
        let fields = [
            ("PYTORCH_CUDA_ALLOC_CONF", Value::from(settings.conf.as_str()), settings.conf == of_file.conf),
            ("max_split_size", settings.max_split_size.map_or(Value::Int(-1), Value::from), settings.max_split_size == of_file.max_split_size),
            ("garbage_collection_threshold", Value::Float(settings.garbage_collection_threshold), settings.garbage_collection_threshold.to_bits() == of_file.garbage_collection_threshold.to_bits()),
            ("expandable_segments", Value::Bool(settings.expandable_segments), settings.expandable_segments == of_file.expandable_segments),
            ("roundup_power2_divisions", Value::Dict(divisions), settings.roundup_power2_divisions == of_file.roundup_power2_divisions),
        ];
        self.out.begin_dict()?;
        for (key, value) in &settings.entries {
            let field = fields.iter().find(|(name, _, is_same)| name == key && !is_same);
            self.out.text(key)?;
            self.value(field.map_or(value, |(_, value, _)| value), 0)?;
        }
        let is_new = |name: &str| !settings.entries.iter().any(|(key, _)| key == name);
        for (name, value, is_same) in &fields {
            // A snapshot made by hand has no entries and gets all fields.
            if is_new(name) && (settings.entries.is_empty() || !is_same) {
                self.out.text(name)?;
                self.value(value, 0)?;
            }
        }
        self.out.end_dict()
    }

    fn extra(&mut self, extra: &Extra) -> Result<(), Error> {
        self.entries(extra.iter())
    }

    fn entries<'v>(&mut self, entries: impl Iterator<Item = (&'v str, &'v Value)>) -> Result<(), Error> {
        for (key, value) in entries {
            match self.snapshot.strings.find(key) {
                Some(id) => self.text(id)?,
                None => self.out.text(key)?,
            }
            self.value(value, 0)?;
        }
        Ok(())
    }

    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > Value::MAX_DEPTH {
            return Err(Error::Unwritable { what: "a value is nested too deep" });
        }
        match value {
            Value::None => self.out.none(),
            Value::Bool(value) => self.out.bool(*value),
            Value::Int(value) => self.out.int(*value),
            Value::BigInt(bytes) => self.out.long(bytes),
            Value::Float(value) => self.out.float(*value),
            Value::Str(text) => self.out.text(text),
            Value::Bytes(bytes) => self.out.bytes(bytes),
            Value::ByteArray(bytes) => self.out.byte_array(bytes),
            Value::List(items) => self.list(items, |writer, item| writer.value(item, depth + 1)),
            Value::Tuple(items) => {
                self.out.mark()?;
                for item in items {
                    self.value(item, depth + 1)?;
                }
                self.out.tuple()
            }
            Value::Dict(pairs) => {
                self.out.begin_dict()?;
                for (key, value) in pairs {
                    self.value(key, depth + 1)?;
                    self.value(value, depth + 1)?;
                }
                self.out.end_dict()
            }
            Value::Stack(stack) => self.stack(*stack),
        }
    }

    fn key(&mut self, key: StringId) -> Result<(), Error> {
        if let Some(place) = self.keys[key.0 as usize] {
            return self.out.get(place);
        }
        self.out.text(keys::text(key))?;
        self.keys[key.0 as usize] = Some(self.out.memoize()?);
        Ok(())
    }

    fn text(&mut self, id: StringId) -> Result<(), Error> {
        let memo = self.texts.get_mut(id.0 as usize).ok_or(FOREIGN_ID)?;
        if let Some(place) = *memo {
            return self.out.get(place);
        }
        self.out.text(self.snapshot.strings.get(id))?;
        *memo = Some(self.out.memoize()?);
        Ok(())
    }

    fn pool(&mut self, pool: PoolId) -> Result<(), Error> {
        if let Some(&place) = self.pools.get(&pool) {
            return self.out.get(place);
        }
        self.out.unsigned(pool.0)?;
        self.out.unsigned(pool.1)?;
        self.out.pair()?;
        let place = self.out.memoize()?;
        self.pools.insert(pool, place);
        Ok(())
    }

    fn stack(&mut self, stack: StackId) -> Result<(), Error> {
        if stack.is_none() {
            return self.out.begin_list();
        }
        if let Some(&place) = self.stacks.get(&stack) {
            return self.out.get(place);
        }
        if stack.0 as usize >= self.snapshot.stacks.len() {
            return Err(FOREIGN_ID);
        }
        self.out.begin_list()?;
        let place = self.out.memoize()?;
        self.stacks.insert(stack, place);
        let snapshot = self.snapshot;
        let mut frames = snapshot.stacks.frames(stack).peekable();
        while frames.peek().is_some() {
            self.out.mark()?;
            for frame in frames.by_ref().take(BATCH) {
                self.frame(frame)?;
            }
            self.out.appends()?;
        }
        Ok(())
    }

    fn frame(&mut self, id: FrameId) -> Result<(), Error> {
        if let Some(place) = self.frames[id.0 as usize] {
            return self.out.get(place);
        }
        let frame = self.snapshot.stacks.frame(id);
        self.out.begin_dict_unmarked()?;
        self.frames[id.0 as usize] = Some(self.out.memoize()?);
        self.out.mark()?;
        self.key(keys::NAME)?;
        self.text(frame.name)?;
        self.key(keys::FILENAME)?;
        self.text(frame.filename)?;
        self.key(keys::LINE)?;
        self.out.int(frame.line)?;
        if let Some(extra) = self.snapshot.stacks.frame_extra(id) {
            self.extra(extra)?;
        }
        self.out.end_dict()
    }
}

const FOREIGN_ID: Error = Error::Unwritable { what: "an id of another snapshot" };

/// Whether an entry has one of its usual keys.
fn has(usual: &[StringId], extra: &Extra, key: StringId) -> bool {
    usual.iter().position(|&usual| usual == key).is_some_and(|place| !extra.lacks(place))
}
