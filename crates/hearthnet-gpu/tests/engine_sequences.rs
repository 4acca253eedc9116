//! Sequences on the card: batches, cuts, forks, moves, budgets, and a card that is lost.
#![cfg(feature = "wgpu")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/engines.rs"]
mod engines;

use engines::{append, assert_same, both, on_card, on_processor, options, through};
use hearthnet_engine::{Backend, EngineError, EngineOn, EngineOptions, Span};
use hearthnet_files::ModelFile;
use hearthnet_testkit::{TinyLlama, assert_matches, embeddings as rows, family};

/// A model with a sliding window and attention sinks beside one without.
fn models() -> [(&'static str, ModelFile); 2] {
    [
        ("tiny", TinyLlama::default().file()),
        ("gemma3", family("gemma3")),
    ]
}

/// A model with each kind of recurrence: gated delta rule, Mamba-2, short convolution.
fn recurrent() -> [(&'static str, ModelFile); 3] {
    ["qwen35", "granitehybrid", "lfm2"].map(|name| (name, family(name)))
}

#[test]
fn whole_blocks_of_the_real_model_equal_the_processor_in_every_batch_and_cut() {
    let file = ModelFile::open(&hearthnet_testkit::smollm2()).unwrap();
    let width = file.spec().width as usize;
    let input = rows(&file, 37, 1);
    let expected = through(&mut on_processor(&file, 0..2), &input, &[37]);
    let mut engine = on_card(&file, 0..2);
    for sizes in [&[37][..], &[16, 1, 5], &[1, 2, 3, 4]] {
        let found = through(&mut engine, &input, sizes);
        assert_same(&found, &expected, width, &format!("{sizes:?}"));
    }
    // The cut between the two blocks: card then processor, and the reverse.
    let [mut first, mut second] = [0..1, 1..2].map(|layers| on_card(&file, layers));
    let [mut third, mut fourth] = [0..1, 1..2].map(|layers| on_processor(&file, layers));
    let between = through(&mut first, &input, &[37]);
    let found = through(&mut fourth, &between, &[9]);
    assert_same(&found, &expected, width, "card, then processor");
    let between = through(&mut third, &input, &[9]);
    let found = through(&mut second, &between, &[37]);
    assert_same(&found, &expected, width, "processor, then card");
}

#[test]
fn a_batch_of_any_number_of_sequences_gives_each_the_bytes_it_has_alone() {
    for (name, file) in models().into_iter().chain(recurrent()) {
        let width = file.spec().width as usize;
        let (mut engine, mut alone) = both(&file);
        let count = 17;
        let prompts: Vec<_> = (0..count)
            .map(|nth| rows(&file, 2 + 5 * nth % 40, nth as u32))
            .collect();
        let seqs: Vec<_> = prompts.iter().map(|_| engine.open().unwrap()).collect();
        // All but the last row of each together, then the last row of 1 to 17 of them.
        let mut spans = Vec::new();
        let mut x = Vec::new();
        for (seq, prompt) in seqs.iter().zip(&prompts) {
            let rows = prompt.len() / width - 1;
            spans.push(Span::new(*seq, 0, rows as u32));
            x.extend_from_slice(&prompt[..rows * width]);
        }
        engine.forward(&spans, &mut x).unwrap();
        let expected: Vec<_> = prompts
            .iter()
            .map(|prompt| through(&mut alone, prompt, &[50]))
            .collect();
        let mut rest = &x[..];
        for (span, expected) in spans.iter().zip(&expected) {
            let (own, later) = rest.split_at(span.rows as usize * width);
            assert_same(own, &expected[..own.len()], width, name);
            rest = later;
        }
        for batch in 1..=count {
            let mut spans = Vec::new();
            let mut x = Vec::new();
            for (seq, prompt) in seqs.iter().zip(&prompts).take(batch) {
                let position = (prompt.len() / width - 1) as u32;
                engine.truncate(*seq, position).unwrap();
                spans.push(Span::new(*seq, position, 1));
                x.extend_from_slice(&prompt[prompt.len() - width..]);
            }
            engine.forward(&spans, &mut x).unwrap();
            for (own, expected) in x.chunks(width).zip(&expected) {
                let last = &expected[expected.len() - width..];
                assert_same(own, last, width, &format!("{name}, {batch} at once"));
            }
        }
    }
}

#[test]
fn a_sequence_continues_equally_after_truncation_and_fork() {
    for (name, file) in models() {
        let width = file.spec().width as usize;
        let (mut card, mut processor) = both(&file);
        let (begin, end) = (rows(&file, 50, 1), rows(&file, 9, 2));
        let other = rows(&file, 9, 3);
        let seq = card.open().unwrap();
        append(&mut card, seq, &begin, &[50]).unwrap();
        let fork = card.fork(seq).unwrap();
        let both = append(&mut card, seq, &end, &[9]).unwrap();
        let others = append(&mut card, fork, &other, &[4, 5]).unwrap();
        let expected = [&end, &other].map(|end| {
            let whole = [&begin[..], end].concat();
            through(&mut processor, &whole, &[59])[begin.len()..].to_vec()
        });
        assert_same(&both, &expected[0], width, name);
        assert_same(&others, &expected[1], width, name);
        // Back into the page that the two share, and beyond it.
        for len in [45u32, 31] {
            assert_eq!(card.truncate(seq, len).unwrap(), len);
            let again = append(&mut card, seq, &begin[len as usize * width..], &[7]).unwrap();
            let expected = &through(&mut processor, &begin, &[50])[len as usize * width..];
            assert_same(&again, expected, width, name);
        }
        let more = append(&mut card, fork, &end, &[9]).unwrap();
        let whole = [&begin[..], &other, &end].concat();
        let expected = &through(&mut processor, &whole, &[68])[59 * width..];
        assert_same(&more, expected, width, name);
    }
}

/// What a test does with a sequence and its fork, on either engine: the rows that come out, and the
/// lengths after each way back.
fn back_and_forth<B: Backend>(
    engine: &mut EngineOn<B>,
    (begin, end): (&[f32], &[f32]),
    width: usize,
) -> (Vec<f32>, Vec<u32>) {
    let seq = engine.open().unwrap();
    let mut out = append(engine, seq, begin, &[90, 1, 37]).unwrap();
    let fork = engine.fork(seq).unwrap();
    let mut lengths = Vec::new();
    // A step back, to the state before the last batch, into the last interval, far back, to 0.
    for (len, rows) in [(0, 1), (1, 9), (20, 70), (100, 3), (10_000, 66)] {
        let now = engine.len(seq).unwrap();
        lengths.push(engine.truncate(seq, now.saturating_sub(len)).unwrap());
        out.extend(append(engine, seq, &end[..rows * width], &[rows]).unwrap());
    }
    out.extend(append(engine, fork, end, &[64, 5]).unwrap());
    engine.close(seq);
    // The states that were freed are used again.
    let third = engine.open().unwrap();
    out.extend(append(engine, third, end, &[71]).unwrap());
    (out, lengths)
}

#[test]
fn states_go_back_and_are_shared_by_forks_as_on_the_processor() {
    for (name, file) in recurrent() {
        let width = file.spec().width as usize;
        let (begin, end) = (rows(&file, 165, 1), rows(&file, 80, 2));
        let (mut card, mut processor) = both(&file);
        let all = (&begin[..], &end[..]);
        let (found, at) = back_and_forth(&mut card, all, width);
        let (expected, wanted) = back_and_forth(&mut processor, all, width);
        assert_eq!(at, wanted, "{name}");
        assert!(wanted.contains(&128) && wanted.contains(&0), "{wanted:?}");
        assert_same(&found, &expected, width, name);
    }
}

#[test]
fn a_state_goes_on_where_a_pass_cuts_the_rows_of_a_sequence() {
    for (name, file) in recurrent() {
        let width = file.spec().width as usize;
        let (mut card, mut processor) = both(&file);
        // 650 rows; a pass takes 512, and ends in the fourth sequence.
        let prompts: Vec<_> = (0..5).map(|seed| rows(&file, 130, seed)).collect();
        let seqs: Vec<_> = prompts.iter().map(|_| card.open().unwrap()).collect();
        let spans: Vec<_> = seqs.iter().map(|seq| Span::new(*seq, 0, 130)).collect();
        let mut x = prompts.concat();
        card.forward(&spans, &mut x).unwrap();
        for ((seq, prompt), found) in seqs.iter().zip(&prompts).zip(x.chunks(130 * width)) {
            let expected = through(&mut processor, prompt, &[130]);
            assert_same(found, &expected, width, name);
            // The state that was kept on the way, and the one at the end.
            let more = append(&mut card, *seq, &prompt[..width], &[1]).unwrap();
            assert_eq!(card.truncate(*seq, 129).unwrap(), 128);
            let again = append(&mut card, *seq, &prompt[128 * width..], &[2]).unwrap();
            assert_same(&again, &expected[128 * width..], width, name);
            let other = processor.open().unwrap();
            append(&mut processor, other, prompt, &[130]).unwrap();
            let expected = append(&mut processor, other, &prompt[..width], &[1]).unwrap();
            assert_same(&more, &expected, width, name);
            processor.close(other);
        }
    }
}

#[test]
fn an_answer_that_moves_between_card_and_processor_keeps_its_bytes() {
    let file = TinyLlama::default().file();
    let width = file.spec().width as usize;
    let (mut card, mut processor) = both(&file);
    let input = rows(&file, 60, 5);
    let expected = through(&mut on_processor(&file, 0..2), &input, &[60]);
    // As a caller does: the new host gets all rows so far, then the answer goes on.
    let mut found = Vec::new();
    let cut = |row: usize| row * width;
    let (first, second) = (card.open().unwrap(), processor.open().unwrap());
    found.extend(append(&mut card, first, &input[..cut(20)], &[13, 1]).unwrap());
    append(&mut processor, second, &input[..cut(20)], &[20]).unwrap();
    found.extend(append(&mut processor, second, &input[cut(20)..cut(35)], &[1]).unwrap());
    append(&mut card, first, &input[cut(20)..cut(35)], &[15]).unwrap();
    found.extend(append(&mut card, first, &input[cut(35)..], &[1]).unwrap());
    assert_same(&found, &expected, width, "moved twice");
}

#[test]
fn keys_and_values_grow_and_are_bounded_by_the_budget() {
    let file = TinyLlama::default().file();
    let layers = 0..file.spec().layers;
    let input = rows(&file, 250, 1);
    let budget = |pages: u64| EngineOptions {
        max_kv_bytes: pages * on_card(&file, layers.clone()).footprint().page_bytes(),
        ..options()
    };
    let load = |options: &EngineOptions| {
        hearthnet_gpu::load(
            &file,
            layers.clone(),
            engines::card(),
            options,
            &mut |_, _| (),
        )
    };
    let mut engine = load(&budget(20)).unwrap();
    let expected = through(&mut on_processor(&file, layers.clone()), &input, &[250]);
    // 16 pages, of which the second eight need larger buffers.
    let seqs = [(); 2].map(|()| engine.open().unwrap());
    for seq in seqs {
        let found = append(&mut engine, seq, &input, &[100]).unwrap();
        assert_same(&found, &expected, 64, "grown");
    }
    let third = engine.open().unwrap();
    let error = append(&mut engine, third, &input, &[250]).unwrap_err();
    assert_matches!(error, EngineError::KvFull { .. });
    assert_eq!(engine.len(third).unwrap(), 0);
    engine.close(seqs[0]);
    let found = append(&mut engine, third, &input, &[250]).unwrap();
    assert_same(&found, &expected, 64, "in freed pages");
    let used = engine.kv_bytes_in_use();
    assert_eq!(used, 16 * engine.footprint().page_bytes());
}

#[test]
fn the_row_and_layer_of_an_overflow_are_those_of_the_processor() {
    let loud = TinyLlama {
        loud: Some(7),
        boundary: Some("f16"),
        embedding: "f32",
        ..TinyLlama::default()
    };
    let file = loud.file();
    let head = hearthnet_engine::Head::load(&file, &options()).unwrap();
    let mut input = Vec::new();
    head.embed(&[1, 2, 7, 3, 7], &mut input).unwrap();
    let error = |result: Result<Vec<f32>, EngineError>| result.unwrap_err();
    let (mut card, mut processor) = both(&file);
    let (a, b) = (card.open().unwrap(), processor.open().unwrap());
    let found = error(append(&mut card, a, &input, &[5]));
    assert_eq!(found, error(append(&mut processor, b, &input, &[5])));
    assert_matches!(found, EngineError::BoundaryOverflow { row: 2, .. });
    assert_eq!(card.len(a).unwrap(), 0);
}

#[test]
fn a_lost_card_is_an_error_and_is_noticed() {
    let gpu = engines::open();
    let file = TinyLlama::default().file();
    let layers = 0..file.spec().layers;
    let mut engine = hearthnet_gpu::load(&file, layers, &gpu, &options(), &mut |_, _| ()).unwrap();
    let seq = engine.open().unwrap();
    let input = rows(&file, 3, 1);
    append(&mut engine, seq, &input, &[3]).unwrap();
    assert!(!engine.is_lost());
    gpu.destroy();
    let error = append(&mut engine, seq, &input, &[3]).unwrap_err();
    assert_matches!(error, EngineError::Device(_));
    assert!(engine.is_lost());
    engine.close(seq);
}
