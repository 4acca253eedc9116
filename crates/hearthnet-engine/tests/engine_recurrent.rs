//! Sequences of a model with recurrent layers: their states cannot be cut at any position.
//!
//! The models are those of `data/families` (see its README). In most, four of five layers have a gated
//! delta rule, or three of four or five a short convolution or Mamba-2, and the others have attention.
//! Checkpoints lie at multiples of 64 positions.
#![allow(clippy::unwrap_used, clippy::panic)]

use hearthnet_engine::kernels::Isa;
use hearthnet_engine::{EngineError, EngineOptions, SeqId, Span, footprint};
use hearthnet_files::BoundaryDtype;
use hearthnet_files::gguf::TensorType;
use hearthnet_testkit::{FullModel, family};
use proptest::prelude::*;

use crate::engine_common::{
    append, assert_same_bits, embed, engine, forward, ids, in_chunks, open, options, run, whole,
};
use crate::families::rewrite;

const NAMES: [&str; 8] = [
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "lfm2",
    "lfm2moe",
    "granitehybrid",
    "granitehybridmoe",
    "nemotronh",
];
const LENGTH: usize = 250;

fn model(name: &str, threads: usize) -> FullModel {
    whole(&family(name), &options(threads, Isa::detect()))
}

/// Rows of tokens, from the length of the sequence on.
fn go_on(whole: &mut FullModel, seq: SeqId, ids: &[u32], chunk: usize) -> Vec<f32> {
    let len = whole.engine_mut().len(seq).unwrap() as usize;
    append(whole, seq, &ids[len..], chunk)
}

#[test]
fn a_sequence_goes_back_to_a_checkpoint_and_on_with_the_same_bits() {
    for name in NAMES {
        let mut whole = model(name, 2);
        let width = family(name).spec().width as usize;
        let tokens = ids(&family(name), LENGTH, 3);
        let expected = in_chunks(&mut whole, &tokens, 1);
        for (to, kept) in [
            (249, 192),
            (200, 192),
            (191, 128),
            (128, 128),
            (100, 64),
            (63, 0),
        ] {
            let (seq, _) = run(&mut whole, &tokens);
            let left = whole.engine_mut().truncate(seq, to).unwrap();
            assert_eq!((left, whole.engine_mut().len(seq).unwrap()), (kept, kept));
            let rows = go_on(&mut whole, seq, &tokens, 50);
            let what = format!("{name}, back to {to}");
            assert_same_bits(&rows, &expected[kept as usize * width..], width, &what);
            whole.engine_mut().close(seq);
        }
    }
}

#[test]
fn the_last_batch_can_be_taken_back() {
    let mut whole = model("qwen35", 1);
    let tokens = ids(&family("qwen35"), 120, 4);
    let seq = open(&mut whole);
    append(&mut whole, seq, &tokens[..100], 100);
    let expected = append(&mut whole, seq, &tokens[100..], 1);
    let width = expected.len() / 20;
    assert_eq!(whole.engine_mut().truncate(seq, 119), Ok(119));
    let again = go_on(&mut whole, seq, &tokens, 1);
    assert_same_bits(&again, &expected[19 * width..], width, "the last row");
}

#[test]
fn forks_share_a_state_until_they_append() {
    for name in NAMES {
        let mut whole = model(name, 2);
        let width = family(name).spec().width as usize;
        let tokens = ids(&family(name), 200, 5);
        let others = [&tokens[..130], &ids(&family(name), 70, 6)].concat();
        let expected = [&tokens, &others].map(|tokens| in_chunks(&mut whole, tokens, 9));
        let (seq, _) = run(&mut whole, &tokens[..130]);
        let fork = whole.engine_mut().fork(seq).unwrap();
        // Both go on in the same batches.
        let mut found = [Vec::new(), Vec::new()];
        for from in (130..200).step_by(7) {
            let mut rows = embed(whole.head(), &tokens[from..from + 7]);
            rows.extend(embed(whole.head(), &others[from..from + 7]));
            let spans = [seq, fork].map(|seq| Span::new(seq, from as u32, 7));
            whole.engine_mut().forward(&spans, &mut rows).unwrap();
            let (first, second) = rows.split_at(7 * width);
            found[0].extend_from_slice(first);
            found[1].extend_from_slice(second);
        }
        for (found, expected) in found.iter().zip(&expected) {
            assert_same_bits(found, &expected[130 * width..], width, name);
        }
        // The fork has the checkpoints of the original.
        assert_eq!(whole.engine_mut().truncate(fork, 129), Ok(128));
        let again = go_on(&mut whole, fork, &tokens, 30);
        assert_same_bits(&again, &expected[0][128 * width..], width, name);
        assert!(whole.engine_mut().close(seq) && whole.engine_mut().close(fork));
    }
}

