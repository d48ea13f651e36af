//! What a device says about itself: attributes by number, and `cudaDeviceProp` laid out by CUDA major version.

use crate::profile::Profile;

/// Attributes 1 to 147 of an H200 under driver 580, read with `cuDeviceGetAttribute`. Where a profile says
/// otherwise, [`attribute`] overrides.
const H200_ATTRIBUTES: [i32; 147] = [
    1024,
    1024,
    1024,
    64,
    2_147_483_647,
    65_535,
    65_535,
    49_152,
    65_536,
    32, // 1
    2_147_483_647,
    65_536,
    1_980_000,
    512,
    1,
    132,
    0,
    0,
    1,
    0, // 11
    131_072,
    131_072,
    65_536,
    16_384,
    16_384,
    16_384,
    32_768,
    32_768,
    2048,
    512, // 21
    1,
    1,
    0,
    6,
    0,
    3_201_000,
    6016,
    62_914_560,
    2048,
    3, // 31
    1,
    32_768,
    2048,
    1,
    32_768,
    32_768,
    8192,
    8192,
    32_768,
    0, // 41
    32,
    32_768,
    32_768,
    2046,
    32_768,
    131_072,
    65_536,
    16_384,
    16_384,
    16_384, // 51
    32_768,
    2048,
    32_768,
    32_768,
    2048,
    32_768,
    32_768,
    2046,
    268_435_456,
    131_072, // 61
    65_000,
    2_097_120,
    32_768,
    32_768,
    9,
    0,
    32_768,
    1,
    1,
    1, // 71
    233_472,
    65_536,
    1,
    0,
    0,
    0,
    2,
    0,
    1,
    1, // 81
    1,
    0,
    0,
    0,
    1,
    1,
    232_448,
    0,
    1,
    0, // 91
    0,
    1,
    1,
    0,
    0,
    32,
    1,
    39_321_600,
    134_217_728,
    1, // 101
    1024,
    1,
    1,
    1,
    1,
    1,
    1,
    100,
    9,
    1, // 111
    1,
    1,
    1,
    1,
    1,
    4,
    1,
    1,
    1,
    0, // 121
    -1,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    590_680_286,
    415_174_878, // 131
    1,
    1,
    0,
    1,
    1,
    0,
    0, // 141
];

/// The value of an attribute, by the driver's number for it.
pub(crate) fn attribute(profile: &Profile, number: i32, device: usize) -> Option<i32> {
    let (major, minor) = profile.capability;
    let device = i32::try_from(device).unwrap_or(0);
    Some(match number {
        16 => profile.n_multiprocessors,
        33 => 1 + device,
        37 => profile.bus_bits,
        38 => profile.l2_bytes,
        39 => profile.threads_per_multiprocessor,
        75 => major,
        76 => minor,
        81 => profile.shared_bytes_per_multiprocessor,
        97 => profile.shared_bytes_opt_in(),
        106 => profile.blocks_per_multiprocessor,
        111 if major < 8 => 0,
        // Cluster launches and tensor maps begin with Hopper.
        120 | 127 if major < 9 => 0,
        // On the bus it is the first device of its own bus. Memory cannot be shared with other processes or devices here: no GPUDirect, no fabric handles, no
        // file descriptors.
        34 | 103 | 110 | 116..=119 | 124 | 128 => 0,
        _ => *H200_ATTRIBUTES.get(usize::try_from(number).ok()?.checked_sub(1)?)?,
    })
}

/// A PCI bus id, by which the runtime and NVML agree on a device.
pub(crate) fn pci_bus_id(device: usize) -> String {
    format!("0000:{:02X}:00.0", device + 1)
}

/// Sixteen bytes that are the same in every process, and no real device's.
pub(crate) fn uuid(device: usize) -> [u8; 16] {
    let mut uuid = *b"unhand-standin\0\0";
    uuid[15] = u8::try_from(device).unwrap_or(u8::MAX);
    uuid
}

/// A struct under construction: fields at the offsets a C compiler gives them.
struct Layout {
    bytes: Vec<u8>,
}

impl Layout {
    fn align(&mut self, to: usize) {
        self.bytes.resize(self.bytes.len().next_multiple_of(to), 0);
    }

    fn int(&mut self, value: i32) {
        self.align(4);
        self.bytes.extend(value.to_le_bytes());
    }

    fn ints(&mut self, numbers: &[i32], value: impl Fn(i32) -> i32) {
        for number in numbers {
            self.int(value(*number));
        }
    }

    fn size(&mut self, value: u64) {
        self.align(8);
        self.bytes.extend(value.to_le_bytes());
    }
}

