//! Products with many rows, by tiles.

use hearthnet_files::blocks::WeightType;
use hearthnet_gpu::testing::{Draw, Kernel, Route, Tile, Way};
use hearthnet_gpu::{Arithmetic, Choice, Gpu, GpuError};

use super::float_operations::flushing_card;
use super::reference;
use super::shapes::{products_of_shape, quantised};
use super::spirv::TILES;
use super::{assert_same, four_rows, software};

fn kernel(weight_type: WeightType, tile: Tile, units: bool) -> Kernel {
    Kernel::Tiles {
        weight_type,
        tile,
        units,
    }
}

#[test]
fn tiles_of_each_shape_give_the_bytes_of_the_processor() {
    let gpu = software();
    // Types with an offset, with a minimum, with sub-scales for 16 inputs, and with both. All types have
    // one shape in `all`.
    use WeightType as T;
    for ty in [T::Q5_0, T::Q4_K, T::Q6_K, T::Q2_K] {
        for tile in TILES {
            let kernel = kernel(ty, tile, false);
            let got = gpu.self_test(kernel).unwrap();
            let what = format!("{ty:?} {tile:?}");
            assert_same(&what, &got, &reference::results(kernel));
        }
    }
}

/// The driver's matrix units, if it has some. With the environment variable `MATRIX_UNITS` it must.
#[test]
fn matrix_units_give_the_bytes_of_the_processor() {
    let gpu = software();
    let Some(tile) = gpu.tile() else {
        assert!(
            std::env::var_os("MATRIX_UNITS").is_none(),
            "no matrix units"
        );
        println!("SKIPPED: {} has no matrix units", gpu.facts().driver);
        return;
    };
    println!("{}: {tile:?}, {}", gpu.facts().driver, gpu.summary());
    assert!(gpu.summary().ends_with(", tiles"));
    let mut draw = Draw::new(11);
    for weight_type in quantised() {
        let kernel = kernel(weight_type, tile, true);
        let way = gpu.way_of(kernel).unwrap();
        assert_eq!(way.route, Route::Spirv);
        let got = gpu.self_test(kernel).unwrap();
        assert_same(&kernel.to_string(), &got, &reference::results(kernel));
        // Outputs, inputs and rows: a part of a workgroup, several in each direction; odd numbers of
        // blocks, if the type permits it.
        for shape in [(16, 256, 16), (100, 512, 33), (40, 672, 71), (70, 1280, 20)] {
            products_of_shape(&gpu, weight_type, shape, &mut draw);
        }
    }
}

/// The software kernel in the native arithmetic, whose chains have no guard.
#[test]
fn tiles_with_a_native_chain_give_the_bytes_of_the_processor() {
    let gpu = Gpu::open_altered(Choice::Software, Arithmetic::Native, flushing_card).unwrap();
    for weight_type in quantised() {
        let kernel = kernel(weight_type, TILES[1], false);
        assert_eq!(gpu.arithmetic_of(kernel).unwrap(), Arithmetic::Native);
    }
}

/// Whether the self-test refuses the tiles of a type with an altered text, in one way.
fn refused(ty: WeightType, most: impl Into<Way>, alter: fn(String) -> String) {
    let gpu = Gpu::open_altered(Choice::Software, most, alter).unwrap();
    let kernel = match gpu.tile() {
        Some(tile) => kernel(ty, tile, true),
        None => kernel(ty, TILES[1], false),
    };
    let refused = gpu.way_of(kernel);
    assert!(
        matches!(refused, Err(GpuError::SelfTest { .. })),
        "{refused:?}"
    );
    // The others compute the products.
    assert!(gpu.way_of(four_rows(ty)).is_ok());
}

/// Changes the text of tiles; other texts stay.
fn change(text: String, whole: &str, broken: &str) -> String {
    assert!(!text.contains("var<workgroup> integers") || text.contains(whole));
    text.replace(whole, broken)
}

#[test]
fn a_reassociated_sum_of_tiles_is_refused() {
    // The terms of two blocks in the other order.
    refused(WeightType::Q8_0, Arithmetic::Integers, |text| {
        change(
            text,
            "for (var k = 0u; k < min(BLOCKS, p.blocks - begin); k++) {",
            "for (var j = 0u; j < min(BLOCKS, p.blocks - begin); j++) { let k = 1u - j;",
        )
    });
}

#[test]
fn a_dropped_block_is_refused() {
    refused(WeightType::Q4_0, Arithmetic::Integers, |text| {
        change(
            text,
            "k < min(BLOCKS, p.blocks - begin); k++",
            "k < min(BLOCKS, p.blocks - begin) && begin + k < 23u; k++",
        )
    });
}

#[test]
fn a_product_of_scales_that_is_not_rounded_is_refused() {
    refused(WeightType::Q8_0, Arithmetic::Integers, |text| {
        change(
            text,
            "t_fma(f_int(i), t_mul(f.x, head.x, careful), sum, careful)",
            "t_fma(soft_mul(f_int(i), head.x), f.x, sum, careful)",
        )
    });
}

#[test]
fn wrong_columns_of_tiles_are_refused() {
    // Rows of the second half of a workgroup get those of the first half.
    refused(WeightType::Q8_0, Arithmetic::Integers, |text| {
        change(
            text,
            "let head = heads[32u * k + row];",
            "let head = heads[32u * k + row % 16u];",
        )
    });
}

#[test]
fn a_native_chain_in_another_order_is_refused() {
    // Only rows without small scales are computed without the guard.
    let alter = |text: String| {
        let text = flushing_card(text);
        let text = change(
            text,
            "for (var k = 0u; k < min(BLOCKS, p.blocks - begin); k++) {",
            "for (var j = 0u; j < min(BLOCKS, p.blocks - begin); j++) {
                let k = select(j, BLOCKS - 1u - j, UNGUARDED && !careful);",
        );
        match text.contains("const ROWS: u32 = 4u;") {
            true => text.replace(
                "step(step(acc, a, false), b, false)",
                "step(step(acc, b, false), a, false)",
            ),
            false => text,
        }
    };
    let gpu = Gpu::open_altered(Choice::Software, Arithmetic::Native, alter).unwrap();
    for kernel in [
        kernel(WeightType::Q8_0, TILES[1], false),
        four_rows(WeightType::Q8_0),
    ] {
        // Without unguarded chains it is right.
        assert_eq!(
            gpu.arithmetic_of(kernel).unwrap(),
            Arithmetic::Guarded,
            "{kernel}"
        );
    }
}
