//! No template takes more memory than a small multiple of what it may handle, whatever it does:
//! replays the corpus of the fuzz target `template_source`.
//!
//! One test alone in its program, because it watches the whole program's memory.

#![allow(clippy::unwrap_used)]

use hearthnet_model::fuzzing;
use peak_alloc::PeakAlloc;
use std::fs;
use std::path::Path;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// A rendering may handle 128 MiB. A text that grows is copied into twice its size, and a MiB is for
/// the rest.
const LIMIT: usize = (3 * 128 + 1) << 20;

#[test]
fn no_template_takes_more_memory_than_its_bounds_allow() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/template_source");
    let mut seeds = 0;
    for seed in fs::read_dir(corpus).unwrap() {
        let path = seed.unwrap().path();
        let source = fs::read(&path).unwrap();
        let before = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        fuzzing::template_source(&source);
        let used = MEMORY.peak_usage().saturating_sub(before);
        assert!(used < LIMIT, "{}: {used} bytes", path.display());
        // What holds itself would never be given back.
        let left = MEMORY.current_usage().saturating_sub(before);
        assert!(left < 1 << 20, "{}: {left} bytes are left", path.display());
        seeds += 1;
    }
    assert!(seeds >= 40, "{seeds}");
}
