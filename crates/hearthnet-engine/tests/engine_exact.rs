//! The engine on the real model: a row's result depends only on the weights and the rows before it.
#![allow(clippy::unwrap_used, clippy::panic)]

use hearthnet_engine::kernels::Isa;
use hearthnet_engine::{Engine, EngineOptions, Span, footprint};
use hearthnet_files::ModelFile;
use hearthnet_files::spec::CacheDtype;
use hearthnet_testkit::FullModel;

use crate::engine_common::{
    append, assert_same_bits, differing, embed, forward, ids, in_chunks, logits, open, options,
    run, whole,
};

fn model() -> ModelFile {
    ModelFile::open(&hearthnet_testkit::smollm2()).unwrap()
}

/// The model with each format of keys and values.
fn models() -> [ModelFile; 2] {
    CacheDtype::ALL.map(|cache| model().with_cache(cache).unwrap())
}

/// Logits of the last rows.
fn last_logits(whole: &FullModel, rows: &[f32], count: usize) -> Vec<f32> {
    let width = whole.engine().spec().width as usize;
    logits(whole.head(), &rows[rows.len() - count * width..])
}

#[test]
fn logits_do_not_depend_on_how_a_prompt_is_cut() {
    for file in models() {
        let (width, vocab) = (file.spec().width as usize, file.spec().vocab as usize);
        let prompt = ids(&file, 530, 1);
        let mut whole = whole(&file, &options(2, Isa::detect()));
        let (_, expected) = run(&mut whole, &prompt);
        for chunk in [1, 7, 64, 512] {
            let rows = in_chunks(&mut whole, &prompt, chunk);
            assert_same_bits(&rows, &expected, width, &format!("chunks of {chunk}"));
            let [found, expected] = [&rows, &expected].map(|rows| last_logits(&whole, rows, 20));
            assert_same_bits(&found, &expected, vocab, "logits");
        }
    }
}

/// Checks that rows and the logits of the last 40 are the same bits with all options. Batches have
/// many rows, some rows and single rows: every way of splitting the work.
fn check_same(file: &ModelFile, all: impl IntoIterator<Item = EngineOptions>, counts: [usize; 3]) {
    let prompt = ids(file, counts.iter().sum(), 2);
    let results = all.into_iter().map(|options| {
        let mut whole = whole(file, &options);
        let (seq, mut rows, mut rest) = (open(&mut whole), Vec::new(), &prompt[..]);
        for (count, chunk) in counts.into_iter().zip([usize::MAX, usize::MAX, 1]) {
            let (ids, others) = rest.split_at(count);
            rows.extend(append(&mut whole, seq, ids, chunk));
            rest = others;
        }
        let logits = last_logits(&whole, &rows, prompt.len().min(40));
        (format!("{options:?}"), rows, logits)
    });
    let results: Vec<_> = results.collect();
    for (what, rows, logits) in &results[1..] {
        assert_same_bits(rows, &results[0].1, file.spec().width as usize, what);
        assert_same_bits(logits, &results[0].2, file.spec().vocab as usize, what);
    }
}

#[test]
fn logits_do_not_depend_on_the_number_of_threads() {
    for file in models() {
        let all = [1, 2, 3].map(|threads| options(threads, Isa::detect()));
        check_same(&file, all, [200, 20, 10]);
    }
}

#[test]
fn logits_do_not_depend_on_the_instruction_set() {
    for file in models() {
        let all = Isa::available().into_iter().map(|isa| options(2, isa));
        check_same(&file, all, [20, 0, 4]);
    }
}

#[test]
fn a_row_does_not_depend_on_what_shares_its_batch() {
    let file = model();
    let width = file.spec().width as usize;
    let mut whole = whole(&file, &options(2, Isa::detect()));
    // Sequences of very different lengths, so that the batch mixes prefill and decoding.
    let lengths = [1usize, 40, 3, 130, 17, 1, 66, 9];
    let prompts: Vec<Vec<u32>> = (0..)
        .zip(lengths)
        .map(|(i, n)| ids(&file, n + 40, i))
        .collect();
    let alone: Vec<Vec<f32>> = prompts.iter().map(|ids| run(&mut whole, ids).1).collect();
    // First rows together, in a batch of few rows for some sequences; then more, in two orders.
    for reverse in [false, true] {
        let mut order: Vec<usize> = (0..prompts.len()).collect();
        if reverse {
            order.reverse();
        }
        let seqs: Vec<_> = prompts.iter().map(|_| open(&mut whole)).collect();
        let mut done = vec![0usize; prompts.len()];
        let steps: [&dyn Fn(usize) -> usize; 4] = [&|i| lengths[i], &|_| 1, &|i| i % 3 * 4, &|i| {
            if i == 3 { 30 } else { 1 }
        }];
        for step in steps {
            let mut spans = Vec::new();
            let mut rows = Vec::new();
            for &i in &order {
                let count = step(i);
                if count > 0 {
                    rows.extend(embed(whole.head(), &prompts[i][done[i]..done[i] + count]));
                    let position = done[i] as u32;
                    spans.push((i, Span::new(seqs[i], position, count as u32)));
                }
            }
            let batch: Vec<Span> = spans.iter().map(|(_, span)| *span).collect();
            whole.engine_mut().forward(&batch, &mut rows).unwrap();
            let mut rest = &rows[..];
            for (i, span) in spans {
                let (own, others) = rest.split_at(span.rows as usize * width);
                rest = others;
                let expected = &alone[i][done[i] * width..][..own.len()];
                assert_same_bits(own, expected, width, &format!("sequence {i}"));
                done[i] += span.rows as usize;
            }
        }
        seqs.into_iter()
            .for_each(|seq| assert!(whole.engine_mut().close(seq)));
    }
}

