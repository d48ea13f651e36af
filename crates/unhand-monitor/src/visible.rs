//! Which devices a process sees, and under which index, by `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER`. A pure function.

use std::fmt;

use crate::{Device, MigDevice, Sample};

/// What the environment says about devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Selection<'a> {
    /// `CUDA_VISIBLE_DEVICES`; `None` if it is not set, which is not the same as empty.
    pub visible_devices: Option<&'a str>,
    /// `CUDA_DEVICE_ORDER`.
    pub device_order: Option<&'a str>,
}

/// The devices a process sees.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Visible {
    /// In CUDA's order: the first is `cuda:0`.
    pub devices: Vec<VisibleDevice>,
    /// Whether the order is sure. CUDA puts the fastest device first unless it is told to follow the bus, and only CUDA
    /// knows which one that is.
    pub is_order_certain: bool,
    /// What ended the list early, or hid everything.
    pub ended: Option<Ended>,
}

/// A device, or a part of one, as a process sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VisibleDevice {
    /// The driver's index of the device.
    pub index: u32,
    /// The identifier: `GPU-…`, or `MIG-…` of the part.
    pub uuid: String,
    /// The part's index, if it is a part.
    pub mig_index: Option<u32>,
}

/// Why a list of devices was not read to its end. CUDA says nothing about any of these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The variable is set and empty.
    Empty,
    /// A negative number.
    Negative(String),
    /// Not a number, and not the beginning of an identifier.
    NotADevice(String),
    /// A number or an identifier that no device has.
    NoSuchDevice(String),
    /// Several identifiers begin like this.
    Ambiguous(String),
    /// The same device again. All devices are hidden then.
    Repeated(String),
    /// A process sees one part of a divided device, and nothing beside it.
    OnePart(String),
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ended::Empty => write!(f, "it is empty, which hides all devices"),
            Ended::Negative(entry) => write!(f, "`{entry}` ends the list"),
            Ended::NotADevice(entry) => write!(f, "`{entry}` names no device, which ends the list"),
            Ended::NoSuchDevice(entry) => write!(f, "there is no device `{entry}`, which ends the list"),
            Ended::Ambiguous(entry) => write!(f, "`{entry}` fits several devices, which ends the list"),
            Ended::Repeated(entry) => write!(f, "`{entry}` is there twice, which hides all devices"),
            Ended::OnePart(entry) => {
                write!(f, "`{entry}` is left out: beside a part of a divided device nothing else is seen")
            }
        }
    }
}

/// The devices of `sample` that a process with this environment sees.
///
/// The rules are CUDA's, as far as it documents them, and PyTorch's (`torch.cuda._parse_visible_devices`) beyond that.
pub fn visible(sample: &Sample, selection: Selection<'_>) -> Visible {
    let mut devices: Vec<&Device> = sample.devices.iter().collect();
    devices.sort_by_key(|device| device.index);
    let follows_the_bus = selection.device_order.is_some_and(|order| order.trim() == "PCI_BUS_ID");
    let first_name = devices.first().and_then(|device| device.name.as_deref());
    let are_alike =
        devices.iter().all(|device| device.name.is_some() && device.name.as_deref() == first_name);
    let mut list = List::default();
    match selection.visible_devices {
        None => {
            list.is_by_number = true;
            for device in &devices {
                if list.add(device, part_of(device), &device.uuid).is_err() {
                    break;
                }
            }
        }
        Some(text) => {
            list.ended = read(text, &devices, &mut list).err();
        }
    }
    let is_order_certain = !list.is_by_number || follows_the_bus || are_alike || devices.len() <= 1;
    Visible { devices: list.devices, is_order_certain, ended: list.ended }
}

/// The devices that a variable has named so far.
#[derive(Default)]
struct List {
    devices: Vec<VisibleDevice>,
    is_by_number: bool,
    ended: Option<Ended>,
}

impl List {
    fn add(&mut self, device: &Device, part: Part<'_>, entry: &str) -> Result<(), Ended> {
        let seen = match part {
            Part::Whole => VisibleDevice { index: device.index, uuid: device.uuid.clone(), mig_index: None },
            Part::Of(part) => {
                VisibleDevice { index: device.index, uuid: part.uuid.clone(), mig_index: Some(part.index) }
            }
            // Divided, and no part has been made yet.
            Part::Nothing => return Ok(()),
        };
        if self.devices.contains(&seen) {
            self.devices.clear();
            return Err(Ended::Repeated(entry.to_owned()));
        }
        let has_part = seen.mig_index.is_some() || self.devices.iter().any(|seen| seen.mig_index.is_some());
        if has_part && !self.devices.is_empty() {
            return Err(Ended::OnePart(entry.to_owned()));
        }
        self.devices.push(seen);
        Ok(())
    }
}

