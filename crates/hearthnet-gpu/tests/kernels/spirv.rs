//! SPIR-V of the kernels, as a Vulkan driver gets it.

use std::path::PathBuf;

use hearthnet_files::blocks::WeightType;
use hearthnet_gpu::Arithmetic;
use hearthnet_gpu::testing::{Kernel, Offer, Tile, all, spirv, text};

/// A driver that offers everything, with matrix units of this shape.
fn offer(tile: Tile) -> Offer {
    Offer {
        fma: true,
        rounds_to_even: true,
        preserves_special_values: true,
        preserves_subnormal_numbers: true,
        dot_products: true,
        robust: true,
        tile: Some(tile),
    }
}

/// Shapes of matrix units: Mesa's in software, and those of cards.
pub(crate) const TILES: [Tile; 5] = [
    tile(8, 8, 8),
    tile(16, 16, 16),
    tile(16, 8, 32),
    tile(8, 16, 32),
    tile(16, 16, 32),
];

const fn tile(m: u32, n: u32, k: u32) -> Tile {
    Tile { m, n, k }
}

fn name(kernel: Kernel) -> String {
    let more = match kernel {
        Kernel::Matrix { rows, paired, .. } => {
            let paired = if paired { " paired" } else { "" };
            format!(" {rows}{paired}")
        }
        Kernel::Tiles { tile, units, .. } => {
            let units = if units { " units" } else { "" };
            format!(" tiles {}x{}x{}{units}", tile.m, tile.n, tile.k)
        }
        _ => String::new(),
    };
    format!("{kernel}{more}").replace(' ', "_")
}

fn tiles(weight_type: WeightType) -> impl Iterator<Item = Kernel> {
    TILES.into_iter().map(move |tile| Kernel::Tiles {
        weight_type,
        tile,
        units: true,
    })
}

/// With the environment variable `SPIRV`, writes the modules into folders in this folder, as
/// `KERNEL.ARITHMETIC.ENTRY.spv`: `usual` has those for a driver that offers dot products and robust
/// buffers only, which `tests/gpu_code.py` compiles for a card; `all` has those for a driver that offers
/// everything, which `tests/run mesa` validates.
#[test]
fn every_kernel_becomes_spirv_in_every_arithmetic() {
    let folder = std::env::var_os("SPIRV").map(PathBuf::from);
    let most = offer(TILES[0]);
    let usual = Offer {
        dot_products: true,
        robust: true,
        ..Offer::default()
    };
    let quantised = WeightType::ALL.into_iter().filter(|ty| ty.quantised());
    let with_units = quantised.flat_map(tiles).map(|kernel| (kernel, "all"));
    let kernels =
        ["usual", "all"].map(|offer| all().into_iter().map(move |kernel| (kernel, offer)));
    let mut names = std::collections::HashSet::new();
    for (kernel, of) in kernels.into_iter().flatten().chain(with_units) {
        let offer = match (kernel, of) {
            (Kernel::Tiles { tile, .. }, "all") => &offer(tile),
            (_, "all") => &most,
            _ => &usual,
        };
        for arithmetic in Arithmetic::FASTEST_FIRST {
            let words = spirv(kernel, &text(kernel, arithmetic), offer).unwrap();
            assert_eq!(words[0], 0x0723_0203, "the magic number");
            let file = format!("{of}/{}.{arithmetic}.{}.spv", name(kernel), kernel.entry());
            if let Some(folder) = &folder {
                std::fs::create_dir_all(folder.join(of)).unwrap();
                let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
                std::fs::write(folder.join(&file), bytes).unwrap();
            }
            assert!(names.insert(file), "{kernel} {arithmetic} twice");
        }
    }
}

/// Instructions of a module that the tests look at.
#[derive(Default)]
struct Contents {
    /// Numbers of the operations, and of those of GLSL.std.450.
    operations: Vec<u32>,
    extended: Vec<u32>,
    capabilities: Vec<u32>,
    /// Number of decorations `NoContraction`.
    exact: usize,
}

fn contents(words: &[u32]) -> Contents {
    let (mut found, mut rest) = (Contents::default(), &words[5..]);
    while let Some(first) = rest.first() {
        let (one, after) = rest.split_at((first >> 16) as usize);
        found.operations.push(first & 0xffff);
        match (first & 0xffff, one) {
            (12, [_, _, _, _, operation, ..]) => found.extended.push(*operation),
            (17, [_, capability]) => found.capabilities.push(*capability),
            (71, [_, _, 42]) => found.exact += 1,
            _ => {}
        }
        rest = after;
    }
    found
}

#[test]
fn modules_use_what_the_driver_offers_and_nothing_else() {
    const MULTIPLY: u32 = 133;
    const FMA: u32 = 4427;
    // Number of GLSL's fma.
    const GLSL_FMA: u32 = 50;
    // FMAKHR, RoundingModeRTE, SignedZeroInfNanPreserve, DenormPreserve, CooperativeMatrixKHR,
    // VulkanMemoryModel, Int8, DotProduct.
    const OFFERED: [u32; 8] = [6030, 4467, 4466, 4464, 6022, 5345, 39, 6019];
    for kernel in all().into_iter().chain(tiles(WeightType::Q8_0).take(1)) {
        let text = text(kernel, Arithmetic::Native);
        let units = matches!(kernel, Kernel::Tiles { units: true, .. });
        match spirv(kernel, &text, &Offer::default()) {
            Ok(words) => {
                let found = contents(&words);
                let used = |one| found.capabilities.contains(one);
                assert!(!OFFERED.iter().any(used), "{kernel}");
                assert!(!found.operations.contains(&FMA), "{kernel}");
                // Each product and fma of floats.
                let count = |all: &[u32], one| all.iter().filter(|op| **op == one).count();
                let floats = count(&found.operations, MULTIPLY) + count(&found.extended, GLSL_FMA);
                assert_eq!(found.exact, floats, "{kernel}");
            }
            Err(_) => assert!(units, "{kernel}"),
        }
        let found = contents(&spirv(kernel, &text, &offer(TILES[0])).unwrap());
        let used = |one| found.capabilities.contains(one);
        let fused = found.operations.contains(&FMA);
        assert_eq!(used(&OFFERED[0]), fused, "{kernel}");
        assert!(
            fused || !matches!(kernel, Kernel::Matrix { .. }),
            "{kernel}"
        );
        assert!(!found.extended.contains(&GLSL_FMA), "{kernel}");
        assert!(OFFERED[1..4].iter().all(used), "{kernel}");
        assert!(
            OFFERED[4..7].iter().all(|one| used(one) == units),
            "{kernel}"
        );
    }
}