#[test]
fn a_failed_batch_changes_no_state() {
    // The feed-forward layer of the second block gives values of some thousands, so only a row that
    // is already near the end of the range of f16 leaves it.
    let file = rewrite("qwen35", &[], |tensor, values| {
        if tensor == "blk.1.ffn_down.weight" {
            values.iter_mut().for_each(|value| *value *= 3000.0);
        }
        TensorType::F16
    });
    let file = file.unwrap().with_boundary(BoundaryDtype::F16);
    let layers = file.spec().layers;
    let mut part = engine(&file, 0..layers, &options(2, Isa::detect()));
    let width = file.spec().width as usize;
    let head = hearthnet_engine::Head::load(&file, &options(1, Isa::detect())).unwrap();
    let rows = embed(&head, &ids(&file, 100, 7));
    let expected = {
        let (seq, mut rows) = (part.open().unwrap(), rows.clone());
        forward(&mut part, seq, &mut rows).unwrap();
        rows
    };
    let (victim, culprit) = (part.open().unwrap(), part.open().unwrap());
    let mut first = rows[..70 * width].to_vec();
    forward(&mut part, victim, &mut first).unwrap();
    let mut batch = rows[70 * width..].to_vec();
    batch.extend(std::iter::repeat_n(64_992.0, width));
    let spans = [Span::new(victim, 70, 30), Span::new(culprit, 0, 1)];
    let failed = part.forward(&spans, &mut batch);
    assert!(
        matches!(
            failed,
            Err(EngineError::BoundaryOverflow { layer: 1, row: 30 })
        ),
        "{failed:?}"
    );
    assert_eq!((part.len(victim), part.len(culprit)), (Ok(70), Ok(0)));
    let mut rest = rows[70 * width..].to_vec();
    forward(&mut part, victim, &mut rest).unwrap();
    assert_same_bits(&rest, &expected[70 * width..], width, "the victim");
}

#[test]
fn states_count_towards_the_memory_of_sequences() {
    let file = family("qwen35");
    let of = footprint(file.spec(), 0..5);
    let state = file.spec().state_bytes(0..5);
    // Two states, and three checkpoints. Three earlier rows of 128 channels, and four heads.
    assert_eq!(state, 4 * 4 * (3 * 128 + 4 * 16 * 16));
    assert_eq!(of.per_sequence, 5 * state);
    assert_eq!(of.per_position, 2 * 2 * 2 * 16);
    assert_eq!(footprint(file.spec(), 0..3).per_position, 0);
    assert_eq!(footprint(file.spec(), 3..4).per_sequence, 0);
    // Two or three earlier rows.
    for (name, layers, rows) in [("lfm2", 3, 2), ("lfm2moe", 3, 3)] {
        let spec = family(name).spec().clone();
        assert_eq!(spec.state_bytes(0..spec.layers), layers * rows * 32 * 4);
    }
    let options = EngineOptions {
        max_kv_bytes: 2 * of.bytes(1),
        ..options(1, Isa::detect())
    };
    let mut whole = whole(&file, &options);
    let seqs = [(); 3].map(|()| open(&mut whole));
    assert_eq!(whole.engine_mut().kv_bytes_in_use(), 0);
    for seq in &seqs[..2] {
        append(&mut whole, *seq, &[1], 1);
    }
    let mut rows = embed(whole.head(), &[1]);
    let full = forward(whole.engine_mut(), seqs[2], &mut rows);
    assert!(
        matches!(full, Err(EngineError::KvFull { free: 0, .. })),
        "{full:?}"
    );
    let full = whole.engine_mut().fork(seqs[0]);
    assert!(matches!(full, Err(EngineError::KvFull { .. })), "{full:?}");
    assert_eq!(whole.engine_mut().truncate(seqs[1], 0), Ok(0));
    assert_eq!(whole.engine_mut().kv_bytes_in_use(), of.bytes(1));
    append(&mut whole, seqs[2], &[1], 1);
}

