//! Kernels that are wrong on purpose: the self-test must refuse each.

use hearthnet_files::blocks::WeightType;
use hearthnet_gpu::testing::{Draw, INPUTS, Kernel, weights};
use hearthnet_gpu::{Arithmetic, Choice, Gpu, GpuError};

use super::float_operations::{flushing_card, products};
use super::{assert_same, differ, four_rows};

/// Replaces a part of a text that some kernels have; a text without it stays.
fn change(text: String, what: &str, by: &str) -> String {
    text.replace(what, by)
}

/// Replaces a part of a text, and panics if the text lacks it: each kernel has this part.
fn change_each(text: String, whole: &str, by: &str) -> String {
    assert!(text.contains(whole), "{whole}");
    change(text, whole, by)
}

#[test]
fn wrong_float_operations_are_refused() {
    let mutants: [(&str, fn(String) -> String); 6] = [
        ("an fma of two roundings", |text| {
            change_each(
                text,
                "fn f_fma(a: u32, b: u32, c: u32) -> u32 { return soft_fma(a, b, c); }",
                "fn f_fma(a: u32, b: u32, c: u32) -> u32 { return soft_fma(soft_mul(a, b), ONE, c); }",
            )
        }),
        ("a lost sticky bit", |text| {
            let whole = "let sticky = select(0u, 1u, lost != 0u);";
            change_each(text, whole, "let sticky = 0u;")
        }),
        ("flushed subnormal operands", |text| {
            change_each(
                text,
                "if (f == 0u) { return vec2<u32>(0u, 0u); }",
                "if (f != 0x7fffffffu) { return vec2<u32>(0u, 0u); }",
            )
        }),
        ("flushed subnormal results", |text| {
            change_each(
                text,
                "    if (field < 1) {",
                "    if (field < 1) { return sign; }\n    if (field < 1) {",
            )
        }),
        // As conversions in hardware do with another rounding mode.
        ("a conversion to f16 that cuts", |text| {
            let whole = "a + 0xfffu + ((a >> 13u) & 1u) - 0x38000000u";
            change_each(text, whole, "a - 0x38000000u")
        }),
        ("a division that is not rounded", |text| {
            let whole = "quotient = (quotient << 1u) | select(0u, 1u, rest != 0u);";
            change_each(text, whole, "quotient = quotient << 1u;")
        }),
    ];
    for (what, alter) in mutants {
        match Gpu::open_altered(Choice::Software, Arithmetic::Integers, alter) {
            Err(GpuError::SelfTest { kernel, .. }) => {
                assert_eq!(kernel, "float operations", "{what}");
            }
            other => panic!(
                "{what} is not refused: {:?}",
                other.map(|gpu| gpu.arithmetic())
            ),
        }
    }
}

/// Changes of single kernels, which the self-test of these finds.
#[test]
fn a_reassociated_product_is_refused() {
    // (I * d) * D instead of I * (D * d).
    let alter = |text: String| {
        let text = change(
            text,
            "let scale = t_mul(w.scale, head.x, careful);",
            "let scale = w.scale;",
        );
        change(
            text,
            "vec2<u32>(f_int(integer), scale)",
            "vec2<u32>(soft_mul(f_int(integer), head.x), scale)",
        )
    };
    let gpu = Gpu::open_altered(Choice::Software, Arithmetic::Integers, alter).unwrap();
    for weight_type in WeightType::ALL.into_iter().filter(|ty| ty.quantised()) {
        let refused = gpu.arithmetic_of(four_rows(weight_type)).unwrap_err();
        assert!(matches!(refused, GpuError::SelfTest { .. }), "{refused}");
    }
}

#[test]
fn another_order_of_a_sum_is_refused() {
    let alter = |text: String| {
        let text = change(
            text,
            "var d = 8u; d > 0u; d = d >> 1u",
            "var d = 1u; d < 16u; d = d << 1u",
        );
        change(
            text,
            "if (j < d) { lanes[j]",
            "if (j % (2u * d) == 0u) { lanes[j]",
        )
    };
    let gpu = Gpu::open_altered(Choice::Software, Arithmetic::Integers, alter).unwrap();
    for kernel in [Kernel::RmsNorm, Kernel::LayerNorm, Kernel::Softmax] {
        assert!(gpu.arithmetic_of(kernel).is_err(), "{kernel}");
    }
}

