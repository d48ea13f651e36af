//! The runtime about graphs and the objects that hang on them.
#![allow(unsafe_code, reason = "calls destructors that the program registered")]

use std::ffi::{c_int, c_uint};

use super::entries;
use crate::code::{Code, Outcome};
use crate::gpu::copy::replay;
use crate::gpu::graph::{Destructor, Work};
use crate::gpu::{config, gpu};
use crate::pointers::{In, Out, Text};
use crate::sys;

/// `cudaGraphUserObjectMove`: the graph takes the caller's references.
const MOVE: c_uint = 1;

entries! { runtime:
    fn cudaGraphCreate(graph: Out<u64>, _flags: c_uint) {
        graph.set(gpu().graphs.create())
    }
    fn cudaGraphDestroy(graph: u64) {
        let gone = gpu().graphs.destroy(graph)?;
        run(gone);
        Ok(())
    }
    fn cudaGraphInstantiate(executable: Out<u64>, graph: u64, _third: u64, _fourth: u64, _fifth: usize) {
        executable.set(gpu().graphs.instantiate(graph)?)
    }
    fn cudaGraphInstantiateWithFlags(executable: Out<u64>, graph: u64, _flags: u64) {
        executable.set(gpu().graphs.instantiate(graph)?)
    }
    fn cudaGraphExecDestroy(executable: u64) {
        let gone = gpu().graphs.destroy_executable(executable)?;
        run(gone);
        Ok(())
    }
    fn cudaGraphLaunch(executable: u64, stream: u64) {
        replay(stream, executable)
    }
    fn cudaGraphUpload(_executable: u64, _stream: u64) {
        Ok(())
    }
    fn cudaGraphGetNodes(graph: u64, nodes: Out<u64>, count: Out<usize>) {
        let gpu = gpu();
        list(gpu.graphs.nodes(graph)?, nodes, count)
    }
    fn cudaGraphGetRootNodes(graph: u64, nodes: Out<u64>, count: Out<usize>) {
        let gpu = gpu();
        let all = gpu.graphs.nodes(graph)?.iter().copied();
        let roots = all.filter(|node| gpu.graphs.node(*node).is_ok_and(|node| node.dependencies.is_empty()));
        list(&roots.collect::<Vec<_>>(), nodes, count)
    }
    fn cudaGraphNodeGetType(node: u64, kind: Out<c_int>) {
        kind.set(gpu().graphs.node(node)?.work.kind())
    }
    fn cudaGraphNodeGetDependencies(node: u64, nodes: Out<u64>, third: Out<usize>, fourth: Out<usize>) {
        let gpu = gpu();
        let dependencies = &gpu.graphs.node(node)?.dependencies;
        // CUDA 12 has no data of the edges before the count; all edges are of the default kind, which is zero.
        if config().cuda_major() < 13 {
            return list(dependencies, nodes, third);
        }
        if !nodes.is_null() {
            for index in 0..dependencies.len().min(fourth.get()?) {
                third.at(index).set_if_asked(0);
            }
        }
        list(dependencies, nodes, fourth)
    }
    fn cudaGraphAddEmptyNode(node: Out<u64>, graph: u64, dependencies: In<u64>, count: usize) {
        let dependencies = (0..count).map(|index| dependencies.at(index).get()).collect::<Result<Vec<_>, _>>()?;
        node.set(gpu().graphs.add(graph, Work::Empty, dependencies)?)
    }
    // A node made from a description, and control flow inside a graph, would need kernels that compute.
    fn cudaGraphAddNode(node: Out<u64>, _graph: u64, _nodes: u64, _edges: u64, _count: usize, _parameters: u64) {
        node.set(0)?;
        Err(Code::NOT_SUPPORTED)
    }
    fn cudaGraphConditionalHandleCreate(handle: Out<u64>, _graph: u64, _value: c_uint, _flags: c_uint) {
        handle.set(0)?;
        Err(Code::NOT_SUPPORTED)
    }
    fn cudaGraphDebugDotPrint(graph: u64, path: Text, _flags: c_uint) {
        let dot = gpu().graphs.dot(graph)?;
        let path = path.get().ok_or(Code::INVALID_VALUE)?.to_string_lossy().into_owned();
        std::fs::write(path, dot).map_err(|_| Code::INVALID_VALUE)
    }
    fn cudaUserObjectCreate(object: Out<u64>, data: u64, destructor: u64, count: c_uint, _flags: c_uint) {
        object.set(gpu().graphs.create_object((destructor, data), u64::from(count)))
    }
    fn cudaUserObjectRetain(_object: u64, _count: c_uint) {
        Err(Code::NOT_SUPPORTED)
    }
    fn cudaUserObjectRelease(object: u64, count: c_uint) {
        let gone = gpu().graphs.release_object(object, u64::from(count))?;
        run(gone);
        Ok(())
    }
    fn cudaGraphRetainUserObject(graph: u64, object: u64, count: c_uint, flags: c_uint) {
        gpu().graphs.retain_object(graph, object, u64::from(count), flags & MOVE != 0)
    }
}

/// Calls what has to be called, with no lock held.
fn run(gone: impl IntoIterator<Item = Destructor>) {
    for (function, data) in gone {
        // SAFETY: the program passed a `cudaHostFn_t` and its data when it made the object.
        unsafe { sys::call(function, data) };
    }
}

/// CUDA's way to return a list: the count alone, or at most as many as there is room for and the count.
fn list(found: &[u64], nodes: Out<u64>, count: Out<usize>) -> Outcome {
    if !nodes.is_null() {
        let room = count.get()?;
        for index in 0..room {
            nodes.at(index).set(found.get(index).copied().unwrap_or(0))?;
        }
        return count.set(found.len().min(room));
    }
    count.set(found.len())
}
