//! The story every PyTorch user lives through: a model is freed, and the GPU stays full.
//!
//! `cargo run -p unhand-alloc --example 01-where-freed-memory-stays` runs it on host memory, on any machine. A
//! model, an optimizer and data are allocated and freed; *allocated* falls, *reserved* and the device's *used*
//! stay; `empty_cache` brings both down, except where one small survivor pins its segment.

use std::io::Write;

use unhand_alloc::{AllocError, Allocation, Bytes, CachingAllocator, HostDevice, Request};

const MIB: u64 = 1 << 20;

type Failure = Box<dyn std::error::Error>;

struct Story {
    allocator: CachingAllocator<HostDevice>,
    out: std::io::Stdout,
}

impl Story {
    fn tensors(&self, count: usize, bytes: u64) -> Result<Vec<Allocation>, AllocError> {
        (0..count).map(|_| self.allocator.malloc(0, Request::new(bytes))).collect()
    }

    fn free(&self, tensors: Vec<Allocation>) -> Result<(), AllocError> {
        tensors.into_iter().try_for_each(|tensor| self.allocator.free(0, tensor))
    }

    fn say(&mut self, what: &str) -> Result<(), Failure> {
        let info = self.allocator.mem_get_info(0)?;
        writeln!(
            self.out,
            "{what:<44} allocated {:>9}   reserved {:>9}   used {:>9}",
            Bytes(self.allocator.memory_allocated(0)?),
            Bytes(self.allocator.memory_reserved(0)?),
            Bytes(info.total_bytes - info.free_bytes),
        )?;
        Ok(())
    }
}

fn main() -> Result<(), Failure> {
    let allocator = CachingAllocator::new(vec![HostDevice::new(1024 * MIB)]);
    let mut story = Story { allocator, out: std::io::stdout() };

    let model = story.tensors(20, 4 * MIB)?;
    let optimizer = story.tensors(40, 4 * MIB)?;
    let data = story.tensors(8, 16 * MIB)?;
    story.say("a model, an optimizer and data")?;

    story.free(data)?;
    story.free(optimizer)?;
    story.free(model)?;
    story.say("all of it freed: the cache keeps the segments")?;

    story.allocator.empty_cache()?;
    story.say("empty_cache(): now they are back")?;

    writeln!(story.out, "\nThe same again, but one block of every fifth lives on, say in a list of losses.")?;
    let (survivors, rest): (Vec<_>, Vec<_>) =
        story.tensors(40, 4 * MIB)?.into_iter().enumerate().partition(|(number, _)| number % 5 == 0);
    story.free(rest.into_iter().map(|(_, tensor)| tensor).collect())?;
    story.allocator.empty_cache()?;
    story.say("8 of 40 blocks survive, after empty_cache()")?;
    write!(story.out, "{}", story.allocator.pinned_report(0)?)?;

    story.free(survivors.into_iter().map(|(_, tensor)| tensor).collect())?;
    story.allocator.empty_cache()?;
    story.say("the survivors are freed, too")?;
    Ok(())
}
