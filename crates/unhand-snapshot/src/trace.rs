//! The history of one device as columns: 33 bytes an event instead of a dict of nine entries.

use std::fmt;

use rustc_hash::FxHashMap;

use crate::{Action, Event, Extra, PoolId, StackId, StringId};

/// The history of one device (`device_traces[i]`), oldest event first.
///
/// What differs from event to event has a column of its own; stream, pool, context and metadata repeat, so each
/// combination of them is kept once.
#[derive(Clone, Default)]
pub struct Trace {
    actions: Vec<Action>,
    addrs: Vec<u64>,
    sizes: Vec<u64>,
    times: Vec<i64>,
    stacks: Vec<StackId>,
    shape_ids: Vec<u32>,
    shapes: Vec<Shape>,
    shape_table: FxHashMap<Shape, u32>,
    /// `extras[shape.extra - 1]`.
    extras: Vec<Extra>,
}

/// What events have in common.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) stream: u64,
    pub(crate) pool_id: Option<PoolId>,
    pub(crate) compile_context: StringId,
    pub(crate) user_metadata: StringId,
    pub(crate) action_name: StringId,
    /// Which keys the dict has, as bits of [`keys`].
    pub(crate) keys: u8,
    /// 0 for none, else one more than the index of the extras.
    pub(crate) extra: u32,
}

/// The bits of [`Shape::keys`]. `action` is always there; `time_us` and `pool_id` are options of their own.
pub(crate) mod keys {
    pub(crate) const ADDR: u8 = 1;
    pub(crate) const DEVICE_FREE: u8 = 2;
    pub(crate) const SIZE: u8 = 4;
    pub(crate) const STREAM: u8 = 8;
    pub(crate) const FRAMES: u8 = 16;
    pub(crate) const COMPILE_CONTEXT: u8 = 32;
    pub(crate) const USER_METADATA: u8 = 64;
}

impl Trace {
    /// What [`times_us`](Trace::times_us) holds for an event without a time.
    pub const NO_TIME: i64 = i64::MIN;

    /// How many events there are.
    pub fn len(&self) -> usize {
        self.actions.len()
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.actions.is_empty()
    }

    /// The event at an index.
    ///
    /// # Panics
    ///
    /// If `index` is not below [`len`](Trace::len).
    #[inline]
    pub fn event(&self, index: usize) -> Event {
        let shape = &self.shapes[self.shape_ids[index] as usize];
        let time = self.times[index];
        Event {
            action: self.actions[index],
            addr: self.addrs[index],
            size: self.sizes[index],
            stream: shape.stream,
            time_us: (time != Trace::NO_TIME).then_some(time),
            stack: self.stacks[index],
            compile_context: shape.compile_context,
            user_metadata: shape.user_metadata,
            pool_id: shape.pool_id,
            action_name: shape.action_name,
        }
    }

