//! Body of the fuzz target `weight_blocks`, also used by tests that replay a fuzzer's findings. Not a
//! public interface.

use hearthnet_files::blocks::WeightType;

use super::{Act, ActForm, Arena, Isa, Kernels, Matrix, Output, Packed, TileMut};

/// Multiplies any blocks of a weight type with any activations, on every instruction set of this
/// machine. The first four bytes give the type, the outputs, the blocks of a row and the rows of
/// activations. The rest fills the blocks and then the activations, again and again.
///
/// # Panics
/// If two instruction sets differ in a bit; if a row depends on the rows beside it; or if a matrix
/// with a weight that is not finite is accepted.
pub fn weight_blocks(input: &[u8]) {
    let [ty, outputs, blocks, rows, rest @ ..] = input else {
        return;
    };
    let ty = WeightType::ALL[usize::from(*ty) % WeightType::ALL.len()];
    let outputs = 1 + usize::from(*outputs) % 34;
    let blocks = 1 + usize::from(*blocks) % 3;
    let cols = match ty.quantised() {
        true => ty.inputs() * blocks,
        false => 1 + 19 * blocks,
    };
    let rows = 1 + usize::from(*rows) % 9;
    let mut endless = rest.iter().copied().chain([0]).cycle();
    let bytes = outputs * cols / ty.inputs() * ty.file_block();
    let bytes: Vec<u8> = endless.by_ref().take(bytes).collect();
    let mut value = || {
        f32::from_bits(
            endless
                .by_ref()
                .take(4)
                .fold(0, |bits, byte| bits << 8 | u32::from(byte)),
        )
    };
    let x: Vec<f32> = (0..rows * cols).map(|_| value()).collect();

    let matrix = Matrix {
        weight_type: ty,
        rows: outputs,
        cols,
        bytes: &bytes,
    };
    let packed = Packed::pack_stacked(&mut Arena::default(), &[matrix]);
    let Ok(packed) = packed else {
        unreachable!("the shape is right");
    };
    let mut weights = vec![0.0; cols];
    let mut is_finite = true;
    for row in 0..outputs {
        packed.dequantise_row(row, &mut weights);
        is_finite &= weights.iter().all(|weight| weight.is_finite());
    }
    // A scale of MXFP4 is refused if only the largest value of its table would overflow.
    assert!(is_finite || packed.not_finite().is_some(), "{ty:?}");
    assert!(!is_finite || packed.not_finite().is_none() || ty == WeightType::MXFP4);

    let product = |isa: Isa, x: &[f32]| {
        let kernels = Kernels::new(isa)?;
        let (mut act, rows) = (Act::default(), x.len() / cols);
        kernels.prepare(x, cols, ActForm::of([&packed]), &mut act);
        let mut out = vec![f32::NAN; rows * outputs];
        let tile = TileMut::new(&mut out, rows, outputs, outputs);
        kernels.matmul(&packed, 0..packed.panels(), &act, Output::Store, tile);
        Some(out)
    };
    let same = |a: &[f32], b: &[f32]| {
        let pairs = a.iter().zip(b);
        pairs
            .into_iter()
            .all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()))
    };
    let wanted = product(Isa::Portable, &x).unwrap_or_default();
    for isa in Isa::available() {
        let Some(found) = product(isa, &x) else {
            continue;
        };
        assert!(
            found.len() == wanted.len() && same(&found, &wanted),
            "{isa} {ty:?}"
        );
        let alone = x.chunks(cols).filter_map(|row| product(isa, row));
        let alone: Vec<f32> = alone.flatten().collect();
        assert!(same(&alone, &wanted), "{isa} {ty:?}, row by row");
    }
}
