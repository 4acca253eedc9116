//! Templates take no more memory than a small multiple of their budget: replays the corpus of the
//! fuzz target `template_source`.
#![allow(clippy::unwrap_used)]

use hearthnet_tokens::fuzzing;
use std::fs;
use std::path::Path;

use crate::{ALONE, MEMORY};

/// A rendering may handle 128 MiB. Growing a text copies it into a buffer of twice its size; one
/// MiB is for the rest.
const LIMIT: usize = (3 * 128 + 1) << 20;

#[test]
fn no_template_takes_more_memory_than_its_bounds_allow() {
    let _alone = ALONE.lock();
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/template_source");
    let mut seeds = 0;
    for seed in fs::read_dir(corpus).unwrap() {
        let path = seed.unwrap().path();
        let source = fs::read(&path).unwrap();
        let before = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        fuzzing::template_source(&source);
        let used = MEMORY.peak_usage().saturating_sub(before);
        assert!(used < LIMIT, "{}: {used} bytes", path.display());
        // A value that contains itself would never be freed.
        let left = MEMORY.current_usage().saturating_sub(before);
        assert!(left < 1 << 20, "{}: {left} bytes are left", path.display());
        seeds += 1;
    }
    assert!(seeds >= 40, "{seeds}");
}