/// What of a device a process sees.
#[derive(Clone, Copy)]
enum Part<'a> {
    Whole,
    Of(&'a MigDevice),
    Nothing,
}

/// Of a divided device CUDA takes the first part.
fn part_of(device: &Device) -> Part<'_> {
    match &device.mig {
        Some(mig) if mig.is_enabled => mig.devices.first().map_or(Part::Nothing, Part::Of),
        _ => Part::Whole,
    }
}

/// Reads the variable. Its first entry says whether it is a list of identifiers or of numbers.
fn read(text: &str, devices: &[&Device], list: &mut List) -> Result<(), Ended> {
    if text.trim().is_empty() {
        return Err(Ended::Empty);
    }
    let prefix = ["GPU-", "MIG-"].into_iter().find(|prefix| text.starts_with(prefix));
    list.is_by_number = prefix.is_none();
    for entry in text.split(',').map(str::trim) {
        match prefix {
            Some(prefix) if !entry.starts_with(prefix) => return Err(Ended::NotADevice(entry.to_owned())),
            Some("GPU-") => {
                let device = one(devices.iter().filter(|device| device.uuid.starts_with(entry)), entry)?;
                list.add(device, part_of(device), entry)?;
            }
            Some(_) => {
                let parts = devices.iter().flat_map(|device| {
                    let parts = device.mig.iter().flat_map(|mig| &mig.devices);
                    parts.map(move |part| (device, part))
                });
                let (device, part) = one(parts.filter(|(_, part)| part.uuid.starts_with(entry)), entry)?;
                list.add(device, Part::Of(part), entry)?;
            }
            None => {
                let number = number(entry)?;
                let device = devices.get(number).ok_or_else(|| Ended::NoSuchDevice(entry.to_owned()))?;
                list.add(device, part_of(device), entry)?;
            }
        }
    }
    Ok(())
}

/// The number that an entry begins with: `1gpu` is 1 to CUDA.
fn number(entry: &str) -> Result<usize, Ended> {
    let digits = entry.strip_prefix('+').unwrap_or(entry);
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    if entry.starts_with('-') && entry.len() > 1 {
        return Err(Ended::Negative(entry.to_owned()));
    }
    digits[..end].parse().map_err(|_| Ended::NotADevice(entry.to_owned()))
}

