//! Naming what is refused: opcodes that would run code, opcodes of old protocols, files that are no pickles.

use crate::item::{Item, View};
use crate::machine::Machine;
use crate::{Error, opcode as op};

impl Machine<'_> {
    /// The error for an opcode that is not carried out.
    pub(crate) fn refuse(&mut self, opcode: u8) -> Error {
        let offset = self.op_at as u64;
        let Some(name) = op::name(opcode) else { return Error::UnknownOpcode { byte: opcode, offset } };
        let class = match opcode {
            op::GLOBAL | op::INST => {
                let module = self.line();
                format!("{module}.{}", self.line())
            }
            op::STACK_GLOBAL => {
                let text = |item: Option<&Item>| match item.map(|item| item.view()) {
                    Some(View::Str(id)) => short(self.strings.get(id)),
                    _ => "?".to_owned(),
                };
                let [.., module, class] = self.stack.as_slice() else {
                    return Error::Refused { name, class: "?".to_owned(), offset };
                };
                format!("{}.{}", text(Some(module)), text(Some(class)))
            }
            op::PERSID => format!("persistent id {}", self.line()),
            op::EXT1 | op::EXT2 | op::EXT4 => "a registered extension".to_owned(),
            op::REDUCE | op::BUILD | op::OBJ | op::NEWOBJ | op::NEWOBJ_EX | op::BINPERSID => {
                "an object outside the file".to_owned()
            }
            op::FLOAT
            | op::INT
            | op::LONG
            | op::STRING
            | op::UNICODE
            | op::DICT
            | op::LIST
            | op::GET
            | op::PUT => {
                return Error::OldOpcode { name, offset };
            }
            _ => return Error::Unsupported { name, offset },
        };
        Error::Refused { name, class, offset }
    }

    /// A line of text for a message.
    fn line(&mut self) -> String {
        let rest = &self.data[self.at..];
        let length = rest.iter().take(256).position(|&byte| byte == b'\n').unwrap_or(rest.len().min(256));
        self.at = (self.at + length + 1).min(self.data.len());
        short(&String::from_utf8_lossy(&rest[..length]))
    }
}

/// A name for a message: hostile files may have long ones.
fn short(text: &str) -> String {
    text.chars().take(100).flat_map(char::escape_default).collect()
}

/// What a file that is not a pickle may be.
pub(crate) fn looks_like(data: &[u8]) -> &'static str {
    match data {
        [0x1f, 0x8b, ..] => "gzip data, which must be unpacked first",
        [0xfd, b'7', b'z', b'X', b'Z', ..] => "xz data, which must be unpacked first",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "zstd data, which must be unpacked first",
        [b'P', b'K', ..] => "a zip archive, perhaps from `torch.save`",
        [b'<', ..] => "an HTML page",
        [b'{', ..] => "JSON",
        [b'[', ..] if matches!(data.get(1), Some(b'{' | b'[' | b'"' | b']' | b'\n' | b' ')) => "JSON",
        // What protocols 0 and 1 begin with: a mark or an empty list or dict.
        [b'(' | b']' | b'}', ..] => "a pickle of protocol 0 or 1",
        _ => "something else",
    }
}
