//! Each kernel as the driver in software runs it.

use hearthnet_gpu::testing::{Kernel, all};
use hearthnet_gpu::{Arithmetic, Choice, Gpu};

use super::{assert_same, reference, software};

/// Every kernel's case, in an arithmetic at most as fast as `most`.
fn all_kernels(gpu: &Gpu) {
    for kernel in all() {
        let got = gpu.self_test(kernel).unwrap();
        assert_same(&kernel.to_string(), &got, &reference::results(kernel));
    }
}

#[test]
fn every_kernel_gives_the_bytes_of_the_processor() {
    all_kernels(&software());
}

/// A card whose fma is fused, but flushes subnormal numbers, as those of Apple do: made of integers,
/// so that each driver in software shows the guard.
pub(crate) fn flushing_card(text: String) -> String {
    const CARD: &str = "
fn flushed(x: u32) -> u32 { return select(x, x & SIGN, (x & INF) == 0u); }
fn card_fma(a: u32, b: u32, c: u32) -> u32 { return flushed(soft_fma(flushed(a), flushed(b), flushed(c))); }
fn card_mul(a: u32, b: u32) -> u32 { return flushed(soft_mul(flushed(a), flushed(b))); }
fn card_int(i: i32) -> u32 { return soft_int(i); }
";
    instead_of_the_card(&text, CARD)
}

/// A card whose fma rounds twice.
pub(crate) fn card_of_two_roundings(text: String) -> String {
    const CARD: &str = "
fn card_fma(a: u32, b: u32, c: u32) -> u32 { return soft_fma(soft_mul(a, b), ONE, c); }
fn card_mul(a: u32, b: u32) -> u32 { return soft_mul(a, b); }
fn card_int(i: i32) -> u32 { return soft_int(i); }
";
    instead_of_the_card(&text, CARD)
}

/// Replaces the functions of `card.wgsl`, if the text has them.
fn instead_of_the_card(text: &str, card: &str) -> String {
    text.replace(include_str!("../../src/wgsl/card.wgsl"), card)
}

#[test]
fn a_card_that_flushes_subnormal_numbers_gives_the_same_bytes_natively() {
    let gpu = Gpu::open_altered(Choice::Software, Arithmetic::Native, flushing_card).unwrap();
    assert_eq!(gpu.arithmetic(), Arithmetic::Native);
    all_kernels(&gpu);
    let ty = hearthnet_files::blocks::WeightType::Q4_K;
    let kernel = Kernel::Matrix {
        weight_type: ty,
        rows: 4,
        paired: false,
        careful: false,
    };
    assert_eq!(gpu.arithmetic_of(kernel).unwrap(), Arithmetic::Native);
}

#[test]
fn a_card_that_flushes_subnormal_numbers_gives_the_same_bytes_guarded() {
    let gpu = Gpu::open_altered(Choice::Software, Arithmetic::Guarded, flushing_card).unwrap();
    assert_eq!(gpu.arithmetic(), Arithmetic::Guarded);
    all_kernels(&gpu);
}

#[test]
fn a_card_with_two_roundings_gets_integers() {
    let gpu = Gpu::open_altered(Choice::Software, Arithmetic::Native, card_of_two_roundings);
    assert_eq!(gpu.unwrap().arithmetic(), Arithmetic::Integers);
}
