//! Memory of the whole process while untrusted files are read. In a binary of their own, with an
//! allocator that counts.

mod gguf;
mod hugging_face;
mod template;

use parking_lot::Mutex;
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Held by the test that measures, because the counters are the process's.
static ALONE: Mutex<()> = Mutex::new(());
