//! Splits of the real model's 30 layers at any position give bit-identical answers.
//!
//! A split works as between two hosts: rows leave one engine as bytes of the boundary dtype and
//! enter another with its own keys and values. [`every_cut_in_two_or_three`] tests all 29 splits in
//! two and all 406 in three with three independent engines. Part 1 always runs on the first, part 2
//! on the second, part 3 on the third, each as a sub-range of its layers with a sequence of its
//! own.
//!
//! (Loading 435 combinations of engines would add no information: other tests here show, down to 30
//! engines of one layer, that an engine which has *loaded* only a range computes the same as a
//! sub-range.)
#![allow(clippy::unwrap_used, clippy::panic)]

use std::ops::Range;

use hearthnet_engine::kernels::Isa;
use hearthnet_engine::{Engine, Head, Span};
use hearthnet_files::ModelFile;
use hearthnet_files::spec::CacheDtype;

use crate::engine_common::{
    assert_same_bits, differing, embed, engine, hop, ids, logits, options, run, whole,
};

/// Rows of each batch: a prefill, then decoding.
const BATCHES: [u32; 3] = [3, 1, 1];
const POSITIONS: usize = 5;

struct Reference {
    file: ModelFile,
    head: Head,
    inputs: Vec<f32>,
    rows: Vec<f32>,
    logits: Vec<f32>,
}

/// The unsplit model.
fn reference(cache: CacheDtype) -> Reference {
    let file = ModelFile::open(&hearthnet_testkit::smollm2()).unwrap();
    let file = file.with_cache(cache).unwrap();
    let options = options(2, Isa::detect());
    let mut whole = whole(&file, &options);
    let ids = ids(&file, POSITIONS, 77);
    let (_, rows) = run(&mut whole, &ids);
    let head = Head::load(&file, &options).unwrap();
    let (inputs, logits) = (embed(&head, &ids), logits(&head, &rows));
    Reference {
        file,
        head,
        inputs,
        rows,
        logits,
    }
}

impl Reference {
    fn width(&self) -> usize {
        self.file.spec().width as usize
    }

    fn options(&self) -> hearthnet_engine::EngineOptions {
        options(2, Isa::detect())
    }

    /// Runs all batches of a new sequence through some layers of an engine.
    fn part(&self, engine: &mut Engine, layers: Range<u32>, rows: &[f32]) -> Vec<f32> {
        let seq = engine.open().unwrap();
        let mut rows = hop(self.file.spec(), rows);
        let mut rest = &mut rows[..];
        for count in BATCHES {
            let (batch, others) = rest.split_at_mut(count as usize * self.width());
            let span = Span::new(seq, engine.len(seq).unwrap(), count);
            let ran = engine.forward_layers(layers.clone(), &[span], batch);
            ran.unwrap();
            rest = others;
        }
        assert!(rest.is_empty());
        engine.close(seq);
        rows
    }

    #[track_caller]
    fn check(&self, rows: &[f32], what: &str) {
        assert_same_bits(rows, &self.rows, self.width(), what);
    }

    #[track_caller]
    fn check_logits(&self, rows: &[f32], what: &str) {
        let logits = logits(&self.head, &hop(self.file.spec(), rows));
        assert_same_bits(&logits, &self.logits, self.file.spec().vocab as usize, what);
    }
}

#[test]
fn every_cut_in_two_or_three() {
    check_every_cut(CacheDtype::F16);
}

#[test]
fn every_cut_in_two_or_three_with_a_cache_of_8_bits() {
    check_every_cut(CacheDtype::Q8_0);
}

fn check_every_cut(cache: CacheDtype) {
    let reference = reference(cache);
    let layers = reference.file.spec().layers;
    let load = || engine(&reference.file, 0..layers, &reference.options());
    let [mut first, mut second, mut third] = [load(), load(), load()];
    let (mut in_two, mut in_three) = (0, 0);
    for i in 1..layers {
        let head = reference.part(&mut first, 0..i, &reference.inputs);
        let rows = reference.part(&mut second, i..layers, &head);
        reference.check(&rows, &format!("cut at {i}"));
        reference.check_logits(&rows, &format!("cut at {i}"));
        in_two += 1;
        for j in i + 1..layers {
            let middle = reference.part(&mut second, i..j, &head);
            let rows = reference.part(&mut third, j..layers, &middle);
            // Equal rows have equal logits: the head is checked above.
            reference.check(&rows, &format!("cut at {i} and {j}"));
            in_three += 1;
        }
    }
    assert_eq!((in_two, in_three), (29, 406));
}

#[test]
fn thirty_engines_of_one_layer_each_are_the_whole_model() {
    let reference = reference(CacheDtype::F16);
    let layers = reference.file.spec().layers;
    let mut rows = reference.inputs.clone();
    let mut bytes = 0;
    for layer in 0..layers {
        let mut engine = engine(&reference.file, layer..layer + 1, &reference.options());
        assert_eq!(engine.weight_bytes(), reference.file.layer_bytes(layer));
        bytes += engine.weight_bytes();
        rows = reference.part(&mut engine, layer..layer + 1, &rows);
    }
    reference.check(&rows, "thirty engines");
    reference.check_logits(&rows, "thirty engines");
    let all: u64 = (0..layers)
        .map(|layer| reference.file.layer_bytes(layer))
        .sum();
    assert_eq!(bytes, all, "nobody loads more than its layers");
}

#[test]
fn engines_that_load_only_their_range_agree_with_sub_ranges() {
    let reference = reference(CacheDtype::F16);
    let cuts: [&[u32]; 5] = [
        &[0, 15, 30],
        &[0, 1, 29, 30],
        &[0, 7, 15, 30],
        &[0, 10, 20, 30],
        &[0, 2, 3, 17, 29, 30],
    ];
    for cut in cuts {
        let mut rows = reference.inputs.clone();
        for range in cut.windows(2) {
            let layers = range[0]..range[1];
            let mut engine = engine(&reference.file, layers.clone(), &reference.options());
            rows = reference.part(&mut engine, layers, &rows);
        }
        reference.check(&rows, &format!("{cut:?}"));
        reference.check_logits(&rows, &format!("{cut:?}"));
    }
}

#[test]
fn a_cut_that_rounds_differently_would_be_noticed() {
    let reference = reference(CacheDtype::F16);
    let layers = reference.file.spec().layers;
    let mut engine = engine(&reference.file, 0..layers, &reference.options());
    let mut rows = reference.part(&mut engine, 0..11, &reference.inputs);
    // bf16 on the wire instead of the model's f16: eight bits instead of eleven.
    hearthnet_files::BoundaryDtype::Bf16.round(&mut rows);
    let rows = reference.part(&mut engine, 11..layers, &rows);
    let differing = differing(&rows, &reference.rows).len();
    assert!(
        differing > rows.len() / 2,
        "{differing} of {} values",
        rows.len()
    );
}
