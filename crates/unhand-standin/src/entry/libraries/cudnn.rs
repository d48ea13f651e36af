//! cuDNN: versions, tensor descriptors that remember, and graphs for which there is always one engine.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::code::Code;
use crate::entry::{answers, entries};
use crate::gpu::{config, gpu};
use crate::pointers::{In, Out};

const BAD_PARAMETER: Code = Code(2000);

/// The attributes that have an answer of their own, by cuDNN's numbers.
const ENGINEHEUR_RESULTS: c_int = 202;
const ENGINECFG_ENGINE: c_int = 300;
const ENGINECFG_SHARED_MEMORY_USED: c_int = 304;
const EXECUTION_PLAN_WORKSPACE_SIZE: c_int = 402;
const OPERATIONGRAPH_ENGINE_GLOBAL_COUNT: c_int = 802;
const ENGINE_GLOBAL_INDEX: c_int = 1301;

/// A tensor as descriptors tell about it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tensor {
    pub(super) data_type: c_int,
    pub(super) sizes: Vec<c_int>,
    pub(super) strides: Vec<c_int>,
}

/// All that is remembered.
#[derive(Default)]
struct Descriptors {
    tensors: HashMap<u64, Tensor>,
    /// Descriptor of a graph's part → attribute → how many values, and their bytes.
    parts: HashMap<u64, HashMap<c_int, (usize, Vec<u8>)>>,
    streams: HashMap<u64, u64>,
}

fn descriptors<T>(with: impl FnOnce(&mut Descriptors) -> T) -> T {
    static DESCRIPTORS: OnceLock<Mutex<Descriptors>> = OnceLock::new();
    with(&mut DESCRIPTORS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner))
}

/// Describes a tensor whose descriptor the caller made.
pub(super) fn describe(descriptor: u64, tensor: Tensor) {
    descriptors(|descriptors| descriptors.tensors.insert(descriptor, tensor));
}

/// Bytes of a value of a cuDNN data type: float, double, half, int8, int32, …
pub(super) fn data_bytes(data_type: c_int) -> u64 {
    match data_type {
        1 | 10 => 8,
        2 | 9 => 2,
        3 | 5 | 6 | 7 | 8 | 11 | 12 | 13 => 1,
        _ => 4,
    }
}

/// Bytes of an attribute's value, by cuDNN's number for its type.
fn value_bytes(kind: c_int) -> usize {
    match kind {
        0 | 3 | 5 | 6 | 15 | 26 => 8,
        2 | 24 => 1,
        _ => 4,
    }
}

