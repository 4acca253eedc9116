//! Every model family and weight type on the card: the bytes of the processor.
#![cfg(feature = "wgpu")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout
)]

#[path = "common/engines.rs"]
mod engines;

use engines::{both, difference, on_processor, options, through};
use hearthnet_engine::LoadError;
use hearthnet_files::BoundaryDtype;
use hearthnet_files::gguf::TensorType;
use hearthnet_files::spec::CacheDtype;
use hearthnet_gpu::GpuLoadError;
use hearthnet_testkit::{
    TinyLlama, assert_none_differ, embeddings as rows, every_weight_as, families, family,
};

/// Families that the card leaves to the processor.
const REFUSED: [&str; 0] = [];

#[test]
fn a_cache_of_8_bits_is_left_to_the_processor() {
    let model = TinyLlama {
        head_dim: 32,
        ..TinyLlama::default()
    };
    let file = model.file();
    assert!(hearthnet_gpu::check(file.spec()).is_ok());
    let file = file.with_cache(CacheDtype::Q8_0).unwrap();
    let error = hearthnet_gpu::check(file.spec()).unwrap_err().to_string();
    assert!(error.contains("attention.cache"), "{error}");
    assert!(
        error.contains("the processor computes this model"),
        "{error}"
    );
}

#[test]
fn every_family_gives_the_bytes_of_the_processor_or_is_refused_in_one_sentence() {
    let (mut wrong, mut refused, mut same) = (Vec::new(), Vec::new(), Vec::new());
    for name in families() {
        let file = family(&name);
        let all = 0..file.spec().layers;
        let loaded = hearthnet_gpu::load(
            &file,
            all.clone(),
            engines::card(),
            &options(),
            &mut |_, _| (),
        );
        let mut card = match loaded {
            Err(GpuLoadError::Load(LoadError::Unsupported(what))) => {
                assert!(what.contains("the processor computes this model"), "{what}");
                refused.push(name);
                continue;
            }
            Err(error) => panic!("{name}: {error}"),
            Ok(card) => card,
        };
        let values = file.spec().row_values(&all);
        let input = rows(&file, 70, 7);
        // In an encoder, a batch is a whole text.
        let sizes: &[usize] = match file.spec().encoder {
            Some(_) => &[70],
            None => &[40, 1, 2, 17],
        };
        let expected = through(&mut on_processor(&file, all), &input, sizes);
        let found = through(&mut card, &input, sizes);
        if let Some(difference) = difference(&found, &expected, values) {
            wrong.push(format!("{name}: {difference}"));
        }
        same.push(name);
    }
    let (card, arithmetic) = (engines::card().facts(), engines::card().arithmetic());
    println!("{}, {}: {arithmetic}", card.name, card.driver);
    println!(
        "same bytes: {}\nrefused: {}",
        same.join(" "),
        refused.join(" ")
    );
    assert_none_differ(&wrong);
    assert_eq!(refused, REFUSED);
}

#[test]
fn every_boundary_dtype_is_rounded_to_as_on_the_processor() {
    let mut wrong = Vec::new();
    for boundary in BoundaryDtype::ALL {
        for name in ["llama31", "gemma3"] {
            let file = family(name).with_boundary(boundary);
            let input = rows(&file, 12, 3);
            let (mut card, mut processor) = both(&file);
            let expected = through(&mut processor, &input, &[12]);
            let found = through(&mut card, &input, &[12]);
            let difference = difference(&found, &expected, file.spec().width as usize);
            wrong.extend(difference.map(|what| format!("{name} {boundary}: {what}")));
        }
    }
    assert_none_differ(&wrong);
}

#[test]
fn every_weight_type_gives_the_bytes_of_the_processor() {
    let types: Vec<TensorType> = TensorType::supported().collect();
    assert!(types.len() >= 16, "{types:?}");
    let mut wrong = Vec::new();
    for dtype in types {
        let model = TinyLlama {
            width: 256,
            head_dim: 64,
            ffn: 512,
            vocab: 325,
            weights: "f32",
            embedding: "f32",
            ..TinyLlama::default()
        };
        let [file, _] = every_weight_as(&model, |_| dtype);
        let input = rows(&file, 40, 3);
        let (mut engine, mut processor) = both(&file);
        let expected = through(&mut processor, &input, &[40]);
        for sizes in [&[1][..], &[3, 16], &[37]] {
            let found = through(&mut engine, &input, sizes);
            let difference = difference(&found, &expected, 256);
            wrong.extend(difference.map(|what| format!("{dtype} {sizes:?}: {what}")));
        }
    }
    assert_none_differ(&wrong);
}