/// `cudaDeviceProp` as CUDA 12 and 13 lay it out. The caller has room for all of it; what comes after the fields
/// below is reserved.
pub(crate) fn device_properties(
    profile: &Profile,
    memory_bytes: u64,
    device: usize,
    cuda_major: i32,
) -> Vec<u8> {
    let value = |number| attribute(profile, number, device).unwrap_or(0);
    let wide = |number| u64::try_from(value(number)).unwrap_or(0);
    // CUDA 13 dropped what `cudaDeviceGetAttribute` tells as well.
    let is_12 = cuda_major < 13;
    let mut layout = Layout { bytes: profile.device_name.as_bytes().to_vec() };
    layout.bytes.resize(256, 0);
    layout.bytes.extend(uuid(device));
    layout.bytes.extend([0; 8]);
    // The node mask of a local identifier, which only Windows has.
    layout.int(0);
    layout.size(memory_bytes);
    layout.size(wide(8));
    layout.ints(&[12, 10], value);
    layout.size(wide(11));
    layout.ints(&[1, 2, 3, 4, 5, 6, 7], value);
    if is_12 {
        layout.int(value(13));
    }
    layout.size(wide(9));
    layout.ints(&[75, 76], value);
    layout.size(wide(14));
    layout.size(wide(51));
    if is_12 {
        layout.int(value(15));
    }
    layout.int(value(16));
    if is_12 {
        layout.int(value(17));
    }
    layout.ints(&[18, 19], value);
    if is_12 {
        layout.int(value(20));
    }
    layout.ints(&[21, 77], value);
    if is_12 {
        layout.int(value(69));
    }
    let textures_and_surfaces = [
        22, 23, 73, 74, 70, 71, 72, 45, 46, 24, 25, 26, 47, 48, 49, 52, 42, 43, 27, 28, 29, 53, 54, 55, 56,
        57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68,
    ];
    layout.ints(&textures_and_surfaces, value);
    layout.size(wide(30));
    layout.ints(&[31, 32, 33, 34, 50, 35, 40, 41], value);
    if is_12 {
        layout.int(value(36));
    }
    layout.ints(&[37, 38, 108, 39, 78, 79, 80], value);
    layout.size(wide(81));
    layout.ints(&[82, 83, 84, 85, 86], value);
    if is_12 {
        layout.int(value(87));
    }
    layout.ints(&[88, 89, 90, 91, 95], value);
    if is_12 {
        layout.int(value(96));
    }
    layout.size(wide(97));
    layout.ints(&[100, 101, 106, 109], value);
    layout.size(wide(111));
    layout.ints(&[99, 112, 113, 114, 115, 116, 117, 118, 119, 121, 122, 120, 129], value);
    if !is_12 {
        layout.ints(&[130, 131, 133, 134, 139, 140, 143], value);
    }
    layout.bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{H200, PROFILES};

    /// What `cudaGetDeviceProperties` of CUDA 13.0 wrote on an H200.
    const REAL: &str = include_str!("../../tables/h200-properties.hex");

    #[test]
    fn an_h200_describes_itself_as_a_real_one_does() {
        let digits: Vec<u8> = REAL.bytes().filter(u8::is_ascii_hexdigit).collect();
        let digit = |byte: u8| {
            char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok()).expect("a digit")
        };
        let real: Vec<u8> = digits.chunks(2).map(|pair| digit(pair[0]) * 16 + digit(pair[1])).collect();
        let ours = device_properties(&H200, H200.memory_bytes, 0, 13);
        // The dump ends where only reserved zeros follow.
        assert!(ours[real.len()..].iter().all(|byte| *byte == 0));
        let differs = (256..real.len()).step_by(4).filter(|&at| ours[at..at + 4] != real[at..at + 4]);
        // The identifier, where on the bus it is, and that it cannot be reached from other devices.
        assert_eq!(differs.collect::<Vec<_>>(), [256, 260, 264, 268, 568, 572, 724, 728, 732, 736]);
    }

    #[test]
    fn cuda_12_has_eight_fields_more() {
        let new = device_properties(&H200, 1, 0, 13);
        let old = device_properties(&H200, 1, 0, 12);
        // Up to the first of them, the clock rate, both are the same.
        assert_eq!(old[..348], new[..348]);
        assert_eq!(old[348..352], 1_980_000_i32.to_le_bytes());
        assert_eq!(
            (&old[360..368], &new[360..368]),
            (&[9, 0, 0, 0, 0, 0, 0, 0][..], &[9, 0, 0, 0, 0, 0, 0, 0][..])
        );
    }

    #[test]
    fn devices_differ_where_they_have_to() {
        for profile in PROFILES {
            let (first, second) =
                (device_properties(profile, 1, 0, 13), device_properties(profile, 1, 1, 13));
            assert_ne!(first[256..272], second[256..272]);
            assert_eq!(first.len(), second.len());
        }
        assert_eq!((pci_bus_id(0).as_str(), attribute(&H200, 33, 0)), ("0000:01:00.0", Some(1)));
        assert_eq!((attribute(&H200, 0, 0), attribute(&H200, 148, 0)), (None, None));
    }
}
