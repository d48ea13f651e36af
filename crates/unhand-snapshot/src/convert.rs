//! From the items a pickle left behind to the model: which key is which field, and what is kept as it is.

use std::collections::HashMap;

use crate::item::{Item, View};
use crate::machine::{Machine, Node};
use crate::values::{FEW_ITEMS, unique};
use crate::{
    AllocatorSettings, Annotation, Block, BlockState, Error, Extra, PoolId, Segment, SegmentKind, Snapshot,
    StackId, Stage, StringId, Trace, Value, keys,
};

impl Machine<'_> {
    /// Makes the model out of the root item.
    pub(crate) fn into_snapshot(mut self, root: Item) -> Result<Snapshot, Error> {
        self.op_at = self.length();
        let mut snapshot = Snapshot { protocol: self.protocol, ..Snapshot::default() };
        let mut homes = (Item::EMPTY_LIST, Item::EMPTY_LIST);
        if let Some(pairs) = self.dict(root) {
            let layout = &mut snapshot.layout;
            layout.has_segments = false;
            layout.has_traces = false;
            layout.has_annotations = false;
            for (key, value) in pairs {
                match key.view() {
                    View::Str(keys::SEGMENTS) => {
                        snapshot.layout.has_segments = true;
                        snapshot.segments = self.segments(value, "segments")?;
                    }
                    View::Str(keys::HOST_SEGMENTS) => {
                        snapshot.layout.has_host_segments = true;
                        snapshot.host_segments = self.segments(value, "host_segments")?;
                    }
                    View::Str(keys::DEVICE_TRACES) => {
                        snapshot.layout.has_traces = true;
                        homes.0 = value;
                    }
                    View::Str(keys::HOST_TRACES) => {
                        snapshot.layout.has_host_traces = true;
                        homes.1 = value;
                    }
                    View::Str(keys::ALLOCATOR_SETTINGS) => snapshot.settings = self.settings(value)?,
                    View::Str(keys::EXTERNAL_ANNOTATIONS) => {
                        snapshot.layout.has_annotations = true;
                        snapshot.annotations = self.annotations(value)?;
                    }
                    View::Str(id) => {
                        let value = self.value(value, 0)?;
                        snapshot.extra.push((self.strings.get(id).to_owned(), value));
                    }
                    _ => return Err(form("the snapshot", "a dict whose keys are texts")),
                }
            }
            if !snapshot.layout.has_segments && !snapshot.layout.has_traces {
                return Err(not_a_snapshot(&snapshot));
            }
        } else if matches!(root.view(), View::Node(_) | View::EmptyList) && self.list(root).is_some() {
            snapshot.layout.is_segment_list = true;
            snapshot.segments = self.segments(root, "the list")?;
        } else {
            let found = match root.view() {
                View::Trace(_) => "a list of events",
                View::Stack(_) => "a list of frames",
                View::Str(_) => "a text",
                View::Bytes(_) => "bytes",
                View::Int(_) | View::Wide(_) | View::Float(_) | View::Bool(_) => "a number",
                View::None => "None",
                _ => "a tuple",
            };
            return Err(Error::NotASnapshot { found: found.to_owned() });
        }
        self.frame_extras()?;
        self.event_extras()?;
        let mut places = HashMap::new();
        snapshot.traces = self.take_traces(homes.0, "device_traces", &mut places, &[])?;
        for (is_here, _) in places.values_mut() {
            *is_here = false;
        }
        snapshot.host_traces = self.take_traces(homes.1, "host_traces", &mut places, &snapshot.traces)?;
        snapshot.pools = pools(&snapshot);
        snapshot.stacks = self.stacks;
        snapshot.strings = self.strings;
        Ok(snapshot)
    }

    /// The items of a list that is not of frames or events.
    fn list(&self, item: Item) -> Option<&[Item]> {
        match item.view() {
            View::EmptyList => Some(&[]),
            View::Node(node) => match &self.nodes[node as usize] {
                Node::List(items) => Some(items),
                _ => None,
            },
            _ => None,
        }
    }

    /// The keys and values of a dict; of a key that was set twice, the last value in the first place.
    fn dict(&mut self, item: Item) -> Option<Vec<(Item, Item)>> {
        match item.view() {
            View::EmptyDict => Some(Vec::new()),
            View::Node(node) => match &self.nodes[node as usize] {
                Node::Dict(items) => Some(unique(items)),
                _ => None,
            },
            _ => None,
        }
    }

    fn segments(&mut self, item: Item, path: &str) -> Result<Vec<Segment>, Error> {
        let items = self.list(item).ok_or_else(|| form(path, "a list of dicts"))?.to_vec();
        let mut segments = Vec::new();
        for (index, &item) in items.iter().enumerate() {
            let at = || format!("{path}[{index}]");
            let pairs = self.dict(item).ok_or_else(|| form(at(), "a dict"))?;
            segments.push(self.segment(pairs, &at)?);
        }
        Ok(segments)
    }

    fn segment(&mut self, pairs: Vec<(Item, Item)>, at: &dyn Fn() -> String) -> Result<Segment, Error> {
        self.charge(size_of::<Segment>() + size_of_val(pairs.as_slice()))?;
        let mut segment = Segment::default();
        let mut rest = Rest::new(&keys::SEGMENT_KEYS);
        for (key, value) in pairs {
            let View::Str(id) = key.view() else { return Err(form(at(), "a dict whose keys are texts")) };
            let is_known = match id {
                keys::DEVICE => set(&mut segment.device, self.as_i32(value)),
                keys::ADDRESS => set(&mut segment.address, self.as_u64(value)),
                keys::TOTAL_SIZE => set(&mut segment.total_size, self.as_u64(value)),
                keys::ALLOCATED_SIZE => set(&mut segment.allocated_size, self.as_u64(value)),
                keys::ACTIVE_SIZE => set(&mut segment.active_size, self.as_u64(value)),
                keys::REQUESTED_SIZE => set(&mut segment.requested_size, self.as_u64(value)),
                keys::STREAM => set(&mut segment.stream, self.as_u64(value)),
                keys::SEGMENT_TYPE => set(&mut segment.kind, segment_kind(value)),
                keys::SEGMENT_POOL_ID => set(&mut segment.pool_id, self.as_pool(value)),
                keys::IS_EXPANDABLE => set(&mut segment.is_expandable, as_bool(value)),
                keys::FRAMES => set(&mut segment.stack, as_stack(value)),
                keys::BLOCKS => {
                    segment.blocks = self.blocks(value, at)?;
                    true
                }
                _ => false,
            };
            rest.note(self, id, is_known, value)?;
        }
        rest.derive_sizes(&mut segment);
        segment.extra = rest.into_extra();
        Ok(segment)
    }

    fn blocks(&mut self, item: Item, at: &dyn Fn() -> String) -> Result<Vec<Block>, Error> {
        let path = || format!("{}.blocks", at());
        let items = self.list(item).ok_or_else(|| form(path(), "a list of dicts"))?.to_vec();
        self.charge(items.len() * (size_of::<Block>() + size_of::<Item>()))?;
        let mut blocks = Vec::with_capacity(items.len());
        for (index, &item) in items.iter().enumerate() {
            let at = || format!("{}[{index}]", path());
            let pairs = self.dict(item).ok_or_else(|| form(at(), "a dict"))?;
            blocks.push(self.block(pairs, &at)?);
        }
        Ok(blocks)
    }

    fn block(&mut self, pairs: Vec<(Item, Item)>, at: &dyn Fn() -> String) -> Result<Block, Error> {
        if pairs.len() > FEW_ITEMS {
            self.charge(size_of_val(pairs.as_slice()))?;
        }
        let mut block = Block::default();
        let mut rest = Rest::new(&keys::BLOCK_KEYS);
        let mut history = None;
        for (key, value) in pairs {
            let View::Str(id) = key.view() else { return Err(form(at(), "a dict whose keys are texts")) };
            let is_known = match id {
                keys::ADDRESS => set(&mut block.address, self.as_u64(value)),
                keys::SIZE => set(&mut block.size, self.as_u64(value)),
                keys::REQUESTED_SIZE => set(&mut block.requested_size, self.as_u64(value)),
                keys::STATE => set(&mut block.state, block_state(value)),
                keys::FRAMES => set(&mut block.stack, as_stack(value)),
                keys::HISTORY => {
                    history = Some(value);
                    false
                }
                _ => false,
            };
            rest.note(self, id, is_known, value)?;
        }
        // Torch 1.13 and 2.0 wrote a list of past owners, the present one first.
        let owner =
            history.and_then(|item| self.list(item)?.first().copied()).and_then(|item| self.dict(item));
        for (key, value) in owner.into_iter().flatten() {
            match key.view() {
                View::Str(keys::FRAMES) if rest.lacks(keys::FRAMES) => {
                    set(&mut block.stack, as_stack(value));
                }
                View::Str(keys::REAL_SIZE) if rest.lacks(keys::REQUESTED_SIZE) => {
                    set(&mut block.requested_size, self.as_u64(value));
                }
                _ => {}
            }
        }
        block.extra = rest.into_extra();
        Ok(block)
    }

    fn annotations(&mut self, item: Item) -> Result<Vec<Annotation>, Error> {
        let path = "external_annotations";
        let items = self.list(item).ok_or_else(|| form(path, "a list of dicts"))?.to_vec();
        self.charge(items.len() * (size_of::<Annotation>() + size_of::<Item>()))?;
        let mut annotations = Vec::with_capacity(items.len());
        for (index, &item) in items.iter().enumerate() {
            let at = || format!("{path}[{index}]");
            let pairs = self.dict(item).ok_or_else(|| form(at(), "a dict"))?;
            if pairs.len() > FEW_ITEMS {
                self.charge(size_of_val(pairs.as_slice()))?;
            }
            let mut annotation = Annotation::default();
            let mut rest = Rest::new(&keys::ANNOTATION_KEYS);
            for (key, value) in pairs {
                let View::Str(id) = key.view() else { return Err(form(at(), "a dict whose keys are texts")) };
                let is_known = match (id, value.view()) {
                    (keys::NAME, View::Str(name)) => set(&mut annotation.name, Some(name)),
                    (keys::STAGE, View::Str(keys::START)) => set(&mut annotation.stage, Some(Stage::Start)),
                    (keys::STAGE, View::Str(keys::END)) => set(&mut annotation.stage, Some(Stage::End)),
                    (keys::DEVICE, _) => set(&mut annotation.device, self.as_i32(value)),
                    (keys::TIME_US, _) => set(&mut annotation.time_us, self.as_i64(value)),
                    _ => false,
                };
                rest.note(self, id, is_known, value)?;
            }
            annotation.extra = rest.into_extra();
            annotations.push(annotation);
        }
        Ok(annotations)
    }

    fn settings(&mut self, item: Item) -> Result<AllocatorSettings, Error> {
        let expected = "a dict whose keys are texts";
        let pairs = self.dict(item).ok_or_else(|| form("allocator_settings", expected))?;
        let mut entries = Vec::new();
        for (key, value) in pairs {
            let View::Str(id) = key.view() else { return Err(form("allocator_settings", expected)) };
            self.charge(size_of::<(String, Value)>() + self.strings.get(id).len())?;
            let value = self.value(value, 0)?;
            entries.push((self.strings.get(id).to_owned(), value));
        }
        Ok(AllocatorSettings::from_entries(entries))
    }

    /// A trace for each list of a list of lists. A list that occurs twice is copied.
    fn take_traces(
        &mut self,
        item: Item,
        path: &str,
        places: &mut HashMap<u32, (bool, usize)>,
        others: &[Trace],
    ) -> Result<Vec<Trace>, Error> {
        let items = self.list(item).ok_or_else(|| form(path, "a list of lists"))?.to_vec();
        let mut traces: Vec<Trace> = Vec::new();
        for (index, item) in items.into_iter().enumerate() {
            self.charge(size_of::<Trace>())?;
            match item.view() {
                View::EmptyList => traces.push(Trace::default()),
                View::Trace(id) => {
                    let trace = match places.get(&id) {
                        Some(&(is_here, place)) => {
                            let first = if is_here { &traces[place] } else { &others[place] };
                            let (n_events, copy) = (first.len(), first.clone());
                            self.charge(n_events * 64)?;
                            copy
                        }
                        None => std::mem::take(&mut self.traces[id as usize].trace),
                    };
                    places.entry(id).or_insert((true, traces.len()));
                    traces.push(trace);
                }
                _ => return Err(form(format!("{path}[{index}]"), "a list of events")),
            }
        }
        Ok(traces)
    }

    fn as_i32(&self, item: Item) -> Option<i32> {
        i32::try_from(self.as_i64(item)?).ok()
    }

    fn as_pool(&self, item: Item) -> Option<PoolId> {
        if let View::Pair(index) = item.view() { Some(self.pairs[index as usize]) } else { None }
    }
}