fn one<T>(mut fitting: impl Iterator<Item = T>, entry: &str) -> Result<T, Ended> {
    let first = fitting.next().ok_or_else(|| Ended::NoSuchDevice(entry.to_owned()))?;
    match fitting.next() {
        Some(_) => Err(Ended::Ambiguous(entry.to_owned())),
        None => Ok(first),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Memory, Mig};

    fn device(index: u32, uuid: &str, name: &str, mig: Mig) -> Device {
        let (uuid, name) = (uuid.to_owned(), Some(name.to_owned()));
        Device { index, uuid, name, memory: Memory::default(), mig: Some(mig), processes: None }
    }

    fn parts(uuids: &[&str]) -> Mig {
        let part = |(index, uuid): (u32, &&str)| MigDevice {
            index,
            uuid: (*uuid).to_owned(),
            name: None,
            memory: Memory::default(),
            processes: None,
        };
        Mig { is_enabled: true, devices: (0..).zip(uuids).map(part).collect() }
    }

    /// Three of a kind.
    fn three() -> Sample {
        let uuids = ["GPU-aa11", "GPU-aa22", "GPU-bb33"];
        let devices = (0..).zip(uuids).map(|(index, uuid)| device(index, uuid, "H200", Mig::default()));
        Sample { devices: devices.collect(), ..Sample::default() }
    }

    fn divided() -> Sample {
        let devices = vec![
            device(0, "GPU-aa11", "A100", parts(&["MIG-1111", "MIG-1122"])),
            device(1, "GPU-bb22", "A100", parts(&[])),
            device(2, "GPU-cc33", "A100", parts(&["MIG-GPU-cc33/1/0"])),
        ];
        Sample { devices, ..Sample::default() }
    }

    fn seen(sample: &Sample, visible_devices: Option<&str>) -> (Vec<String>, Option<Ended>) {
        let visible = visible(sample, Selection { visible_devices, device_order: None });
        (visible.devices.into_iter().map(|device| device.uuid).collect(), visible.ended)
    }

    #[test]
    fn without_the_variable_all_are_seen() {
        assert_eq!(
            seen(&three(), None),
            (vec!["GPU-aa11".into(), "GPU-aa22".into(), "GPU-bb33".into()], None)
        );
    }

    #[test]
    fn numbers_choose_and_order() {
        for (text, expected) in [
            ("2,0", vec!["GPU-bb33", "GPU-aa11"]),
            (" 1 , 2 ", vec!["GPU-aa22", "GPU-bb33"]),
            ("1gpu2,2ampere", vec!["GPU-aa22", "GPU-bb33"]),
            ("+1", vec!["GPU-aa22"]),
        ] {
            assert_eq!(
                seen(&three(), Some(text)),
                (expected.into_iter().map(str::to_owned).collect(), None),
                "{text}"
            );
        }
    }

    #[test]
    fn what_is_no_device_ends_the_list() {
        let first = vec!["GPU-aa11".to_owned()];
        for (text, expected, ended) in [
            ("", vec![], Ended::Empty),
            ("-1", vec![], Ended::Negative("-1".into())),
            ("0,-1,2", first.clone(), Ended::Negative("-1".into())),
            ("0,7,1", first.clone(), Ended::NoSuchDevice("7".into())),
            ("0,,1", first.clone(), Ended::NotADevice(String::new())),
            ("NoDevFiles", vec![], Ended::NotADevice("NoDevFiles".into())),
            ("-", vec![], Ended::NotADevice("-".into())),
            ("0,1,0", vec![], Ended::Repeated("0".into())),
            ("0,GPU-aa22", first.clone(), Ended::NotADevice("GPU-aa22".into())),
            ("GPU-aa1,1", first.clone(), Ended::NotADevice("1".into())),
            ("GPU-aa11,GPU-aa", first.clone(), Ended::Ambiguous("GPU-aa".into())),
            ("GPU-aa11,GPU-ff", first, Ended::NoSuchDevice("GPU-ff".into())),
            ("MIG-1111", vec![], Ended::NoSuchDevice("MIG-1111".into())),
            ("99999999999999999999999", vec![], Ended::NotADevice("99999999999999999999999".into())),
        ] {
            assert_eq!(seen(&three(), Some(text)), (expected, Some(ended)), "{text:?}");
        }
    }

    #[test]
    fn the_beginning_of_an_identifier_is_enough() {
        assert_eq!(seen(&three(), Some("GPU-b,GPU-aa2")), (vec!["GPU-bb33".into(), "GPU-aa22".into()], None));
    }

    #[test]
    fn one_part_of_a_divided_device_is_seen_and_nothing_else() {
        let sample = divided();
        assert_eq!(seen(&sample, Some("MIG-1122")), (vec!["MIG-1122".into()], None));
        assert_eq!(seen(&sample, Some("MIG-GPU-cc33/1/0")), (vec!["MIG-GPU-cc33/1/0".into()], None));
        let second = Some(Ended::OnePart("MIG-1111".into()));
        assert_eq!(seen(&sample, Some("MIG-1122,MIG-1111")), (vec!["MIG-1122".into()], second));
        // By number or by the device's own identifier it is the first part; where there is none, nothing.
        assert_eq!(seen(&sample, Some("0")), (vec!["MIG-1111".into()], None));
        assert_eq!(seen(&sample, Some("GPU-cc")), (vec!["MIG-GPU-cc33/1/0".into()], None));
        assert_eq!(seen(&sample, Some("1")), (vec![], None));
        assert_eq!(seen(&sample, None), (vec!["MIG-1111".into()], None));
    }

    #[test]
    fn the_order_is_sure_where_it_does_not_depend_on_speed() {
        let mut sample = three();
        let is_certain = |sample: &Sample, visible_devices, device_order| {
            visible(sample, Selection { visible_devices, device_order }).is_order_certain
        };
        assert!(is_certain(&sample, None, None), "all are alike");
        sample.devices[1].name = Some("T4".to_owned());
        assert!(!is_certain(&sample, None, None));
        assert!(!is_certain(&sample, Some("1,0"), Some("FASTEST_FIRST")));
        assert!(is_certain(&sample, Some("1,0"), Some("PCI_BUS_ID")));
        assert!(is_certain(&sample, Some("GPU-bb"), None), "named by its identifier");
    }
}
