//! The graph of all Python objects, read through `tp_traverse` without changing a reference count on the way.
//!
//! Every object that CPython's collector tracks becomes a node. `gc.get_objects` names most of them and keeps them
//! alive while the graph is used; what it does not name (frozen objects, objects that became tracked late) is found
//! on the way and kept alive too. Dropping the [`Capture`] drops all of these references.

#![allow(
    unsafe_code,
    reason = "CPython's own functions on objects by address; each block says why it is sound"
)]

use std::ffi::{c_int, c_void};

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;
use rustc_hash::{FxHashMap, FxHashSet};
use unhand_heap::{Graph, Places};

/// The node that stands for the interpreter; objects begin at 1.
pub(crate) const ROOT: u32 = 0;

/// A reference count that says "immortal" (PEP 683), whatever the release writes there.
const IMMORTAL: u32 = u32::MAX;

/// What one pass over the heap found. Nodes are numbers; node 0 is the root and no object.
pub(crate) struct Capture {
    /// Node to address. The objects are kept alive by `listed` and `found`.
    addresses: Vec<usize>,
    places: Places,
    /// Index into `types`, by node.
    type_of: Vec<u32>,
    types: Vec<usize>,
    pub(crate) graph: Graph,
    /// What CPython counts, without the references of this struct.
    pub(crate) reference_counts: Vec<u32>,
    _listed: Py<PyList>,
    _found: Vec<Py<PyAny>>,
}

/// How the objects of one type are traversed.
#[derive(Clone, Copy)]
struct TypeFacts {
    traverse: Option<ffi::traverseproc>,
    /// `None` if every object of the type can be tracked; the type's own answer otherwise.
    is_gc: Option<ffi::inquiry>,
    has_gc: bool,
}

/// Types met so far: asking a type for its slots is much dearer than a look into a small table.
#[derive(Default)]
struct Types {
    index_of: FxHashMap<usize, u32>,
    facts: Vec<TypeFacts>,
    addresses: Vec<usize>,
}

/// The type of an object.
fn type_of(object: usize) -> *mut ffi::PyTypeObject {
    // SAFETY: every address given to this function is a live object: it is in a list we hold, or was just visited as a
    // referent of one while the GIL is held.
    unsafe { ffi::Py_TYPE(object as *mut ffi::PyObject) }
}

impl Types {
    /// The index of a type that has an object.
    fn index(&mut self, type_pointer: *mut ffi::PyTypeObject) -> u32 {
        if let Some(&index) = self.index_of.get(&(type_pointer as usize)) {
            return index;
        }
        let index = u32::try_from(self.facts.len()).unwrap_or(u32::MAX);
        self.facts.push(TypeFacts {
            traverse: slot(type_pointer, ffi::Py_tp_traverse).map(|function| {
                // SAFETY: this slot of a type holds a `traverseproc` (CPython, Include/typeslots.h).
                unsafe { std::mem::transmute::<*mut c_void, ffi::traverseproc>(function) }
            }),
            is_gc: slot(type_pointer, ffi::Py_tp_is_gc).map(|function| {
                // SAFETY: this slot of a type holds an `inquiry`.
                unsafe { std::mem::transmute::<*mut c_void, ffi::inquiry>(function) }
            }),
            // SAFETY: `type_pointer` is the type of a live object.
            has_gc: unsafe { ffi::PyType_GetFlags(type_pointer) } & ffi::Py_TPFLAGS_HAVE_GC != 0,
        });
        self.index_of.insert(type_pointer as usize, index);
        self.addresses.push(type_pointer as usize);
        index
    }

    fn facts(&self, index: u32) -> &TypeFacts {
        &self.facts[index as usize]
    }
}

/// A slot of a type, which may be empty. Static types have slots too (since Python 3.10).
fn slot(type_pointer: *mut ffi::PyTypeObject, slot: c_int) -> Option<*mut c_void> {
    // SAFETY: the type is alive, and the slot's number is one of CPython's.
    let function = unsafe { ffi::PyType_GetSlot(type_pointer, slot) };
    if function.is_null() {
        // A type without the slot is no error here, but some releases set one.
        // SAFETY: the GIL is held.
        unsafe { ffi::PyErr_Clear() };
        return None;
    }
    Some(function)
}

/// Called by `tp_traverse` for each referent. Notes the address and does nothing else: a visitor must not touch a
/// reference count (CPython's documentation of `visitproc`).
extern "C" fn note(object: *mut ffi::PyObject, referents: *mut c_void) -> c_int {
    // SAFETY: `referents` is the vector that `referents_of` passes along and nobody else uses meanwhile.
    let referents = unsafe { &mut *referents.cast::<Vec<usize>>() };
    referents.push(object as usize);
    0
}