/// The keys of an entry that were seen, and those that have no field.
struct Rest<'k> {
    usual: &'k [StringId],
    seen: u32,
    entries: Vec<(String, Value)>,
}

impl<'k> Rest<'k> {
    fn new(usual: &'k [StringId]) -> Rest<'k> {
        Rest { usual, seen: 0, entries: Vec::new() }
    }

    /// Notes a key, with its value unless a field has it.
    fn note(
        &mut self,
        machine: &mut Machine<'_>,
        key: StringId,
        is_known: bool,
        item: Item,
    ) -> Result<(), Error> {
        if is_known {
            let place = self.usual.iter().position(|&usual| usual == key);
            self.seen |= place.map_or(0, |place| 1 << place);
            return Ok(());
        }
        machine.charge(size_of::<(String, Value)>() + machine.strings.get(key).len())?;
        let value = machine.value(item, 0)?;
        self.entries.push((machine.strings.get(key).to_owned(), value));
        Ok(())
    }

    fn lacks(&self, key: StringId) -> bool {
        self.usual.iter().position(|&usual| usual == key).is_none_or(|place| self.seen >> place & 1 == 0)
    }

    fn into_extra(self) -> Extra {
        let all = (1 << self.usual.len()) - 1;
        Extra::from_parts(self.entries, all & !self.seen)
    }

    /// Fills in what old files leave out: addresses and requests of blocks, sums of segments.
    fn derive_sizes(&self, segment: &mut Segment) {
        let address_bit = 0;
        let mut address = segment.address;
        for block in &mut segment.blocks {
            if block.extra.lacks(address_bit) {
                block.address = address;
            }
            address = block.address.saturating_add(block.size);
            if block.requested_size == 0 && block.extra.lacks(2) && block.state != BlockState::Inactive {
                block.requested_size = block.size;
            }
        }
        let sum = |is_counted: fn(BlockState) -> bool, bytes: fn(&Block) -> u64| {
            let counted = segment.blocks.iter().filter(|block| is_counted(block.state));
            counted.map(bytes).fold(0, u64::saturating_add)
        };
        let total = sum(|_| true, |block| block.size);
        let allocated = sum(|state| state == BlockState::ActiveAllocated, |block| block.size);
        let active = sum(|state| state != BlockState::Inactive, |block| block.size);
        let requested = sum(|state| state != BlockState::Inactive, |block| block.requested_size);
        for (key, field, value) in [
            (keys::TOTAL_SIZE, &mut segment.total_size, total),
            (keys::ALLOCATED_SIZE, &mut segment.allocated_size, allocated),
            (keys::ACTIVE_SIZE, &mut segment.active_size, active),
            (keys::REQUESTED_SIZE, &mut segment.requested_size, requested),
        ] {
            if self.lacks(key) {
                *field = value;
            }
        }
    }
}

impl AllocatorSettings {
    /// Picks the settings with a field out of all of them.
    pub(crate) fn from_entries(entries: Vec<(String, Value)>) -> AllocatorSettings {
        let get = |key: &str| entries.iter().find(|(k, _)| k == key).map(|(_, value)| value);
        let divisions = match get("roundup_power2_divisions") {
            Some(Value::Dict(pairs)) => pairs
                .iter()
                .filter_map(|(size, n)| Some((size.as_str()?.parse().ok()?, n.as_u64()?)))
                .collect(),
            _ => Vec::new(),
        };
        AllocatorSettings {
            conf: get("PYTORCH_CUDA_ALLOC_CONF").and_then(Value::as_str).unwrap_or_default().to_owned(),
            max_split_size: get("max_split_size").and_then(Value::as_u64),
            garbage_collection_threshold: get("garbage_collection_threshold")
                .and_then(Value::as_f64)
                .unwrap_or_default(),
            expandable_segments: get("expandable_segments").and_then(Value::as_bool).unwrap_or_default(),
            roundup_power2_divisions: divisions,
            present: true,
            entries,
        }
    }
}

/// Sets a field if there is a value for it, and says so.
fn set<T>(field: &mut T, value: Option<T>) -> bool {
    match value {
        Some(value) => {
            *field = value;
            true
        }
        None => false,
    }
}

fn as_bool(item: Item) -> Option<bool> {
    if let View::Bool(value) = item.view() { Some(value) } else { None }
}

fn as_stack(item: Item) -> Option<StackId> {
    match item.view() {
        View::Stack(stack) => Some(stack),
        View::EmptyList => Some(StackId::NONE),
        _ => None,
    }
}

fn segment_kind(item: Item) -> Option<SegmentKind> {
    match item.view() {
        View::Str(keys::SMALL) => Some(SegmentKind::Small),
        View::Str(keys::LARGE) => Some(SegmentKind::Large),
        _ => None,
    }
}

fn block_state(item: Item) -> Option<BlockState> {
    match item.view() {
        View::Str(keys::ACTIVE_ALLOCATED) => Some(BlockState::ActiveAllocated),
        View::Str(keys::ACTIVE_PENDING_FREE) => Some(BlockState::ActivePendingFree),
        View::Str(keys::INACTIVE) => Some(BlockState::Inactive),
        _ => None,
    }
}

pub(crate) fn form(path: impl Into<String>, expected: &'static str) -> Error {
    Error::Form { path: path.into(), expected }
}

fn not_a_snapshot(snapshot: &Snapshot) -> Error {
    let found: Vec<_> =
        snapshot.extra.iter().take(8).map(|(key, _)| format!("`{}`", key.escape_default())).collect();
    let found = if found.is_empty() {
        "an empty dict".to_owned()
    } else {
        format!("a dict with {}", found.join(", "))
    };
    Error::NotASnapshot { found }
}

/// The pools of all segments and events.
fn pools(snapshot: &Snapshot) -> Vec<PoolId> {
    let segments = snapshot.segments.iter().chain(&snapshot.host_segments).map(|segment| segment.pool_id);
    let traces = snapshot.traces.iter().chain(&snapshot.host_traces);
    let events = traces.flat_map(|trace| trace.shapes().iter().filter_map(|shape| shape.pool_id));
    let mut pools: Vec<_> = segments.chain(events).collect();
    pools.sort_unstable();
    pools.dedup();
    pools
}
