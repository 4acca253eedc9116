//! The wire protocol matches its specification: a client in another language, written from the text
//! alone, gets bit-identical results from the engine.

use std::path::Path;
use std::process::Output;

use hearthnet_bus::NodeKey;
use hearthnet_engine::{Engine, EngineOptions, Head, Span};
use hearthnet_files::{BoundaryDtype, ModelFile};
use serde_json::{Value, json};

use crate::support::*;

/// Node key of the client, not one of the program's.
const SECRET: [u8; 32] = [0x5a; 32];

/// Layers that the hosts serve and the client requests.
const LAYERS: &str = "0-14";

/// Rows of the prompt, which fit into one message.
const ROWS: u32 = 13;

/// Rows of the block: 36 chunks of 4 KiB, more than the 16 that a host grants at first.
const BLOCK_ROWS: u32 = 128;

/// Runs the client against a host, with its files in `dir`.
fn client(host: &Host, dir: &Path, weights: &str, width: u32, extra: &[&str]) -> (Output, Value) {
    let output = python("../tests/clients/x08_client.py")
        .args(["--address", &host.address, "--secret", &hex::encode(SECRET)])
        .args(["--weights", weights, "--lo", "0", "--hi", "14"])
        .args(["--width", &width.to_string()])
        .args(["--rows", "rows", "--out", "out"])
        .args(["--block", "block", "--block-out", "block-out"])
        .args(extra)
        .current_dir(dir)
        .output()
        .expect("Python starts");
    let report = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}{}", text(&output.stdout), text(&output.stderr)));
    (output, report)
}

/// Token ids from all over the vocabulary, the same in every run.
fn ids(rows: u32, vocab: u32) -> Vec<u32> {
    (0..rows).map(|n| (n * 7_919 + 17) % vocab).collect()
}

/// Rows in wire encoding, before and after the layers.
fn on_the_wire(head: &Head, engine: &mut Engine, rows: u32) -> (Vec<u8>, Vec<u8>) {
    let encode = |x: &[f32]| {
        let mut bytes = Vec::new();
        BoundaryDtype::F16.encode(x, &mut bytes);
        bytes
    };
    let mut x = Vec::new();
    head.embed(&ids(rows, head.spec().vocab), &mut x)
        .expect("tokens of the vocabulary");
    let before = encode(&x);
    let seq = engine.open().expect("a sequence");
    let span = Span::new(seq, 0, rows);
    engine.forward(&[span], &mut x).expect("rows");
    assert!(engine.close(seq));
    let after = encode(&x);
    assert_ne!(before, after);
    (before, after)
}

#[test]
fn a_client_written_from_the_specification_is_refused_or_gets_bit_identical_results() {
    let file = ModelFile::open(model().as_ref()).expect("the real model");
    let weights = file.manifest(&mut |_, _| {}).weights_id().to_string();
    let options = EngineOptions::default();
    let head = Head::load(&file, &options).expect("the embedding");
    let mut engine = Engine::load(&file, 0..15, &options, &mut |_, _| {}).expect("the layers");
    let (rows, rows_answer) = on_the_wire(&head, &mut engine, ROWS);
    let (block, block_answer) = on_the_wire(&head, &mut engine, BLOCK_ROWS);

    let dir = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(dir.path().join("rows"), rows).expect("a file");
    std::fs::write(dir.path().join("block"), block).expect("a file");
    let admit = NodeKey::from_secret(&SECRET).id().to_string();
    let host = Host::start(&Home::new(), model(), LAYERS, &admit, &[]);
    let client = |extra: &[&str]| client(&host, dir.path(), &weights, head.spec().width, extra);

    // A key that is not admitted is refused in the handshake, a token for another host afterwards.
    let stranger = hex::encode([0x5b; 32]);
    let other = NodeKey::from_secret(&[0x5c; 32]).id().to_string();
    let (output, report) = client(&["--secret", &stranger]);
    assert_eq!(output.status.code(), Some(3), "{report}");
    assert_eq!(report["refused"]["code"], "tls:TLSV1_ALERT_ACCESS_DENIED");
    let (output, report) = client(&["--audience", &other]);
    assert_eq!(output.status.code(), Some(3), "{report}");
    assert_eq!(report["refused"]["code"], "token_audience");
    assert_eq!(report["refused"]["close"], 4073);

    let (output, report) = client(&[]);
    assert!(output.status.success(), "{report}{}", text(&output.stderr));

    let read = |name: &str| std::fs::read(dir.path().join(name)).expect("the client's answer");
    assert!(read("out") == rows_answer, "other bits than the engine's");
    assert!(
        read("block-out") == block_answer,
        "other bits than the engine's, by tensors"
    );
    // The block was sent in chunks both ways, and had to wait for credit.
    let chunks = block_answer.len().div_ceil(4096);
    let sent = report["chunks_sent"].as_u64().expect("a number");
    assert!(sent >= chunks as u64, "{report}");
    assert_eq!(report["result_chunks"], chunks);
    assert!(report["waits_for_credit"].as_u64().is_some_and(|n| n > 0));
    assert_eq!(report["descriptor"]["layer_range"], json!([0, 14]));
    assert_eq!(report["close"], json!([4000, "normal"]));
}
