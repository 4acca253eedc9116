//! A file cannot make the reader use more memory than a small multiple of its own size, with any
//! byte changed and truncated at any position.

use hearthnet_testkit::TinyLlama;
use hearthnet_tokens::fuzzing;

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
    let header = hearthnet_files::Gguf::from_bytes(good.clone()).unwrap();
    let header = header.head().len();
    // The copy that is read and its index grow with the file. Inspecting it also builds the automata
    // of its pre-tokeniser and compiles its template: about 1.3 MB, whatever the file's size.
    let limit = 8 * good.len() + (2 << 20);
    let check = |bytes: &[u8], what: &dyn Fn() -> String| {
        let before = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        fuzzing::gguf(bytes);
        let used = MEMORY.peak_usage().saturating_sub(before);
        assert!(used <= limit, "{used} bytes: {}", what());
    };
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
