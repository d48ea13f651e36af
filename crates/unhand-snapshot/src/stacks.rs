//! Call stacks as a trie with its root at the outermost frame, so that stacks share what they have in common.
//!
//! A million events have hundreds of thousands of different stacks of dozens of frames each, nearly all of which
//! begin (at the outer end) with the same frames. A node is a frame and the node of its caller: 8 bytes. Nodes that
//! were made in one go lie next to one another, and such a step from caller to callee is found by looking at the
//! neighbour; only where the trie branches is a hash table asked. Most steps are therefore reads of the next 8 bytes.

use std::fmt;

use crate::hash::{IdTable, Seed};
use crate::{Extra, FrameId, StackId, StringId};

/// One line of a call stack, by value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    /// The function's name.
    pub name: StringId,
    /// The source file.
    pub filename: StringId,
    /// The line number; 0 for frames without one.
    pub line: i64,
}

/// The interned frames and stacks of one snapshot.
///
/// Two stacks with the same frames have the same [`StackId`].
///
/// ```
/// use unhand_snapshot::{Frame, Stacks, Strings};
/// let (mut stacks, mut strings) = (Stacks::default(), Strings::default());
/// let filename = strings.intern("train.py");
/// let step = stacks.intern_frame(Frame { name: strings.intern("step"), filename, line: 12 });
/// let main = stacks.intern_frame(Frame { name: strings.intern("main"), filename, line: 3 });
/// let stack = stacks.intern([step, main]); // innermost first, as in the file
/// assert_eq!(stacks.frames(stack).collect::<Vec<_>>(), [step, main]);
/// assert_eq!(stacks.parent(stack), stacks.intern([main]));
/// ```
#[derive(Clone)]
pub struct Stacks {
    nodes: Vec<Node>,
    /// Nodes that do not lie right behind their parent, by parent and frame.
    branches: IdTable,
    frames: Vec<Frame>,
    /// By frame; as long as the last frame that has something extra.
    frame_extras: Vec<Extra>,
    frame_table: IdTable,
    seed: Seed,
}

/// One frame of a stack. Node 0 is the root and has no frame.
#[derive(Clone, Copy)]
struct Node {
    parent: u32,
    frame: u32,
}

impl Default for Stacks {
    fn default() -> Stacks {
        Stacks {
            nodes: vec![Node { parent: u32::MAX, frame: u32::MAX }],
            branches: IdTable::default(),
            frames: Vec::new(),
            frame_extras: Vec::new(),
            frame_table: IdTable::default(),
            seed: Seed::default(),
        }
    }
}