#[test]
fn truncating_and_replaying_gives_the_same_rows() {
    for file in models() {
        let width = file.spec().width as usize;
        let mut whole = whole(&file, &options(2, Isa::detect()));
        let prompt = ids(&file, 100, 4);
        let (seq, expected) = run(&mut whole, &prompt);
        let other = ids(&file, 50, 5);
        for keep in [99, 64, 33, 32, 31, 1, 0] {
            // Other rows in between, so that old cache cells cannot help.
            whole.engine_mut().truncate(seq, keep).unwrap();
            append(&mut whole, seq, &other, 50);
            whole.engine_mut().truncate(seq, keep).unwrap();
            let rows = append(&mut whole, seq, &prompt[keep as usize..], 23);
            let expected = &expected[keep as usize * width..];
            assert_same_bits(&rows, expected, width, &format!("replay from {keep}"));
        }
    }
}

#[test]
fn a_fork_does_not_change_the_original() {
    for file in models() {
        let width = file.spec().width as usize;
        let mut whole = whole(&file, &options(2, Isa::detect()));
        let trunk = ids(&file, 70, 6);
        let branches = [ids(&file, 40, 7), ids(&file, 40, 8), ids(&file, 40, 9)];
        let expected: Vec<Vec<f32>> = branches
            .iter()
            .map(|branch| run(&mut whole, &[&trunk[..], branch].concat()).1)
            .collect();
        let (seq, _) = run(&mut whole, &trunk);
        let shared = whole.engine().kv_bytes_in_use();
        let seqs = [
            seq,
            whole.engine_mut().fork(seq).unwrap(),
            whole.engine_mut().fork(seq).unwrap(),
        ];
        assert_eq!(
            whole.engine().kv_bytes_in_use(),
            shared,
            "a fork takes no memory"
        );
        let mut done = 0;
        for count in [1, 1, 30, 8] {
            let mut rows = Vec::new();
            let mut spans = Vec::new();
            for (seq, branch) in seqs.iter().zip(&branches) {
                rows.extend(embed(whole.head(), &branch[done..done + count]));
                let position = (trunk.len() + done) as u32;
                spans.push(Span::new(*seq, position, count as u32));
            }
            whole.engine_mut().forward(&spans, &mut rows).unwrap();
            for ((own, expected), i) in rows.chunks(count * width).zip(&expected).zip(0..) {
                let expected = &expected[(trunk.len() + done) * width..][..own.len()];
                assert_same_bits(own, expected, width, &format!("branch {i}"));
            }
            done += count;
        }
        // Closing one leaves the others intact.
        whole.engine_mut().close(seqs[0]);
        whole
            .engine_mut()
            .truncate(seqs[1], trunk.len() as u32)
            .unwrap();
        let rows = append(&mut whole, seqs[1], &branches[0], 40);
        assert_same_bits(
            &rows,
            &expected[0][trunk.len() * width..],
            width,
            "after closing",
        );
    }
}

#[test]
fn the_comparison_notices_the_smallest_change() {
    let file = model();
    let width = file.spec().width as usize;
    let mut whole = whole(&file, &options(2, Isa::detect()));
    let prompt = ids(&file, 40, 11);
    let mut rows = embed(whole.head(), &prompt);
    let (_, expected) = run(&mut whole, &prompt);
    // A value of row 20, by one unit in the last place of the boundary dtype (f16).
    let value = &mut rows[20 * width + 100];
    *value = f32::from_bits(value.to_bits() + (1 << 13));
    let seq = open(&mut whole);
    forward(whole.engine_mut(), seq, &mut rows).unwrap();
    let (before, after) = (&rows[..20 * width], &rows[20 * width..]);
    assert_same_bits(
        before,
        &expected[..20 * width],
        width,
        "rows before the change",
    );
    let changed = differing(after, &expected[20 * width..]).len();
    assert!(
        changed > after.len() / 2,
        "{changed} of {} values",
        after.len()
    );
    let logits = [&rows, &expected].map(|rows| last_logits(&whole, rows, 20));
    let changed = differing(&logits[0], &logits[1]).len();
    assert!(
        changed > logits[0].len() / 2,
        "{changed} of {} logits",
        logits[0].len()
    );
}

#[test]
fn memory_is_reported_as_it_is() {
    let file = model();
    let whole = whole(&file, &options(1, Isa::detect()));
    let layers: u64 = (0..file.spec().layers)
        .map(|layer| file.layer_bytes(layer))
        .sum();
    // Packing keeps every weight once; the shapes of this model need no padding.
    assert_eq!(whole.engine().weight_bytes(), layers);
    assert_eq!(whole.head().weight_bytes(), file.head_bytes());
    assert_eq!(whole.engine().footprint().per_position, 30 * 3 * 64 * 2 * 2);
    assert_eq!(whole.engine().kv_bytes_in_use(), 0);
    // A byte per value, and two for each block of 32.
    let q8 = model().with_cache(CacheDtype::Q8_0).unwrap();
    let per_position = footprint(q8.spec(), 0..30).per_position;
    assert_eq!(per_position, 30 * 3 * 2 * (64 + 2 * 2));
}

#[test]
fn loading_reports_its_progress() {
    let file = model();
    let mut seen = Vec::new();
    let mut progress = |done, total| seen.push((done, total));
    Engine::load(&file, 3..5, &options(1, Isa::detect()), &mut progress).unwrap();
    let total = file.layer_bytes(3) + file.layer_bytes(4);
    let [first, last] = [0, seen.len() - 1].map(|at| seen[at]);
    assert_eq!((first, last), ((0, total), (total, total)));
    assert!(seen.is_sorted() && seen.iter().all(|step| step.1 == total));
}