#[test]
fn an_engine_without_attention_has_states_only() {
    let file = family("qwen35");
    let width = file.spec().width as usize;
    let head = hearthnet_engine::Head::load(&file, &options(1, Isa::detect())).unwrap();
    let inputs = embed(&head, &ids(&file, 90, 8));
    let mut parts = [0..3, 3..4, 4..5].map(|part| engine(&file, part, &options(2, Isa::detect())));
    let mut all = engine(&file, 0..5, &options(1, Isa::detect()));
    let mut expected = inputs.clone();
    let seq = all.open().unwrap();
    forward(&mut all, seq, &mut expected).unwrap();
    let mut rows = inputs;
    for part in &mut parts {
        let seq = part.open().unwrap();
        for rows in rows.chunks_mut(40 * width) {
            forward(part, seq, rows).unwrap();
        }
    }
    assert_same_bits(&rows, &expected, width, "three parts");
}

/// Step of a random walk over sequences.
#[derive(Clone, Copy, Debug)]
enum Step {
    Append(usize, usize),
    /// To this share of the length, in percent.
    Truncate(usize, usize),
    Fork(usize),
    Close(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let rows = prop_oneof![Just(1usize), 1usize..9, 20usize..150];
    prop_oneof![
        4 => (any::<usize>(), rows).prop_map(|(seq, rows)| Step::Append(seq, rows)),
        2 => (any::<usize>(), 0usize..=100).prop_map(|(seq, share)| Step::Truncate(seq, share)),
        1 => any::<usize>().prop_map(Step::Fork),
        1 => any::<usize>().prop_map(Step::Close),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_history_of_a_sequence_gives_the_same_bits(
        steps in prop::collection::vec(step(), 1..14),
        name in prop::sample::select(vec!["qwen3next", "lfm2"]),
    ) {
        let file = family(name);
        let width = file.spec().width as usize;
        let tokens = ids(&file, LENGTH, 9);
        let mut whole = model(name, 2);
        let expected = in_chunks(&mut whole, &tokens, LENGTH);
        let mut seqs = vec![open(&mut whole)];
        for step in steps {
            match step {
                Step::Append(seq, rows) => {
                    let seq = seqs[seq % seqs.len()];
                    let len = whole.engine_mut().len(seq).unwrap() as usize;
                    let end = (len + rows).min(LENGTH);
                    if len < end {
                        let rows = append(&mut whole, seq, &tokens[len..end], rows);
                        let expected = &expected[len * width..end * width];
                        assert_same_bits(&rows, expected, width, &format!("{len}..{end}"));
                    }
                }
                Step::Truncate(seq, share) => {
                    let seq = seqs[seq % seqs.len()];
                    let len = whole.engine_mut().len(seq).unwrap();
                    let to = len * share as u32 / 100;
                    let left = whole.engine_mut().truncate(seq, to).unwrap();
                    prop_assert!(left <= to && (left == to || left.is_multiple_of(64)), "{to}: {left}");
                }
                Step::Fork(seq) => {
                    let fork = whole.engine_mut().fork(seqs[seq % seqs.len()]).unwrap();
                    seqs.push(fork);
                }
                Step::Close(seq) => {
                    if seqs.len() > 1 {
                        let seq = seqs.swap_remove(seq % seqs.len());
                        prop_assert!(whole.engine_mut().close(seq));
                    }
                }
            }
        }
    }
}