#[test]
fn wrong_recurrences_are_refused() {
    let alter = |text: String| {
        // The newest input first.
        let text = change(
            text,
            "sum = f_fma(weights[j * p.a + id.x], input(piece, t, id.x), sum);",
            "sum = f_fma(weights[(p.b - 1u - j) * p.a + id.x], input(piece, 2 * i32(id.y) - i32(p.b) + 1 - t, id.x), sum);",
        );
        // The decay is not rounded by itself.
        let text = change(
            text,
            "let s = f_mul(before(piece, cell + i * p.a, row), decay);\n            states[after + i * p.a] = s;\n            read = f_fma(xs[k + i], s, read);",
            "let s = f_mul(before(piece, cell + i * p.a, row), decay);\n            states[after + i * p.a] = s;\n            read = f_fma(f_mul(xs[k + i], decay), before(piece, cell + i * p.a, row), read);",
        );
        // Two roundings.
        change(
            text,
            "let s = f_fma(xs[write + i], added, f_mul(before(piece, cell + i * p.a, row), decay));",
            "let s = f_add(f_mul(xs[write + i], added), f_mul(before(piece, cell + i * p.a, row), decay));",
        )
    };
    let gpu = Gpu::open_altered(Choice::Software, Arithmetic::Integers, alter).unwrap();
    for kernel in [Kernel::Convolve, Kernel::DeltaRule, Kernel::MambaScan] {
        assert!(gpu.arithmetic_of(kernel).is_err(), "{kernel}");
    }
}

#[test]
fn a_convolution_that_keeps_no_checkpoint_is_refused() {
    let alter = |text: String| {
        let whole = "if (copy != NONE) { states[copy * p.words + cell] = value; }";
        change(text, whole, "")
    };
    let gpu = Gpu::open_altered(Choice::Software, Arithmetic::Integers, alter).unwrap();
    assert!(gpu.arithmetic_of(Kernel::Convolve).is_err());
    assert!(gpu.arithmetic_of(Kernel::DeltaRule).is_ok());
}

#[test]
fn a_guard_that_forgets_operands_is_replaced_by_integers() {
    let alter = |text: String| {
        let text = flushing_card(text);
        change(
            text,
            "is_subnormal(a) || is_subnormal(b) || is_subnormal(c) || ",
            "",
        )
    };
    let gpu = Gpu::open_altered(Choice::Software, Arithmetic::Native, alter).unwrap();
    assert_eq!(gpu.arithmetic(), Arithmetic::Integers);
}

#[test]
fn a_quantisation_that_marks_no_small_scale_is_refused() {
    // Rows with small scales must be guarded in the native arithmetic.
    let alter = |text: String| {
        let text = flushing_card(text);
        change(
            text,
            "acts[at + 3u] = select(0u, 1u, d != 0u && d < 0x18800000u);",
            "acts[at + 3u] = 0u;",
        )
    };
    let gpu = Gpu::open_altered(Choice::Software, Arithmetic::Native, alter).unwrap();
    assert!(gpu.arithmetic_of(Kernel::Quantise).is_err());
}

#[test]
fn products_that_forget_marked_blocks_differ() {
    let right = Gpu::open_altered(Choice::Software, Arithmetic::Native, flushing_card).unwrap();
    let alter = |text: String| change(flushing_card(text), "seen |= head.w;", "");
    let wrong = Gpu::open_altered(Choice::Software, Arithmetic::Native, alter).unwrap();
    // D is the smallest binary16, and d is near 2^-105.
    let ty = WeightType::Q8_0;
    let mut bytes = weights(ty);
    for block in bytes.chunks_mut(ty.file_block()) {
        block[..2].copy_from_slice(&1_u16.to_le_bytes());
    }
    let x = Draw::new(10).many(INPUTS as usize, |draw| draw.float(28, 30));
    let [got, wanted] = products(&right, ty, &bytes, &x);
    assert_same("small scales", &got, &wanted);
    let [got, wanted] = products(&wrong, ty, &bytes, &x);
    assert!(differ(&got, &wanted) > 0);
}
