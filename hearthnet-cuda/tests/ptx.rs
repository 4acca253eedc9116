//! What NVIDIA's compiler makes of the kernels has the operations that their text asks for, rounded as it
//! says. Needs the compiler (`tests/run cuda` fetches it) and no card.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "so a test fails")]

use hearthnet_cuda::{Card, CardError, SOURCE, compile};

const ARCHITECTURES: [&str; 3] = ["compute_75", "compute_80", "compute_90"];

/// The instructions of a text of PTX: their names, without operands.
fn instructions(ptx: &str) -> Vec<&str> {
    let lines = ptx
        .lines()
        .map(str::trim)
        .filter(|line| line.ends_with(';'));
    // A predicate comes before the name.
    let bare = lines.map(|line| match line.strip_prefix('@') {
        Some(rest) => rest
            .split_once(char::is_whitespace)
            .map_or("", |(_, rest)| rest.trim()),
        None => line,
    });
    bare.map(|line| line.split(char::is_whitespace).next().unwrap_or_default())
        .map(|name| name.trim_end_matches(';'))
        .collect()
}

/// A kernel's part of a text of PTX.
fn body<'a>(ptx: &'a str, kernel: &str) -> &'a str {
    let start = ptx.find(&format!(".entry {kernel}("));
    let rest = &ptx[start.unwrap_or_else(|| panic!("no kernel {kernel}"))..];
    rest.split("\n}").next().unwrap()
}

fn count(ptx: &str, name: &str) -> usize {
    instructions(ptx)
        .iter()
        .filter(|found| **found == name)
        .count()
}

#[test]
fn every_operation_on_floats_is_rounded_to_nearest_and_keeps_subnormals() {
    // All that may compute with floats. What only moves, compares or chooses rounds nothing.
    const ALLOWED: [&str; 7] = [
        "add.rn.f32",
        "sub.rn.f32",
        "mul.rn.f32",
        "fma.rn.f32",
        "div.rn.f32",
        "sqrt.rn.f32",
        "cvt.rn.f32.s32",
    ];
    const EXACT: [&str; 5] = ["mov.f32", "neg.f32", "selp.f32", "ld.", "st."];
    for architecture in ARCHITECTURES {
        let ptx = compile(architecture).unwrap();
        let mut seen = 0;
        for name in instructions(&ptx) {
            assert!(!name.contains("ftz"), "{architecture}: {name}");
            assert!(!name.contains("approx"), "{architecture}: {name}");
            assert!(
                !name.contains(".f64") && !name.contains(".f16"),
                "{architecture}: {name}"
            );
            let exact = EXACT.iter().any(|exact| name.starts_with(exact))
                || name.starts_with("setp.")
                || name.starts_with(".");
            if name.contains("f32") && !exact {
                assert!(ALLOWED.contains(&name), "{architecture}: {name}");
                seen += 1;
            }
        }
        assert!(seen > 500, "{architecture}: {seen} operations on floats");
    }
}

#[test]
fn no_product_and_sum_are_contracted() {
    for architecture in ARCHITECTURES {
        let ptx = compile(architecture).unwrap();
        let fma = |kernel: &str| count(body(&ptx, kernel), "fma.rn.f32");
        // These have products and sums side by side, and no fma in their text.
        assert_eq!(fma("embed_Q4_1"), 0);
        assert_eq!(fma("embed_Q4_K"), 0);
        assert_eq!(fma("multiply"), 0);
        assert_eq!(fma("add_round"), 0);
        // One in the text of each, the rotation's two, and the nine of the exponential.
        assert_eq!(fma("add_scaled"), 1);
        assert_eq!(fma("rope"), 2);
        assert_eq!(fma("softcap"), 9);
        let (mul, add) = ("mul.rn.f32", "add.rn.f32");
        assert_eq!(count(body(&ptx, "rope"), mul), 2);
        assert_eq!(count(body(&ptx, "softcap"), mul), 2);
        assert_eq!(count(body(&ptx, "add_scaled"), add), 0);
        for kernel in ["rms_norm", "softcap"] {
            assert!(count(body(&ptx, kernel), "div.rn.f32") >= 2, "{kernel}");
        }
        assert_eq!(count(body(&ptx, "rms_norm"), "sqrt.rn.f32"), 1);
    }
}

#[test]
fn integers_are_made_by_dot_products_and_tensor_cores() {
    for architecture in ARCHITECTURES {
        let ptx = compile(architecture).unwrap();
        assert!(count(body(&ptx, "matvec_Q4_0"), "dp4a.s32.s32") >= 1);
        let product = "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32";
        assert!(count(body(&ptx, "matmul_Q4_0"), product) >= 1);
    }
}

/// Registers and shared memory suffice, and every instruction exists there.
#[test]
fn the_kernels_become_machine_code() {
    for processor in ["sm_75", "sm_80", "sm_90"] {
        assert!(compile(processor).unwrap().contains(processor));
    }
}

#[test]
fn the_check_sees_what_it_looks_for() {
    let text = "{\n  @%p1 bra $L;\n  fma.rn.ftz.f32 \t%f1, %f2, %f3, %f4;\n  @!%p2 ex2.approx.f32 %f1, %f2;\n ret;\n}";
    assert_eq!(
        instructions(text),
        ["bra", "fma.rn.ftz.f32", "ex2.approx.f32", "ret"]
    );
    assert!(SOURCE.contains("__fmaf_rn"));
}

#[test]
fn without_a_driver_opening_a_card_is_an_error_that_says_so() {
    match Card::open(0) {
        // A machine with a card: what is written to its memory is what is read.
        Ok(card) => {
            let bytes: Vec<u8> = (0..=255).collect();
            let buffer = card.upload(&bytes).unwrap();
            assert_eq!(buffer.len(), bytes.len());
            assert_eq!(card.download(&buffer).unwrap(), bytes);
        }
        Err(CardError::NoDriver) => {
            assert!(CardError::NoDriver.to_string().contains("libcuda"));
        }
        Err(error) => panic!("{error}: {error:?}"),
    }
}