/// Whether the collector knows this object: then, and only then, it may be traversed.
fn is_tracked(object: usize, facts: &TypeFacts) -> bool {
    let pointer = object as *mut ffi::PyObject;
    if !facts.has_gc || facts.traverse.is_none() {
        return false;
    }
    if let Some(is_gc) = facts.is_gc {
        // SAFETY: the type's own function for its own object. Static types of the interpreter say no here, and have
        // no collector header in front of them.
        if unsafe { is_gc(pointer) } == 0 {
            return false;
        }
    }
    // SAFETY: the object is alive and its type supports the collector.
    (unsafe { ffi::PyObject_GC_IsTracked(pointer) }) != 0
}

fn reference_count(object: usize) -> u32 {
    // SAFETY: the object is alive.
    let count = unsafe { ffi::Py_REFCNT(object as *mut ffi::PyObject) };
    // Since 3.12 the count has 32 bits, with flags beside them; immortal objects have a count no real one reaches.
    let low = u32::try_from(count & 0xffff_ffff).unwrap_or(IMMORTAL);
    if low >= 1 << 30 { IMMORTAL } else { low }
}

/// Addresses met lately that are no node: `None`, small numbers and common strings are most of what objects refer to.
/// Each has one place it can be in, and the last one there stays.
struct Strangers(Vec<usize>);

impl Strangers {
    /// As many as fit the innermost cache of a processor beside what else is there.
    const N: usize = 2048;

    fn new() -> Strangers {
        Strangers(vec![0; Strangers::N])
    }

    fn place(&mut self, address: usize) -> &mut usize {
        &mut self.0[(address >> 4) % Strangers::N]
    }
}

/// This many objects are traversed before what they refer to is looked up: the processor waits for many slots at once.
const BATCH: usize = 64;

/// A capture while it is made.
struct Reader<'py> {
    py: Python<'py>,
    addresses: Vec<usize>,
    places: Places,
    type_of: Vec<u32>,
    types: Types,
    reference_counts: Vec<u32>,
    strangers: Strangers,
    found: Vec<Py<PyAny>>,
}