impl Stacks {
    /// The frames of a stack, innermost first.
    pub fn frames(&self, stack: StackId) -> impl Iterator<Item = FrameId> + '_ {
        let mut at = stack.0;
        std::iter::from_fn(move || {
            if at == 0 {
                return None;
            }
            let node = self.nodes.get(at as usize)?;
            at = node.parent;
            Some(FrameId(node.frame))
        })
    }

    /// The innermost frame of a stack.
    pub fn innermost(&self, stack: StackId) -> Option<FrameId> {
        self.frames(stack).next()
    }

    /// The stack without its innermost frame; [`StackId::NONE`] at the outer end.
    pub fn parent(&self, stack: StackId) -> StackId {
        match self.nodes.get(stack.0 as usize) {
            Some(node) if stack.0 != 0 => StackId(node.parent),
            _ => StackId::NONE,
        }
    }

    /// What a frame says.
    ///
    /// # Panics
    ///
    /// If the id was not given out by these stacks.
    pub fn frame(&self, id: FrameId) -> Frame {
        self.frames[id.0 as usize]
    }

    /// Keys of a frame beyond name, file and line, such as `fx_node_op` (`torch.fx` augmentation).
    pub fn frame_extra(&self, id: FrameId) -> Option<&Extra> {
        self.frame_extras.get(id.0 as usize).filter(|extra| !extra.is_empty())
    }

    /// The id of a frame, new or known.
    ///
    /// # Panics
    ///
    /// After 2³² − 1 different frames.
    pub fn intern_frame(&mut self, frame: Frame) -> FrameId {
        let hash = hash_frame(self.seed, frame);
        let frames = &self.frames;
        let extras = &self.frame_extras;
        let found = self.frame_table.find(hash, |id| {
            frames[id as usize] == frame && extras.get(id as usize).is_none_or(Extra::is_empty)
        });
        if let Some(id) = found {
            return FrameId(id);
        }
        let id = self.push_frame(frame);
        self.frame_table.insert(hash, id.0);
        id
    }

    /// Adds a frame that [`intern_frame`](Stacks::intern_frame) does not find again.
    pub(crate) fn push_frame(&mut self, frame: Frame) -> FrameId {
        let id = u32::try_from(self.frames.len())
            .ok()
            .filter(|&id| id < u32::MAX)
            .expect("fewer than 2^32 frames");
        self.frames.push(frame);
        FrameId(id)
    }

    /// Sets what a frame has beyond name, file and line.
    pub(crate) fn set_frame_extra(&mut self, id: FrameId, extra: Extra) {
        let index = id.0 as usize;
        if self.frame_extras.len() <= index {
            self.frame_extras.resize(index + 1, Extra::default());
        }
        self.frame_extras[index] = extra;
    }

    /// The id of a stack, new or known; the frames are given innermost first.
    ///
    /// # Panics
    ///
    /// After 2³² − 1 nodes, or if a frame was not given out by these stacks.
    pub fn intern<I>(&mut self, innermost_first: I) -> StackId
    where
        I: IntoIterator<Item = FrameId>,
        I::IntoIter: DoubleEndedIterator,
    {
        let mut at = StackId::NONE;
        for frame in innermost_first.into_iter().rev() {
            assert!((frame.0 as usize) < self.frames.len(), "a frame of these stacks");
            at = self.child(at, frame);
        }
        at
    }

    /// The stack with one more frame at its inner end.
    #[inline]
    pub fn child(&mut self, parent: StackId, frame: FrameId) -> StackId {
        let (parent, frame) = (parent.0, frame.0);
        let next = parent as usize + 1;
        if let Some(node) = self.nodes.get(next)
            && node.parent == parent
        {
            if node.frame == frame {
                return StackId(parent + 1);
            }
        } else if next == self.nodes.len() {
            // The newest node has no child yet, and its first one lies behind it.
            return self.push_node(parent, frame);
        }
        self.branch(parent, frame)
    }

    fn branch(&mut self, parent: u32, frame: u32) -> StackId {
        let nodes = &self.nodes;
        let hash = self.seed.pair(parent.into(), frame.into());
        let found = self.branches.find(hash, |id| {
            let node = nodes[id as usize];
            node.parent == parent && node.frame == frame
        });
        if let Some(id) = found {
            return StackId(id);
        }
        let id = self.push_node(parent, frame);
        self.branches.insert(hash, id.0);
        id
    }

    fn push_node(&mut self, parent: u32, frame: u32) -> StackId {
        let id =
            u32::try_from(self.nodes.len()).ok().filter(|&id| id < u32::MAX).expect("fewer than 2^32 nodes");
        self.nodes.push(Node { parent, frame });
        StackId(id)
    }

    /// How many nodes the trie has: every [`StackId`] is below this. Node 0 is [`StackId::NONE`].
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether there is no stack but the empty one.
    pub fn is_empty(&self) -> bool {
        self.nodes.len() == 1
    }

    /// How many different frames there are.
    pub fn n_frames(&self) -> usize {
        self.frames.len()
    }
}

fn hash_frame(seed: Seed, frame: Frame) -> u64 {
    seed.pair(u64::from(frame.name.0) << 32 | u64::from(frame.filename.0), frame.line.cast_unsigned())
}

impl fmt::Debug for Stacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stacks({} nodes, {} frames)", self.nodes.len(), self.frames.len())
    }
}
