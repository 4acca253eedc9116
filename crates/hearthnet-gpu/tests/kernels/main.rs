//! Kernels on a driver in software (Mesa's lavapipe) against the processor's portable kernels.
//! `tests/run gpu` runs them. A machine without such a driver fails them.
#![cfg(feature = "wgpu")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "so a test fails"
)]
#![allow(clippy::print_stdout, reason = "tests print measurements")]

mod digests;
mod float_operations;
mod mutants;
mod reference;
mod shapes;
mod spirv;
mod texts;
mod tiles;

use std::sync::OnceLock;

use hearthnet_files::blocks::WeightType;
use hearthnet_gpu::testing::Kernel;
use hearthnet_gpu::{Choice, Gpu};

/// The driver in software, opened once.
fn software() -> Gpu {
    static OPENED: OnceLock<Gpu> = OnceLock::new();
    OPENED
        .get_or_init(|| Gpu::open(Choice::Software).expect("Mesa's lavapipe (mesa-vulkan-drivers)"))
        .clone()
}

/// Products of a matrix with four rows at a time.
fn four_rows(weight_type: WeightType) -> Kernel {
    Kernel::Matrix {
        weight_type,
        rows: 4,
        paired: false,
        careful: false,
    }
}

/// Numbers of places where two results differ; all NaN are the same.
fn differ(got: &[u32], wanted: &[u32]) -> usize {
    assert_eq!(got.len(), wanted.len());
    let nan = |x: u32| x & 0x7fff_ffff > 0x7f80_0000;
    let same = |(g, w): &(&u32, &u32)| g == w || nan(**g) && nan(**w);
    got.iter().zip(wanted).filter(|pair| !same(pair)).count()
}

#[track_caller]
fn assert_same(what: &str, got: &[u32], wanted: &[u32]) {
    let places = differ(got, wanted);
    let first = got
        .iter()
        .zip(wanted)
        .position(|(g, w)| differ(&[*g], &[*w]) > 0);
    let first = first.map(|i| format!("{i} is {:08x}, not {:08x}", got[i], wanted[i]));
    let first = first.unwrap_or_default();
    assert_eq!(
        places,
        0,
        "{what}: {places} of {} differ; {first}",
        got.len()
    );
}

fn floats(words: &[u32]) -> Vec<f32> {
    words.iter().map(|word| f32::from_bits(*word)).collect()
}

fn words(floats: &[f32]) -> Vec<u32> {
    floats.iter().map(|value| value.to_bits()).collect()
}
