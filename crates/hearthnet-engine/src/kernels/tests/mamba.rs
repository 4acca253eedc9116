//! The kernels of Mamba-2 give the bits of `reference` on every instruction set of this machine.

use hearthnet_files::spec::Activation;
use proptest::prelude::*;

use super::super::*;
use super::reference::{self, Fma};
use super::values::{Values, all_kernels, assert_same, in_two, same};

proptest! {
    #[test]
    fn a_scan_has_the_bits_of_the_reference_however_rows_are_split(
        keys in 1usize..40,
        width in 1usize..170,
        rows in 1usize..9,
        cut in 0usize..9,
        seed: u64,
    ) {
        let mut values = Values(seed);
        let mut draw = |count| values.units(count);
        let (write, read) = (draw(rows * keys), draw(rows * keys));
        let (inputs, decay, steps) = (draw(rows * width), draw(rows), draw(rows));
        let skip = draw(1)[0];
        let mut state = vec![vec![0.0; width]; keys];
        let mut expected = Vec::new();
        for row in 0..rows {
            let key = row * keys..(row + 1) * keys;
            let own = &inputs[row * width..(row + 1) * width];
            let parts = [&write[key.clone()], &read[key], own];
            let factors = [decay[row], steps[row], skip];
            expected.extend(reference::mamba_row(&mut state, parts, factors, Fma::Fused));
        }
        for kernels in all_kernels() {
            let (mut state, mut out) = (vec![0.0; keys * width], inputs.clone());
            for part in in_two(rows, cut) {
                let of_keys = part.start * keys..part.end * keys;
                let rows = MambaRows {
                    write: &write[of_keys.clone()],
                    read: &read[of_keys],
                    decay: &decay[part.clone()],
                    steps: &steps[part.clone()],
                    skip,
                };
                let out = &mut out[part.start * width..part.end * width];
                kernels.mamba_scan(&rows, &mut state, out);
            }
            assert_same(&format!("{kernels:?}"), &out, &expected);
        }
    }

    #[test]
    fn squared_relus_have_the_bits_of_the_reference(count in 1usize..70, seed: u64) {
        let mut values = Values(seed);
        let mut x = values.units(count);
        x[0] = f32::NAN;
        let expected: Vec<f32> = x.iter().map(|x| reference::squared_relu(*x)).collect();
        let gated: Vec<f32> = expected.iter().zip(&x).map(|(r, u)| r * u).collect();
        for kernels in all_kernels() {
            let mut out = x.clone();
            kernels.squared_relu(&mut out);
            assert_same(&format!("{kernels:?}"), &out, &expected);
            let mut out = x.clone();
            kernels.gate(Activation::SquaredRelu, &mut out, &x);
            assert_same(&format!("{kernels:?}, gate"), &out, &gated);
        }
    }
}

#[test]
fn an_unfused_scan_has_other_bits() {
    let mut values = Values(5);
    let mut draw = |count| values.units(count);
    let (write, read, value) = (draw(32), draw(32), draw(32));
    let [fused, separate] = [Fma::Fused, Fma::Separate].map(|how| {
        let mut state = vec![vec![0.0; 32]; 32];
        let parts = [&write[..], &read, &value];
        let rows = (0..2).map(|_| reference::mamba_row(&mut state, parts, [0.9, 0.3, 0.7], how));
        rows.last().unwrap()
    });
    let mut pairs = fused.iter().zip(&separate);
    assert!(pairs.any(|(a, b)| !same(*a, *b)));
}
