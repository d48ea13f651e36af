//! Machine code for one stub: sets every out-parameter, says that it was called, returns.
//!
//! Stubs clobber only registers that a function may clobber, and touch no memory but what callers pass for that
//! purpose. They do not align the stack: the one call they make is a jump, with the caller's stack as it was.

use crate::elf::{Function, Patch};
use crate::table::{Entry, Kind};

/// `mov r11, <argument>` for the six arguments in registers: rdi, rsi, rdx, rcx, r8, r9.
const REGISTERS: [[u8; 3]; 6] = [
    [0x49, 0x89, 0xfb],
    [0x49, 0x89, 0xf3],
    [0x49, 0x89, 0xd3],
    [0x49, 0x89, 0xcb],
    [0x4d, 0x89, 0xc3],
    [0x4d, 0x89, 0xcb],
];
/// Numbers of handles are this far apart.
const STEP: u8 = 0x40;

/// The stub of a table entry. `name_at` and `answer_at` are offsets in the library's texts: the function's name,
/// and the text that functions return.
pub(crate) fn stub(entry: &Entry, version: Option<String>, name_at: usize, answer_at: usize) -> Function {
    let mut code = Code::default();
    for (place, kind) in &entry.outs {
        code.load(*place);
        // test r11, r11; jz over the store, whose length is known afterwards
        code.add(&[0x4d, 0x85, 0xdb, 0x74, 0]);
        let start = code.bytes.len();
        match kind {
            // mov dword [r11], 0
            Kind::Int => code.add(&[0x41, 0xc7, 0x03, 0, 0, 0, 0]),
            // mov qword [r11], 0
            Kind::Size => code.add(&[0x49, 0xc7, 0x03, 0, 0, 0, 0]),
            Kind::Handle => {
                // mov eax, STEP; lock xadd [counter], rax; mov [r11], rax
                code.add(&[0xb8, STEP, 0, 0, 0, 0xf0, 0x48, 0x0f, 0xc1, 0x05]);
                code.distance(Patch::Counter);
                code.add(&[0x49, 0x89, 0x03]);
            }
            Kind::Text => {
                // lea rax, [text]; mov [r11], rax
                code.add(&[0x48, 0x8d, 0x05]);
                code.distance(Patch::Text(answer_at));
                code.add(&[0x49, 0x89, 0x03]);
            }
        }
        let length = code.bytes.len() - start;
        code.bytes[start - 1] = u8::try_from(length).unwrap_or(0);
    }
    if entry.returns_text {
        // lea rax, [text]; ret
        code.add(&[0x48, 0x8d, 0x05]);
        code.distance(Patch::Text(answer_at));
        code.add(&[0xc3]);
    } else if entry.is_work {
        // lea rdi, [name]; jmp [import]. The called function returns 0 in our place.
        code.add(&[0x48, 0x8d, 0x3d]);
        code.distance(Patch::Text(name_at));
        code.add(&[0xff, 0x25]);
        code.distance(Patch::Import);
    } else {
        // mov rax, sign-extended number; ret
        code.add(&[0x48, 0xc7, 0xc0]);
        code.add(&entry.returns.to_le_bytes());
        code.add(&[0xc3]);
    }
    Function { name: entry.name.clone(), version, code: code.bytes, patches: code.patches }
}

#[derive(Default)]
struct Code {
    bytes: Vec<u8>,
    patches: Vec<(usize, Patch)>,
}

impl Code {
    fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
    }

    fn distance(&mut self, patch: Patch) {
        self.patches.push((self.bytes.len(), patch));
        self.add(&[0; 4]);
    }

    /// Puts an argument into r11: from its register, or from the stack above the return address.
    fn load(&mut self, place: u8) {
        if let Some(register) = REGISTERS.get(usize::from(place) - 1) {
            self.add(register);
        } else {
            // mov r11, [rsp + distance]
            self.add(&[0x4c, 0x8b, 0x9c, 0x24]);
            let distance = (i32::from(place) - 6) * 8;
            self.add(&distance.to_le_bytes());
        }
    }
}
