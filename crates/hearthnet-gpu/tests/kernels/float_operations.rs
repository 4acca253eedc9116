//! Each kernel as the driver in software runs it.

use hearthnet_files::blocks::WeightType;
use hearthnet_gpu::testing::{Draw, INPUTS, Kernel, OUTPUTS, Route, Way, all, weights};
use hearthnet_gpu::{Arithmetic, Choice, Gpu, Input};

use super::{assert_same, floats, four_rows, reference, software, words};

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
    // Vulkan drivers take the changed SPIR-V.
    assert_eq!(gpu.way_of(Kernel::Probe).unwrap().route, Route::Spirv);
    all_kernels(&gpu);
    let kernel = four_rows(WeightType::Q4_K);
    assert_eq!(gpu.arithmetic_of(kernel).unwrap(), Arithmetic::Native);
}

#[test]
fn a_driver_that_gets_wgsl_only_gives_the_same_bytes_natively() {
    let most = Way {
        arithmetic: Arithmetic::Native,
        route: Route::Wgsl,
    };
    let gpu = Gpu::open_altered(Choice::Software, most, flushing_card).unwrap();
    assert_eq!(gpu.way_of(Kernel::Probe).unwrap(), most);
    assert_eq!(gpu.summary(), "native");
    all_kernels(&gpu);
}

#[test]
fn a_card_that_flushes_subnormal_numbers_gives_the_same_bytes_guarded() {
    let gpu = Gpu::open_altered(Choice::Software, Arithmetic::Guarded, flushing_card).unwrap();
    assert_eq!(gpu.arithmetic(), Arithmetic::Guarded);
    all_kernels(&gpu);
}

/// Products of one row with the self-test's matrix of other bytes, on a card and on the processor.
pub(crate) fn products(gpu: &Gpu, ty: WeightType, bytes: &[u8], x: &[u32]) -> [Vec<u32>; 2] {
    let (rows, cols) = (OUTPUTS as usize, INPUTS as usize);
    let matrix = gpu.matrix(&reference::packed(ty, bytes, rows, cols));
    let (input, act) = (gpu.upload(x).unwrap(), gpu.act(1, INPUTS).unwrap());
    let out = gpu.buffer(OUTPUTS.into()).unwrap();
    let mut step = gpu.step();
    step.quantise(input.rows(INPUTS), &act, 1, INPUTS);
    let (input, to) = (Input::Quantised(&act), out.rows(OUTPUTS));
    step.matmul(&matrix.unwrap(), input, to, 1);
    step.submit().unwrap();
    let wanted = reference::product(ty, bytes, rows, cols, &floats(x));
    [gpu.read(&out, 0..out.words()).unwrap(), words(&wanted)]
}

#[test]
fn scales_that_are_not_finite_give_the_same_bytes_natively() {
    let gpu = Gpu::open_altered(Choice::Software, Arithmetic::Native, flushing_card).unwrap();
    let ty = WeightType::Q4_1;
    let mut bytes = weights(ty);
    // D of the first row, M of the second one.
    let row = bytes.len() / OUTPUTS as usize;
    bytes[..2].copy_from_slice(&0xfc00_u16.to_le_bytes());
    bytes[row + 2..][..2].copy_from_slice(&0x7e00_u16.to_le_bytes());
    let x = Draw::new(9).many(INPUTS as usize, Draw::value);
    let [got, wanted] = products(&gpu, ty, &bytes, &x);
    assert!(wanted[..2].iter().all(|x| x & 0x7f80_0000 == 0x7f80_0000));
    assert_same("not finite", &got, &wanted);
}

#[test]
fn a_card_with_two_roundings_gets_integers() {
    let gpu = Gpu::open_altered(Choice::Software, Arithmetic::Native, card_of_two_roundings);
    assert_eq!(gpu.unwrap().arithmetic(), Arithmetic::Integers);
}