    /// The events, oldest first.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Event> + DoubleEndedIterator + '_ {
        (0..self.len()).map(|index| self.event(index))
    }

    /// The actions of all events.
    pub fn actions(&self) -> &[Action] {
        &self.actions
    }

    /// The addresses of all events; device free bytes for [`Action::Oom`].
    pub fn addrs(&self) -> &[u64] {
        &self.addrs
    }

    /// The sizes of all events, in bytes; see [`Action`] for which bytes.
    pub fn sizes(&self) -> &[u64] {
        &self.sizes
    }

    /// The times of all events in microseconds since the epoch; [`NO_TIME`](Trace::NO_TIME) where there is none.
    pub fn times_us(&self) -> &[i64] {
        &self.times
    }

    /// The stacks of all events.
    pub fn stacks(&self) -> &[StackId] {
        &self.stacks
    }

    /// The stream of an event, without the rest of it.
    ///
    /// # Panics
    ///
    /// If `index` is not below [`len`](Trace::len).
    pub fn stream(&self, index: usize) -> u64 {
        self.shapes[self.shape_ids[index] as usize].stream
    }

    /// Keys of an event that [`Event`] has no field for, such as `category`, `forward_frames` and
    /// `internal_metadata`.
    ///
    /// # Panics
    ///
    /// If `index` is not below [`len`](Trace::len).
    pub fn extra(&self, index: usize) -> Option<&Extra> {
        match self.shapes[self.shape_ids[index] as usize].extra {
            0 => None,
            extra => self.extras.get(extra as usize - 1),
        }
    }

    /// Appends an event. Of the optional keys those are written back that are not empty.
    pub fn push(&mut self, event: Event) {
        let addr = if event.action == Action::Oom { keys::DEVICE_FREE } else { keys::ADDR };
        let mut present = addr | keys::SIZE | keys::STREAM;
        if !event.stack.is_none() {
            present |= keys::FRAMES;
        }
        if event.compile_context != StringId::default() {
            present |= keys::COMPILE_CONTEXT;
        }
        if event.user_metadata != StringId::default() {
            present |= keys::USER_METADATA;
        }
        let shape = Shape {
            stream: event.stream,
            pool_id: event.pool_id,
            compile_context: event.compile_context,
            user_metadata: event.user_metadata,
            action_name: event.action_name,
            keys: present,
            extra: 0,
        };
        let time = event.time_us.unwrap_or(Trace::NO_TIME);
        self.push_parts(event.action, event.addr, event.size, time, event.stack, shape);
    }

    #[inline]
    pub(crate) fn push_parts(
        &mut self,
        action: Action,
        addr: u64,
        size: u64,
        time: i64,
        stack: StackId,
        shape: Shape,
    ) {
        self.actions.push(action);
        self.addrs.push(addr);
        self.sizes.push(size);
        self.times.push(time);
        self.stacks.push(stack);
        // Nearly all events have the shape of the one before.
        let id = match self.shape_ids.last() {
            Some(&last) if self.shapes[last as usize] == shape => last,
            _ => self.intern_shape(shape),
        };
        self.shape_ids.push(id);
    }

    fn intern_shape(&mut self, shape: Shape) -> u32 {
        let shapes = &mut self.shapes;
        *self.shape_table.entry(shape).or_insert_with(|| {
            shapes.push(shape);
            u32::try_from(shapes.len() - 1).expect("fewer than 2^32 shapes")
        })
    }

    /// What an event shares with others.
    pub(crate) fn shape(&self, index: usize) -> &Shape {
        &self.shapes[self.shape_ids[index] as usize]
    }

    /// All combinations that occur.
    pub(crate) fn shapes(&self) -> &[Shape] {
        &self.shapes
    }

    /// All extras that occur.
    pub(crate) fn extras(&self) -> &[Extra] {
        &self.extras
    }

    /// Sets what `Shape::extra` refers to.
    pub(crate) fn set_extras(&mut self, extras: Vec<Extra>) {
        self.extras = extras;
    }

    /// Sorts by time, keeping the order of events of one time, and says how many events were earlier than the one
    /// before them. Events without a time leave the whole trace as it is.
    pub(crate) fn repair_order(&mut self) -> usize {
        let n_early = self.times.windows(2).filter(|pair| pair[1] < pair[0]).count();
        if n_early == 0 || self.times.contains(&Trace::NO_TIME) {
            return 0;
        }
        let mut order: Vec<usize> = (0..self.len()).collect();
        order.sort_by_key(|&index| self.times[index]);
        permute(&mut self.actions, &order);
        permute(&mut self.addrs, &order);
        permute(&mut self.sizes, &order);
        permute(&mut self.times, &order);
        permute(&mut self.stacks, &order);
        permute(&mut self.shape_ids, &order);
        n_early
    }

    /// Gives back the memory that the columns reserved for growing.
    pub(crate) fn shrink(&mut self) {
        self.actions.shrink_to_fit();
        self.addrs.shrink_to_fit();
        self.sizes.shrink_to_fit();
        self.times.shrink_to_fit();
        self.stacks.shrink_to_fit();
        self.shape_ids.shrink_to_fit();
    }
}

fn permute<T: Copy>(column: &mut Vec<T>, order: &[usize]) {
    *column = order.iter().map(|&index| column[index]).collect();
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Trace({} events)", self.len())
    }
}
