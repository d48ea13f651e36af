//! Unpacking gzip, xz and zstd data in memory, with a limit against small files that unpack to huge ones.

use std::borrow::Cow;
use std::io::Read;

use crate::Error;

/// What any file may unpack to, in bytes.
const FREE_ALLOWANCE: u64 = 1 << 30;

/// How often its own length a file may unpack to. Recorded snapshots pack to about a tenth with gzip and a
/// twentieth with xz; bombs reach a thousand and more.
const ALLOWANCE_PER_BYTE: u64 = 256;

/// How much is unpacked at a time.
const STEP_BYTES: usize = 32 * 1024;

/// The content of a file: unpacked if it is gzip, xz or zstd by its first bytes, and as it is otherwise.
///
/// At most 1 GiB, or 256 times the packed length if that is more, is unpacked;
/// [`decompress_limited`] takes another limit.
///
/// # Errors
///
/// [`Error::Decompress`] for damaged data, [`Error::DecompressedTooLarge`] above the limit.
///
/// ```
/// // Not compressed, so not copied either.
/// let content = unhand_snapshot::decompress(b"\x80\x04].")?;
/// assert!(matches!(content, std::borrow::Cow::Borrowed(_)));
/// # Ok::<(), unhand_snapshot::Error>(())
/// ```
pub fn decompress(bytes: &[u8]) -> Result<Cow<'_, [u8]>, Error> {
    decompress_limited(bytes, FREE_ALLOWANCE.max(ALLOWANCE_PER_BYTE.saturating_mul(bytes.len() as u64)))
}

/// Like [`decompress`], with a limit on the unpacked bytes.
///
/// # Errors
///
/// [`Error::Decompress`] for damaged data, [`Error::DecompressedTooLarge`] above the limit.
pub fn decompress_limited(bytes: &[u8], limit: u64) -> Result<Cow<'_, [u8]>, Error> {
    match decompress_partial(bytes, limit) {
        (content, None) => Ok(content),
        (_, Some(error)) => Err(error),
    }
}

/// Like [`decompress_limited`], but with what could be unpacked before an error, for files that are cut off. Read the
/// content with [`ReadOptions::tolerate_truncation`](crate::ReadOptions::tolerate_truncation).
pub fn decompress_partial(bytes: &[u8], limit: u64) -> (Cow<'_, [u8]>, Option<Error>) {
    let mut content = Vec::new();
    let error = match bytes {
        [0x1f, 0x8b, ..] => unpack("gzip", flate2::bufread::MultiGzDecoder::new(bytes), limit, &mut content),
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => {
            // The dictionary is allocated before anything is unpacked: xz has at most 64 MiB of it at its usual
            // levels, and a quarter of the limit beyond that is the reader's own choice.
            let memory_kib = u32::try_from(limit / 4096).unwrap_or(u32::MAX - 1).clamp(1 << 17, u32::MAX - 1);
            let reader = lzma_rust2::XzReader::new_mem_limit(bytes, true, memory_kib);
            unpack("xz", reader, limit, &mut content)
        }
        [0x28, 0xb5, 0x2f, 0xfd, ..] => unpack_zstd(bytes, limit, &mut content),
        _ => return (Cow::Borrowed(bytes), None),
    };
    (Cow::Owned(content), error.err())
}

/// Unpacks up to the limit onto the end of `content`. In small steps, since what a step has unpacked before it fails
/// is lost.
fn unpack(
    format: &'static str,
    mut reader: impl Read,
    limit: u64,
    content: &mut Vec<u8>,
) -> Result<(), Error> {
    let mut step = vec![0; STEP_BYTES];
    loop {
        let n = match reader.read(&mut step) {
            Ok(0) => return Ok(()),
            Ok(n) => n,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(bad(format, &error)),
        };
        let rest = limit.saturating_sub(content.len() as u64);
        if n as u64 > rest {
            content.extend_from_slice(&step[..usize::try_from(rest).unwrap_or(n)]);
            return Err(Error::DecompressedTooLarge { format, limit });
        }
        content.extend_from_slice(&step[..n]);
    }
}

/// A zstd file is one frame after the other.
fn unpack_zstd(mut bytes: &[u8], limit: u64, content: &mut Vec<u8>) -> Result<(), Error> {
    use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
    const FORMAT: &str = "zstd";
    // Enough for `zstd --long=27`; larger windows need a flag for unpacking anyway.
    const WINDOW_BYTES: u64 = 128 << 20;
    while !bytes.is_empty() {
        let frame = ruzstd::decoding::StreamingDecoder::new_with_max_window_size(&mut bytes, WINDOW_BYTES);
        let mut frame = match frame {
            Ok(frame) => frame,
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length, ..
            })) => {
                bytes =
                    bytes.get(length as usize..).ok_or_else(|| bad(FORMAT, &"a skipped frame is cut off"))?;
                continue;
            }
            Err(error) => return Err(bad(FORMAT, &error)),
        };
        unpack(FORMAT, &mut frame, limit, content)?;
        let decoder = &frame.decoder;
        if let (Some(stored), Some(actual)) =
            (decoder.get_checksum_from_data(), decoder.get_calculated_checksum())
            && stored != actual
        {
            return Err(bad(FORMAT, &"the checksum is wrong"));
        }
    }
    Ok(())
}

fn bad(format: &'static str, reason: &dyn std::fmt::Display) -> Error {
    Error::Decompress { format, reason: reason.to_string() }
}
