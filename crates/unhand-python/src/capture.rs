//! The graph of all Python objects, read through `tp_traverse` without changing a reference count on the way.
//!
//! Every object that CPython's collector tracks becomes a node. `gc.get_objects` names most of them and keeps them
//! alive while the graph is used; what it does not name (frozen objects, objects that became tracked late) is found
//! on the way and kept alive too. Dropping the [`Capture`] drops all of these references.

#![allow(unsafe_code, reason = "CPython's own functions on objects by address; each block says why it is sound")]

use std::ffi::{c_int, c_void};

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;
use rustc_hash::{FxHashMap, FxHashSet};

/// The node that stands for the interpreter; objects begin at 1.
pub(crate) const ROOT: u32 = 0;

/// A reference count that says "immortal" (PEP 683), whatever the release writes there.
const IMMORTAL: u32 = u32::MAX;

/// What one pass over the heap found. Nodes are numbers; node 0 is the root and no object.
pub(crate) struct Capture {
    /// Node to address. The objects are kept alive by `listed` and `found`.
    addresses: Vec<usize>,
    nodes: FxHashMap<usize, u32>,
    /// Index into `types`, by node.
    type_of: Vec<u32>,
    types: Vec<usize>,
    pub(crate) offsets: Vec<u32>,
    pub(crate) successors: Vec<u32>,
    /// What CPython counts, without the references of this struct.
    pub(crate) reference_counts: Vec<u32>,
    _listed: Py<PyList>,
    _found: Vec<Py<PyAny>>,
}

/// How the objects of one type are traversed.
#[derive(Clone, Copy)]
struct TypeFacts {
    index: u32,
    traverse: Option<ffi::traverseproc>,
    /// `None` if every object of the type can be tracked; the type's own answer otherwise.
    is_gc: Option<ffi::inquiry>,
    has_gc: bool,
}

/// Types met so far: asking a type for its slots is much dearer than a look into a small table.
#[derive(Default)]
struct Types {
    facts: FxHashMap<usize, TypeFacts>,
    addresses: Vec<usize>,
}

impl Types {
    fn of(&mut self, object: usize) -> TypeFacts {
        let pointer = object as *mut ffi::PyObject;
        // SAFETY: every address given to this function is a live object: it is in a list we hold, or was just visited
        // as a referent of one while the GIL is held.
        let type_pointer = unsafe { ffi::Py_TYPE(pointer) };
        if let Some(facts) = self.facts.get(&(type_pointer as usize)) {
            return *facts;
        }
        let facts = TypeFacts {
            index: u32::try_from(self.addresses.len()).unwrap_or(u32::MAX),
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
        };
        self.facts.insert(type_pointer as usize, facts);
        self.addresses.push(type_pointer as usize);
        facts
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
    let low = (count as u64 & 0xffff_ffff) as u32;
    if low >= 1 << 30 { IMMORTAL } else { low }
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
        let n_listed = listed.len();
        let mut types = Types::default();
        let mut addresses = Vec::with_capacity(n_listed + n_listed / 8 + 1);
        let mut nodes = FxHashMap::with_capacity_and_hasher(n_listed + n_listed / 8, rustc_hash::FxBuildHasher);
        let mut type_of = Vec::with_capacity(addresses.capacity());
        let mut reference_counts = Vec::with_capacity(addresses.capacity());
        addresses.push(0);
        type_of.push(u32::MAX);
        reference_counts.push(IMMORTAL);
        for index in 0..n_listed {
            // SAFETY: the index is within the list, which nobody else refers to.
            let object = unsafe { ffi::PyList_GetItem(listed.as_ptr(), ffi::Py_ssize_t::try_from(index)?) } as usize;
            let node = u32::try_from(addresses.len())?;
            if nodes.insert(object, node).is_some() {
                continue;
            }
            addresses.push(object);
            type_of.push(types.of(object).index);
            // The list has one reference itself.
            let count = reference_count(object);
            reference_counts.push(if count == IMMORTAL { count } else { count - 1 });
        }
        let mut found = Vec::new();
        for seed in seeds {
            let object = seed.as_ptr() as usize;
            let facts = types.of(object);
            if !nodes.contains_key(&object) && is_tracked(object, &facts) {
                nodes.insert(object, u32::try_from(addresses.len())?);
                addresses.push(object);
                type_of.push(facts.index);
                // The seed itself is one reference.
                let count = reference_count(object);
                reference_counts.push(if count == IMMORTAL { count } else { count.saturating_sub(1) });
                found.push(seed.clone().unbind());
            }
        }
        let mut offsets = Vec::with_capacity(addresses.len() + 1);
        let mut successors = Vec::with_capacity(addresses.len() * 3 / 2);
        let mut referents: Vec<usize> = Vec::new();
        offsets.extend([0, 0]);
        let mut next = 1;
        while next < addresses.len() {
            let object = addresses[next];
            next += 1;
            referents.clear();
            let facts = types.of(object);
            if let Some(traverse) = facts.traverse
                && !skipped.contains(&object)
            {
                // SAFETY: the object is alive and tracked, so its type's `tp_traverse` may be called on it with the
                // GIL held; the visitor only notes addresses into the vector, which outlives the call.
                unsafe { traverse(object as *mut ffi::PyObject, note, (&raw mut referents).cast()) };
            }
            for &referent in &referents {
                if let Some(&node) = nodes.get(&referent) {
                    successors.push(node);
                    continue;
                }
                let facts = types.of(referent);
                if !is_tracked(referent, &facts) {
                    continue;
                }
                let node = u32::try_from(addresses.len())?;
                nodes.insert(referent, node);
                addresses.push(referent);
                type_of.push(facts.index);
                reference_counts.push(reference_count(referent));
                // SAFETY: the object is alive: the one that was just traversed refers to it.
                found.push(unsafe { Bound::from_borrowed_ptr(py, referent as *mut ffi::PyObject) }.unbind());
                successors.push(node);
            }
            let end = u32::try_from(successors.len())
                .map_err(|_| PyRuntimeError::new_err("more references than 32 bits can count"))?;
            offsets.push(end);
        }
        Ok(Capture {
            addresses,
            nodes,
            type_of,
            types: types.addresses,
            offsets,
            successors,
            reference_counts,
            _listed: listed.unbind(),
            _found: found,
        })
    }

    pub(crate) fn n_nodes(&self) -> u32 {
        u32::try_from(self.addresses.len()).unwrap_or(u32::MAX)
    }

    /// The node of an object, if it was there and tracked.
    pub(crate) fn node(&self, object: &Bound<'_, PyAny>) -> Option<u32> {
        self.nodes.get(&(object.as_ptr() as usize)).copied()
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
