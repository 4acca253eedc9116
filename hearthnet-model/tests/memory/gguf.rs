//! A file cannot make the reader use more memory than a small multiple of its own size, with any
//! byte changed and truncated at any position.

use hearthnet_model::fuzzing;
use hearthnet_testkit::TinyLlama;

use crate::{ALONE, MEMORY};

#[test]
fn no_damage_makes_the_reader_panic_or_use_much_memory() {
    let _alone = ALONE.lock();
    let tiny = TinyLlama {
        layers: 1,
        width: 32,
        heads: 2,
        kv_heads: 1,
        ffn: 32,
        vocab: TinyLlama::LEAST_VOCAB,
        weights: "q4_0",
        embedding: "q4_0",
        ..TinyLlama::default()
    };
    let good = tiny.bytes();
    let header = hearthnet_model::Gguf::from_bytes(good.clone()).unwrap();
    let header = header
        .tensors()
        .iter()
        .map(|info| info.offset)
        .min()
        .unwrap() as usize;
    // The copy that is read, its index, and the memory of a message or a manifest.
    let limit = 8 * good.len() + (64 << 10);
    let check = |bytes: &[u8], what: &dyn Fn() -> String| {
        let before = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        fuzzing::gguf(bytes);
        let used = MEMORY.peak_usage().saturating_sub(before);
        assert!(
            used <= limit,
            "{used} bytes for {} in {}",
            good.len(),
            what()
        );
    };
    // Tables that are built on first use stay in memory.
    fuzzing::gguf(&good);
    check(&good, &|| "the sound file".to_owned());
    let mut bytes = good.clone();
    // Weights are only hashed, so a few of their bytes suffice.
    for at in (0..header).chain((header..good.len()).step_by(997)) {
        for flip in [0x01, 0x80, 0xff] {
            bytes[at] ^= flip;
            check(&bytes, &|| format!("byte {at} ^ {flip:#x}"));
            bytes[at] ^= flip;
        }
    }
    for len in (0..header).chain((header..good.len()).step_by(97)) {
        check(&good[..len], &|| format!("{len} bytes"));
    }
}