impl<'py> Reader<'py> {
    fn new(py: Python<'py>, n_expected: usize) -> Reader<'py> {
        let mut reader = Reader {
            py,
            addresses: Vec::with_capacity(n_expected),
            places: Places::new(),
            type_of: Vec::with_capacity(n_expected),
            types: Types::default(),
            reference_counts: Vec::with_capacity(n_expected),
            strangers: Strangers::new(),
            found: Vec::new(),
        };
        reader.addresses.push(0);
        reader.type_of.push(u32::MAX);
        reader.reference_counts.push(IMMORTAL);
        reader
    }

    fn next_node(&self) -> PyResult<u32> {
        // Nodes are half of what 32 bits count (`Graph`), and one is for the root.
        u32::try_from(self.addresses.len())
            .ok()
            .filter(|&node| node < u32::MAX / 2)
            .ok_or_else(|| PyRuntimeError::new_err("more objects than 31 bits can count"))
    }

    /// Adds the node of an object that has been put in its place. `n_ours` references to it are this capture's.
    fn push(&mut self, object: usize, kind: u32, n_ours: u32) {
        self.addresses.push(object);
        self.type_of.push(kind);
        let count = reference_count(object);
        self.reference_counts.push(if count == IMMORTAL { count } else { count.saturating_sub(n_ours) });
    }

    /// The node of an object that the collector did not list, if it tracks it. `n_ours` as in `push`.
    fn find(
        &mut self,
        object: usize,
        type_pointer: *mut ffi::PyTypeObject,
        n_ours: u32,
    ) -> PyResult<Option<u32>> {
        let kind = self.types.index(type_pointer);
        if !is_tracked(object, self.types.facts(kind)) {
            *self.strangers.place(object) = object;
            return Ok(None);
        }
        let node = self.next_node()?;
        if !self.places.insert(object, node) {
            return Ok(self.places.get(object));
        }
        self.push(object, kind, n_ours);
        // SAFETY: the object is alive: a seed, or the one that was just traversed refers to it.
        self.found.push(unsafe { Bound::from_borrowed_ptr(self.py, object as *mut ffi::PyObject) }.unbind());
        Ok(Some(node))
    }

    fn list(&mut self, listed: &Bound<'py, PyList>) -> PyResult<()> {
        for index in 0..listed.len() {
            // SAFETY: the index is within the list, which nobody else refers to.
            let object =
                unsafe { ffi::PyList_GetItem(listed.as_ptr(), ffi::Py_ssize_t::try_from(index)?) } as usize;
            let node = self.next_node()?;
            if self.places.insert(object, node) {
                let kind = self.types.index(type_of(object));
                // The list has one reference itself.
                self.push(object, kind, 1);
            }
        }
        Ok(())
    }

    /// Follows the references of every node, those found on the way included.
    fn follow(&mut self, skipped: &FxHashSet<usize>) -> PyResult<(Vec<u32>, Vec<u32>)> {
        let mut offsets = Vec::with_capacity(self.addresses.len() + 1);
        let mut successors = Vec::with_capacity(self.addresses.len() * 2);
        let mut referents: Vec<usize> = Vec::new();
        let mut nodes: Vec<Option<u32>> = Vec::new();
        let mut ends = Vec::with_capacity(BATCH);
        let mut unknown = Vec::new();
        offsets.extend([0, 0]);
        let mut next = 1;
        while next < self.addresses.len() {
            let batch = next..self.addresses.len().min(next + BATCH);
            next = batch.end;
            referents.clear();
            ends.clear();
            for node in batch {
                let object = self.addresses[node];
                if let Some(traverse) = self.types.facts(self.type_of[node]).traverse
                    && !skipped.contains(&object)
                {
                    // SAFETY: the object is alive and tracked, so its type's `tp_traverse` may be called on it with
                    // the GIL held; the visitor only notes addresses into the vector, which outlives the call.
                    unsafe { traverse(object as *mut ffi::PyObject, note, (&raw mut referents).cast()) };
                }
                ends.push(referents.len());
            }
            // In three passes, so that no look into memory waits for what the one before brought.
            nodes.clear();
            nodes.extend(referents.iter().map(|&referent| self.places.get(referent)));
            unknown.clear();
            for (at, &referent) in referents.iter().enumerate() {
                if nodes[at].is_none() && *self.strangers.place(referent) != referent {
                    unknown.push((at, type_of(referent)));
                }
            }
            for &(at, type_pointer) in &unknown {
                nodes[at] = self.find(referents[at], type_pointer, 0)?;
            }
            let mut from = 0;
            for &end in &ends {
                successors.extend(nodes[from..end].iter().flatten());
                from = end;
                let n_edges = u32::try_from(successors.len())
                    .map_err(|_| PyRuntimeError::new_err("more references than 32 bits can count"))?;
                offsets.push(n_edges);
            }
        }
        Ok((offsets, successors))
    }
}

impl Capture {
    /// Reads the graph. `seeds` are objects to begin with beside those the collector lists: it lists no frozen ones.
    /// `skipped` are objects whose referents are of no interest: the caller's own.
    pub(crate) fn take(
        py: Python<'_>,
        seeds: &[Bound<'_, PyAny>],
        skipped: &[Bound<'_, PyAny>],
    ) -> PyResult<Capture> {
        let listed: Bound<'_, PyList> = py.import("gc")?.call_method0("get_objects")?.cast_into()?;
        let skipped: FxHashSet<usize> = skipped.iter().map(|object| object.as_ptr() as usize).collect();
        let mut reader = Reader::new(py, listed.len() + listed.len() / 8 + 1);
        reader.list(&listed)?;
        for seed in seeds {
            let object = seed.as_ptr() as usize;
            if reader.places.get(object).is_none() {
                // The seed itself is one reference.
                reader.find(object, type_of(object), 1)?;
            }
        }
        let (offsets, successors) = reader.follow(&skipped)?;
        let graph = Graph::from_csr(offsets, successors)
            .map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        Ok(Capture {
            addresses: reader.addresses,
            places: reader.places,
            type_of: reader.type_of,
            types: reader.types.addresses,
            graph,
            reference_counts: reader.reference_counts,
            _listed: listed.unbind(),
            _found: reader.found,
        })
    }

    pub(crate) fn n_nodes(&self) -> u32 {
        u32::try_from(self.addresses.len()).unwrap_or(u32::MAX)
    }

    /// The node of an object, if it was there and tracked.
    pub(crate) fn node(&self, object: &Bound<'_, PyAny>) -> Option<u32> {
        self.places.get(object.as_ptr() as usize)
    }

    /// The object of a node; nothing for the root and for nodes that were added later.
    pub(crate) fn object<'py>(&self, py: Python<'py>, node: u32) -> Option<Bound<'py, PyAny>> {
        if node == ROOT {
            return None;
        }
        let address = *self.addresses.get(node as usize)?;
        // SAFETY: `_listed` or `_found` keeps the object alive.
        Some(unsafe { Bound::from_borrowed_ptr(py, address as *mut ffi::PyObject) })
    }

    /// Every type that has an object, with the number of its objects.
    pub(crate) fn types<'py>(&self, py: Python<'py>) -> Vec<(Bound<'py, PyAny>, usize)> {
        let mut counts = vec![0; self.types.len()];
        for &index in &self.type_of[1..] {
            counts[index as usize] += 1;
        }
        let with_objects = self.types.iter().zip(counts).filter(|&(_, count)| count > 0);
        with_objects
            .map(|(&address, count)| {
                // SAFETY: a type lives as long as its objects, and one of them is kept alive.
                (unsafe { Bound::from_borrowed_ptr(py, address as *mut ffi::PyObject) }, count)
            })
            .collect()
    }

    /// The nodes whose type is exactly one of these.
    pub(crate) fn instances(&self, types: &[Bound<'_, PyAny>]) -> Vec<u32> {
        let wanted: FxHashSet<usize> = types.iter().map(|kind| kind.as_ptr() as usize).collect();
        let is_wanted: Vec<bool> = self.types.iter().map(|address| wanted.contains(address)).collect();
        (1..self.n_nodes()).filter(|&node| is_wanted[self.type_of[node as usize] as usize]).collect()
    }
}
