//! Writes a model with the shape of a published one and random weights. With a third argument, a
//! mixture of experts has so many of them in each layer: the file is smaller, and the work for a token
//! is the same.
//!
//! ```text
//! cargo run --release -p hearthnet-testkit --example random_model -- qwen2.5-7b model.gguf
//! cargo run --release -p hearthnet-testkit --example random_model -- qwen3.6-35b-a3b model.gguf 128
//! ```
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::path::Path;
use std::process::ExitCode;

use hearthnet_testkit::Shape;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [name, path, rest @ ..] = &args[..] else {
        return usage();
    };
    let Some(mut shape) = Shape::named(name) else {
        return usage();
    };
    let used = shape.experts.map_or(0, |(_, used)| used);
    match (rest, rest.first().map(|count| count.parse::<u32>())) {
        ([], _) => {}
        ([_], Some(Ok(count))) if used > 0 && count >= used => shape.experts = Some((count, used)),
        _ => return usage(),
    }
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
    eprintln!("usage: random_model {names} FILE [EXPERTS]");
    ExitCode::FAILURE
}
