//! The opcodes of a pickle being written, in frames as protocol 4 wants them. It knows nothing of snapshots.

use std::io::Write;

use crate::{Error, opcode as op};

/// A frame is written out when it has grown to this; the size Python's own pickler aims at.
const FRAME_BYTES: usize = 64 * 1024;

/// Room for `FRAME` and its length, in front of the frame's content.
const HEADER_BYTES: usize = 9;

/// Writes values one after the other.
pub(crate) struct Pickler<W: Write> {
    out: W,
    /// The frame being filled, behind room for its header.
    frame: Vec<u8>,
    n_memoized: u32,
}

impl<W: Write> Pickler<W> {
    pub(crate) fn new(mut out: W) -> Result<Pickler<W>, Error> {
        out.write_all(&[op::PROTO, 4])?;
        let mut frame = Vec::with_capacity(FRAME_BYTES + 4096);
        frame.resize(HEADER_BYTES, 0);
        Ok(Pickler { out, frame, n_memoized: 0 })
    }

    /// Ends the pickle.
    pub(crate) fn finish(mut self) -> Result<(), Error> {
        self.frame.push(op::STOP);
        self.flush()?;
        self.out.flush()?;
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Error> {
        let length = (self.frame.len() - HEADER_BYTES) as u64;
        self.frame[0] = op::FRAME;
        self.frame[1..HEADER_BYTES].copy_from_slice(&length.to_le_bytes());
        self.out.write_all(&self.frame)?;
        self.frame.truncate(HEADER_BYTES);
        Ok(())
    }

    /// Adds an opcode with its arguments, which must not be torn apart by a frame's end.
    #[inline]
    fn put(&mut self, opcode: u8, argument: &[u8]) -> Result<(), Error> {
        if self.frame.len() >= HEADER_BYTES + FRAME_BYTES {
            self.flush()?;
        }
        self.frame.push(opcode);
        self.frame.extend_from_slice(argument);
        Ok(())
    }

    pub(crate) fn none(&mut self) -> Result<(), Error> {
        self.put(op::NONE, &[])
    }

    pub(crate) fn bool(&mut self, value: bool) -> Result<(), Error> {
        self.put(if value { op::NEWTRUE } else { op::NEWFALSE }, &[])
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // each arm's range says why not
    pub(crate) fn int(&mut self, value: i64) -> Result<(), Error> {
        match value {
            0..=0xff => self.put(op::BININT1, &[value as u8]),
            0x100..=0xffff => self.put(op::BININT2, &(value as u16).to_le_bytes()),
            -0x8000_0000..=0x7fff_ffff => self.put(op::BININT, &(value as i32).to_le_bytes()),
            _ => {
                let bytes = value.to_le_bytes();
                // The bytes that only repeat the sign are left out.
                let sign = if value < 0 { 0xff } else { 0 };
                let mut length = 8;
                while bytes[length - 1] == sign && bytes[length - 2] >> 7 == sign & 1 {
                    length -= 1;
                }
                self.long(&bytes[..length])
            }
        }
    }

    pub(crate) fn unsigned(&mut self, value: u64) -> Result<(), Error> {
        if let Ok(value) = i64::try_from(value) {
            return self.int(value);
        }
        let mut bytes = [0; 9];
        bytes[..8].copy_from_slice(&value.to_le_bytes());
        self.long(&bytes)
    }

    /// An int in two's complement.
    pub(crate) fn long(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if let Ok(length) = u8::try_from(bytes.len()) {
            self.put(op::LONG1, &[length])?;
        } else {
            let length = i32::try_from(bytes.len());
            let length = length.map_err(|_| Error::Unwritable { what: "an int is too long" })?;
            self.put(op::LONG4, &length.to_le_bytes())?;
        }
        self.frame.extend_from_slice(bytes);
        Ok(())
    }

    pub(crate) fn float(&mut self, value: f64) -> Result<(), Error> {
        self.put(op::BINFLOAT, &value.to_be_bytes())
    }

    pub(crate) fn text(&mut self, text: &str) -> Result<(), Error> {
        if let Ok(length) = u8::try_from(text.len()) {
            self.put(op::SHORT_BINUNICODE, &[length])?;
        } else if let Ok(length) = u32::try_from(text.len()) {
            self.put(op::BINUNICODE, &length.to_le_bytes())?;
        } else {
            self.put(op::BINUNICODE8, &(text.len() as u64).to_le_bytes())?;
        }
        self.frame.extend_from_slice(text.as_bytes());
        Ok(())
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.put(op::BINBYTES8, &(bytes.len() as u64).to_le_bytes())?;
        self.frame.extend_from_slice(bytes);
        Ok(())
    }

    /// `BYTEARRAY8` is of protocol 5, but every reader since Python 3.8 takes it in any file.
    pub(crate) fn byte_array(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.put(op::BYTEARRAY8, &(bytes.len() as u64).to_le_bytes())?;
        self.frame.extend_from_slice(bytes);
        Ok(())
    }

    pub(crate) fn begin_list(&mut self) -> Result<(), Error> {
        self.put(op::EMPTY_LIST, &[])
    }

    pub(crate) fn mark(&mut self) -> Result<(), Error> {
        self.put(op::MARK, &[])
    }

    pub(crate) fn appends(&mut self) -> Result<(), Error> {
        self.put(op::APPENDS, &[])
    }

    pub(crate) fn begin_dict_unmarked(&mut self) -> Result<(), Error> {
        self.put(op::EMPTY_DICT, &[])
    }

    pub(crate) fn begin_dict(&mut self) -> Result<(), Error> {
        self.begin_dict_unmarked()?;
        self.mark()
    }

    pub(crate) fn end_dict(&mut self) -> Result<(), Error> {
        self.put(op::SETITEMS, &[])
    }

    /// A tuple of everything since the mark.
    pub(crate) fn tuple(&mut self) -> Result<(), Error> {
        self.put(op::TUPLE, &[])
    }

    /// A tuple of the last two values.
    pub(crate) fn pair(&mut self) -> Result<(), Error> {
        self.put(op::TUPLE2, &[])
    }

    /// Lets the reader remember the last value, and says under which number.
    pub(crate) fn memoize(&mut self) -> Result<u32, Error> {
        self.put(op::MEMOIZE, &[])?;
        let place = self.n_memoized;
        self.n_memoized =
            place.checked_add(1).ok_or(Error::Unwritable { what: "too many values to be remembered" })?;
        Ok(place)
    }

    /// A remembered value.
    #[inline]
    pub(crate) fn get(&mut self, place: u32) -> Result<(), Error> {
        match u8::try_from(place) {
            Ok(place) => self.put(op::BINGET, &[place]),
            Err(_) => self.put(op::LONG_BINGET, &place.to_le_bytes()),
        }
    }
}