entries! { plain:
    fn cudnnCreate(handle: Out<u64>) {
        handle.set(gpu().kernels.handle())
    }
    fn cudnnSetStream(handle: u64, stream: u64) {
        descriptors(|descriptors| descriptors.streams.insert(handle, stream));
        Ok(())
    }
    fn cudnnGetStream(handle: u64, stream: Out<u64>) {
        stream.set(descriptors(|descriptors| descriptors.streams.get(&handle).copied().unwrap_or(0)))
    }
    fn cudnnGetProperty(kind: c_int, value: Out<c_int>) {
        let version = config().cudnn_version;
        value.set(match kind {
            0 => version / 10_000,
            1 => version / 100 % 100,
            _ => version % 100,
        })
    }
    fn cudnnCreateTensorDescriptor(descriptor: Out<u64>) {
        let new = gpu().kernels.handle();
        describe(new, Tensor::default());
        descriptor.set(new)
    }
    fn cudnnDestroyTensorDescriptor(descriptor: u64) {
        descriptors(|descriptors| descriptors.tensors.remove(&descriptor));
        Ok(())
    }
    fn cudnnSetTensorNdDescriptor(
        descriptor: u64,
        data_type: c_int,
        n_dimensions: c_int,
        sizes: In<c_int>,
        strides: In<c_int>,
    ) {
        let n_dimensions = usize::try_from(n_dimensions).map_err(|_| BAD_PARAMETER)?;
        let list = |values: In<c_int>| {
            (0..n_dimensions.min(8)).map(|index| values.at(index).get()).collect::<Result<Vec<c_int>, Code>>()
        };
        let tensor = Tensor { data_type, sizes: list(sizes)?, strides: list(strides)? };
        describe(descriptor, tensor);
        Ok(())
    }
    fn cudnnGetTensorNdDescriptor(
        descriptor: u64,
        room: c_int,
        data_type: Out<c_int>,
        n_dimensions: Out<c_int>,
        sizes: Out<c_int>,
        strides: Out<c_int>,
    ) {
        let tensor = descriptors(|descriptors| descriptors.tensors.get(&descriptor).cloned()).ok_or(BAD_PARAMETER)?;
        let room = usize::try_from(room).map_err(|_| BAD_PARAMETER)?;
        data_type.set_if_asked(tensor.data_type);
        n_dimensions.set_if_asked(c_int::try_from(tensor.sizes.len()).unwrap_or(0));
        for (index, (size, stride)) in tensor.sizes.iter().zip(&tensor.strides).take(room).enumerate() {
            sizes.at(index).set(*size)?;
            strides.at(index).set(*stride)?;
        }
        Ok(())
    }

    fn cudnnBackendCreateDescriptor(_kind: c_int, descriptor: Out<u64>) {
        let new = gpu().kernels.handle();
        descriptors(|descriptors| descriptors.parts.insert(new, HashMap::new()));
        descriptor.set(new)
    }
    fn cudnnBackendDestroyDescriptor(descriptor: u64) {
        descriptors(|descriptors| descriptors.parts.remove(&descriptor));
        Ok(())
    }
    fn cudnnBackendFinalize(_descriptor: u64) {
        Ok(())
    }
    fn cudnnBackendSetAttribute(descriptor: u64, name: c_int, kind: c_int, count: i64, values: In<u8>) {
        let count = usize::try_from(count).map_err(|_| BAD_PARAMETER)?;
        let bytes = (0..count * value_bytes(kind)).map(|index| values.at(index).get());
        let bytes: Vec<u8> = bytes.collect::<Result<_, _>>().map_err(|_| BAD_PARAMETER)?;
        descriptors(|descriptors| {
            descriptors.parts.entry(descriptor).or_default().insert(name, (count, bytes));
        });
        Ok(())
    }
    fn cudnnBackendGetAttribute(
        descriptor: u64,
        name: c_int,
        kind: c_int,
        room: i64,
        count: Out<i64>,
        values: Out<u8>,
    ) {
        let bytes = match name {
            // The caller made the descriptors for results; there is one, and it is as good as any.
            ENGINEHEUR_RESULTS | ENGINECFG_ENGINE => {
                count.set_if_asked(1);
                return Ok(());
            }
            EXECUTION_PLAN_WORKSPACE_SIZE => (1, config().cudnn_workspace_bytes.to_le_bytes().to_vec()),
            OPERATIONGRAPH_ENGINE_GLOBAL_COUNT => (1, 1_i64.to_le_bytes().to_vec()),
            ENGINECFG_SHARED_MEMORY_USED => (1, 0_i32.to_le_bytes().to_vec()),
            ENGINE_GLOBAL_INDEX => (1, 0_i64.to_le_bytes().to_vec()),
            _ => descriptors(|descriptors| {
                descriptors.parts.get(&descriptor).and_then(|part| part.get(&name)).cloned().unwrap_or_default()
            }),
        };
        let (n_values, bytes) = bytes;
        count.set_if_asked(i64::try_from(n_values).unwrap_or(0));
        if values.is_null() {
            return Ok(());
        }
        let room = usize::try_from(room).unwrap_or(0) * value_bytes(kind);
        for (index, byte) in bytes.into_iter().take(room).enumerate() {
            values.at(index).set(byte)?;
        }
        Ok(())
    }
}

answers! {
    fn cudnnGetVersion() -> usize {
        usize::try_from(config().cudnn_version).unwrap_or(0)
    }
    fn cudnnGetCudartVersion() -> usize {
        usize::try_from(config().cuda_version).unwrap_or(0)
    }
}
