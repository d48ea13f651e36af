//! cuDNN's recurrent networks: where each weight lies in the packed buffer. Nothing is computed.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::cudnn::{Tensor, data_bytes, describe};
use crate::code::Code;
use crate::entry::entries;
use crate::gpu::gpu;
use crate::pointers::Out;

const BAD_PARAMETER: Code = Code(2000);

/// What a program says about a network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Network {
    cell: c_int,
    has_bias: bool,
    is_bidirectional: bool,
    data_type: c_int,
    input: u64,
    hidden: u64,
    projected: u64,
    n_layers: u64,
}

/// A weight of a network: its first element and its shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    offset: u64,
    rows: u64,
    columns: u64,
}

impl Network {
    /// Matrices that take the input; there are as many that take the last output.
    fn n_gates(&self) -> u64 {
        match self.cell {
            2 => 4,
            3 => 3,
            _ => 1,
        }
    }

    fn n_directions(&self) -> u64 {
        if self.is_bidirectional { 2 } else { 1 }
    }

    fn has_projection(&self) -> bool {
        self.cell == 2 && self.projected != self.hidden
    }

    fn input_of(&self, layer: u64) -> u64 {
        if layer < self.n_directions() { self.input } else { self.projected * self.n_directions() }
    }

    fn matrix_elements(&self, layer: u64) -> u64 {
        let projection = if self.has_projection() { self.projected * self.hidden } else { 0 };
        self.n_gates() * self.hidden * (self.input_of(layer) + self.projected) + projection
    }

    fn n_pseudo_layers(&self) -> u64 {
        self.n_layers * self.n_directions()
    }

    fn elements(&self) -> u64 {
        let matrices: u64 = (0..self.n_pseudo_layers()).map(|layer| self.matrix_elements(layer)).sum();
        let biases =
            if self.has_bias { self.n_pseudo_layers() * 2 * self.n_gates() * self.hidden } else { 0 };
        matrices + biases
    }

    /// All matrices come first, layer by layer, then all biases: the order that PyTorch checks when it copies its
    /// own weights into the buffer.
    fn matrix(&self, layer: u64, index: u64) -> Option<Part> {
        let before: u64 = (0..layer).map(|layer| self.matrix_elements(layer)).sum();
        let (gates, hidden, input) = (self.n_gates(), self.hidden, self.input_of(layer));
        let inputs = gates * hidden * input;
        if index < gates {
            return Some(Part { offset: before + index * hidden * input, rows: hidden, columns: input });
        }
        if index < 2 * gates {
            let offset = before + inputs + (index - gates) * hidden * self.projected;
            return Some(Part { offset, rows: hidden, columns: self.projected });
        }
        let offset = before + inputs + gates * hidden * self.projected;
        let is_projection = self.has_projection() && index == 2 * gates;
        is_projection.then_some(Part { offset, rows: self.projected, columns: hidden })
    }

    fn bias(&self, layer: u64, index: u64) -> Option<Part> {
        if !self.has_bias || index >= 2 * self.n_gates() {
            return None;
        }
        let matrices: u64 = (0..self.n_pseudo_layers()).map(|layer| self.matrix_elements(layer)).sum();
        let offset = matrices + (layer * 2 * self.n_gates() + index) * self.hidden;
        Some(Part { offset, rows: self.hidden, columns: 1 })
    }
}

fn networks<T>(with: impl FnOnce(&mut HashMap<u64, Network>) -> T) -> T {
    static NETWORKS: OnceLock<Mutex<HashMap<u64, Network>>> = OnceLock::new();
    with(&mut NETWORKS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner))
}

fn network(descriptor: u64) -> Result<Network, Code> {
    networks(|networks| networks.get(&descriptor).copied()).ok_or(BAD_PARAMETER)
}

