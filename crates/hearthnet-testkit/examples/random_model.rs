//! Writes a model with the shape of a published one and random weights.
//!
//! ```text
//! cargo run --release -p hearthnet-testkit --example random_model -- qwen2.5-7b model.gguf
//! ```
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::path::Path;
use std::process::ExitCode;

use hearthnet_testkit::Shape;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [name, path] = &args[..] else {
        return usage();
    };
    let Some(shape) = Shape::named(name) else {
        return usage();
    };
    match shape.write(Path::new(path), 1) {
        Ok(bytes) => {
            println!("{path}: {bytes} bytes of weights");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{path}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    let names = Shape::ALL.map(|shape| shape.name).join("|");
    eprintln!("usage: random_model {names} FILE");
    ExitCode::FAILURE
}
