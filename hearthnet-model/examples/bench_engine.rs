//! Measures the engine on a model file and prints JSON:
//! `cargo run --release -p hearthnet-model --example bench_engine -- FILE [key=value ...]`
//! with the keys `threads`, `prefill`, `depths` (lists with commas), `decode`, `repetitions`, `isa`.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::error::Error;
use std::path::PathBuf;
use std::str::FromStr;

use hearthnet_model::bench::{BenchOptions, bench_engine};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let file = PathBuf::from(args.next().ok_or("which file?")?);
    let mut options = BenchOptions::default();
    for arg in args {
        let (key, value) = arg.split_once('=').ok_or("key=value is expected")?;
        match key {
            "threads" => options.threads = list(value)?,
            "depths" => options.depths = list(value)?,
            "prefill" => options.prefill = list(value)?,
            "decode" => options.decode = value.parse()?,
            "repetitions" => options.repetitions = value.parse()?,
            "isa" => options.isa = value.parse()?,
            _ => return Err(format!("unknown key {key:?}").into()),
        }
    }
    let bench = bench_engine(&file, &options, &mut |what| eprintln!("{what}"))?;
    println!("{}", serde_json::to_string_pretty(&bench)?);
    Ok(())
}

fn list<T: FromStr>(text: &str) -> Result<Vec<T>, T::Err> {
    text.split(',').map(str::parse).collect()
}