entries! { plain:
    fn cudnnCreateRNNDescriptor(descriptor: Out<u64>) {
        let new = gpu().kernels.handle();
        networks(|networks| networks.insert(new, Network::default()));
        descriptor.set(new)
    }
    fn cudnnDestroyRNNDescriptor(descriptor: u64) {
        networks(|networks| networks.remove(&descriptor));
        Ok(())
    }
    fn cudnnSetRNNDescriptor_v8(
        descriptor: u64,
        _algorithm: c_int,
        cell: c_int,
        bias: c_int,
        direction: c_int,
        _input_mode: c_int,
        data_type: c_int,
        _precision: c_int,
        _math: c_int,
        input: c_int,
        hidden: c_int,
        projected: c_int,
        n_layers: c_int,
        _dropout: u64,
        _flags: c_uint,
    ) {
        let size = |value: c_int| u64::try_from(value).map_err(|_| BAD_PARAMETER);
        let network = Network {
            cell,
            has_bias: bias != 0,
            is_bidirectional: direction == 1,
            data_type,
            input: size(input)?,
            hidden: size(hidden)?,
            projected: size(projected)?,
            n_layers: size(n_layers)?,
        };
        networks(|networks| networks.insert(descriptor, network));
        Ok(())
    }
    fn cudnnGetRNNWeightSpaceSize(_handle: u64, descriptor: u64, bytes: Out<usize>) {
        let network = network(descriptor)?;
        let size = network.elements() * data_bytes(network.data_type);
        bytes.set(usize::try_from(size).unwrap_or(usize::MAX))
    }
    fn cudnnGetRNNWeightParams(
        _handle: u64,
        descriptor: u64,
        layer: c_int,
        _bytes: usize,
        space: u64,
        index: c_int,
        matrix: u64,
        matrix_address: Out<u64>,
        bias: u64,
        bias_address: Out<u64>,
    ) {
        let network = network(descriptor)?;
        let number = |value: c_int| u64::try_from(value).map_err(|_| BAD_PARAMETER);
        let (layer, index) = (number(layer)?, number(index)?);
        let answers = [
            (network.matrix(layer, index), matrix, matrix_address),
            (network.bias(layer, index), bias, bias_address),
        ];
        for (part, tensor, address) in answers {
            let Some(part) = part else {
                address.set_if_asked(0);
                describe(tensor, Tensor::default());
                continue;
            };
            address.set_if_asked(space + part.offset * data_bytes(network.data_type));
            let size = |value: u64| c_int::try_from(value).map_err(|_| BAD_PARAMETER);
            let (rows, columns) = (size(part.rows)?, size(part.columns)?);
            let strides = vec![rows * columns, columns, 1];
            describe(tensor, Tensor { data_type: network.data_type, sizes: vec![1, rows, columns], strides });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lstm(has_bias: bool) -> Network {
        Network {
            cell: 2,
            has_bias,
            is_bidirectional: true,
            data_type: 0,
            input: 10,
            hidden: 20,
            projected: 20,
            n_layers: 2,
        }
    }

    #[test]
    fn parts_fill_the_buffer_without_gap_or_overlap() {
        for network in [
            lstm(true),
            lstm(false),
            Network { projected: 5, ..lstm(true) },
            Network { cell: 3, ..lstm(true) },
        ] {
            let mut next = 0;
            for layer in 0..network.n_pseudo_layers() {
                for index in 0.. {
                    let Some(part) = network.matrix(layer, index) else { break };
                    assert_eq!(part.offset, next);
                    next += part.rows * part.columns;
                }
            }
            for layer in 0..network.n_pseudo_layers() {
                for index in 0.. {
                    let Some(part) = network.bias(layer, index) else { break };
                    assert_eq!(part.offset, next);
                    next += part.rows;
                }
            }
            assert_eq!(next, network.elements());
        }
    }

    #[test]
    fn has_as_many_elements_as_the_parameters_of_the_module() {
        // torch.nn.LSTM(10, 20, 2, bidirectional=True): 4 gates of 20, weights and two biases.
        let per_layer = |input: u64| 4 * 20 * (input + 20 + 2);
        assert_eq!(lstm(true).elements(), 2 * per_layer(10) + 2 * per_layer(40));
    }
}
