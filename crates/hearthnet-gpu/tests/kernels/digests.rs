//! The constants of the self-test.

use hearthnet_gpu::testing::{DIGESTS, all, digest};

use super::reference;

/// The table as the code and the specification have it.
fn computed() -> Vec<(String, u64)> {
    let mut table: Vec<(String, u64)> = Vec::new();
    for kernel in all() {
        let name = kernel.to_string();
        if table.iter().all(|(known, _)| *known != name) {
            table.push((name, digest(&reference::results(kernel))));
        }
    }
    table
}

#[test]
fn the_self_test_wants_the_bytes_of_the_processor() {
    let computed = computed();
    let known: Vec<_> = DIGESTS
        .iter()
        .map(|(name, d)| ((*name).to_owned(), *d))
        .collect();
    if computed != known {
        for (name, digest) in &computed {
            println!("    (\"{name}\", {digest:#018x}),");
        }
    }
    assert!(
        computed == known,
        "the table above is that of the processor"
    );
}

#[test]
fn the_specification_has_the_digests_of_the_self_test() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../specs/gpu-arithmetic.md");
    let spec = std::fs::read_to_string(path).unwrap();
    let missing: Vec<String> = DIGESTS
        .iter()
        .map(|(name, digest)| format!("| {name} | `{digest:016x}` |"))
        .filter(|row| !spec.contains(row))
        .collect();
    assert!(missing.is_empty(), "missing rows:\n{}", missing.join("\n"));
}
