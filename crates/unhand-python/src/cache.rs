//! What of a live process's cache can be given back: the analysis crate's rules over segments that Python hands in.

use serde::Serialize;
use unhand_analyze::{Cache, devices};
use unhand_snapshot::{ReadOptions, Snapshot};

/// The cache of every device that has segments.
#[derive(Debug, Serialize)]
struct Caches {
    devices: Vec<DeviceCache>,
}

/// The cache of one device.
#[derive(Debug, Serialize)]
struct DeviceCache {
    device: usize,
    cache: Cache,
}

/// Reads segments as `torch.cuda.memory._snapshot()` shapes them and answers in JSON.
pub(crate) fn caches(pickle: &[u8]) -> Result<String, String> {
    let snapshot = Snapshot::read(pickle, &ReadOptions::default()).map_err(|error| error.to_string())?;
    let devices = devices(&snapshot)
        .into_iter()
        .map(|device| DeviceCache { device, cache: Cache::of_device(&snapshot, device) })
        .collect();
    serde_json::to_string(&Caches { devices }).map_err(|error| error.to_string())
}
